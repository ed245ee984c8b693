"""Frozen experts in fp8-128 whose rows are quantised, too: the numbers, when it is taken, and what keeps bf16 products.

T tokens · K experts per token · E experts · H hidden · I intermediate

Gluon does not run without a GPU: its products are stood in for by torch, as in test_fp8_kernels.
"""

from types import SimpleNamespace

import pytest
import torch
from test_fp8_kernels import on_hopper, sentinels, without_gpu
from test_fp8_plans import as_launch
from torch import Tensor

from amoeba import Activation, Request, Routing, experts
from amoeba.backends import experts_operator, fp8_choice, fp8_kernel_rows, quantised_triton, sorted_rows
from amoeba.backends.registry import explain
from amoeba.core.problem import Problem
from amoeba.kernels import decode as decode_kernels
from amoeba.kernels.hopper import fp8_gemm, fp8_gemm_parts
from amoeba.kernels.launch import plan as launch_plan
from amoeba.kernels.quantise import empty_rows
from amoeba.precision import FP8_128, FP8_TRAINING, MXFP8, QuantisedMatrix, quantise
from amoeba.precision.formats import fp8_blocks
from amoeba.precision.quantised_experts import Products, QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case
from amoeba.proof.conformance import verify_case
from amoeba.proof.reference import experts as reference
from fp8_stand_ins import product, stand_in, up
from selection import each_value_once
from small_layer import E, Layer

CPU = torch.device("cpu")
# Sizes of no whole block, experts without rows, one row, one expert for all, no tokens, biases, other activations.
CASES = [
    Case(63, 2, SILU, True, "sentinels", 144, 136),
    Case(1, 1, SILU, False, "random", 320, 192),
    Case(9, 2, PLAIN_RELU2, True, "empty_experts", 31, 23),
    Case(33, 1, CLAMPED_SWIGLU, True, "all_on_one", 160, 200),
    Case(9, 2, SILU, False, "sentinels_alone"),
    Case(0, 2, SILU, True),
    Case(21, 2, SILU, True, "random", 144, 136, lora="all", rank=3),
]
GPU_CASES = [
    Case(333, 2, SILU, True, "sentinels", 512, 384),
    Case(760, 4, SILU, False, "empty_experts", 512, 256, num_experts=16),
    Case(399, 4, SILU, False, "sentinels", 320, 192),  # half blocks, of which gates and ups have their own
    Case(399, 2, SILU, True, "random", 192, 320),
    Case(333, 2, PLAIN_RELU2, True, "sentinels", 128, 640),
    Case(1, 1, SILU, False, "random", 512, 256),
    Case(333, 1, SILU, False, "all_on_one", 128, 64),
]


def quantised(layer: Layer, products: Products = "w8a8", dtype: torch.dtype = torch.float32) -> QuantisedExperts:
    named = {name: tensor.detach().to(dtype) for name, tensor in layer.tensors.items()}
    return quantise_experts(layer.weights(named), FP8_128, products)


def run(layer: Layer, weights: QuantisedExperts, backend: str = "auto", lora: bool = False) -> Tensor:
    with torch.no_grad():
        routing = Routing(layer.expert_TK, layer.tensors["weight"])
        factors = layer.lora(layer.tensors) if lora else None
        return experts(layer.tensors["x"].to(weights.dtype), routing, weights, backend=backend, lora=factors)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_gradients_rows_are_quantised_and_with_them_they_stay(case: Case) -> None:
    """Both against fp64: with rows as they are, w8a8 is 4 % away."""
    for dtype, most in ((torch.float32, 3e-3), (torch.bfloat16, 1e-2)):
        result = verify_case(case, "w8a8", CPU, dtype)
        assert result.ok and result.refused is None, (dtype, result)
        assert case.has_kink or result.errors["inference"] <= most, (dtype, result)
        assert {"output", "inference", "x", "weight"} <= set(result.errors)


def test_the_error_is_that_of_rows_in_e4m3() -> None:
    layer = Layer(tokens=64, hidden=256, inner=256, bias=False)
    truth = reference.experts_forward(
        layer.tensors["x"].detach().double(),
        layer.expert_TK,
        layer.tensors["weight"].detach().double(),
        dequantise_experts(quantised(layer), torch.float64),
    )
    errors = {
        products: float((run(layer, quantised(layer, products)).double() - truth).norm() / truth.norm())
        for products in ("bf16", "w8a8")
    }
    assert errors["bf16"] < 1e-5 and 0.03 < errors["w8a8"] < 0.055, errors


@pytest.mark.parametrize("dispatched", [False, True], ids=["direct", "by torch's dispatcher, as in a traced graph"])
def test_lora_and_gradients_keep_the_bits_of_bf16_products(dispatched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatched:
        monkeypatch.setattr(experts_operator, "can_skip_dispatcher", lambda *tensors: False)
    layer = Layer(tokens=9, hidden=64, inner=96, rank=3)
    plain, w8a8 = (quantised(layer, products) for products in ("bf16", "w8a8"))
    assert torch.equal(run(layer, w8a8, "eager", lora=True), run(layer, plain, "eager", lora=True))
    assert not torch.equal(run(layer, w8a8, "eager"), run(layer, plain, "eager"))
    found = []
    for weights, recompute in ((plain, False), (w8a8, False), (w8a8, True)):
        y_TH = experts(
            layer.tensors["x"],
            Routing(layer.expert_TK, layer.tensors["weight"]),
            weights,
            backend="eager",
            recompute=recompute,
        )
        found.append((y_TH.detach(), *torch.autograd.grad(y_TH, [layer.tensors["x"]], layer.dy_TH)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(fp8_choice, "why_not_there", lambda *given: None)
    monkeypatch.setattr(fp8_choice, "why_not_sized", lambda *given: None)


@each_value_once()
@without_gpu
@pytest.mark.parametrize("sizes", [(128, 256), (192, 64), (64, 192)], ids=str)
@pytest.mark.parametrize("activation", [SILU, PLAIN_RELU2], ids=str)
def test_kernels_have_the_numbers_of_plain_torch(activation: Activation, sizes: tuple, stood_in: None) -> None:
    layer = Layer(activation, tokens=23, hidden=sizes[0], inner=sizes[1], expert_TK=sentinels(23))
    expected = run(layer, quantised(layer), "eager")
    found = run(layer, quantised(layer), "triton")
    assert (found - expected).norm() <= 2e-3 * expected.norm()
    codes = quantised(layer).gate_up_EJH.matrix
    assert codes.parts == (2 if activation.gated else 1)


@without_gpu
def test_the_codes_of_the_file_are_multiplied_and_not_a_copy(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = Layer(tokens=5, hidden=64, inner=64), []
    weights = quantised(layer)
    monkeypatch.setattr(fp8_gemm, "up", lambda *given, **named: seen.append(given[3]) or up(*given, **named))
    monkeypatch.setattr(fp8_gemm, "multiply", lambda *given, **named: seen.append(given[1]) or product(*given, **named))
    run(layer, weights, "triton")
    stored = weights.stored_gate_up, weights.stored_down
    assert [each.data.data_ptr() for each in seen] == [data.data_ptr() for data, _, _ in stored]
    assert [each.scales.data_ptr() for each in seen] == [scales.data_ptr() for _, scales, _ in stored]


@without_gpu
def test_a_repeated_pass_has_the_bits_of_one_that_is_computed(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_gemm, "multiply", as_launch(product))
    monkeypatch.setattr(fp8_gemm, "up", as_launch(up))
    launch_plan.forget_plans()
    layer = Layer(tokens=5, hidden=64, inner=64, bias=False)
    expected, *_ = [run(layer, quantised(layer), "triton") for _ in range(3)]
    monkeypatch.setattr(sorted_rows, "forward", None)
    assert torch.equal(run(layer, quantised(layer), "triton"), expected)


def test_large_experts_with_few_rows_are_decoded(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(hidden=64, inner=64, bias=False)
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE_FROZEN", 64 * 64)
    monkeypatch.setattr(fp8_choice, "LARGE_HIDDEN", 64)
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_LARGE", 2)
    monkeypatch.setattr(fp8_choice, "MOST_ROWS_DECODED", 3)
    auto = quantised(layer, "auto", torch.bfloat16)
    decoded = []
    monkeypatch.setattr(decode_kernels, "decode", lambda problem, *, e4m3: decoded.append(e4m3) or problem.x_TH)
    for tokens, expected in ((E - 1, [False]), (E, [True])):  # two experts of each
        problem = problem_of(tokens, auto)
        quantised_triton.BACKEND.forward(problem._replace(x_TH=problem.x_TH.bfloat16()), "nothing")
        assert decoded == expected
        decoded.clear()
    problem = problem_of(3 * E // 2 + 1, auto)
    assert fp8_choice.takes_w8a8(problem, "nothing")
    assert not fp8_choice.decodes_w8a8(problem._replace(x_TH=problem.x_TH.bfloat16())), "sorted rows read weights once"


def problem_of(tokens: int, weights: QuantisedExperts, top_k: int = 2, most_rows: int | None = None) -> Problem:
    expert_TK = torch.zeros(tokens, top_k, dtype=torch.int64)
    x_TH = torch.zeros(tokens, weights.hidden)
    return Problem(x_TH, expert_TK, torch.ones(tokens, top_k), weights, most_rows=most_rows)


def test_auto_takes_it_where_it_was_measured_to_be_faster(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(hidden=64, inner=64, bias=False)
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE_FROZEN", 64 * 64)
    auto = quantised(layer, "auto")
    enough = fp8_choice.FEWEST_ROWS_FROZEN * E // 2  # tokens with two experts each
    assert not fp8_choice.takes_w8a8(problem_of(enough - 1, auto), "nothing")
    monkeypatch.setattr(fp8_choice, "FEWEST_ROWS_FROZEN", 1)
    assert not fp8_choice.takes_w8a8(problem_of(64, auto), "nothing"), "these are decoded"
    assert fp8_choice.takes_w8a8(problem_of(65, auto), "nothing")
    assert not fp8_choice.takes_w8a8(problem_of(65, auto, most_rows=3), "nothing"), "few of them are of these experts"
    for save in ("h", "inputs"):
        assert not fp8_choice.takes_w8a8(problem_of(65, auto), save)  # type: ignore[arg-type]
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE_FROZEN", 64 * 64 + 1)
    assert not fp8_choice.takes_w8a8(problem_of(65, auto), "nothing")
    assert fp8_choice.takes_w8a8(problem_of(1, quantised(layer)), "nothing"), "w8a8 was asked for"
    assert not fp8_choice.takes_w8a8(problem_of(65, quantised(layer, "bf16")), "nothing")


def test_reasons_against_it() -> None:
    layer = Layer(hidden=64, inner=64, bias=False)
    auto = quantised(layer, "auto")
    assert "needs a Hopper GPU" in (fp8_choice.why_not_w8a8(auto) or "")
    for format in (MXFP8, fp8_blocks(64, 64)):
        weights = quantise_experts(layer.weights(layer.tensors), format)
        assert "e4m3 in blocks of 128 x 128" in (weights.why_not_w8a8() or "")
        with pytest.raises(ValueError, match=f"in {format.name}"):
            weights.with_products("w8a8")
    request = Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), quantised(layer))
    explanation = explain(request)
    assert explanation.backend is not None and explanation.backend.name == "eager"
    assert "quantises no rows" in explanation.reasons


def test_small_experts_and_experts_in_slots_are_named(stood_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(hidden=64, inner=64, bias=False)
    auto = quantised(layer, "auto")
    assert "1024 x 512 numbers and more, these are of 64 x 64" in (fp8_choice.why_not_w8a8(auto) or "")
    tensors = [None if each is None else torch.cat((each, each), dim=1)[:, : each.shape[1]] for each in auto.tensors()]
    in_slots = QuantisedExperts.of(tensors, auto.constants())
    assert "in slots" in (fp8_choice.why_not_w8a8(in_slots) or "")


@pytest.mark.parametrize(("inner", "parts"), [(64, 2), (192, 2), (256, 2), (192, 1), (256, 1)])
def test_each_column_of_a_tile_meets_the_scale_of_its_own_block(inner, parts, monkeypatch):
    """Where gates and ups have blocks of their own, and where these are counted through both."""
    matrix = QuantisedMatrix(
        torch.zeros(1, 2 * inner, 128, dtype=torch.uint8),
        torch.arange(-(-inner // 128) * 2 if parts == 2 else -(-2 * inner // 128)).float()[None, :, None],
        FP8_128 if parts == 2 else FP8_TRAINING,
        128,
        parts,
    )
    plans: list = []
    monkeypatch.setattr(fp8_gemm, "_launch", lambda plan, *given: plans.append(plan))
    rows, a, order_N = empty_rows(3, 128, CPU), empty_rows(3, inner, CPU), torch.zeros(3, dtype=torch.int32)
    fp8_gemm.up(rows, order_N, 1, matrix, order_N, SILU, a)
    monkeypatch.setattr(
        fp8_gemm_parts, "gl", SimpleNamespace(cdiv=lambda one, other: -(-one // other), minimum=min, constexpr=int)
    )
    blocks = fp8_gemm_parts.blocks_of_matrix.fn(2 * inner, inner, plans[0])
    assert blocks == matrix.scales.shape[1]
    codes = QuantisedMatrix(torch.full_like(matrix.data, 0x38), matrix.scales, matrix.format, 128, parts)  # ones
    of_column = codes.dequantise()[0, :, 0]
    for n in range(-(-inner // 128)):
        left, right, far = fp8_gemm_parts.blocks_of_columns.fn(n, inner, blocks, plans[0])
        for column in range(128 * n, min(inner, 128 * n + 128)):
            of_up = far if plans[0].SHIFTED and column % 128 >= 64 else right
            assert of_column[column] == left and of_column[inner + column] == of_up, (n, column)


def test_products_of_other_blocks_are_refused_by_the_launcher() -> None:
    rows, table = empty_rows(3, 128, CPU), torch.zeros(3, dtype=torch.int32)
    out = torch.zeros(3, 128, dtype=torch.bfloat16)
    matrix = quantise(torch.zeros(1, 128, 128), fp8_blocks(64, 128))
    with pytest.raises(ValueError, match="in blocks of 128"):
        fp8_gemm.multiply(rows, matrix, table, out)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_on_a_gpu_inference_agrees_with_fp64_on_quantised_rows(case: Case) -> None:
    result = verify_case(case, "w8a8", torch.device("cuda"), torch.bfloat16)
    assert result.ok and result.refused is None, result
    # the kernels round the activation to bf16 before they quantise it, so that a few codes fall to their neighbours
    assert case.has_kink or result.errors["inference"] <= 1.5e-2, result


@pytest.mark.gpu
@on_hopper
def test_on_a_gpu_a_pass_does_not_wait_and_a_replayed_graph_has_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE_FROZEN", 0)
    layer = Layer(tokens=300, hidden=512, inner=384).to(torch.device("cuda"))
    weights, kinds = quantised(layer, "auto", torch.bfloat16), []
    rows = fp8_kernel_rows.W8a8KernelRows
    dispatch = rows.dispatch.__func__
    monkeypatch.setattr(rows, "dispatch", classmethod(lambda *given: kinds.append(given[0]) or dispatch(*given)))
    expected, *_ = [run(layer, weights) for _ in range(4)]
    assert kinds, "w8a8 was not taken"
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(layer, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(layer, weights)
    graph.replay()
    assert torch.equal(again, expected) and torch.equal(captured, expected)
    plain = run(layer, weights.with_products("bf16"))
    assert 0.02 < float((plain - expected).norm() / plain.norm()) < 0.07


def test_a_recorded_pass_is_not_repeated_for_other_products() -> None:
    layer = Layer(hidden=64, inner=64, bias=False)
    keys = {quantised_triton.pass_constants(problem_of(3, quantised(layer, each))) for each in ("bf16", "w8a8")}
    assert len(keys) == 2
