"""`python -m benchmarks stream`: settings are compared with resident layers, then timed, and written down. What there
is over a link is in tests/stream/test_stream_bench.py."""

import errno
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amoeba.commands.output import Output
from amoeba.core.weights import ExpertWeights
from benchmarks.stream import decode, stores
from benchmarks.stream import run as suite
from benchmarks.stream.problem import SIZES, StreamProblem, choose_problem
from selection import quick

CPU = torch.device("cpu")
TINY = StreamProblem(SIZES["tiny"], CPU)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch) -> None:
    few = {"WARM": 3, "WARM_FROM_DISK": 3, "COMPARED": 1, "AHEAD": 1, "HITS": 1}
    for name, value in few.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(suite, "WARM", 3)


def test_every_setting_is_right_and_timed(tmp_path: Path) -> None:
    seen: list[int] = []
    report = suite.run_stream(TINY, 40, tmp_path, so_far=lambda found: seen.append(len(found.decodes)))
    assert not list(tmp_path.iterdir()) and sorted(set(seen)) == [*range(1, len(report.decodes) + 1)]
    check_decodes(report, has_link=False)
    assert [each.over_disk is None for each in report.decodes] == [True, False, False]
    check_lora(report)


def check_decodes(report: suite.StreamSuiteReport, has_link: bool) -> None:
    assert not report.wrong
    wanted = [each.name for each in suite.settings(16, has_link)]
    assert [each.setting for each in report.decodes] == wanted
    for each in report.decodes:
        is_whole = each.slots == 16
        assert (each.same_bits and each.error == 0) or each.miss != "move"
        assert each.error < 1e-5 and each.us > 0 and each.hits_us > 0 and each.over_least > 0
        assert (each.simulated_hit_rate is None) == (each.miss != "move" or is_whole)
        if each.miss == "auto":  # time decides what is moved
            continue
        assert (each.bytes_up_per_token == 0) == (each.hit_rate == 1 or each.miss == "cpu") and (
            each.hit_rate == 1 or not is_whole
        )
        assert (each.computed_us is None) == (each.miss == "move")
        assert (each.over_disk is None) == (each.bytes_from_disk_per_token == 0)
        assert each.bytes_from_disk_per_token == 0 or "disk" in each.setting
        assert (each.share_of_link is None) == (not has_link or each.bytes_up_per_token == 0)
        assert (each.export_us is None) == (not has_link or is_whole)
    assert report.disk_bytes_per_second > 0 and report.resident_us > 0


def test_rounds_go_on_in_the_trace_and_each_has_its_own_bytes(tmp_path: Path, monkeypatch) -> None:
    seen, step = dict[decode.Tokens, list](), decode.Tokens.step
    monkeypatch.setattr(
        decode.Tokens, "step", lambda self, ids: (seen.setdefault(self, []).append(ids), step(self, ids))
    )
    report = suite.run_stream(replace(TINY, parts=("disk",)), 4 * 40, tmp_path)
    for found in report.decodes:
        assert [each.tokens for each in found.rounds] == [8] * 5 and found.tokens == 40
        assert found.us == statistics.median(each.us for each in found.rounds)
        for name in ("bytes_up_per_token", "bytes_from_disk_per_token", "hit_rate"):
            of_rounds = [getattr(each, name) for each in found.rounds]
            assert statistics.fmean(of_rounds) == pytest.approx(getattr(found, name)) and len({*of_rounds}) > 1
        for each in found.rounds:
            moved = each.bytes_up_per_token / 55e9 * 1e6 / found.layers
            assert each.bar_us == pytest.approx(1.1 * (each.resident_us + moved) + 15) and each.resident_us > 0
    streamed = [ids for tokens, ids in seen.items() if not isinstance(tokens._kinds[0], ExpertWeights)]
    assert len(streamed) == 2
    for ids in streamed:
        assert len(ids) - 1 == len({*map(id, ids)}) == 3 + 5 * (1 + 8)  # warm, rounds, and once more the last of all


def check_lora(report: suite.StreamSuiteReport) -> None:
    lora = report.lora
    assert lora.same_bits and lora.ms > 0 and lora.resident_ms > 0 and lora.share_of_link > 0
    assert lora.bytes_per_step > 0 and lora.bytes_per_step % report.expert_bytes == 0


def test_the_simulator_says_the_hits_that_are_measured(tmp_path: Path) -> None:
    report = suite.run_stream(replace(TINY, parts=("disk",)), 400, tmp_path)
    assert [each.slots for each in report.decodes] == [8, 4]
    assert all(abs(each.hit_rate - each.simulated_hit_rate) < 0.02 for each in report.decodes)


def test_only_what_was_asked_for_is_measured(tmp_path: Path) -> None:
    report = suite.run_stream(choose_problem(["tiny"], "lora", CPU), 4, tmp_path)
    assert not report.decodes and report.resident_us is None and report.lora.ms > 0
    report = suite.run_stream(choose_problem(["tiny"], "disk", CPU), 4, tmp_path)
    assert [each.slots for each in report.decodes] == [8, 4] and report.lora is None


@quick(lambda format: format == "nvfp4")
@pytest.mark.parametrize("format", ["fp8-128", "mxfp4", "nvfp4"])
def test_codes_are_right_and_timed(format: str, tmp_path: Path) -> None:
    problem = StreamProblem(replace(SIZES["tiny"], format=format), CPU, ("decode", "disk", "lora"))
    report = suite.run_stream(problem, 4, tmp_path)
    assert not report.wrong and all(each.same_bits and each.us > 0 for each in report.decodes)
    assert report.lora is not None and report.lora.error < 1e-5


def test_experts_that_differ_from_the_resident_ones_get_no_times(tmp_path: Path, monkeypatch) -> None:
    true = stores.FileStore._read

    def wrong(self, layer, expert, memory) -> None:
        true(self, layer, expert, memory)
        memory.tensor.view(torch.float32).mul_(1.5)

    monkeypatch.setattr(stores.FileStore, "_read", wrong)
    report = suite.run_stream(choose_problem(["tiny"], None, CPU), 4, tmp_path)
    assert len(report.wrong) == len(report.decodes) + 1 == 4
    assert all("out of tolerance" in reason for reason in report.wrong)
    assert all(each.us is None for each in report.decodes) and report.lora.ms is None


def test_the_command_prints_a_table_and_writes_the_document(tmp_path: Path, capsys) -> None:
    path = tmp_path / "found.json"
    document, is_right = suite.run(TINY, 1, path, Output())
    assert is_right and document["finished"] and document["commit"] and document["machine"]
    assert document["command"] == "python -m benchmarks stream --device cpu --shape tiny --repeats 1"
    assert json.loads(path.read_text()) == document
    (found,) = document["streams"]
    assert found["decodes"][0]["setting"] == "100 %" and found["lora"]["ms"] > 0
    printed = capsys.readouterr().out
    for text in ("resident", "25 %, rest on disk", "x disk", "LoRA step", "of the disk's ", "GB/s"):
        assert text in printed


def test_a_run_that_is_stopped_has_shown_what_it_measured(capsys, monkeypatch) -> None:
    monkeypatch.setattr(suite.lora, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        suite.run(TINY, 1, None, Output())
    printed = capsys.readouterr()
    assert "100 %: " in printed.out and "us a layer, 100.0% hits" in printed.out
    assert "a fine-tuning step over 2 layers" in printed.err


@pytest.mark.parametrize(
    ("shapes", "passes", "said"),
    [
        (["qwen3"], None, "one of tiny, small, qwen3_30b"),
        (["tiny", "small"], None, "Give one name"),
        (["tiny"], "training", "one of decode, disk, lora"),
    ],
)
def test_what_it_does_not_measure_is_refused(shapes, passes, said) -> None:
    with pytest.raises(ValueError, match=said):
        choose_problem(shapes, passes, CPU)


def test_a_size_without_room_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.stream.problem.available_memory", lambda device: 10_000)
    with pytest.raises(ValueError, match="of memory on the device for tiny"):
        choose_problem(["tiny"], None, CPU)


def test_a_size_without_room_on_the_disk_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("benchmarks.stream.problem.shutil.disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(ValueError, match=r"of room on the disk .* for tiny"):
        choose_problem(["tiny"], "disk", CPU)


@pytest.mark.parametrize("refuses", [False, True], ids=["as it is", "without O_DIRECT"])
def test_files_hold_every_expert_as_its_own_bytes(refuses: bool, tmp_path, monkeypatch) -> None:
    opened = os.open

    def refused(path, flags, *mode) -> int:
        if flags & getattr(os, "O_DIRECT", 0) and flags & os.O_WRONLY:
            raise OSError(errno.EINVAL, "refused")
        return opened(path, flags, *mode)

    if refuses:
        monkeypatch.setattr(os, "open", refused)
    resident = TINY.resident(2)
    store = stores.FileStore(TINY, resident, tmp_path)
    blob = torch.empty(store.expert_bytes(0), dtype=torch.uint8)
    for layer, expert in ((0, 0), (0, 15), (1, 7)):
        store.read(layer, expert, blob)
        views = store.views(layer, blob)
        assert torch.equal(views.gate_up_JH, resident[layer].gate_up_EJH[expert])
        assert torch.equal(views.down_HI, resident[layer].down_EHI[expert])
    store.end()
    sizes = {file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes == {16 * store.expert_bytes(0)} and len(list(tmp_path.iterdir())) == 2


@pytest.mark.gpu
def test_on_a_gpu_every_setting_is_right_and_timed(tmp_path: Path) -> None:
    report = suite.run_stream(StreamProblem(SIZES["small"], torch.device("cuda")), 8, tmp_path)
    assert not report.wrong and all(each.same_bits or each.miss != "move" for each in report.decodes)
    assert {each.miss for each in report.decodes} == {"move", "cpu", "auto"}
    assert report.lora.error < 1e-3  # groups of experts one after the other add up in another order than all at once
    assert all(0 < each.export_us < 1000 for each in report.decodes if each.slots < 32)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8-128", "mxfp4", "nvfp4"])
def test_on_a_gpu_codes_are_right_and_timed(format: str, tmp_path: Path) -> None:
    problem = StreamProblem(replace(SIZES["small"], format=format), torch.device("cuda"))
    report = suite.run_stream(problem, 8, tmp_path)
    assert not report.wrong and all(each.same_bits and each.miss == "move" for each in report.decodes)
    assert report.lora.error < 1e-3
