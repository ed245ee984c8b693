"""The benchmark: it refuses what is wrong, counts bytes right, measures in turns, and writes everything down."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from amoeba import placements
from amoeba.backends.registry import backends_of
from amoeba.bench import implementations as implementations_module
from amoeba.bench import suite as suite_module
from amoeba.bench import timing as ceilings_module
from amoeba.bench import timing as timing_module
from amoeba.bench.implementations import (
    BY_BACKEND,
    LOOP,
    THROUGH_TRANSFORMERS,
    TRANSFORMERS,
    implementations,
    names_of_ours,
)
from amoeba.bench.suite import Plan, run_suite
from amoeba.bench.timing import (
    Ceilings,
    Product,
    Size,
    Timing,
    measure_ceilings,
    peak_bytes,
    time_in_turns,
    watch_saved,
)
from amoeba.bench.workload import SHAPES, SUITES, Implementation, Shape, make_workload, parse_shape, relative_error
from amoeba.commands.bench_run import make_document, result_path, write_document
from amoeba.core import cost
from amoeba.core.placement import Tolerance
from amoeba.core.weights import LORA_NAMES, ExpertWeights
from amoeba.placements import placement_named
from amoeba.proof.reference.experts import experts_forward

CPU = torch.device("cpu")
TINY = Shape("tiny", tokens=37, hidden=32, intermediate=16, experts=6, top_k=2)
MIB = 2**20


@pytest.fixture
def workload():
    return make_workload(TINY, CPU, torch.float32)


def reference(workload, scale: float = 1.0):
    weights = ExpertWeights(workload.gate_up_EJH, workload.down_EHI)
    return scale * experts_forward(workload.x_TH, workload.expert_TK, workload.weight_TK, weights)


def refusing(workload):
    def raise_out_of_order():
        raise RuntimeError("out of order\nand more lines")

    def without_gradient_of_x():
        weights = ExpertWeights(workload.gate_up_EJH, workload.down_EHI)
        return experts_forward(workload.x_TH.detach(), workload.expert_TK, workload.weight_TK, weights)

    def wrong_gradient_only():
        y = reference(workload)
        return y + 0.1 * (y - y.detach())

    def not_a_number():
        return reference(workload) * math.nan

    return {
        "right": lambda: reference(workload),
        "wrong": lambda: reference(workload, scale=1.0001),
        "raises": raise_out_of_order,
        "no gradient": without_gradient_of_x,
        "wrong gradient": wrong_gradient_only,
        "not a number": not_a_number,
    }


def test_refuses_to_time_what_is_wrong(monkeypatch):
    def planted(workload, *, training, peers, ours):
        return [Implementation(name, False, run) for name, run in refusing(workload).items()], {}

    monkeypatch.setattr(suite_module, "implementations", planted)
    forward, training = run_suite(Plan([TINY], CPU, [torch.float32], ["forward", "training"], repeats=1))

    timed = {m.implementation: m for m in forward.measurements}
    assert {name for name, m in timed.items() if m.status == "timed"} == {"right", "no gradient", "wrong gradient"}

    found = {m.implementation: m for m in training.measurements}
    assert {name for name, m in found.items() if m.status == "timed"} == {"right"}
    for name, words in {
        "wrong": "out of tolerance: output 1.0e-04 > 1e-05",
        "raises": "RuntimeError: out of order",
        "no gradient": "gave no gradient to x",
        "wrong gradient": "x 1.0e-01 > 1e-05, weight 1.0e-01 > 1e-05, gate_up 1.0e-01 > 1e-05, down 1.0e-01 > 1e-05",
        "not a number": "output inf",
    }.items():
        assert words in found[name].reason
        assert found[name].median_ms is None
        assert found[name].rounds == 0
        assert name not in found["right"].times_faster_than


def test_every_implementation_here_passes_its_check_and_is_timed():
    (report,) = run_suite(Plan([TINY], CPU, [torch.float32], ["training"], repeats=2))
    timed = {m.implementation for m in report.measurements if m.status == "timed"}
    ours = {f"amoeba {backend.name}" for backend in backends_of(ExpertWeights, CPU)}
    left_out = {m.implementation for m in report.measurements if m.status == "left out"}
    assert not [m for m in report.measurements if m.status == "refused"]
    assert ours <= timed | left_out
    assert {THROUGH_TRANSFORMERS, *(f"transformers {name}" for name in TRANSFORMERS)} <= timed
    for measurement in report.measurements:
        if measurement.status == "timed":
            assert set(measurement.errors) == {"output", "x", "weight", "gate_up", "down"}
            assert 0 < measurement.min_ms <= measurement.median_ms
            assert measurement.rounds >= 2
            assert set(measurement.times_faster_than) == timed - {measurement.implementation}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_keeps_x_and_h_and_the_row_maps(dtype):
    (report,) = run_suite(Plan([TINY], CPU, [dtype], ["training"], repeats=1))
    ours = [m for m in report.measurements if m.ours and m.status == "timed"]
    assert ours
    maps = cost.row_map_bytes(rows=TINY.rows, experts=TINY.experts, weight_itemsize=dtype.itemsize)
    x_and_h = cost.kept_bytes(
        tokens=TINY.tokens, rows=TINY.rows, hidden=TINY.hidden, intermediate=TINY.intermediate, itemsize=dtype.itemsize
    )
    inputs = TINY.tokens * TINY.hidden * dtype.itemsize + TINY.rows * (8 + dtype.itemsize)
    for measurement in ours:
        # in bf16 `cpu` may sort the rows again instead of keeping the maps, if this CPU multiplies bf16
        sorts_again = measurement.implementation in ("amoeba cpu", THROUGH_TRANSFORMERS) and dtype == torch.bfloat16
        routed = x_and_h + TINY.rows * (8 + dtype.itemsize)
        assert measurement.kept_bytes in ((x_and_h + maps, routed) if sorts_again else (x_and_h + maps,))
        assert measurement.kept_bytes_without_inputs == measurement.kept_bytes - inputs


def test_peak_of_known_allocations():
    def step():
        first = torch.empty(3 * MIB, dtype=torch.int8)
        second = torch.empty(2 * MIB, dtype=torch.int8)
        del first
        third = torch.empty(4 * MIB, dtype=torch.int8)
        return second, third

    assert peak_bytes(step, CPU) == pytest.approx(6 * MIB, abs=4096)


def test_kept_counts_a_storage_once_and_leaves_out_what_is_named():
    parameter = torch.randn(100, 10, requires_grad=True)
    x = torch.randn(50, 100, requires_grad=True)
    with watch_saved() as kept:
        (x[:20] @ parameter).sum() + (x[20:] @ parameter).sum()
    assert kept.bytes_without([parameter]) == x.nbytes
    assert kept.bytes_without([]) == x.nbytes + parameter.nbytes


def test_batched_mm_is_left_out_when_its_copies_do_not_fit(monkeypatch, workload):
    monkeypatch.setattr(implementations_module, "available_memory", lambda device: 2**20)
    found, left_out = implementations(workload, training=True)
    assert "transformers batched_mm" not in {implementation.name for implementation in found}
    assert "copies the weights for each of 74 rows" in left_out["transformers batched_mm"]


def test_without_transformers_ours_are_measured_alone(monkeypatch, workload):
    monkeypatch.setitem(sys.modules, "transformers.models.qwen3_moe.configuration_qwen3_moe", None)
    found, left_out = implementations(workload, training=True)
    assert all(implementation.ours for implementation in found)
    assert {THROUGH_TRANSFORMERS, *(f"transformers {name}" for name in TRANSFORMERS)} <= set(left_out)
    assert "pip install" in left_out["transformers eager"]


def test_steps_take_turns_and_a_slow_one_sits_out(monkeypatch):
    monkeypatch.setattr(timing_module, "MOST_SECONDS_EACH", 0.02)
    calls: list[str] = []

    def step_of(name: str, seconds: float):
        def step(mark):
            mark()
            calls.append(name)
            time.sleep(seconds)
            mark()

        return step

    steps = {"slow": step_of("slow", 0.015), "fast": step_of("fast", 0.0), "last": step_of("last", 0.0)}
    timings = time_in_turns(steps, CPU, repeats=4)
    assert calls[:6] == ["slow", "fast", "last", "last", "fast", "slow"]
    assert (timings["slow"].rounds, timings["fast"].rounds) == (2, 4)
    assert timings["slow"].min_ms >= 15


def test_time_before_the_first_mark_is_not_counted():
    def step(mark):
        time.sleep(0.02)
        mark()
        time.sleep(0.002)
        mark()
        time.sleep(0.005)
        mark()

    timing = time_in_turns({"step": step}, CPU, repeats=1)["step"]
    first, second = timing.part_medians_ms
    assert first >= 2
    assert second >= 5
    assert timing.median_ms == pytest.approx(first + second)


def test_decoding_is_measured_forward_only():
    shape = Shape("step", 1, 32, 16, 6, 2, forward_only=True)
    (report,) = run_suite(Plan([shape], CPU, [torch.float32], ["forward", "training"], repeats=1))
    assert report.measured_pass == "forward"
    assert report.weight_bytes == cost.weight_bytes(experts=2, hidden=32, intermediate=16, itemsize=4)


def test_skewed_routing_is_skewed_and_never_picks_an_expert_twice():
    shape = Shape("skewed", 2000, 8, 8, 128, 8, skew=1.2)
    skewed = make_workload(shape, CPU, torch.float32, training=False)
    even = make_workload(Shape("even", 2000, 8, 8, 128, 8), CPU, torch.float32, training=False)
    assert 14 < skewed.busiest() < 16
    assert even.busiest() < 1.5
    for made in (skewed, even):
        assert made.expert_TK.sort(dim=1).values.diff(dim=1).min() > 0


def test_relative_error_in_slices_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr("amoeba.bench.workload._COMPARED_AT_ONCE", 64)
    truth = torch.randn(13, 7, 3, dtype=torch.float64)
    found = truth + 1e-3 * torch.randn_like(truth)
    assert relative_error(found, truth) == pytest.approx(float((found - truth).norm() / truth.norm()))
    assert relative_error(found[:-1], truth) == math.inf


def test_suites_are_made_of_known_shapes():
    assert {name for names in SUITES.values() for name in names} <= set(SHAPES)
    assert parse_shape("512,512,256,32,4").rows == SHAPES["small"].rows


@pytest.mark.parametrize("text", ["", "smal", "1,2,3", "1,2,3,4,x", "0,8,8,4,2", "8,8,8,4,5"])
def test_a_bad_shape_says_what_was_expected(text):
    with pytest.raises(ValueError, match="--shape: expected"):
        parse_shape(text)


def test_the_document_is_complete_and_names_no_place(tmp_path):
    reports = run_suite(Plan([TINY], CPU, [torch.float32], ["training"], repeats=2))
    document = make_document("amoeba bench --shape tiny", load_before=0.5, results=reports)
    text = json.dumps(document, allow_nan=False)
    assert {"date", "commit", "command", "machine", "versions", "load_before", "results"} <= set(document)
    assert {"model", "cores", "threads", "instruction_sets"} <= set(document["machine"]["cpu"])
    assert {"python", "torch", "transformers", "amoeba"} <= set(document["versions"])
    for place in (str(Path.home()), str(Path.cwd()), sys.prefix):
        assert place not in text
    (result,) = document["results"]
    assert (result["pass"], result["dtype"], result["reference"]) == ("training", "float32", "float64")
    for measurement in result["measurements"]:
        if measurement["status"] == "timed":
            for field in ("median_ms", "min_ms", "rounds", "kept_bytes", "peak_bytes", "flops_per_second", "errors"):
                assert measurement[field]


def test_ceilings_count_two_operations_per_product_and_both_sides_of_a_copy(monkeypatch):
    def two_ms(steps, device, repeats):
        for step in steps.values():
            step(lambda: None)
        return {name: Timing([(2.0,)]) for name in steps}

    monkeypatch.setattr(ceilings_module, "time_in_turns", two_ms)
    monkeypatch.setitem(ceilings_module.SIZES, "cpu", Size(96, copy_bytes=4000, rounds=1))
    found = measure_ceilings(CPU, [torch.float64])
    rate = 2 * 96**3 / 2e-3
    assert found.matmul == {"float32": Product(96, rate), "float64": Product(96, rate)}
    assert found.copy_bytes_per_second == pytest.approx(2 * 4000 / 2e-3)
    assert "\n" not in found.line()


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setitem(ceilings_module.SIZES, "cpu", Size(64, copy_bytes=1 << 20, rounds=3))
    found = measure_ceilings(CPU, [torch.float32, torch.bfloat16])
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e6 < found.matmul_flops_per_second(dtype) < 1e14
    assert 1e6 < found.copy_bytes_per_second < 1e13


def test_a_problem_is_held_against_the_product_that_it_is_computed_with(monkeypatch):
    found = Ceilings("cpu", {"float32": Product(64, 1.0), "bfloat16": Product(64, 2.0)}, 0, 0.0)
    for has_instructions, expected in ((True, 2.0), (False, 1.0)):
        monkeypatch.setattr("amoeba.system.cpu_features.has_bf16_instructions", lambda has=has_instructions: has)
        assert found.matmul_flops_per_second(torch.bfloat16) == expected
    assert found.matmul_flops_per_second(torch.float16) == 1.0


def test_a_result_is_written_whole_and_never_over_another(tmp_path):
    path = result_path(tmp_path / "results")
    write_document(path, {"first": True}, first=True)
    assert json.loads(path.read_text()) == {"first": True}
    with pytest.raises(FileExistsError, match="not overwritten"):
        result_path(tmp_path / "results")
    with pytest.raises(FileExistsError):
        write_document(path, {"first": False}, first=True)
    assert json.loads(path.read_text()) == {"first": True}
    assert list(path.parent.iterdir()) == [path]


def test_quantised_experts_are_timed_by_other_backends_on_request():
    workload = make_workload(TINY, CPU, torch.bfloat16, training=False)
    names, formats = list(BY_BACKEND), ("fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights")
    found, left_out = implementations(workload, training=False, peers=(), ours=names)
    assert {each.name for each in found} == {f"amoeba {name}" for name in names}
    found_by_name = {each.name: each.run() for each in found}
    for name in formats:
        by_eager, by_fused = (found_by_name[f"amoeba {name} by {backend}"] for backend in ("eager", "cpu-fused"))
        assert (by_eager - by_fused).norm() <= 1e-2 * by_eager.norm()
    assert len({float(y.detach().float().norm()) for y in found_by_name.values()}) >= len(formats), (
        "formats of their own"
    )
    assert set(names) <= set(names_of_ours())
    found, left_out = implementations(workload, training=False, peers=(), ours=["eager"])
    assert {left_out[f"amoeba {name}"] for name in names} == {"was not asked for"}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 8192])
def test_on_a_gpu_times_bytes_and_both_references(tokens):
    shape = Shape("on gpu", tokens=tokens, hidden=512, intermediate=256, experts=16, top_k=4)
    forward, training = run_suite(
        Plan([shape], torch.device("cuda"), [torch.bfloat16], ["forward", "training"], repeats=3)
    )
    assert training.reference == (torch.float64 if tokens == 64 else torch.float32)
    x_and_h = cost.kept_bytes(tokens=tokens, rows=shape.rows, hidden=512, intermediate=256, itemsize=2)
    gradients = cost.weight_bytes(experts=16, hidden=512, intermediate=256, itemsize=2)
    for report in (forward, training):
        timed = [m for m in report.measurements if m.status == "timed"]
        assert {THROUGH_TRANSFORMERS, "transformers grouped_mm"} <= {m.implementation for m in timed}
        # a peer may be out of tolerance (transformers' batched_mm is, in bf16); ours may not
        assert not [m for m in report.measurements if m.ours and m.status == "refused"]
        assert all(0 < m.min_ms <= m.median_ms < 1000 for m in timed)
    for measurement in training.measurements:
        if measurement.ours and measurement.status == "timed":
            kernels = ("amoeba triton", "amoeba tasks", "amoeba exact", "amoeba fp8", THROUGH_TRANSFORMERS)
            map_itemsize = 4 if measurement.implementation.startswith(kernels) else 8
            maps = cost.row_map_bytes(
                rows=shape.rows, experts=shape.experts, weight_itemsize=2, map_itemsize=map_itemsize
            )
            if measurement.implementation.endswith("h recomputed"):
                assert 0.1 < measurement.kept_bytes / (x_and_h + maps) < 0.3
            elif measurement.implementation.startswith("amoeba fp8-saved"):
                assert 0.5 < measurement.kept_bytes / (x_and_h + maps) < 0.75
            else:
                assert measurement.kept_bytes == x_and_h + maps, measurement.implementation
            assert gradients < measurement.peak_bytes < 20 * (gradients + x_and_h)


@pytest.mark.gpu
def test_on_a_gpu_ceilings_are_those_of_a_gpu_and_leave_no_memory_behind():
    device = torch.device("cuda")
    square = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    square @ square  # cuBLAS keeps a workspace from its first product on
    del square
    before = torch.cuda.memory_allocated(device)
    found = measure_ceilings(device, [torch.bfloat16])
    assert set(found.matmul) == {"bfloat16"}
    assert 1e13 < found.matmul_flops_per_second(torch.bfloat16) < 1e16
    assert 1e11 < found.copy_bytes_per_second < 1e14
    assert torch.cuda.memory_allocated(device) == before


class TestLora:
    shape = Shape("lora", tokens=37, hidden=64, intermediate=32, experts=12, top_k=2, rank=3)

    def test_experts_are_frozen_and_the_factors_get_the_gradients(self):
        workload = make_workload(self.shape, CPU, torch.bfloat16)
        assert not workload.gate_up_EJH.requires_grad and not workload.down_EHI.requires_grad
        assert set(workload.truth) == {"output", *workload.leaves()}
        assert set(workload.leaves()) == {"x", "weight", *LORA_NAMES}
        assert all(workload.truth[name].shape == leaf.shape for name, leaf in workload.leaves().items())

    def test_no_two_experts_are_the_same(self):
        gate_up = make_workload(self.shape, CPU, torch.bfloat16, training=False).gate_up_EJH
        assert len({tuple(expert.flatten().tolist()) for expert in gate_up}) == self.shape.experts

    def test_packed_experts_and_the_loop_are_timed_next_to_our_backends(self):
        (report,) = run_suite(Plan([self.shape], CPU, [torch.float32], ["training"], repeats=1))
        timed = {m.implementation for m in report.measurements if m.status == "timed"}
        assert {"amoeba cpu-bf16", "amoeba cpu-int8", "amoeba in float32", LOOP, f"{LOOP} in float32"} <= timed
        assert report.dtype == torch.bfloat16
        assert report.flops == 2 * cost.forward_flops(rows=self.shape.rows, hidden=64, intermediate=32)
        assert not [m.reason for m in report.measurements if m.status == "refused"]

    def test_decoding_in_bf16_is_measured_with_packed_experts_too(self):
        shape = Shape("decode", tokens=1, hidden=64, intermediate=32, experts=6, top_k=2, forward_only=True)
        (report,) = run_suite(Plan([shape], CPU, [torch.bfloat16], ["forward"], repeats=1, peers=()))
        timed = {m.implementation: m for m in report.measurements if m.status == "timed"}
        assert {"amoeba cpu-bf16", "amoeba cpu-int8", "amoeba in float32"} <= set(timed)
        read = [timed[f"amoeba {name}"] for name in ("cpu-int8", "cpu-bf16", "in float32")]
        assert [round(m.weight_bytes_per_second * m.median_ms / 1e3 / report.weight_bytes, 6) for m in read] == [
            0.5,
            1,
            2,
        ]

    def test_int8_has_its_own_tolerance_and_is_refused_beyond_it(self, monkeypatch):
        int8 = replace(placement_named("cpu-int8"), tolerances={torch.bfloat16: Tolerance(3e-2, 1e-4)})
        monkeypatch.setitem(placements._placements, "cpu-int8", int8)
        (report,) = run_suite(Plan([self.shape], CPU, [torch.bfloat16], ["training"], repeats=1))
        (int8,) = (m for m in report.measurements if m.implementation == "amoeba cpu-int8")
        assert int8.status == "refused" and "x " in int8.reason and "output" not in int8.reason

    def test_what_does_not_fit_is_left_out_with_the_sizes(self, monkeypatch):
        monkeypatch.setattr(implementations_module, "available_memory", lambda device: 1000)
        found, left_out = implementations(make_workload(self.shape, CPU, torch.bfloat16), training=True)
        assert "GiB are free" in left_out["amoeba cpu-bf16"]
        assert not [candidate for candidate in found if "cpu-" in candidate.name]


@pytest.mark.gpu
def test_on_a_gpu_decoding_is_timed_in_a_graph_of_steps_on_other_experts_too():
    shape = Shape("decode", tokens=1, hidden=512, intermediate=256, experts=32, top_k=4, forward_only=True)
    (report,) = run_suite(Plan([shape], torch.device("cuda"), [torch.bfloat16], ["forward"], repeats=3))
    found = {m.implementation: m for m in report.measurements if m.status == "timed"}
    for name in ("amoeba triton", THROUGH_TRANSFORMERS):
        assert 0 < found[name].graph_median_ms < found[name].median_ms
        expected = report.weight_bytes / found[name].graph_median_ms * 1e3
        assert found[name].graph_weight_bytes_per_second == pytest.approx(expected)
    assert found["transformers eager"].graph_median_ms is None, "it asks the host which experts there are"
