"""Whole models in the benchmark: all candidates compute one model, in a process that ends, and are written down."""

import contextlib
import itertools
import json
import logging
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from amoeba.bench.timing import Ceilings, Product
from amoeba.integrations import fused_attention
from amoeba.jobs.train import fast_paths
from amoeba.jobs.train import trainer as fast_trainer
from benchmarks.models import measure as measure_module
from benchmarks.models import run as suite
from benchmarks.models import worker
from benchmarks.models.candidates import CANDIDATES, Candidate, candidates_for
from benchmarks.models.decoding import Agreement, Difference
from benchmarks.models.measure import DecodeTime, ModelMeasurement, measure
from benchmarks.models.problem import DECODE_ROWS, KINDS, SIZES, Batch, Problem, choose_problems
from benchmarks.models.run import ModelReport, run_models
from noted_output import NotedOutput
from selection import quick

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
LIMITS = Ceilings("cpu", {"float32": Product(2048, 1e9)}, copied_bytes=4096, copy_bytes_per_second=1e8)


def tiny(kind) -> Problem:
    return Problem(TINY, kind, CPU)


@quick(lambda kind: kind == "decode")
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
            rounded = 1e-2 if each.candidate.endswith(("fp8", "mxfp4", "nvfp4")) else 1e-4
            assert each.first_loss == pytest.approx(found[0].first_loss, rel=rounded), "one model, one batch"
            assert each.flops_per_second == pytest.approx(1e6 * each.tokens_per_second)
            assert each.tokens_per_second == pytest.approx(problem.tokens / each.ms * 1e3)
            frozen = "frozen" in each.candidate
            assert (each.last_loss == pytest.approx(each.first_loss)) == frozen, "what is trained gets better"


AS_COMMANDS = [("training", "amoeba as it trains, fp32 moments"), ("lora", "amoeba as it finetunes")]
AS_COMMANDS += [("lora", "amoeba as it finetunes, frozen: forward and dx")]


def _candidate(kind, name) -> Candidate:
    return next(each for each in CANDIDATES if (each.kind, each.name) == (kind, name))


@pytest.fixture
def documents_seen(monkeypatch):
    """The fast paths of a GPU on this CPU, attention by documents in torch's own operations; fills with their ends."""
    seen = []

    def by_documents(q, k, v, ends, *, longest, scale, window):
        seen.append(ends.tolist())
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(each[:, first:last] for each in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
            )
            for first, last in itertools.pairwise(seen[-1])
            if first < last
        ]
        return torch.cat(parts, 1).transpose(0, 1)

    monkeypatch.setattr(fast_paths, "_is_on_a_gpu", lambda trainer: True)
    monkeypatch.setattr(fused_attention, "why_not", lambda *heads: None)
    monkeypatch.setattr(fused_attention, "document_attention", by_documents)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)  # so nothing is captured
    monkeypatch.setattr(fast_trainer, "on_stream", lambda stream: contextlib.nullcontext())
    return seen


@quick(lambda name: name == "amoeba as it finetunes")
@pytest.mark.parametrize(("kind", "name"), AS_COMMANDS)
def test_a_step_of_a_command_takes_the_fast_paths_and_has_the_same_loss(kind, name, documents_seen):
    found = measure(_candidate(kind, name), tiny(kind), repeats=1, flops_per_token=1e6)
    assert documents_seen and all(ends[:3] == [0, 32, 64] for ends in documents_seen if len(ends) > 3)
    assert found.said[0] == ("each step uses: fused loss, per-document attention, CUDA graph")
    taken = len(documents_seen)
    peer = _candidate("training", "transformers grouped_mm, fp32 + autocast")
    assert found.first_loss == pytest.approx(measure(peer, tiny("training"), 1, 1e6).first_loss, rel=1e-4)
    assert len(documents_seen) == taken, "the fast paths are gone when it was measured"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_every_candidate_that_does_not_compile_is_measured(kind):
    problem = Problem(TINY, kind, torch.device("cuda"))
    for candidate in candidates_for(problem):
        if "compiled" in candidate.name:
            continue
        found = measure(candidate, problem, repeats=2, flops_per_token=1e6)
        assert found.status == "measured"
        if "amoeba as it" in candidate.name:
            (line,) = found.said
            for part in ("fused loss", "per-document attention", "compiled decoder layers", "CUDA graph"):
                assert part in line


@pytest.mark.parametrize(
    ("name", "parameters"), [("120m", 0.68e9), ("1b", 1.27e9), ("olmoe", 6.92e9), ("qwen3_30b", 30.5e9)]
)
def test_sizes_are_those_of_the_models_that_they_are_named_after(name, parameters):
    size = SIZES[name]
    assert Problem(size, next(iter(size.batches)), CPU).parameters() == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("name", ["120m", "1b", "qwen3_30b"])
def test_operations_are_those_of_products_and_causal_attention(name):
    """Written out for Qwen3's layers; norms, which are among the parameters at work, are less than a thousandth."""
    c, length = SIZES[name].settings, 1024
    hidden, heads, groups, head = (
        c[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    projections = 2 * hidden * head * (2 * heads + 2 * groups)
    experts = 6 * c["num_experts_per_tok"] * c["moe_intermediate_size"] * hidden + 2 * hidden * c["num_experts"]
    scores = 2 * 2 * length * heads * head / 2
    forward = c["num_hidden_layers"] * (projections + experts + scores) + 2 * hidden * c["vocab_size"]
    batch = Batch(1, length)
    size = replace(SIZES[name], batches={"training": batch})
    assert Problem(size, "training", CPU).flops_per_token() == pytest.approx(3 * forward, rel=1e-3)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_the_first_token_is_the_prompts_and_the_others_are_the_steps(monkeypatch):
    clock, seen = Clock(), set[int]()

    def decode(ids, new_tokens):
        clock.now += 0.050 * ids.shape[0] + 0.004 * (new_tokens - 1) + (3.0 if ids.shape[0] not in seen else 0.0)
        seen.add(ids.shape[0])
        return ids.new_zeros(ids.shape[0], new_tokens)

    monkeypatch.setattr(measure_module, "time", clock)
    found = measure(_planted(lambda problem, stage: decode, "decode"), tiny("decode"), 1, 0.0)
    one, eight = found.decodes
    assert (one.rows, eight.rows) == (1, 8)
    assert (one.first_token_ms, eight.first_token_ms) == (pytest.approx(50.0), pytest.approx(400.0))
    assert (one.ms, eight.ms) == (pytest.approx(4.0), pytest.approx(4.0))
    assert eight.tokens_per_second == pytest.approx(2000.0)
    assert one.first_call_seconds == pytest.approx(3.0 + 0.050 + 0.004 * 7)
    assert one.prepare_seconds == pytest.approx(3.0), "what is compiled and captured"


def _planted(prepare, kind="training", **changes) -> Candidate:
    return replace(Candidate("planted", True, kind, "for a test", prepare, "amoeba", 8.0), **changes)


def _fails(problem, stage):
    raise RuntimeError("out of order\nand more lines")


@pytest.mark.parametrize(
    ("kind", "prepare", "said"),
    [
        ("training", _fails, "RuntimeError: out of order and more lines"),
        ("training", lambda problem, stage: lambda: torch.tensor(math.nan), "ValueError: the loss is nan"),
        (
            "decode",
            lambda problem, stage: lambda ids, count: ids[:, :1],
            "expected 8 new tokens for each of 1 rows, got (1, 1)",
        ),
    ],
)
def test_what_a_candidate_raises_is_its_result(kind, prepare, said, monkeypatch):
    monkeypatch.setattr(worker, "CANDIDATES", (_planted(prepare, kind),))
    (found,) = worker.run(_job(kind, "planted"))
    assert found.status == "failed"
    assert said in found.reason


def _job(kind, *names) -> dict:
    return {
        "candidates": names, "size": "tiny", "kind": kind, "device": "cpu", "repeats": 1, "flops_per_token": 1.0,
    }  # fmt: skip


def test_a_candidates_set_up_is_undone_and_its_messages_are_kept(monkeypatch):
    undone = []

    def prepare(name):
        def prepared(problem, stage):
            stage.callback(undone.append, name)
            stage.said.append(f"{name} without a part")
            logging.getLogger("amoeba").warning("%s is slow", name)
            return lambda: torch.tensor(float(len(undone)))

        return prepared

    three = [replace(_planted(prepare(name)), name=name) for name in ("a", "b", "c")]
    three[1] = replace(three[1], prepare=_fails)
    monkeypatch.setattr(worker, "CANDIDATES", tuple(three))
    first, second = worker.run(_job("training", "a", "b", "c"))
    assert (first.status, second.status) == ("measured", "failed"), "after one that failed the process ends"
    assert undone == ["a"]
    assert first.said == ["a without a part", "a is slow"]
    (third,) = worker.run(_job("training", "c"))
    assert third.first_loss == 1.0, "a was undone before"


def test_who_is_left_out_is_listed_with_the_reason(monkeypatch):
    asked = []

    monkeypatch.setattr(suite, "measure_in_process", lambda candidates, *others: asked.append(candidates))
    monkeypatch.setattr(suite, "WorkerProcess", lambda kind: contextlib.nullcontext())
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


def _report(kind, *measurements) -> ModelReport:
    return ModelReport("tiny", "about", kind, "cpu", 10**9, 2, 32, 8, 1e6, {}, list(measurements))


def test_the_command_prints_each_table_and_writes_the_document(monkeypatch, tmp_path):
    stepped = ModelMeasurement(
        "amoeba, bf16", True, "", "measured", prepare_seconds=2.0, first_step_seconds=3.0, steps=20, ms=196.0,
        tokens_per_second=167_000.0, flops_per_second=2.5e8, first_loss=10.4, peak_bytes=36 * 2**30,
    )  # fmt: skip
    peer = replace(stepped, candidate="transformers grouped_mm, bf16", ours=False, ms=294.0)
    parted = Agreement(False, 64, [Difference(3, 7, 0.02), Difference(5, 1, 0.01)], 0.4)
    decodes = [
        DecodeTime(1, 3.5, 285.0, 60.0, 12.0, 11.5, Agreement(True, 8, [])),
        DecodeTime(8, 5.0, 1600.0, 90.0, 12.0, 11.5, parted),
    ]
    decoded = ModelMeasurement("amoeba", True, "", "measured", prepare_seconds=1.0, decodes=decodes)
    slower = [replace(each, ms=1.2 * each.ms) for each in decodes]
    adapted = replace(decoded, candidate="amoeba, adapter", against="amoeba", decodes=slower, said=["is slow"])
    failed = ModelMeasurement("amoeba, compiled", True, "", "failed", "RuntimeError: no")
    factors = replace(stepped, candidate="amoeba, factors", against="amoeba, bf16", ms=205.8)

    def run(problems, repeats, progress, done, ours, peers, so_far):
        assert (repeats, ours, peers) == (7, ("bf16",), None)
        reports = []
        for kind, *found in (
            ("training", stepped, peer, failed), ("decode", decoded, adapted), ("lora", factors, stepped),
        ):  # fmt: skip
            report = _report(kind)
            reports.append(report)
            for each in found:
                report.measurements.append(each)
                so_far(report)
                kept = json.loads(path.read_text())
                assert not kept["finished"], "what is measured is kept if the rest is not"
                assert kept["models"][-1]["measurements"][-1]["candidate"] == each.candidate
            done(report)
        return reports

    monkeypatch.setattr(suite, "run_models", run)
    path, output, chosen = tmp_path / "models.json", NotedOutput(), suite.Chosen(("bf16",), None)
    problems = choose_problems(["tiny"], None, CPU)
    document, ok = suite.run(problems, 7, chosen, path, output, lambda device, dtypes: LIMITS)
    assert not ok, "one of ours failed"
    assert json.loads(path.read_text()) == document
    assert document["finished"] and document["format"] == 2 and not document["results"]
    assert document["command"] == "python -m benchmarks models --device cpu --shape tiny --repeats 7 --ours bf16"
    assert document["models"][0]["measurements"][0]["tokens_per_second"] == 167_000.0
    assert document["models"][1]["measurements"][0]["decodes"][1]["ms"] == 5.0

    (title, columns, (row, _)), (_, decode_columns, decode_rows), (_, lora_columns, lora_rows) = output.tables
    assert title == "tiny (1.00B parameters) training, 2 x 32, on cpu"
    assert dict(zip(columns, row, strict=True)) == {
        "": "amoeba, bf16", "ms": "196", "tokens/s": "167,000", "of matmul": "25.0%", "peak GiB": "36.0",
        "start s": "2.0 + 3.0", "loss": "10.400",
    }  # fmt: skip
    by_itself, with_adapter = (dict(zip(decode_columns, each, strict=True)) for each in decode_rows)
    assert by_itself == {
        "": "amoeba", "ms, 1 row": "3.5", "first ms, 1": "60", "x, 1": "-", "ms, 8 rows": "5", "first ms, 8": "90",
        "x, 8": "-", "greedy": "same; 2 of 8 rows part, at 0.02 (0.4)", "peak GiB": "-", "start s": "1.0 + 12.0",
    }  # fmt: skip
    assert (with_adapter["x, 1"], with_adapter["x, 8"]) == ("1.20", "1.20")
    assert [dict(zip(lora_columns, each, strict=True))["x"] for each in lora_rows] == ["1.050", "-"]
    assert "  amoeba, bf16: 1.50 times as fast as transformers grouped_mm, bf16" in output.lines
    assert "  amoeba, adapter: is slow" in output.lines
    assert any("dense product of 0.001 TFLOP/s" in line for line in output.lines), "the peak is said"
    assert "  amoeba, compiled: failed, RuntimeError: no" in output.lines
    assert any("one after another" in line and "without rests" in line for line in output.lines)


@pytest.mark.parametrize(
    ("sizes", "kind", "said"),
    [
        (["huge"], None, "--shape: expected one of tiny, 120m, 1b, olmoe, qwen3_30b, qwen3_6"),
        ([], "forward", "--pass: expected one of training, lora, decode; got 'forward'"),
        (["qwen3_30b"], "training", "'training' of qwen3_30b"),
    ],
)
def test_a_problem_that_is_not_there_is_said(sizes, kind, said):
    with pytest.raises(ValueError) as raised:
        choose_problems(sizes, kind, CPU)
    assert said in str(raised.value)


def test_the_default_is_what_the_machine_can_take():
    assert {problem.size.name for problem in choose_problems([], None, CPU)} == {"tiny"}
    on_gpu = choose_problems([], None, torch.device("cuda"))
    assert {(problem.size.name, problem.kind) for problem in on_gpu} == {
        (size.name, kind) for size in SIZES.values() if size is not TINY for kind in size.batches
    }


def test_a_candidate_that_is_not_there_is_said():
    problems = choose_problems(["tiny"], "lora", CPU)
    with pytest.raises(
        ValueError, match=r"--peer: expected one of these, or a part of it: .*PEFT on transformers grouped_mm"
    ):
        suite.choose_candidates(problems, [], ["sonic"])
    assert suite.choose_candidates(problems, ["factors"], ["PEFT"]) == (("factors",), ("PEFT",))


def test_a_whole_name_stands_for_that_candidate_alone_and_none_for_nobody():
    problem = Problem(SIZES["1b"], "training", CPU)

    def names(*peers):
        chosen = suite.choose_candidates([problem], ["as it trains"], peers)
        assert ("--peer none" in suite.command_line([problem], 1, chosen)) == (peers == ("none",))
        return [each.name for each in candidates_for(problem, *chosen) if not each.ours]

    assert names("transformers grouped_mm, bf16") == ["transformers grouped_mm, bf16"]
    assert names("grouped_mm, bf16") == ["transformers grouped_mm, bf16", "transformers grouped_mm, bf16, compiled"]
    assert names("none") == []
    assert len(names()) == 4


def test_without_peft_its_lora_is_left_out_with_the_command_that_installs_it(monkeypatch):
    problem = Problem(SIZES["1b"], "lora", torch.device("cuda"))
    plain, compiled = candidates_for(problem, ours=[], peers=["PEFT"])
    assert compiled.name == f"{plain.name}, compiled"
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    sys.modules["peft"].__spec__ = SimpleNamespace()
    assert plain.why_not(problem) is None
    monkeypatch.setitem(sys.modules, "peft", None)
    assert all("pip install peft" in each.why_not(problem) for each in (plain, compiled))
