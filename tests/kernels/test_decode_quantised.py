"""A few tokens through quantised experts, against fp64 on what their codes stand for.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import pytest
import torch

from amoeba import ExpertWeights, Routing, experts
from amoeba.core.problem import Problem
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.kernels.blocks import columns_together
from amoeba.kernels.decode import by_slot, decode, low_rank, quantised_configuration
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.precision.formats import OF_BLOCKS
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU
from amoeba.proof.conformance import poisoned_memory
from amoeba.proof.reference import experts as reference
from selection import each_value_once, quick
from small_layer import SCALING, E, Layer

BLOCKS = ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "nf4")
FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4, *(OF_BLOCKS[name] for name in BLOCKS))
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
# several steps with a rest of blocks; no whole block; several steps of down; nothing but whole steps
SIZES = [(160, 24), (31, 23), (32, 272), (128, 64)]  # H, I


# a GPU has instructions of its own for bf16, which the interpreter has not
DTYPES = [torch.float32, *([torch.bfloat16, torch.float16] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def in_steps(problem: Problem):
    chosen, format = quantised_configuration.by_slot(problem), problem.weights.format
    depth = columns_together(format.name) if format.scale == "inside" else 32
    return chosen._replace(down=chosen.down._replace(columns=2, depth=depth, at_once=False, chunks=0))


WAYS = {
    "by slot": quantised_configuration.by_slot,
    "in steps": in_steps,
    "by expert": quantised_configuration.by_expert,
    "by lanes": lambda problem: quantised_configuration.by_expert(problem)._replace(by_lanes=True),
    "listed": lambda problem: quantised_configuration.by_expert(problem)._replace(listed=True),
    "early": lambda problem: quantised_configuration.by_expert(problem)._replace(early=True),
}
TURNS = ("by slot", "in steps", "by expert")


@each_value_once()
@pytest.mark.parametrize("sizes", [(256, 384), (144, 136)], ids=str)
@pytest.mark.parametrize("activation", [SILU, PLAIN_RELU2, CLAMPED_SWIGLU], ids=str)
def test_by_quantised_rows_y_is_that_of_plain_torch(activation, sizes, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    expert_TK = torch.tensor([[0, 3], [E, 3], [-1, E], *([[3, 1]] * 17)])  # more slots than a chunk has
    layer = Layer(activation, tokens=20, hidden=sizes[0], inner=sizes[1], expert_TK=expert_TK)
    named = {name: tensor.detach().to(device, dtype) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), FP8_128, "w8a8")
    problem = Problem(named["x"], expert_TK.to(device), named["weight"].float(), weights)
    with torch.no_grad(), poisoned_memory():  # rows of sentinels are never written
        found = decode(problem, e4m3=True)
        expected = experts(named["x"], Routing(problem.expert_TK, problem.weight_TK), weights, backend="eager")
        plain = decode(problem)
    allowed = (2e-2 if dtype == torch.bfloat16 else 2e-3) * expected.float().norm()  # a bit of a changes its code
    assert (found - expected).float().norm() <= allowed < (plain - expected).float().norm()


@quick(
    lambda format, activation, sizes, way, dtype: (
        activation is SILU
        and sizes == SIZES[FORMATS.index(format) % len(SIZES)]
        and (way not in TURNS or way == TURNS[FORMATS.index(format) % 3])
        and (way != "by lanes" or format.element.bits == 4)
        and (way not in ("listed", "early") or format is NVFP4)
    )
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", [SILU, PLAIN_RELU2, CLAMPED_SWIGLU], ids=str)
@by_format
def test_y_is_that_of_what_the_codes_stand_for(format, activation, sizes, way, dtype, device, monkeypatch):
    monkeypatch.setattr(quantised_configuration, "WIDEST_PIECE", 128)  # several pieces of a row, and steps
    monkeypatch.setattr(quantised_configuration, "DEPTH_BYTES", {8: 32, 4: 32})
    monkeypatch.setattr(by_slot, "MOST_DOWN_BYTES", 256)  # one slot after the other
    hidden, inner = sizes
    expert_TK = torch.tensor([[0, 3], [E, 3], [-1, E]])
    layer = Layer(activation, tokens=3, hidden=hidden, inner=inner, expert_TK=expert_TK)
    named = {name: tensor.detach().to(device, dtype) for name, tensor in layer.tensors.items()}
    named["weight"] = named["weight"].float()
    named["weight"][1, 0] = torch.nan  # a sentinel's
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"], expert_TK.to(device), named["weight"], weights)
    with poisoned_memory():  # rows of sentinels are never written
        found = decode(problem, configuration=WAYS[way](problem))
    exact = dequantise_experts(weights, torch.float64)
    weight = named["weight"].nan_to_num().double()
    truth = reference.experts_forward(named["x"].double(), expert_TK.to(device), weight, exact)
    assert (found.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()
    assert found[2].count_nonzero() == 0


# which factors there are, and whether gate and up have one A
ADAPTED = [
    (SILU, LORA_NAMES, False),
    (CLAMPED_SWIGLU, LORA_NAMES, True),
    (CLAMPED_SWIGLU, LORA_NAMES[:2], False),
    (PLAIN_RELU2, LORA_NAMES[2:], False),
    (SILU, LORA_NAMES[4:], False),
]


@quick(
    lambda format, adapted, way, dtype: (
        format is FORMATS[(list(WAYS).index(way) + ADAPTED.index(adapted)) % len(FORMATS)]
        and way in (("by slot", "listed", "early") if adapted is ADAPTED[0] else ("by slot", "by expert"))
    )
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adapted", ADAPTED, ids=["all", "one A", "gate", "plain", "down"])
@by_format
def test_factors_next_to_codes_agree_with_the_reference(format, adapted, way, dtype, device, monkeypatch):
    """Factors in fp32, which are rounded to x's dtype; those of experts without a slot are NaN."""
    monkeypatch.setattr(low_rank, "DEPTH", 32)
    monkeypatch.setattr(by_slot, "MOST_DOWN_BYTES", 256)  # one slot after the other
    activation, names, one_a = adapted
    expert_TK = torch.tensor([[0, 3], [E, 3], [-1, E]])
    layer = Layer(activation, tokens=3, hidden=48, inner=40, expert_TK=expert_TK, rank=5)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    factors = {name: named[name].clone() for name in names}
    for factor in factors.values():
        factor[1:3] = torch.nan
    if one_a:
        factors["up_lora_a"] = factors["gate_lora_a"]
    x_TH, lora = named["x"].to(dtype), LoraFactors(**factors, scaling=SCALING)
    weights = quantise_experts(layer.weights(named), format).to(dtype)
    problem = Problem(x_TH, expert_TK.to(device), named["weight"], weights, lora)
    with poisoned_memory():  # rows of sentinels are never written
        found = decode(problem, configuration=WAYS[way](problem))
    exact = LoraFactors(**{name: factor.to(dtype).double() for name, factor in factors.items()}, scaling=SCALING)
    truth = reference.experts_forward(
        x_TH.double(), problem.expert_TK, named["weight"].double(), dequantise_experts(weights, torch.float64), exact
    )
    assert (found.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()
    assert found[2].count_nonzero() == 0


def test_a_plan_is_found_again_by_the_factors_that_it_was_made_for(device: torch.device) -> None:
    layer = Layer(tokens=2, rank=2)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), MXFP8)
    problem = Problem(named["x"], layer.expert_TK.to(device), named["weight"], weights)
    exact = dequantise_experts(weights, torch.float64)
    all_of_them = {name: named[name] for name in LORA_NAMES}
    down = {name: named[name] for name in LORA_NAMES[4:]}
    adapters = [None, LoraFactors(**all_of_them), LoraFactors(**all_of_them, scaling=2.0), LoraFactors(**down)]
    for lora in (*adapters, *adapters):
        found = decode(problem._replace(lora=lora))
        truth = reference.experts_forward(
            problem.x_TH.double(), problem.expert_TK, problem.weight_TK.double(), exact, lora and lora.to(torch.float64)
        )
        assert (found.double() - truth).norm() <= 1e-5 * truth.norm()


# one has three chunks of slots, one a full chunk, others none, sentinels among them; several have more than one chunk;
# as many chunks of one as there can be
LISTED = {
    "one of many": [3] * 35 + [1] * 16 + [-1, 0, E, 0, 3],
    "several": [0] * 17 + [2] * 49 + [3] * 18,
    "one": [2] * 48,
}


@quick(lambda format, ids: format is MXFP4 and ids == "several")
@pytest.mark.parametrize("ids", LISTED)
@by_format
def test_listed_slots_have_the_bits_of_slots_that_programs_find(format, ids, device):
    chosen_N = torch.tensor(LISTED[ids])
    expert_TK = chosen_N[torch.randperm(len(chosen_N), generator=torch.Generator().manual_seed(0))].view(-1, 2)
    layer = Layer(SILU, tokens=len(expert_TK), hidden=64, inner=32, expert_TK=expert_TK)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"], expert_TK.to(device), named["weight"], weights)
    chosen = quantised_configuration.by_expert(problem)._replace(rows=16)
    assert chosen._replace(listed=True).lists(problem)
    with poisoned_memory():
        alone, *found = [
            decode(problem, configuration=chosen._replace(listed=listed, early=early))
            for listed, early in ((False, False), (True, False), (True, True))  # both: what is in slots is like more
        ]
    assert alone.count_nonzero() > 0 and torch.isfinite(alone).all()
    assert all(torch.equal(one, alone) for one in found)


# a slot that owns its expert, one that does not, and a sentinel; nothing but that; more slots than a chunk has
SHARED = {"fewer slots than experts": [3, E, 3], "a sentinel": [-1], "more": [0, 3, -1, E] + [3] * 16 + [1]}


@quick(lambda format, ids, rank: (ids == "fewer slots than experts" and rank == 0) or (format is FP8_128 and rank == 2))
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("ids", SHARED)
@by_format
def test_slots_that_up_lists_for_down_have_the_same_bits(format, ids, rank, device):
    expert_TK = torch.tensor(SHARED[ids])[:, None]
    layer = Layer(SILU, tokens=len(expert_TK), hidden=40, inner=24, expert_TK=expert_TK, rank=rank)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"], expert_TK.to(device), named["weight"], weights, layer.lora(named))
    chosen = quantised_configuration.by_expert(problem)
    chosen = chosen._replace(rows=16, up=chosen.up._replace(columns=16))  # several programs for an expert
    with poisoned_memory():
        found = [decode(problem, configuration=chosen._replace(early=early)) for early in (False, True)]
    assert torch.isfinite(found[0]).all() and torch.equal(*found)
    assert (found[0].count_nonzero() > 0) == (ids != "a sentinel")


@quick(lambda format, tokens: format is NVFP4 or (tokens == 1 and format.name in ("fp8-128", "q4_0")))
@pytest.mark.parametrize("tokens", [1, 40, 70])  # by slot, by expert, sorted
@by_format
def test_experts_that_lie_apart_have_the_bits_of_those_side_by_side(format, tokens, device):
    """As they do in slots of a store. Those side by side come first: what was found for them fits no others."""
    layer = Layer(SILU, tokens=tokens, hidden=64, inner=32)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    together = quantise_experts(layer.weights(named), format)

    def apart(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        wide = torch.full_like(torch.stack([tensor, tensor], dim=1), 7)
        wide[:, 0] = tensor
        return wide[:, 0]

    scattered = QuantisedExperts.of([apart(tensor) for tensor in together.tensors()], together.constants())
    routing = Routing(layer.expert_TK.to(device), named["weight"])
    with torch.no_grad():
        found = [experts(named["x"], routing, weights, backend="triton") for weights in (together, scattered)]
    assert found[0].count_nonzero() > 0 and torch.equal(*found)


def test_tiles_whose_products_would_be_wrong_are_refused(device: torch.device) -> None:
    layer = Layer(SILU, tokens=9, hidden=64, inner=32)
    named = {name: tensor.detach().to(device, torch.bfloat16) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), MXFP4)
    problem = Problem(named["x"], layer.expert_TK.to(device), named["weight"], weights)
    chosen = quantised_configuration.by_expert(problem)
    with pytest.raises(ValueError, match="1 or 2 warps"):
        decode(problem, configuration=chosen._replace(up=chosen.up._replace(warps=4)))


@pytest.mark.gpu  # whose own instructions decode
@pytest.mark.parametrize("rank", [0, 16, 130])
@pytest.mark.parametrize("tokens", [1, 3, 8, 11, 61, 150])
@by_format
def test_many_slots_of_whole_blocks_in_bf16(format: Format, tokens: int, rank: int, device: torch.device) -> None:
    """As models have them: steps without masks, several chunks of an expert, codes of every size."""
    generator = torch.Generator(device=device).manual_seed(tokens)
    count, hidden, inner, top_k = 8, 512, 384, 3

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    size = 2.0 ** torch.randint(-20, 4, (count, 1, 1), generator=generator, device=device)
    made = ExpertWeights((drawn(count, 2 * inner, hidden) * size).bfloat16(), drawn(count, hidden, inner) / 16)
    weights = quantise_experts(made, format)
    expert_TK = torch.rand(tokens, count + 1, generator=generator, device=device).argsort(1)[:, :top_k]
    up_a, up_b = drawn(count, rank, hidden) / 8, drawn(count, inner, rank) / 8
    down_a, down_b = drawn(count, rank, inner) / 8, drawn(count, hidden, rank) / 8
    lora = LoraFactors(up_a, up_b, up_a, -up_b, down_a.float(), down_b.float(), scaling=0.5) if rank else None
    problem = Problem(drawn(tokens, hidden), expert_TK, torch.rand(tokens, top_k, device=device), weights, lora)
    exact = dequantise_experts(weights, torch.float64)
    truth = reference.experts_forward(
        problem.x_TH.double(), expert_TK, problem.weight_TK.double(), exact, lora and lora.to(torch.float64)
    )
    for way in WAYS.values():
        found = [decode(problem, configuration=way(problem)) for _ in range(2)]
        assert torch.equal(*found)
        assert (found[0].double() - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: launches overlap there")
@pytest.mark.parametrize("rank", [0, 16])
@by_format
def test_calls_in_a_graph_read_no_lists_and_rows_of_the_call_before(format, rank, device):
    """All of them have the same memory for theirs, each other experts; the last one has none."""
    generator = torch.Generator(device=device).manual_seed(rank)
    count, hidden, inner, top_k, tokens = 64, 512, 384, 4, 8

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16() / 16

    weights = quantise_experts(ExpertWeights(drawn(count, 2 * inner, hidden), drawn(count, hidden, inner)), format)
    up_a, up_b = drawn(count, rank, hidden), drawn(count, inner, rank)
    down_a, down_b = drawn(count, rank, inner), drawn(count, hidden, rank)
    lora = LoraFactors(up_a, up_b, up_a, -up_b, down_a, down_b, scaling=0.5) if rank else None
    chosen_experts = [
        torch.rand(tokens, count + 8, generator=generator, device=device).argsort(1)[:, :top_k] for _ in range(12)
    ]
    problems = [
        Problem(drawn(tokens, hidden), expert_TK, torch.rand(tokens, top_k, device=device), weights, lora)
        for expert_TK in (*chosen_experts, torch.full_like(chosen_experts[0], count))
    ]
    chosen = quantised_configuration.by_expert(problems[0])
    expected = [decode(problem, configuration=chosen._replace(early=False)) for problem in problems]
    for problem in problems:
        decode(problem, configuration=chosen._replace(early=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [decode(problem, configuration=chosen._replace(early=True)) for problem in problems]
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, found, expected))
    assert expected[-1].count_nonzero() == 0 < expected[0].count_nonzero()
