"""Experts over ranks that train in fp8: the numbers of one process by the same recipe, whatever carries the rows.

T tokens · K experts per token · E experts · H hidden
"""

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import amoeba
import rank_jobs
from amoeba import Request, Routing, experts, with_precision
from amoeba.backends import fp8_choice
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.parallel import Owners, Ranks, ShardedExperts, shard_experts
from amoeba.parallel.processes import LocalRanks, first_processes
from amoeba.parallel.transports.peers import PeerExchange
from amoeba.parallel.transports.transport import CollectiveExchange
from amoeba.placements import placement_named
from amoeba.precision.recipes import Fp8Experts
from amoeba.proof.cases import SILU, Case
from amoeba.proof.over_ranks import DividedCase, verify_divided
from fp8_stand_ins import stand_in
from rank_jobs import E, H, I
from selection import each_value_once, quick

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")
RECIPES = ("fp8", "fp8-ste", "fp8-saved")


def in_precision(layer: ShardedExperts, precision: str) -> ShardedExperts:
    return replace(layer, local=with_precision(layer.local, precision))


def drawn(rank: int, tokens: int, seed: int = 0, hidden: int = H) -> tuple[Tensor, Routing, Tensor]:
    """x, routing with sentinels, and dy; x and the routing weights want gradients. After the first seed all tokens go
    to experts of the first rank."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x_TH, dy_TH = (torch.randn(tokens, hidden, generator=generator) for _ in range(2))
    expert_TK = torch.randint(*((0, 3) if seed else (-1, E + 1)), (tokens, 2), generator=generator)
    weight_TK = torch.rand(tokens, 2, generator=generator)
    return x_TH.requires_grad_(), Routing(expert_TK, weight_TK.requires_grad_()), dy_TH


def step(layer: ShardedExperts, x_TH: Tensor, routing: Routing, dy_TH: Tensor) -> list[Tensor]:
    """Output and gradients of x, routing weights and weights."""
    trained = [tensor.requires_grad_() for tensor in layer.local.tensors() if tensor is not None]
    y_TH = experts(x_TH, routing, layer)
    return [y_TH.detach(), *torch.autograd.grad(y_TH, [x_TH, routing.weight_TK, *trained], dy_TH)]


def equal(found: list[Tensor], expected: list[Tensor]) -> list[bool]:
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


@each_value_once()
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_have_the_recipes_gradients_and_one_process_bits(processes, recipe, dtype):
    case = Case(199, 4, SILU, True, "sentinels", hidden=272, intermediate=144, num_experts=6)
    result = verify_divided(DividedCase(case, (150, 0, 49), local=recipe), dtype, processes, 3)
    assert result.errors and result.ok, result.failure or result.out_of_tolerance
    assert result.backend == f"3 ranks, {recipe}" and result.judge == recipe


def test_without_the_recipe_a_proof_of_it_would_fail(processes: LocalRanks) -> None:
    """6 % of error would hide nothing here: the truth is the recipe's, and the tolerance that of rounding."""
    case = Case(63, 2, hidden=144, intermediate=208, num_experts=4)
    shares = DividedCase(case, (40, 23), local="fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amoeba.proof.over_ranks.compute_share", computed_without)
        result = verify_divided(shares, torch.float32, processes, 2)
    assert not result.ok and {"output", "x", "gate_up"} <= result.out_of_tolerance.keys()


def computed_without(share: Any) -> dict[str, Tensor]:
    from amoeba.proof.over_ranks import compute_share

    return compute_share(share._replace(local="resident"))


@interpreted
@quick(lambda recipe: recipe == "fp8-saved")
@pytest.mark.parametrize("recipe", RECIPES)
def test_by_peers_it_has_the_bits_of_collective(processes: LocalRanks, recipe: str) -> None:
    jobs = [(rank, recipe, [(3, 5), (0, 7), (0, 0)], {}) for rank in range(2)]
    for found in processes.run(peers_as_collective, jobs):
        assert len(found) == 3 * 5 and all(found)


@interpreted
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param("fp8", {"straight": True}, marks=pytest.mark.thorough),
        ("fp8-saved", {"straight": True, "overlap": True}),
        pytest.param("fp8-ste", {"straight": False, "overlap": True}, marks=pytest.mark.thorough),
    ],
)
def test_sums_that_leave_early_change_no_bit_where_kernels_compute(processes, recipe, options):
    """The room of the first step, by which the second begins, is too little on the first rank."""
    results = processes.run(with_stand_ins, [(rank, recipe, [(3, 2), (2, 3)], options) for rank in range(2)])
    for found, _ in results:
        assert len(found) == 2 * 5 and all(found)
    assert [again for _, again in results] == [1, 0]


def peers_as_collective(
    rank: int, recipe: str, steps: list[tuple[int, ...]], options: dict[str, Any], backend: str = "auto", **sizes: int
) -> list[bool]:
    """Whether outputs and gradients of the steps, with so many tokens on each rank, have the bits of `collective`."""
    ways: dict[str, dict[str, Any]] = {"peers": options, "collective": {}}
    layers = [
        replace(rank_jobs.sharded_layer(2, transport=name, **sizes), local_backend=backend, **more)
        for name, more in ways.items()
    ]
    found: list[bool] = []
    for number, tokens in enumerate(steps):
        given = (drawn(rank, tokens[rank], number, layer.hidden) for layer in layers)
        found += equal(*(step(in_precision(layer, recipe), *each) for layer, each in zip(layers, given, strict=True)))
    return found


def with_stand_ins(
    rank: int, recipe: str, steps: list[tuple[int, ...]], options: dict[str, Any]
) -> tuple[list[bool], int]:
    """The same by our kernels, whose products torch stands in for; and how often there was too little room."""
    from amoeba.kernels import peer_rows
    from amoeba.parallel.transports import symmetric_buffer as buffer
    from amoeba.parallel.transports import symmetric_buffer as rooms

    again, put_back = [], peer_rows.put_back
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr(rooms, "_TILE", 1)  # so that a guess is soon too small
        for each in buffer._buffers.values():
            each.capacity = rooms.CapacityEstimate()
        patch.setattr(peer_rows, "put_back", lambda *given: again.append(1) or put_back(*given))
        return peers_as_collective(rank, recipe, steps, options, "triton", hidden=64, inner=64), len(again)


@pytest.mark.parametrize("tokens", ["own", "same"])
@pytest.mark.parametrize(("fewest", "taken"), [(28, "fp8"), (29, "bf16")])  # 70 tokens, K = 2 and E = 5
def test_auto_is_settled_by_the_rows_of_all_ranks_as_in_one_process(processes, fewest, taken, tokens):
    """One rank has most of the tokens: by its own rows it would take fp8 in both, the other one in neither."""
    found = processes.run(settled, [(rank, fewest, tokens) for rank in range(2)])
    assert found == [taken, taken]


def settled(rank: int, fewest: int, tokens: str) -> str:
    """As which of the two "auto" computes."""
    layer = replace(rank_jobs.sharded_layer(2), tokens=tokens)
    given = drawn(0, 70) if tokens == "same" else drawn(rank, (66, 4)[rank])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_choice, "BACKEND", SimpleNamespace(why_not=lambda request: None))
        patch.setattr(fp8_choice, "FEWEST_ROWS_PER_EXPERT", fewest)
        patch.setattr(fp8_choice, "LEAST_SIZE", 0)
        auto = step(in_precision(layer, "auto"), *given)
    same = [name for name in ("fp8", "bf16") if all(equal(step(in_precision(layer, name), *given), auto))]
    return " and ".join(same)


def test_activation_checkpointing_exchanges_and_quantises_again(processes: LocalRanks) -> None:
    jobs = [(rank, 4, False, "fp8-saved") for rank in range(4)]  # the last one has no experts
    assert processes.run(rank_jobs.with_and_without_checkpointing, jobs) == [[True] * 4] * 4


def test_codes_are_of_the_weights_as_each_pass_finds_them(processes: LocalRanks) -> None:
    for found in processes.run(written_through_data, [(0,), (1,)]):
        assert found == [True] * 5


def written_through_data(rank: int) -> list[bool]:
    """Whether a step has the bits of a layer that was made with weights which were written past every counter."""
    layer, given = in_precision(rank_jobs.sharded_layer(2), "fp8"), drawn(rank, 9)
    before = step(layer, *given)
    for tensor in layer.local.tensors()[:2]:
        tensor.data.mul_(-3)  # type: ignore[union-attr]
    fresh = in_precision(copy.deepcopy(layer), "fp8")
    found = step(layer, *given)
    assert not any(equal(found, before))
    return equal(found, step(fresh, *given))


def test_the_precision_goes_with_the_share() -> None:
    weights = with_precision(rank_jobs.owners_of_one().local, "fp8-saved")
    sharded = shard_experts(weights)
    for layer in (sharded, copy.deepcopy(sharded), sharded.to(torch.bfloat16), sharded.with_tensors(weights.tensors())):
        assert isinstance(layer.local, Fp8Experts) and layer.local.recipe == "fp8-saved"
    assert all(one is other for one, other in zip(layer.tensors(), weights.tensors(), strict=True))
    assert type(shard_experts(rank_jobs.owners_of_one().local).local) is ExpertWeights
    with pytest.raises(ValueError, match=r"weights: expected experts as ordinary tensors.*; got ShardedExperts"):
        with_precision(sharded, "fp8")


def test_what_the_recipe_does_not_serve_is_refused_with_its_reason() -> None:
    layer, (x_TH, routing) = in_precision(rank_jobs.owners_of_one(), "fp8"), rank_jobs.tokens()
    lora = LoraFactors(down_lora_a=torch.zeros(E, 3, I), down_lora_b=torch.zeros(E, H, 3))
    reason = amoeba.explain(Request(x_TH, routing, layer, lora)).refused["ranks"]
    assert reason.startswith("has no backend for its own experts: ") and "with LoRA factors" in reason
    experts(x_TH, routing, in_precision(layer, "auto"), lora=lora)  # which takes no recipe then


@pytest.mark.parametrize(
    ("transport", "recipe"),
    [*(("collective", recipe) for recipe in (*RECIPES, "w8a8")), pytest.param("peers", "fp8", marks=interpreted)],
)
def test_rows_sent_quantised_have_the_bits_of_rows_quantised_on_arrival(processes, transport, recipe):
    """Of three ranks the last one has no experts, and with w8a8 does not know that rows are wanted quantised."""
    ranks = 2 if transport == "peers" else 3
    for same, quantised, as_they_are in processes.run(
        sent_both_ways, [(rank, ranks, transport, recipe) for rank in range(ranks)]
    ):
        assert len(same) == (1 if recipe == "w8a8" else 9) and all(same)
        assert quantised == [144 + 4 * 2 + 8] * len(quantised)  # codes, two scales, and what fills up 16 bytes
        assert as_they_are == [144 * 2 if recipe == "w8a8" else 144 * 4] * len(quantised) and quantised


@interpreted
def test_kernels_take_rows_as_they_were_sent(processes: LocalRanks) -> None:
    job = functools.partial(sent_both_ways, straight=True, overlap=True)
    for same, quantised, as_they_are in processes.run(job, [(rank, 2, "peers", "fp8-saved") for rank in range(2)]):
        assert len(same) == 9 and all(same)
        assert set(quantised) == {64 + 4 + 12} and set(as_they_are) == {64 * 4}


def sent_both_ways(
    rank: int, ranks: int, transport: str, recipe: str, **options: Any
) -> tuple[list[bool], list[int], list[int]]:
    """Whether passes with gate_up frozen have the same bits; and the bytes of each row of x that was sent. options:
    of a layer that our kernels compute, whose products torch stands in for."""
    from amoeba.parallel import sharded_backend

    owners = Owners((0, 1, 1, 0, 1), ranks)
    found, sizes = [], []
    for asked in (sharded_backend._row_format, lambda request: 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_backend, "_row_format", asked)
            sizes.append(bytes_of_rows(patch))
            layer = sharded_in(recipe, owners, transport)
            if options:
                stand_in(patch)
                layer = replace(sharded_in(recipe, owners, transport, 64, 64), local_backend="triton", **options)
            found.append(passes_without_gate_up(layer, rank))
    return equal(*found), *sizes


def sharded_in(
    recipe: str, owners: Owners, transport: str = "auto", hidden: int = 144, inner: int = 24
) -> ShardedExperts:
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.randn(*shape, generator=generator) / 4 for shape in ((E, 2 * inner, hidden), (E, hidden, inner))
    )
    ranks = Ranks(first_processes(owners.ranks), 30.0)
    if recipe == "w8a8":
        weights = ExpertWeights(gate_up.bfloat16(), down.bfloat16())
        make = placement_named(recipe).make
        return shard_experts(weights, ranks, owners, make_local=make, transport=transport)
    weights = with_precision(ExpertWeights(gate_up, down.requires_grad_()), recipe)
    return shard_experts(weights, ranks, owners, transport=transport)


def passes_without_gate_up(layer: ShardedExperts, rank: int) -> list[Tensor]:
    """The output of a pass without gradients; and where experts train, output and gradients of x, routing weights and
    down, of a step that computes h again from rows as they came, and of one that does not."""
    x_TH, routing, dy_TH = drawn(rank, (9, 0, 5)[rank], hidden=layer.hidden)
    with torch.no_grad():
        found = [experts(x_TH.to(layer.dtype), routing, layer)]
    if layer.dtype == torch.bfloat16:  # w8a8: only passes without gradients quantise rows
        return found
    down_EHI = layer.local.tensors()[1]
    for recompute in (True, False):
        y_TH = experts(x_TH, routing, layer, recompute=recompute)
        found += [y_TH.detach(), *torch.autograd.grad(y_TH, [x_TH, routing.weight_TK, down_EHI], dy_TH)]
    return found


def bytes_of_rows(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that each row of x adds its size to as it is sent, by whatever carries it."""
    sizes: list[int] = []
    for kind in (PeerExchange, CollectiveExchange):
        patch.setattr(kind, "dispatch", _noting(kind.dispatch, sizes))
    return sizes


def _noting(dispatch: Any, sizes: list[int]) -> Any:
    def noted(exchange: Any, rows_TH: Tensor, weight_TK: Tensor) -> Any:
        sizes.append(rows_TH.shape[1] * rows_TH.element_size())
        return dispatch(exchange, rows_TH, weight_TK)

    return noted


def test_rows_stay_as_they_are_where_something_else_reads_them(processes: LocalRanks) -> None:
    """A gradient of gate_up is a sum over x itself; "auto" is settled too late; narrow rows would not be smaller."""
    asked = [("fp8", True, 144), ("auto", False, 144), ("bf16", False, 144), ("fp8", False, 4)]
    for found in processes.run(formats_asked_for, [(rank, [*asked, ("fp8-saved", False, 144)]) for rank in range(2)]):
        assert found == [0, 0, 0, 0, 1]


def formats_asked_for(rank: int, cases: list[tuple[str, bool, int]]) -> list[int]:
    from amoeba.parallel.sharded_backend import _row_format

    found = []
    for recipe, trains, hidden in cases:
        layer, (x_TH, routing, _) = sharded_in(recipe, Owners.even(E, 2), hidden=hidden), drawn(rank, 3, 0, hidden)
        layer.local.tensors()[0].requires_grad_(trains)
        found.append(_row_format(Request(x_TH, routing, layer)))
    return found
