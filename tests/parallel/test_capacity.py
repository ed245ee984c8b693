"""`peers` begins a pass with the room that the layer's last one needed, and looks at the number of rows when its first
product has been launched. Interpreted, over real processes."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rank_jobs
from amoeba import LoraFactors, Routing, experts
from amoeba.backends import triton
from amoeba.parallel import ShardedExperts
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.transports import symmetric_buffer as buffer
from amoeba.parallel.transports import symmetric_buffer as rooms
from amoeba.parallel.transports.symmetric_buffer import CapacityEstimate, layer_of, rounded_up
from selection import quick

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")
# Tokens of each rank, and of ten slots how many have an expert of rank 0. Slots without an expert are some of them.
STEPS = [(6, 5, 5), (6, 5, 5), (6, 5, 9), (6, 5, 1), (0, 7, 5), (0, 0, 5), (6, 5, 5)]


def test_a_room_is_one_of_few_sizes() -> None:
    assert [rounded_up(owned, 262144) for owned in (0, 1, 4096, 131073)] == [4096, 4096, 4096, 135168]
    assert rounded_up(27, 28) == 28 and rounded_up(0, 0) == 0


def test_a_guess_grows_at_once_and_comes_down_size_by_size() -> None:
    known, slots, size = CapacityEstimate(), 262144, 4096
    assert known.guess(1, slots) is None
    guesses = []
    for room in (32 * size, 40 * size, 32 * size, 32 * size, 64 * size):
        known.remember(1, room, slots, known.guess(1, slots))
        guesses.append((known.guess(1, slots) or 0) // size)
    assert guesses == [33, 41, 40, 39, 64]  # there are no more than 64
    known.remember(2, 32 * size, slots, None)
    assert known.guess(2, slots // 2) == 33 * size // 2 and known.guess(2, 2 * slots) == 66 * size
    assert known.guess(2, 0) is None and known.guess(3, slots) is None


def test_a_layer_is_known_by_the_place_of_its_weights() -> None:
    one, other = (rank_jobs.owners_of_one().local for _ in range(2))
    assert layer_of(one) == layer_of(one) != layer_of(other)


@interpreted
@quick(lambda steps, options: len(steps) == 2)
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (STEPS[1:3], {}),
        (STEPS, {}),
        (STEPS, {"straight": True, "overlap": True}),
        (STEPS, {"straight": False, "overlap": True}),
    ],
)
def test_more_rows_than_were_guessed_are_computed_anew_and_no_bit_changes(processes, steps, options):
    options = {"straight": True} | options
    found = processes.run(guessing, [(rank, steps, options) for rank in range(2)])
    for equal, guessed, _ in found:
        assert len(equal) == 5 * len(steps) and all(equal)
        assert guessed == sum(step > 0 and any(tokens[:2]) for step, tokens in enumerate(steps))
    assert [again for *_, again in found] == ([1, 0] if len(steps) == 2 else [1, 1])


def guessing(rank: int, steps: list[tuple[int, ...]], options: dict) -> tuple[list[bool], int, int]:
    """Whether outputs and gradients of the steps have the bits of `collective`; in how many the host guessed, and how
    often too low."""
    guesses: list[int | None] = []
    guess = CapacityEstimate.guess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityEstimate, "guess", lambda *given: guesses.append(guess(*given)) or guesses[-1])
        options = {"straight": True} | options
        equal, again = by_both_transports(rank, steps, options, experts)
    return equal, sum(room is not None for room in guesses), again


def by_both_transports(rank: int, steps: list[tuple[int, ...]], options: dict, run: Any) -> tuple[list[bool], int]:
    from amoeba.kernels import peer_rows

    equal, again, put_back = [], list[int](), peer_rows.put_back
    layers = {name: replace(rank_jobs.sharded_layer(2, transport=name), local_backend="triton") for name in WAYS}
    layers["peers"] = replace(layers["peers"], **options)
    with pytest.MonkeyPatch.context() as patch:
        _know_nothing(patch)
        patch.setattr(peer_rows, "put_back", lambda *given: again.append(1) or put_back(*given))
        for step, (*tokens, share) in enumerate(steps):
            found = []
            for layer in layers.values():
                x_TH, routing, dy_TH = drawn(rank, step, tokens[rank], share)
                wanted = [x_TH, routing.weight_TK, *_trained(layer)]
                y_TH = run(x_TH, routing, layer)
                found.append([y_TH, *torch.autograd.grad(y_TH, wanted, dy_TH)])
            equal += [torch.equal(one, other) for one, other in zip(*found, strict=True)]
    return equal, len(again)


WAYS = ("peers", "collective")


def _trained(layer: ShardedExperts) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in layer.local.tensors() if tensor is not None]


def _know_nothing(patch: pytest.MonkeyPatch) -> None:
    """Of layers that have been; and sizes are so small that few rows more are too many."""
    patch.setattr(rooms, "_TILE", 1)
    for each in buffer._buffers.values():
        each.capacity = CapacityEstimate()


def drawn(rank: int, step: int, tokens: int, share: int) -> tuple[torch.Tensor, Routing, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x_TH, dy_TH = (torch.randn(tokens, rank_jobs.H, generator=generator) for _ in range(2))
    of_first = torch.arange(2 * tokens).view(tokens, 2) % 10 < share
    expert_TK = torch.where(of_first, torch.arange(tokens)[:, None] % 3, 3 + torch.arange(tokens)[:, None] % 3)
    weight_TK = torch.rand(tokens, 2, generator=generator)
    return x_TH.requires_grad_(), Routing(expert_TK, weight_TK.requires_grad_()), dy_TH


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["checkpointed", "recompute", "lora"])
def test_backward_has_the_room_that_forward_found(processes: LocalRanks, way: str) -> None:
    """Checkpointing wants what forward saves the second time to have the shape of the first."""
    for equal, again in processes.run(in_other_ways, [(rank, way) for rank in range(2)]):
        assert len(equal) == 15 and all(equal)
        assert again == 1


def in_other_ways(rank: int, way: str) -> tuple[list[bool], int]:
    """Of three passes, of which the second has more rows on rank 0 and the third on rank 1; and how often a guess was
    too low."""
    steps = [(6, 6, share) for share in (5, 9, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "DECODE_TOKENS", 0)  # whose kernels `collective` takes for few tokens if no h is kept
        return by_both_transports(rank, steps, {"straight": True}, partial(_run, way))


def _run(way: str, x_TH: torch.Tensor, routing: Routing, layer: ShardedExperts) -> torch.Tensor:
    if way == "checkpointed":
        return checkpoint(lambda x: experts(x * 1, routing, layer).tanh(), x_TH, use_reentrant=False)
    if way == "recompute":
        return experts(x_TH, routing, layer, recompute=True)
    generator = torch.Generator().manual_seed(3)
    own, hidden, inner = layer.own_experts, rank_jobs.H, rank_jobs.I
    shapes = [(2, hidden), (inner, 2)] * 2 + [(2, inner), (hidden, 2)]
    factors = [torch.randn(own, *shape, generator=generator) for shape in shapes]
    return experts(x_TH, routing, layer, lora=LoraFactors(*factors, 0.5))
