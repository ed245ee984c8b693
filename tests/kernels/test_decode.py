"""The experts for few tokens, both ways, against the reference in fp64.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import dataclasses
import itertools
import sys
from typing import get_args

import pytest
import torch

from amoeba.core.config import Activation, ActivationKind
from amoeba.core.problem import Problem
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case, example, lora_of
from amoeba.proof.conformance import TOLERANCE, poisoned_memory
from amoeba.proof.reference.experts import experts_forward
from selection import each_value_once, quick

triton = pytest.importorskip("triton", reason="the kernels need Triton")
tl = pytest.importorskip("triton.language")
decode = pytest.importorskip("amoeba.kernels.decode").decode
decode_configuration = pytest.importorskip("amoeba.kernels.decode.configuration")
decode_slot_lists = pytest.importorskip("amoeba.kernels.decode.slot_lists")
decode_low_rank = pytest.importorskip("amoeba.kernels.decode.low_rank")
Configuration, Tile = decode_configuration.Configuration, decode_configuration.Tile


def configuration(*sizes: int, **options):
    return decode_configuration.configuration(decode_configuration.Layer(*sizes, **options))


# Tiles so small that a small layer has several in each direction, with rests.
BY_SLOT = Configuration(by_slot=True, up=Tile(32, 16), down=Tile(32, 32))
BY_EXPERT = Configuration(by_slot=False, up=Tile(32, 16), down=Tile(32, 32), rows=16)
AT_ONCE = Configuration(by_slot=True, up=Tile(8, 128, at_once=True), down=Tile(8, 64, at_once=True))
WAYS = pytest.mark.parametrize("way", [BY_SLOT, AT_ONCE, BY_EXPERT], ids=["by_slot", "at_once", "by_expert"])
ON_GPU = torch.cuda.is_available()
ODD = 199 if ON_GPU else 75  # several tiles and a rest for every way


def dtypes(way, case):
    """All three on a GPU. The interpreter takes its time, and its tl.dot is wrong in bf16."""
    if ON_GPU:
        return [torch.float32, torch.float16, torch.bfloat16]
    if case.pattern != "random":
        return [torch.float32]
    return [torch.float32, torch.bfloat16 if way.by_slot else torch.float16]


def problem_of(case, dtype, device):
    made = example(case, dtype)
    tensors = {name: tensor.to(device, dtype) for name, tensor in made.inputs.items() if name != "weight"}
    if case.storage == "transposed":
        tensors |= {n: tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("gate_up", "down")}
    weight_TK = made.inputs["weight"].to(device, dtype if case.narrow else torch.float32)
    return Problem(
        tensors["x"],
        made.expert_TK.to(device),
        weight_TK,
        ExpertWeights(
            tensors["gate_up"], tensors["down"], tensors.get("gate_up_bias"), tensors.get("down_bias"), case.activation
        ),
        lora_of(tensors),
    )


def run(problem, way=None):
    with poisoned_memory():
        return decode(problem, configuration=way)


def assert_right(y_TH, truth_TH, dtype):
    assert y_TH.dtype == dtype
    assert y_TH.shape == truth_TH.shape
    found = y_TH.cpu().double()
    assert found.isfinite().all()
    nothing = (truth_TH == 0).all(1)
    assert found[nothing].count_nonzero() == 0
    error = float((found - truth_TH).norm() / truth_TH.norm().clamp(min=1e-30))
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"


def assert_agrees(case, way, device):
    for dtype in dtypes(way, case):
        truth_TH = example(case, dtype).truth["output"]
        assert_right(run(problem_of(case, dtype, device), way), truth_TH, dtype)


FEW = [
    Case(1, 2, bias=True, hidden=63, intermediate=ODD),
    Case(1, 5, CLAMPED_SWIGLU, True, "sentinels"),
    Case(1, 1, PLAIN_RELU2, hidden=64, intermediate=64),
    Case(3, 2, SILU, True, "empty_experts", storage="transposed", narrow=True),
    Case(2, 2, CLAMPED_SWIGLU, True, storage="transposed", hidden=31, intermediate=23),
    Case(2, 1, SILU, hidden=1, intermediate=1, bias=True),
]
MORE = [
    Case(5, 4, SILU, True, "sentinels", num_experts=4),  # K = E: programs are named by expert
    Case(3, 2, CLAMPED_SWIGLU, True, "sentinels", num_experts=16, intermediate=33),  # E > N: they are named by slot
    Case(33, 1, SILU, True, "all_on_one", hidden=31, num_experts=2),  # three chunks of one expert
    Case(17, 2, PLAIN_RELU2, True, num_experts=2, hidden=31, storage="transposed"),  # a second chunk with one slot
    Case(3, 1, SILU, bias=True, num_experts=1),
]


@each_value_once()
@WAYS
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_few_slots_agree_with_the_reference(case, way, device):
    assert_agrees(case, way, device)


@each_value_once()
@pytest.mark.parametrize("listed", [False, True], ids=["ranks", "listed"])
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_shared_experts_agree_with_the_reference(case, listed, device):
    assert_agrees(case, BY_EXPERT._replace(listed=listed), device)


@pytest.mark.parametrize("case", [Case(1, 2, bias=True), Case(7, 2, CLAMPED_SWIGLU, True)], ids=["T1", "T7"])
def test_the_chosen_configuration_agrees_with_the_reference(case, device):
    truth_TH = example(case, torch.float32).truth["output"]
    assert_right(run(problem_of(case, torch.float32, device)), truth_TH, torch.float32)


def test_a_plan_is_found_again_by_all_that_it_was_made_for(device, monkeypatch):
    """One layer after another that differ in one thing each, and then all of them again."""
    base = Case(3, 2, bias=True, hidden=32, intermediate=32)
    changes = [{}, {"activation": CLAMPED_SWIGLU}, {"activation": Activation("gelu")}, {"bias": False}, {"top_k": 1}]
    changes += [{"storage": "transposed"}, {"narrow": True}, {"num_tokens": 2}, {"num_experts": 3}]
    changes += [{"lora": "all"}, {"lora": "all", "rank": 5}, {"lora": "down"}]
    fp32, fp16 = torch.float32, torch.float16
    cases = [(dataclasses.replace(base, **change), fp32, fp32) for change in changes]
    cases += [(base, fp16, fp32), (base, fp16, fp16)]
    plans: dict = {}
    monkeypatch.setattr(sys.modules[decode.__module__], "_plans", plans)
    for laid in (lambda x_TH: x_TH, _with_gaps):  # how x lies is not part of a plan
        for case, dtype, of_weights in cases:
            problem = problem_of(case, dtype, device)
            problem = problem._replace(x_TH=laid(problem.x_TH), weight_TK=problem.weight_TK.to(of_weights))
            assert_right(run(problem), example(case, dtype).truth["output"], dtype)
    assert len(plans) == len(cases)


def _with_gaps(x_TH):
    """The same numbers, each row and each element apart from the next."""
    wide = x_TH.new_empty(2 * x_TH.shape[0], 2 * x_TH.shape[1])[::2, ::2]
    return wide.copy_(x_TH)


ADAPTED = [
    Case(1, 2, bias=True, hidden=63, intermediate=ODD, lora="all", rank=5),
    Case(1, 5, CLAMPED_SWIGLU, True, "sentinels", lora="all", rank=16),
    Case(3, 2, PLAIN_RELU2, True, "sentinels", lora="all", rank=1),
    Case(3, 2, CLAMPED_SWIGLU, hidden=31, intermediate=23, lora="gate_up"),
    Case(2, 3, SILU, storage="transposed", narrow=True, lora="down", rank=3),
    Case(2, 2, SILU, lora="up", rank=17),
]


@each_value_once()
@quick(lambda case, way: case in ADAPTED[:2] or (way == AT_ONCE and case in ADAPTED[::2]))
@WAYS
@pytest.mark.parametrize("case", ADAPTED, ids=lambda case: case.name)
def test_factors_agree_with_the_reference(case, way, device, monkeypatch):
    monkeypatch.setattr(decode_low_rank, "DEPTH", 16)  # so that these sizes take several steps
    assert_agrees(case, way, device)


@quick(lambda case: case in MORE[::2])
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_factors_of_shared_experts_agree_with_the_reference(case, device):
    assert_agrees(dataclasses.replace(case, lora="all", rank=5), BY_EXPERT, device)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 75), (torch.float16, 150)], ids=str)
def test_ranks_that_are_too_many_for_one_step_agree_with_the_reference(dtype, rank, device):
    case = Case(2, 1, bias=True, num_experts=2, hidden=32, intermediate=32, lora="all", rank=rank)
    most = decode_low_rank.MOST_WIDE_RANKS if dtype == torch.float32 else decode_low_rank.MOST_RANKS
    assert rank > most.value
    assert_right(run(problem_of(case, dtype, device), BY_EXPERT), example(case, dtype).truth["output"], dtype)


def factors(problem, shared, ranks, device):
    """Of gate, up and down with ranks of their own; 0: none."""
    generator = torch.Generator().manual_seed(3)
    experts, hidden, inner = problem.weights.down_EHI.shape
    made = {}
    for name, rank in ranks.items():
        fan_in, fan_out = (inner, hidden) if name == "down" else (hidden, inner)
        if rank:
            made[f"{name}_lora_a"] = torch.randn(experts, rank, fan_in, generator=generator).to(device) / 8
            # stored the other way round, so that it is no contiguous tensor
            made[f"{name}_lora_b"] = torch.randn(experts, rank, fan_out, generator=generator).to(device).mT
    if shared:
        made["up_lora_a"] = made["gate_lora_a"]
    return LoraFactors(**made, scaling=0.5)


@each_value_once()
@quick(lambda activation, shared, ranks: (activation is SILU) == (shared or ranks[1] == 0))
@WAYS
@pytest.mark.parametrize("activation", [SILU, CLAMPED_SWIGLU], ids=str)
@pytest.mark.parametrize(
    ("shared", "ranks"),
    [(True, (3, 3, 2)), (False, (3, 9, 1)), (False, (4, 0, 0)), (False, (2, 0, 5)), (False, (3, 3, 3))],
    ids=str,
)
def test_every_combination_of_ranks_agrees_with_the_reference(activation, shared, ranks, way, device):
    problem = problem_of(Case(3, 2, activation, True, "sentinels"), torch.float32, device)
    lora = factors(problem, shared, dict(zip(("gate", "up", "down"), ranks, strict=True)), device)
    truth_TH = experts_forward(
        problem.x_TH.cpu().double(),
        problem.expert_TK.cpu(),
        problem.weight_TK.cpu().double(),
        ExpertWeights(*(t.cpu().double() for t in problem.weights.tensors()), activation),
        LoraFactors(**{name: tensor.cpu().double() for name, tensor in lora.tensors().items()}, scaling=0.5),
    )
    assert_right(run(problem._replace(lora=lora), way), truth_TH, torch.float32)


@WAYS
def test_fp32_factors_next_to_half_precision_are_rounded_as_they_are_read(way, device):
    problem = problem_of(Case(3, 2, bias=True), torch.float16, device)
    lora = factors(problem, True, {"gate": 3, "up": 3, "down": 2}, device)
    rounded = run(problem._replace(lora=lora.to(torch.float16)), way)
    assert torch.equal(run(problem._replace(lora=lora), way), rounded)


@each_value_once("way")
@WAYS
@pytest.mark.parametrize(("kind", "gated"), list(itertools.product(get_args(ActivationKind), (True, False))))
def test_every_activation(kind, gated, way, device):
    case = Case(1, 2, Activation(kind, gated=gated, limit=0.75), bias=True, hidden=32, intermediate=32)
    truth_TH = example(case, torch.float32).truth["output"]
    assert_right(run(problem_of(case, torch.float32, device), way), truth_TH, torch.float32)


@pytest.mark.parametrize("top_k", [0, 2])
def test_no_tokens_or_no_experts_per_token(top_k, device):
    problem = problem_of(Case(0, 2), torch.float32, device)
    tokens = 0 if top_k else 3
    x_TH = problem.x_TH.new_ones(tokens, 32)
    empty = problem._replace(
        x_TH=x_TH,
        expert_TK=problem.expert_TK.new_empty(tokens, top_k),
        weight_TK=problem.weight_TK.new_empty(tokens, top_k),
    )
    assert torch.equal(run(empty), torch.zeros_like(x_TH))


@WAYS
def test_what_nobody_owns_is_not_read(way, device):
    """NaN in weights and factors of untouched experts, in routing weights of nobody's slots and in x of lost tokens."""
    problem = problem_of(Case(4, 2, bias=True, lora="all"), torch.float32, device)
    expert_TK = torch.tensor([[3, -1], [8, 5], [2**32 + 3, 8], [5, 3]], device=device)
    nobody_TK = (expert_TK < 0) | (expert_TK >= 8)
    problem = problem._replace(expert_TK=expert_TK)
    truth_TH = experts_forward(
        problem.x_TH.cpu().double(),
        expert_TK.cpu(),
        problem.weight_TK.cpu().double(),
        ExpertWeights(*(t.cpu().double() for t in problem.weights.tensors()), problem.weights.activation),
        lora_of({name: tensor.cpu().double() for name, tensor in problem.lora.tensors().items()}),
    )
    assert truth_TH[2].count_nonzero() == 0
    x_TH = problem.x_TH.clone()
    x_TH[2] = torch.nan
    untouched = torch.ones(8, dtype=torch.bool, device=device)
    untouched[[3, 5]] = False

    def poison(tensor):
        return tensor.masked_fill(untouched.view(-1, *[1] * (tensor.dim() - 1)), torch.nan)

    poisoned = Problem(
        x_TH,
        expert_TK,
        problem.weight_TK.masked_fill(nobody_TK, torch.nan),
        ExpertWeights(*map(poison, problem.weights.tensors()), problem.weights.activation),
        lora_of({name: poison(tensor) for name, tensor in problem.lora.tensors().items()}),
    )
    assert_right(run(poisoned, way), truth_TH, torch.float32)


@WAYS
def test_same_bits_from_run_to_run_and_for_any_storage_of_the_routing(way, device):
    problem = problem_of(Case(2, 3, bias=True, pattern="empty_experts", num_experts=4), torch.float32, device)
    first = run(problem, way)
    assert torch.equal(first, run(problem, way))
    strided = problem._replace(
        x_TH=problem.x_TH.t().contiguous().t(),
        expert_TK=problem.expert_TK.to(torch.int32).t().contiguous().t(),
        weight_TK=problem.weight_TK.t().contiguous().t(),
    )
    assert torch.equal(first, run(strided, way))


def test_a_larger_chunk_takes_more_slots_at_once(device):
    case = Case(33, 1, pattern="all_on_one", num_experts=1, hidden=31)
    truth_TH = example(case, torch.float32).truth["output"]
    problem = problem_of(case, torch.float32, device)
    assert_right(run(problem, BY_EXPERT._replace(rows=32)), truth_TH, torch.float32)


my_expert, slots_of_chunk = decode_slot_lists.my_expert, decode_slot_lists.slots_of_chunk


@triton.jit
def _report_slots(expert_N, count_O, slot_OR, N, E, BY_EXPERT: tl.constexpr, BLOCK_N: tl.constexpr):
    owner = tl.program_id(0)
    expert, count = my_expert(expert_N, owner, N, E, BY_EXPERT, BLOCK_N)
    tl.store(count_O + owner, count)
    for first_rank in range(0, count, 2):
        slot = slots_of_chunk(expert_N, expert, first_rank, N, 2, 4)
        tl.store(slot_OR + owner * 16 + first_rank + tl.arange(0, 2), slot)


@pytest.mark.parametrize("by_expert", [True, False])
def test_each_touched_expert_is_computed_once_and_finds_all_its_slots(by_expert, device):
    """The weights of an expert are read once because one owner has all of its slots; O owners, chunks of 2 slots."""
    ids = [3, 0, 3, -1, 6, 3, 0, 3, 2**32 + 3, 6, 3]
    owners = 6 if by_expert else len(ids)
    count_O = torch.full((owners,), -1, dtype=torch.int32, device=device)
    slot_OR = torch.full((owners, 16), -1, dtype=torch.int32, device=device)
    _report_slots[(owners,)](torch.tensor(ids, device=device), count_O, slot_OR, len(ids), 6, by_expert, 16)
    found = {}
    for owner, (count, slots) in enumerate(zip(count_O.tolist(), slot_OR.tolist(), strict=True)):
        if count:
            found[owner] = slots[:count]
    assert found == ({0: [1, 6], 3: [0, 2, 5, 7, 10]} if by_expert else {0: [0, 2, 5, 7, 10], 1: [1, 6]})


class TestConfiguration:
    SIZES = tuple(itertools.product((1, 2, 8, 64), (1, 8, 16), (1, 16, 128), (1, 63, 2048), (1, 199, 768, 14336)))

    def test_tiles_are_powers_of_two_that_a_dot_takes(self):
        for (tokens, top_k, experts, hidden, inner), gated in itertools.product(self.SIZES, (True, False)):
            chosen = configuration(tokens, top_k, experts, hidden, inner, gated=gated, itemsize=2)
            for size in (*chosen.up[:2], *chosen.down[:2], chosen.rows):
                assert size & (size - 1) == 0
                assert chosen.by_slot or size >= 16

    def test_three_stages_fit_in_99_kb_of_shared_memory(self):
        for (tokens, top_k, experts, hidden, inner), itemsize in itertools.product(self.SIZES, (2, 4)):
            chosen = configuration(tokens, top_k, experts, hidden, inner, gated=True, itemsize=itemsize)
            for tile, rows_per_column in ((chosen.up, 2), (chosen.down, 1)):
                lines = tile.columns * rows_per_column + (1 if chosen.by_slot else chosen.rows)
                assert tile.at_once or lines * tile.depth * itemsize * tile.stages <= 99 * 1024

    def test_what_is_in_flight_at_once_covers_the_rows_and_fits_in_registers(self):
        """A thread has 255 registers of 4 bytes."""
        for (tokens, top_k, experts, hidden, inner), itemsize in itertools.product(self.SIZES, (2, 4)):
            chosen = configuration(tokens, top_k, experts, hidden, inner, gated=True, itemsize=itemsize)
            if chosen.up.at_once:
                assert chosen.up.depth >= hidden
                assert 2 * chosen.up.columns * chosen.up.depth * itemsize <= 32 * chosen.up.warps * 128
            if chosen.down.at_once:
                slots, pieces = triton.next_power_of_2(top_k), triton.cdiv(inner, chosen.down.depth)
                assert pieces <= 8
                bytes_in_flight = slots * chosen.down.columns * pieces * chosen.down.depth * itemsize
                assert bytes_in_flight <= 32 * chosen.down.warps * 256


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("lora", ["none", "all"])
    @pytest.mark.parametrize("tokens", [1, 8, 64])
    def test_a_real_layer_agrees_with_the_reference(self, tokens, lora, device):
        case = Case(tokens, 8, hidden=2048, intermediate=768, num_experts=32, lora=lora, rank=16)
        truth_TH = example(case, torch.bfloat16).truth["output"]
        assert_right(run(problem_of(case, torch.bfloat16, device)), truth_TH, torch.bfloat16)

    @quick(lambda tokens, hidden: tokens != 2 or hidden == 2048)
    @pytest.mark.parametrize("tokens", [1, 2, 4])
    @pytest.mark.parametrize(
        ("hidden", "inner", "top_k"), [(2048, 768, 8), (4096, 63, 2), (64, 14336, 2), (2880, 200, 4)]
    )
    def test_tiles_of_real_layers_by_slot_agree_with_the_reference(self, tokens, hidden, inner, top_k, device):
        case = Case(tokens, top_k, bias=True, hidden=hidden, intermediate=inner, num_experts=8)
        chosen = configuration(1, top_k, 8, hidden, inner, gated=True, itemsize=2)
        way = chosen._replace(overlap=torch.cuda.get_device_capability() >= (9, 0))
        assert chosen.up.at_once
        assert chosen.down.at_once
        truth_TH = example(case, torch.bfloat16).truth["output"]
        assert_right(run(problem_of(case, torch.bfloat16, device), way), truth_TH, torch.bfloat16)

    @quick(lambda tokens: tokens != 2)
    @pytest.mark.parametrize("lora", ["none", "all"])
    @pytest.mark.parametrize("overlap", [False, True])
    @pytest.mark.parametrize("tokens", [1, 2, 8])
    def test_a_graph_follows_the_routing_that_lies_in_its_memory(self, tokens, overlap, lora, device):
        if overlap and torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("programmatic dependent launch needs compute capability 9.0")
        sizes = {"hidden": 512, "intermediate": 256, "num_experts": 32}
        case = Case(tokens, 4, bias=True, pattern="sentinels", lora=lora, rank=16, **sizes)
        problem = problem_of(case, torch.bfloat16, device)
        chosen = configuration(tokens, 4, 32, 512, 256, gated=True, itemsize=2)
        way = chosen._replace(overlap=overlap)
        decode(problem, configuration=way)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_TH = decode(problem, configuration=way)
        for _ in range(20):
            problem.expert_TK.copy_((problem.expert_TK + 1) % 33)
            y_TH.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y_TH, decode(problem, configuration=chosen))
