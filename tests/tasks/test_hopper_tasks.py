"""The scheduled backward in Gluon has the bits of Hopper's own kernels, in every run, and ends."""

import time

import pytest
import torch

from amoeba.core.config import Activation
from amoeba.core.problem import Needs, Problem
from amoeba.core.weights import ExpertWeights
from amoeba.proof.conformance import poisoned_memory
from selection import quick

pytest.importorskip("triton")
from amoeba.backends import sorted_rows
from amoeba.backends.triton_rows import TritonRows
from amoeba.kernels.activation import constants
from amoeba.tasks.hopper.backward import Plan, hopper_backward, plan_of
from amoeba.tasks.sizes import bundle_of
from amoeba.tasks.triton.bias_tasks import BiasTasks

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")]
ALL = Needs(x=True, weight=True, gate_up=True, down=True)
BIASES = Needs(x=True, weight=True, gate_up=True, down=True, gate_up_bias=True, down_bias=True)

# name -> T, H, I, E, K, how tokens are routed. Few widths are whole tiles of 128 and 256.
CASES = {
    "ragged": (777, 320, 192, 7, 2, "even"),
    "empty experts": (300, 256, 128, 40, 2, "few"),
    "skew": (2000, 448, 256, 16, 4, "skew"),
    "one expert": (515, 192, 768, 3, 1, "one"),
    "one row": (1, 64, 64, 5, 1, "even"),
    "wide lines": (600, 512, 512, 9, 8, "sentinels"),
    "widest lines": (900, 320, 2048, 5, 2, "sentinels"),
    "a part of a line": (400, 256, 1472, 6, 2, "even"),
    "many slots": (333, 1024, 256, 64, 16, "even"),
    "many waves": (3000, 512, 256, 130, 4, "even"),
}


def make_problem(tokens, hidden, intermediate, experts, top_k, how, dtype=torch.bfloat16, seed=0, biases=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to("cuda", dtype)

    scores = torch.rand(tokens, experts, generator=generator)
    if how == "skew":
        scores *= torch.arange(1, experts + 1) ** -1.2
    if how == "few":
        scores[:, experts // 4 :] = -1
    ids = torch.zeros(tokens, top_k, dtype=torch.int64) if how == "one" else scores.topk(top_k, 1).indices
    if how == "sentinels":
        ids[torch.rand(tokens, top_k, generator=generator) < 0.3] = -1
    weight = torch.rand(tokens, top_k, generator=generator).cuda()
    given = (normal(experts, 2 * intermediate), normal(experts, hidden)) if biases else ()
    weights = ExpertWeights(normal(experts, 2 * intermediate, hidden), normal(experts, hidden, intermediate), *given)
    return Problem(normal(tokens, hidden), ids.cuda(), weight, weights), normal(tokens, hidden)


def scheduled(problem, dy_TH, saved, small=False, **options):
    weights = problem.weights
    with poisoned_memory():
        return hopper_backward(
            dy_TH, problem.x_TH, saved.h_NJ, problem.expert_TK, problem.weight_TK, weights.gate_up_EJH,
            weights.down_EHI, weights.activation, saved.maps, small=small,
            biases=BiasTasks(weights.gate_up_bias_EJ, weights.down_bias_EH), **options,
        )  # fmt: skip


def check(found, expected):
    for name, value in found._asdict().items():
        if value is None:
            assert getattr(expected, name) is None, name
            continue
        assert value.isfinite().all(), name
        assert value.equal(getattr(expected, name)), name


class TestOnHopper:
    pytestmark = on_hopper

    @quick(lambda name, dtype: dtype == torch.bfloat16 or name == "ragged")  # a kernel is compiled for each
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", CASES)
    def test_gradients_have_the_bits_of_the_kernels_apart(self, name, dtype):
        problem, dy_TH = make_problem(*CASES[name], dtype=dtype)
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        expected = sorted_rows.backward(problem, saved, dy_TH, ALL, TritonRows)
        first = scheduled(problem, dy_TH, saved)
        check(first, expected)
        check(scheduled(problem, dy_TH, saved), first)
        check(scheduled(problem, dy_TH, saved, overwrite_h=True), first)

    @pytest.mark.parametrize("name", ["ragged", "empty experts", "wide lines", "one expert"])
    def test_biases_have_the_bits_of_the_kernels_apart(self, name):
        problem, dy_TH = make_problem(*CASES[name], biases=True)
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        expected = sorted_rows.backward(problem, saved, dy_TH, BIASES, TritonRows)
        for small in (False, True, False):
            check(scheduled(problem, dy_TH, saved, small=small), expected)

    def test_300_passes_end_and_a_captured_one_has_their_bits(self):
        problem, dy_TH = make_problem(1500, 512, 256, 16, 4, "even")
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        first = scheduled(problem, dy_TH, saved)
        differ = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(300):
            for left, right in zip(first[:4], scheduled(problem, dy_TH, saved)[:4], strict=True):
                differ |= (left != right).any()
        assert not differ
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = scheduled(problem, dy_TH, saved)
        for each in captured[:4]:
            each.zero_()
        for _ in range(3):
            graph.replay()
        check(captured, first)

    @pytest.mark.parametrize(
        "name", ["many waves", "ragged", "empty experts", "one row", "many slots", "wide lines", "skew", "one expert"]
    )
    def test_the_order_of_small_layers_has_the_same_bits(self, name):
        problem, dy_TH = make_problem(*CASES[name])
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        expected = sorted_rows.backward(problem, saved, dy_TH, ALL, TritonRows)
        for _ in range(3):
            check(scheduled(problem, dy_TH, saved, small=True), expected)

    @pytest.mark.parametrize("small", [False, True])
    def test_copies_on_another_stream_next_to_it_neither_stop_it_nor_change_a_bit(self, small):
        """As when the next layer's weights are gathered meanwhile: copies from the host, within the device, and kernels
        that take multiprocessors from it."""
        problem, dy_TH = make_problem(1500, 512, 256, 16, 4, "even")
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        first = scheduled(problem, dy_TH, saved, small=small)
        differ = torch.zeros((), dtype=torch.bool, device="cuda")
        beside = torch.cuda.Stream()
        shard = torch.ones(8 << 20, dtype=torch.bfloat16, pin_memory=True)
        whole = torch.empty(4, len(shard), dtype=torch.bfloat16, device="cuda")
        beside.wait_stream(torch.cuda.current_stream())
        for step in range(60):
            with torch.cuda.stream(beside):
                whole[0].copy_(shard, non_blocking=True)
                whole[1:] = whole[0] * (step + 1)
            for left, right in zip(first[:4], scheduled(problem, dy_TH, saved, small=small)[:4], strict=True):
                differ |= (left != right).any()
        ends = [torch.cuda.Event() for _ in range(2)]
        ends[0].record()
        ends[1].record(beside)
        deadline = time.monotonic() + 60
        while not all(end.query() for end in ends):
            assert time.monotonic() < deadline, "somebody waits for ever"
            time.sleep(0.01)
        assert not differ and whole[3, -1] == 60

    def test_its_tickets_are_those_of_the_list_each_once_behind_its_gates(self):
        from amoeba.tasks.hopper.task_list import make_list
        from amoeba.tasks.timeline import DeviceTrace
        from amoeba.tasks.triton.tickets import make_table

        tokens, hidden, intermediate, experts, top_k, _ = CASES["skew"]
        problem, dy_TH = make_problem(*CASES["skew"])
        _, saved = sorted_rows.forward(problem, "h", TritonRows)
        trace = DeviceTrace(problem.x_TH.device)
        check(scheduled(problem, dy_TH, saved, trace=trace.room), scheduled(problem, dy_TH, saved))
        records = trace.records()
        assert [record.ticket for record in records] == list(range(len(records)))
        plan = Plan(hidden, intermediate, experts, top_k, **constants(Activation()))
        programs = torch.cuda.get_device_properties(0).multi_processor_count
        layout, table = plan.layout(tokens, tokens * top_k, programs), make_table(saved.offs_E, 128)
        assert len(records) == layout.most_tickets(int(table.first_tile[-1]))
        lines = make_list(table, saved.offs_E, layout, len(records), row_counters=plan.ROW_COUNTERS)
        assert [list(map(int, record.task)) for record in records] == lines[:, :3].tolist()
        assert all(record.came <= record.started <= record.ended for record in records)
        arrows = trace.gates(records, saved.offs_E.tolist())
        assert all(before.ended <= after.started for before, after in arrows)

    def test_the_backend_takes_it_and_the_plain_kernel_where_it_does_not_serve(self):
        from amoeba.backends.tasks import kernel_for
        from amoeba.tasks.triton.backward import scheduled_backward

        problem = make_problem(*CASES["one row"])[0]
        assert kernel_for(problem) is hopper_backward
        plain = ExpertWeights(*problem.weights.tensors()[:2], activation=Activation("silu", interleaved=True))
        assert kernel_for(problem._replace(weights=plain)) is scheduled_backward


@pytest.mark.parametrize(
    ("top_k", "activation", "reason"),
    [
        (8, Activation(), None),
        (16, Activation("gelu", limit=7.0), None),
        (8, Activation("relu", gated=False), "all gate rows before all up rows"),
        (8, Activation(interleaved=True), "all gate rows before all up rows"),
        (17, Activation(), "up to 16 experts per token; these have 17"),
    ],
)
def test_what_it_does_not_serve_has_a_reason(top_k, activation, reason):
    from amoeba.tasks.hopper.backward import why_not

    found = why_not(top_k, activation)
    assert found is None if reason is None else found is not None and reason in found


def test_a_stage_holds_the_same_bytes_whatever_the_task_is():
    from amoeba.kernels.hopper import gemm, wgrad
    from amoeba.tasks.hopper import queue as hopper_queue

    bytes_of_stage = hopper_queue.STAGE_BYTES.value
    assert bytes_of_stage == 2 * gemm.BLOCK_K * (gemm.BLOCK_M + gemm.BLOCK_N)
    assert bytes_of_stage == 2 * wgrad.BLOCK_N * (wgrad.BLOCK_H + wgrad.BLOCK_W)
    tile = (hopper_queue.BLOCK_M.value, hopper_queue.BLOCK_N.value, hopper_queue.BLOCK_K.value)
    assert tile == (gemm.BLOCK_M, gemm.BLOCK_N, gemm.BLOCK_K)
    assert tile == (wgrad.BLOCK_H, wgrad.BLOCK_W, wgrad.BLOCK_N)
    assert hopper_queue.STAGES.value == gemm.STAGES == wgrad.STAGES
    for intermediate in (64, 128, 192, 256, 512, 768, 1024, 1408, 1472, 2048):
        plan = Plan(512, intermediate, 8, 2, **constants(Activation()))
        assert bytes_of_stage == 2 * 3 * plan.LINES * plan.BLOCK
        assert plan.OWN_LINES % 8 == 0  # each warpgroup has whole patterns of the shared memory's layout


def test_a_stage_holds_whole_tokens_for_their_sums():
    from amoeba.tasks.hopper.backward import MOST_SLOTS, Plan

    for top_k in range(1, MOST_SLOTS + 1):
        plan = Plan(512, 256, 32, top_k, **constants(Activation()))
        assert plan.TOGETHER * top_k <= plan.STAGED_ROWS <= 64 and plan.TOKENS % plan.TOGETHER == 0
        assert plan.TOGETHER == plan.TOKENS or 2 * plan.TOGETHER * top_k > 64


@pytest.mark.parametrize("small", [False, True])
def test_every_tile_is_handed_out_in_large_and_small_layers(small):
    plan = plan_of(1792, 256, 128, 8, Activation(), small, bundle_of(8192, 128, small) > 1)
    layout = plan.layout(1024, 8192, 132)
    assert plan.SMALL == plan.BUNDLED == small and plan.LISTED
    bundle = 4 if small else 1
    assert layout.down_weight_parts * bundle >= plan.DOWN_TILES > (layout.down_weight_parts - 1) * bundle
    assert layout.up_weight_parts * bundle >= plan.UP_TILES > (layout.up_weight_parts - 1) * bundle
    kept = (128 - layout.late) * layout.up_weight_parts
    assert layout.behind == (kept * 30 // 100 if small else 0)
    assert layout.token_blocks == 1024 // plan.TOKENS
