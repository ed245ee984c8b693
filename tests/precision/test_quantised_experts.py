"""Quantised experts through the seam: every gradient, any routing, and what a module does with them.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amoeba
from amoeba import Activation, ExpertWeights, Request, Routing, experts
from amoeba.backends import quantised_triton
from amoeba.backends.registry import all_backends_of
from amoeba.core.problem import Problem
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.precision.blocks import BLOCK_KINDS, PACKED_KINDS
from amoeba.precision.formats import OF_BLOCKS, Element, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case
from amoeba.proof.conformance import verify_case
from amoeba.proof.reference import experts as reference
from random_blocks import HALVES, random_rows
from selection import each_value_once, quick
from small_layer import SCALING, E, Layer, kernel_device

Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, NF4 = BLOCKS = tuple(OF_BLOCKS[name] for name in PACKED_KINDS)
FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4, *BLOCKS)
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
CPU = torch.device("cpu")
PLACEMENTS = (
    *("fp8-weights", "mxfp8-weights", "mxfp4-weights", "nvfp4-weights"),
    *(f"{kind}-weights" for kind in PACKED_KINDS),
)
# Every routing there is, no tokens, sizes of no whole block, biases, all activations; the rest is thorough.
CASES = [
    Case(63, 8, SILU, True, "sentinels", lora="all", rank=5),
    Case(0, 2, SILU, True, lora="all"),
    Case(9, 2, PLAIN_RELU2, True, "empty_experts", 31, 23, lora="all", rank=3),
    Case(9, 1, CLAMPED_SWIGLU, True, "all_on_one", lora="all", rank=5, recompute=True),
    Case(9, 2, SILU, False, "sentinels_alone", lora="all"),
    Case(21, 2, SILU, False, "random", 144, 136, storage="transposed", narrow=True, lora="all", rank=8),
]


@each_value_once()
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_output_and_every_gradient_against_what_the_weights_stand_for(placement: str, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        result = verify_case(case, placement, CPU, dtype)
        assert result.ok and result.refused is None, (dtype, result)
        assert {"output", "inference", "x", "weight", "down_lora_a", "down_lora_b"} <= set(result.errors)


def frozen(layer: Layer) -> ExpertWeights:
    return layer.weights({name: tensor.detach() for name, tensor in layer.tensors.items()})


def run(layer: Layer, weights, **options) -> dict[str, Tensor]:
    named = {name: t for name, t in layer.tensors.items() if name in ("x", "weight", *LORA_NAMES)}
    y_TH = experts(named["x"], Routing(layer.expert_TK, named["weight"]), weights, lora=layer.lora(named), **options)
    return {"output": y_TH.detach()} | dict(
        zip(named, torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH), strict=True)
    )


@quick(
    lambda format, activation: (
        (format.name, activation)
        in {("fp8-128", "swiglu"), ("mxfp4", "gpt-oss"), ("q4_k", "swiglu"), ("q6_k", "plain")}
    )
)
@pytest.mark.parametrize("activation", ["swiglu", "gpt-oss", "plain"])
@by_format
def test_the_kernels_agree_with_dequantised_experts_in_every_gradient(format: Format, activation: str) -> None:
    acts = {"gpt-oss": Activation("silu", True, 1.702, 7.0, 1.0, True), "plain": Activation("relu2", gated=False)}
    layer = Layer(acts.get(activation), rank=3, hidden=21, inner=23, tokens=7).to(kernel_device())
    quantised = quantise_experts(frozen(layer), format)
    expected = run(layer, dequantise_experts(quantised), backend="eager")
    for recompute in (False, True):
        found = run(layer, quantised, backend="triton", recompute=recompute)
        for name, tensor in expected.items():
            assert (found[name] - tensor).norm() <= 2e-6 * tensor.norm(), name


ROUTINGS = {
    "no tokens": torch.zeros(0, 2, dtype=torch.int64),
    "sentinels and an empty expert": torch.tensor([[0, E], [E, E], [3, 0], [0, -1], [2, 3]]),
    "sentinels alone": torch.full((3, 2), E),
}


@quick(lambda format: format in (FP8_128, MXFP4, Q5_K, NF4))
@each_value_once()
@pytest.mark.parametrize("routing", ROUTINGS)
@by_format
def test_the_kernels_take_any_routing(format: Format, routing: str) -> None:
    expert_TK = ROUTINGS[routing]
    layer = Layer(rank=2, hidden=33, inner=16, tokens=len(expert_TK), expert_TK=expert_TK).to(kernel_device())
    quantised = quantise_experts(frozen(layer), format)
    expected = run(layer, dequantise_experts(quantised), backend="eager")
    found = run(layer, quantised, backend="triton")
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 2e-6 * tensor.norm(), name
    with torch.no_grad():  # few tokens have kernels of their own then
        y_TH = experts(
            layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), quantised,
            lora=layer.lora(layer.tensors), backend="triton",
        )  # fmt: skip
    assert (y_TH - expected["output"]).norm() <= 2e-6 * expected["output"].norm()


@quick(lambda format: format is NVFP4)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@by_format
def test_two_runs_have_the_same_bits(format: Format, backend: str) -> None:
    layer = Layer(rank=3, hidden=20, inner=12, tokens=5).to(kernel_device() if backend == "triton" else CPU)
    quantised = quantise_experts(frozen(layer), format)
    first, second = (run(layer, quantised, backend=backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@quick(lambda kinds: kinds == "q3_k q5_0")  # any bits of the others: kernels/test_block_planes.py
@pytest.mark.parametrize("kinds", ["q4_k q6_k", "q4_k q4_k", "q3_k q5_0", "q2_k q5_1", "q4_1 q8_0"])
def test_blocks_of_any_bits_and_two_types_have_every_gradient(kinds: str) -> None:
    """As files have them, and types that nothing here quantises to. Against fp64 on what they stand for."""
    up_kind, down_kind = kinds.split()
    inner = max(64, OF_BLOCKS[down_kind].block[1])
    layer = Layer(rank=3, hidden=256, inner=inner, tokens=7).to(kernel_device())

    def drawn(kind: str, rows: int, columns: int) -> QuantisedMatrix:
        format = OF_BLOCKS[kind]
        found = torch.from_numpy(random_rows(kind, E * rows, columns // format.block[1])).view(E, rows, -1)
        blocks = found.view(E, rows, -1, BLOCK_KINDS[kind].bytes)
        for place in HALVES.get(kind, [0, 2]):
            blocks[..., place + 1] = blocks[..., place + 1] & 0x83 | 0x14  # scales that leave numbers of about one
        return QuantisedMatrix(found, found.new_empty((E, 0, 0)), format, columns)

    both = drawn(up_kind, 2 * inner, 256), drawn(down_kind, 256, inner)
    weights = QuantisedExperts.holding(*both, activation=layer.activation, dtype=torch.float32)
    weights = weights.of([t if t is None else t.to(kernel_device()) for t in weights.tensors()], weights.constants())
    exact = dequantise_experts(weights, torch.float64)
    names = ("x", "weight", *LORA_NAMES)
    wide = {name: layer.tensors[name].detach().double().requires_grad_() for name in names}
    lora = LoraFactors(**{name: wide[name] for name in LORA_NAMES}, scaling=SCALING)
    truth = reference.experts_forward(wide["x"], layer.expert_TK, wide["weight"], exact, lora)
    grads = torch.autograd.grad(truth, [wide[name] for name in names], layer.dy_TH.double())
    expected = {"output": truth.detach(), **dict(zip(names, grads, strict=True))}
    found = run(layer, weights, backend="triton")
    x_TH, weight_TK = layer.tensors["x"], layer.tensors["weight"]
    options = {"lora": layer.lora(layer.tensors), "backend": "triton"}
    with torch.no_grad():  # by expert, and a token by slot
        few = [experts(x_TH[:n], Routing(layer.expert_TK[:n], weight_TK[:n]), weights, **options) for n in (7, 1)]
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 5e-6 * tensor.norm(), name
    for y_TH in few:
        assert (y_TH - truth[: len(y_TH)]).norm() <= 5e-6 * truth[: len(y_TH)].norm()


@pytest.mark.gpu
@by_format
def test_on_a_gpu_no_pass_waits_and_a_replayed_graph_has_the_same_bits(format: Format) -> None:
    layer = Layer(rank=3, hidden=96, inner=160, tokens=199).to(torch.device("cuda"))
    in_half = {name: tensor for name, tensor in layer.tensors.items() if name != "weight" and name not in LORA_NAMES}
    layer.tensors |= {name: tensor.detach().bfloat16().requires_grad_() for name, tensor in in_half.items()}
    layer.dy_TH = layer.dy_TH.bfloat16()
    quantised = quantise_experts(frozen(layer), format)
    few = layer.tensors["x"][:5].detach(), Routing(layer.expert_TK[:5], layer.tensors["weight"][:5].detach())

    def passes() -> dict[str, Tensor]:
        with torch.no_grad():
            decoded = experts(*few, quantised, lora=layer.lora(layer.tensors))
        return run(layer, quantised) | {"decoded": decoded}

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = passes()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes()
    graph.replay()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor) and torch.equal(captured[name], tensor), name


@quick(lambda rank: rank > 0)
@pytest.mark.parametrize("rank", [0, 3])
def test_compiled_layers_expect_what_the_kernels_save(rank: int) -> None:
    layer = Layer(rank=rank, hidden=21, inner=23, tokens=5).to(kernel_device())
    lora = layer.lora(layer.tensors) if rank else None
    weights, tensors = quantise_experts(frozen(layer), MXFP4), layer.tensors
    problem = Problem(tensors["x"].detach(), layer.expert_TK, tensors["weight"].detach(), weights, lora)
    with torch.no_grad():
        _, saved = quantised_triton.BACKEND.forward(problem, "h")
    expected = quantised_triton.BACKEND.traced.fake(problem)
    for name in saved._fields:
        found, told = getattr(saved, name), getattr(expected, name)
        assert (found.shape, found.stride(), found.dtype) == (told.shape, told.stride(), told.dtype), name


def test_one_expert_at_a_time_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only those that got rows."""
    asked: list[tuple[int, ...]] = []
    dequantise = QuantisedMatrix.dequantise
    monkeypatch.setattr(
        QuantisedMatrix, "dequantise", lambda self, dtype: asked.append(self.shape) or dequantise(self, dtype)
    )
    layer = Layer(rank=2, expert_TK=torch.tensor([[1, 1], [1, -1]]), tokens=2)
    run(layer, quantise_experts(frozen(layer), MXFP4), backend="eager")
    assert asked and all(len(shape) == 2 for shape in asked) and len(asked) == 4  # up, down, and back


@pytest.mark.thorough  # of a recipe: test_fp8_recipes.py
@by_format
def test_compile_and_checkpointing(format: Format) -> None:
    torch.compiler.reset()
    layer = Layer(rank=3)
    weights, lora = quantise_experts(frozen(layer), format), layer.lora(layer.tensors)

    def layer_of(x: Tensor, weight: Tensor) -> Tensor:
        return experts(x * 2, Routing(layer.expert_TK, weight), weights, lora=lora, backend="eager") + 1

    compiled = torch.compile(layer_of, fullgraph=True, backend="aot_eager")
    leaves = [layer.tensors[name] for name in ("x", "weight", *LORA_NAMES)]
    expected = torch.autograd.grad(layer_of(*leaves[:2]), leaves, layer.dy_TH)
    for call in (compiled, lambda *given: checkpoint(layer_of, *given, use_reentrant=False)):
        for found, right in zip(torch.autograd.grad(call(*leaves[:2]), leaves, layer.dy_TH), expected, strict=True):
            assert torch.equal(found, right)


def test_autocast_and_dtypes_of_x() -> None:
    layer = Layer()
    weights = quantise_experts(frozen(layer), FP8_128)
    x_TH, routing = layer.tensors["x"].detach(), Routing(layer.expert_TK, layer.tensors["weight"].detach())
    with torch.autocast("cpu", torch.bfloat16):
        y_TH = experts(x_TH, routing, weights)
    assert y_TH.dtype == torch.bfloat16
    torch.testing.assert_close(y_TH.float(), experts(x_TH, routing, weights), rtol=3e-2, atol=3e-2)
    with pytest.raises(ValueError, match="as the weights"):
        experts(x_TH.bfloat16(), routing, weights)


def test_the_choice_is_explained() -> None:
    layer = Layer()
    request = Request(
        layer.tensors["x"],
        Routing(layer.expert_TK, layer.tensors["weight"]),
        quantise_experts(frozen(layer), fp8_blocks(128, 8)),
    )
    reason = "cpu reads blocks of powers of two, 16 columns or more; these are 128 x 8"
    assert str(amoeba.explain(request)) == f"eager, experts dequantised one after the other ({reason})"
    with pytest.raises(ValueError, match=r"one that supports quantised weights \(QuantisedExperts\); got grouped"):
        run(layer, request.weights, backend="grouped")


@by_format
def test_a_module_that_holds_them_may_be_cast_copied_and_pickled(format: Format) -> None:
    layer = Layer()
    weights = quantise_experts(frozen(layer), format)
    expected = dequantise_experts(weights)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights
            for place, tensor in enumerate(weights.tensors()):
                if isinstance(tensor, nn.Parameter):
                    self.register_parameter(f"placed_{place}", tensor)

    held = Holder()
    for cast in (torch.bfloat16, torch.float16, torch.float32):
        held.to(cast)
    again = copy.deepcopy(held)
    assert again.weights.tensors()[0] is again.placed_0 and again.weights.tensors()[0] is not weights.tensors()[0]
    for each in (held.weights, again.weights, pickle.loads(pickle.dumps(weights))):
        assert each.format is format
        assert torch.equal(dequantise_experts(each).gate_up_EJH, expected.gate_up_EJH)
        assert torch.equal(dequantise_experts(each).down_EHI, expected.down_EHI)
    held.to("meta")
    assert weights.device == torch.device("cpu")  # the meta device cannot be moved to in place, others can


def test_errors_say_what_was_expected() -> None:
    up, down = torch.zeros(2, 48, 16), torch.zeros(2, 16, 24)
    with pytest.raises(ValueError, match=r"expected gate_up \(2, 24, 16\).*got \(2, 48, 16\) in mxfp4"):
        QuantisedExperts.holding(quantise(up, MXFP4), quantise(down, MXFP4), activation=Activation("relu", gated=False))
    with pytest.raises(ValueError, match=r"in mxfp4 and \(2, 16, 24\) in mxfp8"):
        QuantisedExperts.holding(quantise(up, MXFP4), quantise(down, MXFP8))
    with pytest.raises(ValueError, match=r"bias: expected shape \(2, 48\); got \(2, 3\)"):
        QuantisedExperts.holding(quantise(up, MXFP4), quantise(down, MXFP4), torch.zeros(2, 3))


def test_bytes_of_a_parameter() -> None:
    weights = ExpertWeights(torch.randn(2, 512, 256), torch.randn(2, 256, 256))
    parameters = sum(tensor.numel() for tensor in (weights.gate_up_EJH, weights.down_EHI))
    for format, most in ((FP8_128, 1.01), (MXFP8, 1.04), (MXFP4, 0.54), (NVFP4, 0.57)):
        assert quantise_experts(weights, format).nbytes <= most * parameters


class _Whole(Element):
    """Whole numbers from -8 to 7, which no kernel knows."""

    name, largest, exponent, bits = "int4", 7.0, 2, 4

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        return (values.round().clamp(-7, 7).to(torch.int8) & 15).to(torch.uint8)

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        return ((codes.to(torch.int16) + 8) % 16 - 8).to(torch.float32)


def test_an_element_that_kernels_do_not_know_is_computed_by_plain_torch_alone() -> None:
    """They tell elements by their bits, and would read its codes as e2m1."""
    layer = Layer()
    weights = quantise_experts(frozen(layer), Format("int4", _Whole(), (1, 32), "e8m0"))
    request = Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), weights)
    reasons = {each.name: each.why_not(request) for each in all_backends_of(QuantisedExperts, CPU)}
    assert reasons["eager"] is None
    assert "int4" in reasons["triton"] and "int4" in reasons["cpu"]
    assert sum(reason is None for reason in reasons.values()) == 1, reasons
