"""The proof for experts over ranks: the same layer, its tokens and experts divided over processes, every gradient.

T tokens · K experts per token · E experts · H hidden · W ranks

    results = verify_over_ranks(3, [torch.float32])
    all(result.ok for result in results)

Compared by name with the reference in fp64, as one process's are; and bit by bit with one process that has all tokens
and computes with the same backend. Gradients of weights, factors and routing weights have to be equal there: rows come
in the order in which one process has them. Output and the gradient of x are sums over ranks, rounded once more. The
same holds for experts that train in fp8, whose reference is the recipe in fp64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.placement import Placement
from amoeba.core.weights import LORA_NAMES, AnyExperts
from amoeba.experts import experts
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.processes import LocalRanks, RankFailed, first_processes
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import Tokens, shard_experts
from amoeba.placements import RESIDENT, all_placements, placement_named
from amoeba.proof.cases import FREEZABLE, SILU, Case, Example, example, lora_of, weight_dtype, weights_of
from amoeba.proof.conformance import Result, poisoned_memory, relative_error, tolerance, why_not_placed
from amoeba.routing.router import Routing

PACKED = "cpu-bf16"
_DEADLINE = 30.0
# Output and the gradient of x are added up in another order than one process adds.
_SUMS = ("output", "inference", "x")


@dataclass(frozen=True)
class DividedCase:
    """
    case:     the layer, with the tokens of all ranks.
    tokens:   of each rank, for "own"; else all of them are everybody's.
    owner:    of each expert; None for torch.chunk's rule.
    local:    the placement of each rank's own experts, or the recipe by which they train.
    transport: how tokens travel.
    """

    case: Case
    tokens: tuple[int, ...]
    mode: Tokens = "own"
    owner: tuple[int, ...] | None = None
    local: str = RESIDENT
    transport: str = "auto"

    @property
    def name(self) -> str:
        how = f"tokens {'+'.join(map(str, self.tokens))}" if self.mode == "own" else "the same tokens everywhere"
        words = [self.case.name, how, "" if self.owner is None else f"owners {self.owner}"]
        return ", ".join(word for word in (*words, "" if self.local == RESIDENT else self.local) if word)


def divided_cases(ranks: int) -> Iterator[DividedCase]:
    """Awkward first: uneven experts and tokens, ranks without either, all rows on one rank."""
    uneven = _uneven(63, ranks)
    everything = Case(63, 4, SILU, True, "sentinels", num_experts=10, lora="all", rank=5)
    yield DividedCase(everything, uneven)
    yield DividedCase(everything, uneven, mode="same")
    yield DividedCase(replace(everything, recompute=True, lora="none"), uneven)
    plain = Case(63, 2, num_experts=10)
    yield DividedCase(plain, (*(0,) * (ranks - 1), 63))
    yield DividedCase(replace(plain, num_tokens=0), (0,) * ranks)
    yield DividedCase(replace(plain, top_k=1, pattern="all_on_one"), uneven)
    yield DividedCase(replace(plain, top_k=1, bias=True), uneven)
    yield DividedCase(replace(plain, top_k=10), uneven)
    yield DividedCase(replace(plain, pattern="empty_experts", storage="transposed", narrow=True), uneven)
    yield DividedCase(replace(plain, pattern="sentinels_alone", lora="all"), uneven)
    yield DividedCase(replace(plain, num_experts=2, bias=True, lora="down"), uneven)  # ranks without experts
    yield DividedCase(replace(plain, bias=True), uneven, owner=tuple((7 * e + 1) % ranks for e in range(10)))
    yield DividedCase(replace(everything, frozen=True), uneven, local=PACKED)
    yield DividedCase(replace(everything, frozen=True, num_experts=2, top_k=2), uneven, "same", local=PACKED)
    # several blocks of 128 in a row, and a last one that is not whole
    blocks = replace(everything, lora="none", hidden=144, intermediate=208)
    yield DividedCase(blocks, uneven, local="fp8")
    yield DividedCase(blocks, uneven, mode="same", local="fp8")
    yield DividedCase(replace(blocks, recompute=True), uneven, local="fp8-saved")
    yield DividedCase(replace(plain, num_tokens=0), (0,) * ranks, local="fp8-saved")
    yield DividedCase(replace(plain, num_experts=2, bias=True), uneven, local="fp8")
    yield DividedCase(replace(plain, pattern="empty_experts", storage="transposed"), uneven, local="fp8-ste")
    yield DividedCase(blocks, uneven, local="mxfp8")
    yield DividedCase(blocks, uneven, local="nvfp4")


def _uneven(tokens: int, ranks: int) -> tuple[int, ...]:
    """All different, and none on the second rank."""
    if ranks == 1:
        return (tokens,)
    parts = [0 if rank == 1 else rank + 1 for rank in range(ranks)]
    parts[-1 if ranks > 2 else 0] += tokens - sum(parts)
    return tuple(parts)


class Share(NamedTuple):
    """What one process is sent."""

    tensors: dict[str, Tensor]  # x, weight and dy of its tokens; the weights and factors of all experts
    expert_TK: Tensor
    activation: Activation
    frozen: bool
    recompute: bool
    ranks: int
    mode: Tokens = "own"
    owner: tuple[int, ...] | None = None
    local: str = RESIDENT
    transport: str = "auto"


def compute_share(share: Share) -> dict[str, Tensor]:
    """In one process of the group: its output and gradients, by name."""
    named = {name: tensor.clone() for name, tensor in share.tensors.items()}
    dy_TH = named.pop("dy")
    for name, tensor in named.items():
        tensor.requires_grad_(not (share.frozen and name in FREEZABLE))
    factors = {name: tensor for name, tensor in named.items() if name in LORA_NAMES}
    given = weights_of(named, share.activation)
    weights: AnyExperts = given
    make = None if share.local == RESIDENT else placement_named(share.local).make
    if share.ranks > 1:
        ranks = Ranks(first_processes(share.ranks), _DEADLINE)
        owners = _owners(share.owner, given.num_experts, share.ranks)
        weights = shard_experts(given, ranks, owners, make_local=make, tokens=share.mode, transport=share.transport)
        factors = {name: owners.take(t.detach(), ranks.rank).clone().requires_grad_() for name, t in factors.items()}
    elif make is not None:
        weights = make(given)
    wanted = {"x": named["x"], "weight": named["weight"], **factors}
    if not share.frozen:
        wanted |= {name: t for name, t in zip(FREEZABLE, weights.tensors(), strict=True) if t is not None}
    lora, routing = lora_of(factors), Routing(share.expert_TK, named["weight"])
    with poisoned_memory():
        with torch.no_grad():
            found = {"inference": experts(named["x"], routing, weights, lora=lora, recompute=share.recompute)}
        y_TH = experts(named["x"], routing, weights, lora=lora, recompute=share.recompute)
        found["output"] = y_TH.detach()
        gradients = torch.autograd.grad(y_TH, list(wanted.values()), dy_TH)
    return found | dict(zip(wanted, gradients, strict=True))


def verify_divided(divided: DividedCase, dtype: torch.dtype, processes: LocalRanks, ranks: int) -> Result:
    """ranks: how many of the processes, from the first on."""
    recipe = divided.local if _trains_as_placed(divided.local) else None
    name = f"{ranks} ranks" if recipe is None else f"{ranks} ranks, {recipe}"
    result = Result(name, dtype, divided.name, judged_as=recipe)
    if (refused := why_not(divided, dtype)) is not None:
        return replace(result, refused=refused)
    try:
        errors, unequal = check_divided(divided, dtype, processes, ranks)
    except RankFailed as failure:
        return replace(result, failure=str(failure))
    wrong = {each: error for each, error in errors.items() if not error <= tolerance(result.judge, dtype, each)}
    other_bits = f"other bits than one process: {', '.join(unequal)}" if unequal else None
    return replace(result, errors=errors, out_of_tolerance=wrong, failure=other_bits)


def why_not(divided: DividedCase, dtype: torch.dtype) -> str | None:
    """Why the ranks' own experts cannot be placed so here; or None."""
    placement = _placement(divided.local)
    return None if placement is None else why_not_placed(placement, torch.device("cpu"), dtype)


def _placement(name: str) -> Placement | None:
    """None for resident experts."""
    return next((each for each in all_placements() if each.name == name), None)


def _trains_as_placed(name: str) -> bool:
    placement = _placement(name)
    return placement is not None and placement.trains


def verify_over_ranks(
    ranks: int, dtypes: Sequence[torch.dtype], progress: Callable[[int, int, str], None] | None = None
) -> list[Result]:
    """Every case in every dtype, over this many processes that are started for it. progress: (done, of, case)."""
    checks = list(itertools.product(divided_cases(ranks), dtypes))
    results: list[Result] = []
    while len(results) < len(checks):
        with LocalRanks(ranks) as processes:
            for divided, dtype in checks[len(results) :]:
                if progress is not None:
                    progress(len(results), len(checks), f"{divided.name} in {str(dtype).removeprefix('torch.')}")
                results.append(verify_divided(divided, dtype, processes, ranks))
                if not processes.alive:  # a case that failed took them with it
                    break
    return results


def check_divided(
    divided: DividedCase, dtype: torch.dtype, processes: LocalRanks, ranks: int
) -> tuple[dict[str, float], list[str]]:
    """Errors by name against the reference; and which of what should be equal to one process's bits are not."""
    found = joined(divided, processes.run(compute_share, [(share,) for share in shares(divided, dtype, ranks)]), ranks)
    (alone,) = processes.run(compute_share, [(whole(divided, dtype),)])
    made = _example(divided, dtype)
    dtypes = {name: weight_dtype(divided.case, dtype) if name == "weight" else dtype for name in found}
    errors = {name: relative_error(name, found[name], made.truth[name], dtypes[name]) for name in found}
    return errors, [name for name in found if name not in _SUMS and not torch.equal(found[name], alone[name])]


def _example(divided: DividedCase, dtype: torch.dtype) -> Example:
    placement = _placement(divided.local)
    return example(divided.case, dtype, None if placement is None else placement.represent)


def whole(divided: DividedCase, dtype: torch.dtype) -> Share:
    """The same for one process."""
    case, made = divided.case, _example(divided, dtype)
    tensors = {
        name: tensor.to(weight_dtype(case, dtype) if name == "weight" else dtype)
        for name, tensor in (made.inputs | {"dy": made.dy_TH}).items()
    }
    if case.storage == "transposed":
        tensors = {name: t.mT.contiguous().mT if t.dim() == 3 else t for name, t in tensors.items()}
    frozen = case.frozen or not (divided.local == RESIDENT or _trains_as_placed(divided.local))
    return Share(tensors, made.expert_TK, case.activation, frozen, case.recompute, 1, local=divided.local)


def shares(divided: DividedCase, dtype: torch.dtype, ranks: int) -> list[Share]:
    one = whole(divided, dtype)
    one = one._replace(ranks=ranks, mode=divided.mode, owner=divided.owner, transport=divided.transport)
    if divided.mode == "same":
        return [one] * ranks
    parts = {name: _cut(one.tensors[name], divided.tokens) for name in ("x", "weight", "dy")}
    ids = _cut(one.expert_TK, divided.tokens)
    return [
        one._replace(tensors=one.tensors | {name: part[rank] for name, part in parts.items()}, expert_TK=ids[rank])
        for rank in range(ranks)
    ]


def _cut(tensor: Tensor, tokens: tuple[int, ...]) -> list[Tensor]:
    """Copies: a view is sent with all that it is a view of."""
    return [part.clone() for part in tensor.split(tokens)]


def joined(divided: DividedCase, results: list[dict[str, Tensor]], ranks: int) -> dict[str, Tensor]:
    """As one process would have them."""
    owners = _owners(divided.owner, divided.case.num_experts, ranks)
    found: dict[str, Any] = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name not in ("output", "inference", "x", "weight"):
            found[name] = owners.join(parts)
        elif divided.mode == "own":
            found[name] = torch.cat(parts)
        else:
            different = [rank for rank, part in enumerate(parts) if not torch.equal(part, parts[0])]
            found[name] = parts[0].fill_(torch.nan) if different else parts[0]
    return found


def _owners(owner: tuple[int, ...] | None, num_experts: int, ranks: int) -> Owners:
    return Owners.even(num_experts, ranks) if owner is None else Owners(owner, ranks)
