"""`python -m benchmarks ranks`: each exchange beside the same processes without one, and what fails or is wrong."""

import json
from collections.abc import Iterator

import pytest
import torch

import rank_jobs
from amoeba.commands.bench_run import make_document
from amoeba.core.phase_timer import mark, watch_phases
from amoeba.parallel.processes import LocalRanks
from benchmarks.ranks import run as suite
from benchmarks.ranks import worker
from benchmarks.ranks.run import run_ranks
from benchmarks.ranks.worker import ALONE, RECEIVED, RankJob

JOB = RankJob(2, 6, 16, 8, 4, 2, "cpu", torch.float32)


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalRanks]:
    with rank_jobs.started(2) as found:
        yield found


@pytest.mark.thorough
def test_an_exchange_has_times_memory_and_what_it_hides(processes: LocalRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_ROUNDS", 1)
    seen: list[int] = []
    report = run_ranks(
        JOB, 1, so_far=lambda found: seen.append(len(found.measurements)), processes=processes, settings=["collective"]
    )
    assert [each.setting for each in report.measurements] == [ALONE, RECEIVED, "collective"]
    assert not report.wrong and all(each.ms and each.peak_bytes for each in report.measurements)
    assert report.exchange_ms["collective"] > 0 and report.of("collective").hidden is not None
    assert seen[:3] == [1, 2, 3]  # a run that is stopped keeps what it has
    document = json.loads(json.dumps(make_document("amoeba bench", ranks=[report])))
    found = document["ranks"][0]["measurements"][2]
    assert found["rounds_ms"] and [name for name, _ in found["phases"]] == ["the rest", "backward: the rest"]


@pytest.mark.thorough
def test_experts_that_train_in_fp8_are_measured_but_by_tasks(processes, monkeypatch):
    monkeypatch.setattr(suite, "_ROUNDS", 1)
    wanted = ["collective", "peers, fixed room, tasks"]
    report = run_ranks(JOB._replace(precision="fp8"), 1, processes=processes, settings=wanted)
    assert report.precision == "fp8" and report.of("collective").ms and not report.wrong
    assert report.of(wanted[1]).reason == "cannot serve: tasks does not compute in fp8"
    kinds = processes.run(kinds_of_share, [()] * 2)
    assert kinds == ["Fp8Experts"] * 2


def kinds_of_share() -> str:
    return type(worker._of_state().layer.local).__name__


def test_phases_of_a_step_are_told_in_their_order_and_add_up_to_it() -> None:
    device = torch.device("cpu")
    mark("nobody listens")
    with watch_phases(device) as found:
        for name in ("", "rows: sent", "products"):
            mark(name)
    assert [name for name, _ in found.ms()] == ["rows: sent", "products"]
    assert all(ms >= 0 for _, ms in found.ms())


def test_an_exchange_that_is_wrong_or_fails_gets_no_time(monkeypatch):
    calls = []

    class Processes:
        """Two ranks of which the exchanges `wrong` and `lost` are what they are called."""

        def __init__(self, *_: object, **__: object) -> None:
            calls.append("start")

        def run(self, function, arguments, seconds):
            name = arguments[0][0] if arguments[0] else ""
            if function is worker.check:
                if name == "lost":
                    raise suite.RankFailed({1: "Traceback\nRankLost: rank 1 waited"}, {})
                return [worker.Found(["down"] if name == "wrong" else [], 5)] * 2
            why_not = "is for others" if name == "refused" else None
            found = {worker.prepare: {}, worker.why_not: why_not, worker.step_ms: 2.0, worker.heap_bytes: 0}
            found[worker.phases] = [("ids: sent", 0.5), ("products", 1.5)]
            return [found[function]] * 2

        def close(self) -> None:
            calls.append("end")

    monkeypatch.setattr(suite, "LocalRanks", Processes)
    monkeypatch.setattr(suite, "EXCHANGES", dict.fromkeys(("refused", "right", "wrong", "lost", "after")))
    report = run_ranks(JOB, 3)
    assert report.of("wrong").reason == "other bits than right: down" and report.of("wrong").ms is None
    assert report.of("lost").reason == "rank 1: RankLost: rank 1 waited"
    assert report.of("refused").reason == "cannot serve: is for others"
    assert report.wrong == ["wrong", "lost"]
    assert report.of("right").phases == [("ids: sent", [0.5, 0.5]), ("products", [1.5, 1.5])]
    assert report.of("after").ms == report.of("right").ms == 2.0 and report.of("right").hidden == 1.0
    assert calls == ["start", "end", "start", "end"]


def test_the_command_says_what_it_does_not_take() -> None:
    cpu, dtypes = torch.device("cpu"), [torch.float32]
    job = suite.choose_job(["64,32,16,8,2"], 4, cpu, dtypes)
    assert job == RankJob(4, 64, 32, 16, 8, 2, "cpu", torch.float32)
    assert "--ranks 4 --device cpu --shape 64,32,16,8,2 --dtype float32" in suite.command_line(job, 3)
    in_fp8 = suite.choose_job(["64,32,16,8,2"], 4, cpu, dtypes, ["fp8-saved"])
    assert in_fp8 == job._replace(precision="fp8-saved")
    assert suite.command_line(in_fp8, 3) == suite.command_line(job, 3) + " --ours fp8-saved"
    for ours in (["triton"], ["fp8", "fp8-ste"], ["fp8-all"]):
        with pytest.raises(ValueError, match="--ours: expected one of fp8, fp8-ste, fp8-saved"):
            suite.choose_job([], 2, cpu, dtypes, ours)
    for words, shapes, ranks in (
        ("K experts for each of 5 ranks", ["64,32,16,8,2"], 5),
        ("--ranks: expected 1 to 16", [], 99),
        ("a layer that is trained", ["decode"], 2),
    ):
        with pytest.raises(ValueError, match=words):
            suite.choose_job(shapes, ranks, cpu, dtypes)
