"""Whole models in the benchmark: all candidates compute one model, in a process that ends, and are written down."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from amoeba.bench.ceilings import Ceilings, Product
from amoeba.bench.models import measure as measure_module
from amoeba.bench.models import suite, worker
from amoeba.bench.models.candidate import Candidate
from amoeba.bench.models.candidates import CANDIDATES, candidates_for
from amoeba.bench.models.measure import DecodeTime, ModelMeasurement, measure
from amoeba.bench.models.problem import DECODE_ROWS, KINDS, SIZES, Problem, choose_problems
from amoeba.bench.models.suite import ModelReport, measure_in_process, run_models
from amoeba.commands import bench_models
from amoeba.commands.output import Output
from amoeba.jobs.model_cost import training_flops_per_token

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
LIMITS = Ceilings("cpu", {"float32": Product(2048, 1e9)}, copied_bytes=4096, copy_bytes_per_second=1e8)


def tiny(kind) -> Problem:
    return Problem(TINY, kind, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_every_candidate_of_this_machine_is_measured_on_the_same_model(kind):
    problem = tiny(kind)
    taking_part = [each for each in candidates_for(problem) if each.why_not(problem) is None]
    assert {each.ours for each in taking_part} == {True, False}
    found = [measure(candidate, problem, repeats=1, flops_per_token=1e6) for candidate in taking_part]
    for each in found:
        assert each.status == "measured"
        assert each.peak_bytes > 0
        if kind == "decode":
            assert [decode.rows for decode in each.decodes] == list(DECODE_ROWS)
            assert all(decode.first_token_ms > 0 for decode in each.decodes)
        else:
            assert each.first_loss == pytest.approx(found[0].first_loss, rel=1e-4), "one model, one batch"
            assert each.flops_per_second == pytest.approx(1e6 * each.tokens_per_second)
            assert each.tokens_per_second == pytest.approx(problem.tokens / each.ms * 1e3)
            frozen = "frozen" in each.candidate
            assert (each.last_loss == pytest.approx(each.first_loss)) == frozen, "what is trained gets better"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_every_candidate_that_does_not_compile_is_measured(kind):
    problem = Problem(TINY, kind, torch.device("cuda"))
    for candidate in candidates_for(problem):
        if "compiled" not in candidate.name:
            assert measure(candidate, problem, repeats=2, flops_per_token=1e6).status == "measured"


@pytest.mark.parametrize(
    ("name", "parameters"), [("120m", 0.68e9), ("1b", 1.27e9), ("olmoe", 6.92e9), ("qwen3_30b", 30.5e9)]
)
def test_sizes_are_those_of_the_models_that_they_are_named_after(name, parameters):
    size = SIZES[name]
    assert Problem(size, next(iter(size.batches)), CPU).parameters() == pytest.approx(parameters, rel=0.02)


def test_operations_are_counted_as_a_run_counts_them_and_without_weight_gradients_for_lora():
    model = tiny("training").model("eager", torch.float32)
    assert tiny("training").flops_per_token() == training_flops_per_token(model, TINY.batches["training"].length)
    model.requires_grad_(False)
    assert tiny("lora").flops_per_token() == training_flops_per_token(model, TINY.batches["lora"].length)


def test_names_are_told_apart_and_every_kind_has_ours_and_a_peer():
    assert len({(each.kind, each.name) for each in CANDIDATES}) == len(CANDIDATES)
    assert {(each.kind, each.ours) for each in CANDIDATES} == {(kind, ours) for kind in KINDS for ours in (True, False)}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_first_token_is_the_prompts_and_the_others_are_the_steps(monkeypatch):
    clock = Clock()

    def decode(ids, new_tokens):
        clock.now += 0.050 * ids.shape[0] + 0.004 * (new_tokens - 1)
        return ids.new_zeros(ids.shape[0], new_tokens)

    monkeypatch.setattr(measure_module, "time", clock)
    found = measure(_planted(lambda problem: decode, "decode"), tiny("decode"), 1, 0.0)
    one, eight = found.decodes
    assert (one.rows, eight.rows) == (1, 8)
    assert (one.first_token_ms, eight.first_token_ms) == (pytest.approx(50.0), pytest.approx(400.0))
    assert (one.ms, eight.ms) == (pytest.approx(4.0), pytest.approx(4.0))
    assert eight.tokens_per_second == pytest.approx(2000.0)
    assert one.first_call_seconds == pytest.approx(0.050 + 0.004 * 7)


def _planted(prepare, kind="training", **changes) -> Candidate:
    return replace(Candidate("planted", True, kind, "for a test", prepare, 8.0), **changes)


def _fails(problem):
    raise RuntimeError("out of order\nand more lines")


@pytest.mark.parametrize(
    ("kind", "prepare", "said"),
    [
        ("training", _fails, "RuntimeError: out of order and more lines"),
        ("training", lambda problem: lambda: torch.tensor(math.nan), "ValueError: the loss is nan"),
        (
            "decode",
            lambda problem: lambda ids, count: ids[:, :1],
            "expected 8 new tokens for each of 1 rows, got (1, 1)",
        ),
    ],
)
def test_what_a_candidate_raises_is_its_result(kind, prepare, said, monkeypatch):
    monkeypatch.setattr(worker, "CANDIDATES", (_planted(prepare, kind),))
    job = {"candidate": "planted", "size": "tiny", "kind": kind, "device": "cpu", "repeats": 1, "flops_per_token": 1.0}
    found = worker.run(job)
    assert found.status == "failed"
    assert said in found.reason


def test_a_candidate_is_measured_in_a_process_of_its_own():
    found = measure_in_process(candidates_for(tiny("training"))[0], tiny("training"), 1, 1e6)
    assert (found.status, found.reason) == ("measured", None)
    assert found.process_seconds > found.prepare_seconds > 0


def test_a_candidate_that_takes_too_long_is_stopped_and_one_that_dies_leaves_its_last_words(monkeypatch):
    started = []
    real = suite.subprocess.Popen

    def popen(*arguments, **options):
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(suite.subprocess, "Popen", popen)
    found = measure_in_process(_planted(_fails, limit_seconds=0.2), tiny("training"), 1, 1.0)
    assert (found.status, found.reason) == ("failed", "was stopped after 0.2 s, its limit")
    monkeypatch.setattr(suite, "_WORKER", "amoeba.bench.models.nobody")
    found = measure_in_process(_planted(_fails), tiny("training"), 1, 1.0)
    assert found.status == "failed"
    assert found.reason.startswith("its process ended with 1: ") and "No module named" in found.reason
    assert all(process.returncode is not None for process in started)


def test_who_is_left_out_is_listed_with_the_reason(monkeypatch):
    asked = []

    def measured(candidate, problem, repeats, flops_per_token):
        asked.append(candidate.name)
        return ModelMeasurement(candidate.name, candidate.ours, candidate.about, "measured")

    monkeypatch.setattr(suite, "measure_in_process", measured)
    monkeypatch.setattr(suite, "available_memory", lambda device: 1000)
    done = []
    (report,) = run_models([tiny("training")], 1, done=done.append, ours=["fp32 + autocast"], peers=["eager"])
    assert done == [report]
    assert not asked
    reasons = {each.candidate: each.reason for each in report.measurements}
    assert reasons == {
        "amoeba, fp32 + autocast": "needs 0 GiB for its parameters alone, 0 GiB are free",
        "transformers eager, bf16": "is measured on a GPU",
    }


class Tables(Output):
    def __init__(self) -> None:
        self.found: list[tuple[str, list[str], list[list[str]]]] = []
        self.lines: list[str] = []

    def table(self, title, columns, rows, text=None) -> None:
        self.found.append((title, columns, rows))

    def line(self, text="", style=None) -> None:
        self.lines.append(text)

    def warning(self, text) -> None:
        pass


def _report(kind, *measurements) -> ModelReport:
    return ModelReport("tiny", "about", kind, "cpu", 10**9, 2, 32, 8, 1e6, {}, list(measurements))


def test_the_command_prints_each_table_and_writes_the_document(monkeypatch, tmp_path):
    stepped = ModelMeasurement(
        "amoeba, bf16", True, "", "measured", prepare_seconds=2.0, first_step_seconds=3.0, steps=20, ms=196.0,
        tokens_per_second=167_000.0, flops_per_second=2.5e8, first_loss=10.4, peak_bytes=36 * 2**30,
    )  # fmt: skip
    decodes = [DecodeTime(1, 3.5, 285.0, 60.0, 12.0), DecodeTime(8, 5.0, 1600.0, 90.0, 12.0)]
    decoded = ModelMeasurement("amoeba", True, "", "measured", prepare_seconds=1.0, decodes=decodes)
    failed = ModelMeasurement("amoeba, compiled", True, "", "failed", "RuntimeError: no")

    def run(problems, repeats, progress, done, ours, peers):
        assert (repeats, ours, peers) == (7, ("bf16",), None)
        done(_report("training", stepped, failed))
        assert not json.loads(path.read_text())["finished"], "what is measured is kept if the rest is not"
        done(_report("decode", decoded))

    monkeypatch.setattr(bench_models, "run_models", run)
    path, output, chosen = tmp_path / "models.json", Tables(), bench_models.Chosen(("bf16",), None)
    problems = choose_problems(["tiny"], "both", CPU)
    document, ok = bench_models.run(problems, 7, chosen, path, output, lambda device, dtypes: LIMITS)
    assert not ok, "one of ours failed"
    assert json.loads(path.read_text()) == document
    assert document["finished"] and document["format"] == 2 and not document["results"]
    assert document["command"] == "amoeba bench --suite model --device cpu --shape tiny --repeats 7 --ours bf16"
    assert document["models"][0]["measurements"][0]["tokens_per_second"] == 167_000.0
    assert document["models"][1]["measurements"][0]["decodes"][1]["ms"] == 5.0

    (title, columns, (row,)), (_, decode_columns, (decode_row,)) = output.found
    assert title == "tiny (1.00B parameters) training, 2 x 32, on cpu"
    assert dict(zip(columns, row, strict=True)) == {
        "": "amoeba, bf16", "ms": "196", "tokens/s": "167,000", "of matmul": "25.0%", "peak GiB": "36.0",
        "start s": "2.0 + 3.0", "loss": "10.400",
    }  # fmt: skip
    assert dict(zip(decode_columns, decode_row, strict=True)) == {
        "": "amoeba", "ms, 1 row": "3.5", "first ms, 1": "60", "ms, 8 rows": "5", "first ms, 8": "90",
        "peak GiB": "-", "start s": "1.0 + 12.0",
    }  # fmt: skip
    assert "  amoeba, compiled: failed, RuntimeError: no" in output.lines
    assert any("in a process of its own" in line and "without rests" in line for line in output.lines)


@pytest.mark.parametrize(
    ("sizes", "kind", "said"),
    [
        (["huge"], "both", "--shape: expected one of tiny, 120m, 1b, olmoe, qwen3_30b with --suite model; got 'huge'"),
        ([], "forward", "--pass: expected one of training, lora, decode with --suite model; got 'forward'"),
        (["qwen3_30b"], "training", "'training' of qwen3_30b"),
    ],
)
def test_a_problem_that_is_not_there_is_said(sizes, kind, said):
    with pytest.raises(ValueError) as raised:
        choose_problems(sizes, kind, CPU)
    assert said in str(raised.value)


def test_the_default_is_what_the_machine_can_take():
    assert {problem.size.name for problem in choose_problems([], "both", CPU)} == {"tiny"}
    on_gpu = choose_problems([], "both", torch.device("cuda"))
    assert {(problem.size.name, problem.kind) for problem in on_gpu} == {
        (size.name, kind) for size in SIZES.values() if size is not TINY for kind in size.batches
    }


def test_options_that_say_nothing_about_whole_models_are_refused():
    with pytest.raises(ValueError, match="--dtype: expected none with --suite model"):
        bench_models.check_options(["bfloat16"], None)
    with pytest.raises(ValueError, match="--sustained: expected none with --suite model"):
        bench_models.check_options([], 4.0)
    problems = choose_problems(["tiny"], "lora", CPU)
    with pytest.raises(ValueError, match=r"--peer: expected a part of one of: .*PEFT on transformers grouped_mm"):
        bench_models.choose_candidates(problems, [], ["sonic"])
    assert bench_models.choose_candidates(problems, ["factors"], ["PEFT"]) == (("factors",), ("PEFT",))
