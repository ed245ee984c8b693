"""`amoeba train`, `finetune` and `generate` over ranks: the numbers of one process, through stops and other ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_jobs
from amoeba.jobs.sharded_model import load_share
from amoeba.jobs.train.run_folder import checkpoints
from amoeba.parallel import Ranks
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.rank_zero import RankZero
from amoeba.stream.store import Store
from called import call
from same_runs import check_same_run, weights
from selection import quick
from tiny_models import EXPERTS, LAYERS, build
from tiny_runs import KEPT, Quiet, tiny_run, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore")
COMMANDS = ("train", "finetune")
CHANGED = {"batch_size": 3, "log_every": 1}


@pytest.fixture(scope="module", params=COMMANDS)
def alone(request: pytest.FixtureRequest, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of one process that has all experts, never interrupted."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    tiny_run(tiny_settings(request.param, folder, inputs, **CHANGED, experts="resident"), Quiet())
    return request.param, folder


def told(command: str, folder: Path, inputs: Path, **changes: Any) -> dict[str, Any]:
    return tiny_settings(command, folder, inputs, **CHANGED | changes).as_dict()


@pytest.mark.thorough
def test_a_run_resumes_on_two_ranks_then_four_then_one(processes, alone, inputs, tmp_path):
    command, expected = alone
    given = told(command, tmp_path / "run", inputs, experts="ranks")
    stops = []
    for count, stop in ((2, (1, 3)), (4, (3, 6))):  # a rank other than the first is asked to stop
        options = [(rank, count, command, given, stop) for rank in range(count)]
        found = processes.run(rank_jobs.run_job if count == 2 else rank_jobs.resumed_job, options)
        reports, said = zip(*found, strict=True)
        assert len({json.dumps([report.steps, report.final_loss]) for report in reports}) == 1
        assert all(report.interrupted and report.exit_code == 143 for report in reports)
        assert any(f"torchrun --nproc-per-node {count} -m amoeba {command} --resume" in text for text in said[0])
        stops.append(reports[0].steps)
    assert stops == [3, 6]
    last = checkpoints(tmp_path / "run")[-1]
    parts = sorted(path.name for path in last.glob("optimizer-*"))
    assert parts == [f"optimizer-0000{rank}-of-00004.safetensors" for rank in range(4)]
    settings = tiny_settings(command, tmp_path / "run", inputs, **CHANGED, experts="ranks")
    tiny_run(settings, Quiet(), resume=True, rank_zero=RankZero(Ranks()))
    check_same_run(tmp_path / "run", expected, KEPT[command])


@quick(lambda alone: alone == "finetune")
def test_a_run_of_one_process_goes_on_over_ranks(processes, alone, inputs, tmp_path):
    command, expected = alone
    run = shutil.copytree(expected, tmp_path / "run")
    shutil.rmtree(run / KEPT[command])
    shutil.rmtree(run / "checkpoints" / "checkpoint-12")
    given = told(command, run, inputs, experts="ranks")
    processes.run(rank_jobs.resumed_job, [(rank, 2, command, given) for rank in range(2)])
    check_same_run(run, expected, KEPT[command])


@pytest.mark.thorough
def test_a_command_over_ranks_with_no_expert_on_one_and_no_row_on_another(processes, inputs, tmp_path):
    """Twenty steps and selection biases; and generating with what came of it."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    build("glm4_moe", vocab_size=json.loads((inputs / "base/config.json").read_text())["vocab_size"]).save_pretrained(
        base
    )
    for path in (inputs / "base").glob("tokenizer*"):
        shutil.copy(path, base)
    words = ["train", "--model", str(base), "--data", str(inputs / "train.jsonl"), "--steps", "20", "--batch-size", "3"]
    words += ["--sequence-length", "32", "--balance", "bias", "--learning-rate", "1e-2", "--log-every", "10", "--json"]
    call(*words, "--out", tmp_path / "alone")
    ranked = [*words, "--out", str(tmp_path / "ranks"), "--experts", "ranks"]
    found = processes.run(rank_jobs.run_command, [(rank, 4, ranked) for rank in range(4)])
    assert [code for code, *_ in found] == [0] * 4
    assert json.loads(found[0][1].splitlines()[-1])["steps"] == 20
    over = "experts by amoeba over 4 ranks, which share each batch and exchange rows by collective"
    assert over in found[0][2] and "step 20/20" in found[0][2]
    assert all(out == err == "" for _, out, err in found[1:])  # one of them speaks
    check_same_run(tmp_path / "ranks", tmp_path / "alone", "model")
    assert any("e_score_correction_bias" in name for name in weights(tmp_path / "ranks" / "model"))

    asked = ["generate", str(tmp_path / "ranks" / "model"), "In one", "--max-new-tokens", "8", "--temperature", "0.8"]
    expected = call(*asked, "--seed", "3")
    found = processes.run(
        rank_jobs.run_command, [(rank, 4, [*asked, "--seed", "3", "--experts", "ranks"]) for rank in range(4)]
    )
    assert found[0][1] == expected.stdout and "experts ranks (over 4), backend ranks" in found[0][2]
    assert all(out == err == "" for _, out, err in found[1:])
    many = tmp_path / "prompts.txt"
    many.write_text("In one\nIn two words\n")
    asked = [
        "generate",
        str(tmp_path / "ranks" / "model"),
        "--prompts",
        str(many),
        "--max-new-tokens",
        "3",
        "--seed",
        "1",
    ]
    expected = call(*asked)
    found = processes.run(rank_jobs.run_command, [(rank, 4, [*asked, "--experts", "ranks"]) for rank in range(4)])
    assert found[0][1] == expected.stdout and found[1][1] == ""


def test_what_is_wrong_on_all_ranks_is_told_once(processes: LocalRanks, inputs: Path, tmp_path: Path) -> None:
    words = ["train", "--model", str(inputs / "base"), "--data", str(tmp_path / "nowhere.txt"), "--experts", "ranks"]
    words += ["--out", str(tmp_path / "run"), "--sequence-length", "32"]
    found = processes.run(rank_jobs.run_command, [(rank, 4, words) for rank in range(4)])
    assert [code for code, *_ in found] == [2] * 4
    assert "nowhere.txt" in found[0][2] and [err for _, _, err in found[1:]] == [""] * 3


def test_a_full_disk_on_one_rank_stops_all_and_keeps_the_checkpoint(processes, inputs, tmp_path):
    given = told("train", tmp_path / "run", inputs, experts="ranks")
    first, second = processes.run(rank_jobs.fail_to_write, [(rank, given) for rank in range(2)])
    assert "the checkpoint of step 8: expected enough space" in second and "continues from step 4" in second
    assert "rank 1 failed" in first and "No space left on device" in first
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    assert not (tmp_path / "run" / "checkpoints" / "writing").exists()


@quick(lambda family: family == "gpt_oss")
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "nemotron_h", "olmoe"]
)
def test_what_two_ranks_save_plain_transformers_reads_and_so_does_each_rank(processes, family, tmp_path):
    """Of gpt-oss all experts of a layer are one tensor on disk, transposed, in turns and with biases."""
    for worst in processes.run(rank_jobs.save_and_load, [(rank, family, str(tmp_path)) for rank in range(2)]):
        assert all(difference == 0 for difference in worst.values())
    whole = build(family).state_dict()
    found = weights(tmp_path)
    assert found.keys() == whole.keys() and all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_loading_reads_the_experts_that_a_rank_owns_and_no_other(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = object.__new__(Ranks)
    second.rank, second.count = 1, 4
    read: list[tuple[int, int]] = []
    one = Store.read
    monkeypatch.setattr(Store, "read", lambda self, *about: read.append(about[:2]) or one(self, *about))
    model = load_share(str(inputs / "base"), None, second)
    assert EXPERTS == 6 and read == [(layer, expert) for layer in range(LAYERS) for expert in (2, 3)]
    experts = [parameter for name, parameter in model.named_parameters() if ".placed_" in name]
    assert len(experts) == 2 * LAYERS and all(len(each) == 2 for each in experts)


class TestWithoutOthers:
    def test_a_process_alone_is_told_how_to_start_several(self, inputs: Path, tmp_path: Path) -> None:
        words = ["train", "--model", str(inputs / "base"), "--out", str(tmp_path / "run"), "--experts", "ranks"]
        result = call(*words, code=2)
        assert not (tmp_path / "run").exists()
        assert "--experts ranks: expected several processes, started by torchrun; got a single process" in result.stderr
        assert "torchrun --nproc-per-node 2 -m amoeba" in result.stderr

    def test_a_group_of_one_has_all_experts_and_says_so(self, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        words = ["generate", str(inputs / "base"), "In", "--max-new-tokens", "2", "--experts", "ranks"]
        result = call(*words)
        assert "this single process has all experts" in result.stderr

    def test_a_deadline_that_is_none_is_refused(self, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("AMOEBA_DEADLINE", "soon")):
            monkeypatch.setenv(name, value)
        result = call("generate", inputs / "base", "In", "--experts", "ranks", code=2)
        assert "AMOEBA_DEADLINE: expected seconds, more than 0; got 'soon'" in result.stderr
