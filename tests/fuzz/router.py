"""The router under the same fuzzer: `route` against a loop over tokens in fp64, with NaN and inf among the logits.

T tokens · K experts per token · E experts · G groups

A token whose logits hold a NaN or a +inf has no finite weight; -inf is an expert that is not to be had. Two experts
whose scores differ by less than a rounding may come in either order, and with them what depends on the order.
"""

import itertools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.routing.router import Routing, route

from .attempt import Outcome, verdict_on

# Relative; fp32 scores, whatever the logits are in. Choices closer than this are anybody's.
TOLERANCE = 1e-5
SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": 1e30, "-huge": -1e30}


@dataclass(frozen=True)
class RouterCase:
    seed: int
    device: str = "cpu"
    tokens: int = 1
    experts: int = 2
    top_k: int = 1
    score: str = "softmax"
    renormalize: bool = True
    scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2_sum"
    selection_bias: bool = False
    capacity_factor: float | None = None
    dtype: str = "float32"
    spread: float = 1.0  # of the logits
    special: str = "none"  # a value in some of the logits
    layout: str = "plain"
    wants_gradient: bool = True
    default_dtype: str = "float32"

    @property
    def row(self) -> str:
        return f"{self.device} {self.score} {self.dtype}"

    @property
    def config(self) -> RouterConfig:
        names = RouterConfig.__dataclass_fields__.keys() - {"num_experts", "jitter"}
        return RouterConfig(num_experts=self.experts, **{name: getattr(self, name) for name in names})


def draw(seed: int, device: str = "cpu") -> RouterCase:
    rng = random.Random(seed)
    experts = rng.choice((1, 2, 3, 4, 8, 8, 16, 60, 64, 128, 257, 512))
    divisors = [n for n in range(1, experts + 1) if experts % n == 0]
    n_group = rng.choice(divisors) if rng.random() < 0.4 else 1
    topk_group = rng.randint(1, n_group)
    reachable = topk_group * (experts // n_group)
    return RouterCase(
        seed,
        device,
        tokens=rng.choice((0, 1, 2, 7, 63, 199)),
        experts=experts,
        top_k=min(reachable, rng.choice((1, 2, 4, 8, reachable))),
        score=rng.choice(("softmax", "sigmoid", "topk_softmax")),
        renormalize=rng.random() < 0.6,
        scaling_factor=rng.choice((1.0, 2.5)),
        n_group=n_group,
        topk_group=topk_group,
        group_score=rng.choice(("top2_sum", "max")),
        selection_bias=rng.random() < 0.3,
        capacity_factor=rng.choice((0.1, 0.5, 1.0, 2.0)) if rng.random() < 0.2 else None,
        dtype=rng.choices(("float32", "bfloat16", "float16", "float64"), (5, 3, 1, 2))[0],
        spread=rng.choice((1.0, 1.0, 10.0, 100.0)),
        special=rng.choice(tuple(SPECIAL)) if rng.random() < 0.4 else "none",
        layout=rng.choice(("plain", "transposed", "strided")),
        wants_gradient=rng.random() < 0.8,
        default_dtype=rng.choices(("float32", "bfloat16", "float64"), (7, 2, 1))[0],
    )


def attempt(case: RouterCase) -> Outcome:
    generator = torch.Generator().manual_seed(case.seed)
    logits_TE, bias_E = _logits(case, generator)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.default_dtype))
    try:
        routing = route(logits_TE, case.config, bias_E=bias_E)
        dweight_TK = torch.randn(routing.weight_TK.shape, generator=generator, dtype=torch.float64).to(logits_TE.device)
        gradient_TE = None
        if case.wants_gradient:
            dweight = dweight_TK.to(routing.weight_TK.dtype)
            (gradient_TE,) = torch.autograd.grad(routing.weight_TK, logits_TE, dweight)
    except Exception as error:
        return verdict_on(error)
    finally:
        torch.set_default_dtype(default)
    lines = _faults(case, logits_TE, bias_E, routing, dweight_TK, gradient_TE)
    return Outcome("failed", "; ".join(lines)) if lines else Outcome("passed")


def _logits(case: RouterCase, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    values_TE = torch.randn(case.tokens, case.experts, generator=generator, dtype=torch.float64) * case.spread
    if case.special != "none":
        where_TE = torch.rand(values_TE.shape, generator=generator) < 1.5 / case.experts
        values_TE = values_TE.masked_fill(where_TE, SPECIAL[case.special])
    values_TE = values_TE.to(case.device, getattr(torch, case.dtype))
    if case.layout == "transposed":
        values_TE = values_TE.t().contiguous().t()
    if case.layout == "strided":
        values_TE = torch.stack((values_TE, values_TE), -1)[..., 0]
    bias_E = torch.randn(case.experts, generator=generator, dtype=torch.float64) * 0.1
    bias = bias_E.float().to(case.device) if case.selection_bias else None
    return values_TE.detach().requires_grad_(case.wants_gradient), bias


def _faults(
    case: RouterCase,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    routing: Routing,
    dweight_TK: Tensor,
    gradient_TE: Tensor | None,
) -> list[str]:
    lines = []
    expert_TK = routing.chosen_TK if routing.chosen_TK is not None else routing.expert_TK
    expert_TK, weight_TK = expert_TK.cpu(), routing.weight_TK.detach().cpu().double()
    rows = logits_TE.detach().cpu().double()
    dropped_TK = _dropped(case, expert_TK, [_meaningless(case, row) for row in rows])
    kept_TK = torch.where(dropped_TK, torch.tensor(case.experts), expert_TK)
    if not torch.equal(routing.expert_TK.cpu(), kept_TK):
        lines.append("experts: not those that capacity leaves")
    bias = [0.0] * case.experts if bias_E is None else bias_E.detach().cpu().double().tolist()
    for t, row in enumerate(rows):
        chosen = expert_TK[t].tolist()
        if len(set(chosen)) != case.top_k or not all(0 <= e < case.experts for e in chosen):
            lines.append(f"token {t}: experts {chosen}")
            continue
        if _meaningless(case, row):
            if weight_TK[t].isfinite().all():
                lines.append(f"token {t}: finite weights {weight_TK[t].tolist()} for logits {_strange(row)}")
            continue
        leaf = row.clone().requires_grad_()
        wrong = _badly_chosen(case, leaf.detach(), bias, chosen)
        if wrong:
            lines.append(f"token {t}: {wrong}")
        right_K = _weights(case, leaf, chosen)
        right_K = torch.where(dropped_TK[t], torch.zeros_like(right_K), right_K)
        if not _close(weight_TK[t], right_K.detach()):
            lines.append(f"token {t}: weights {weight_TK[t].tolist()} instead of {right_K.tolist()}")
        if gradient_TE is not None and not _specially_large(row):
            (right_E,) = torch.autograd.grad(right_K, leaf, dweight_TK[t].cpu())
            # weights sum to 1, so what is added up in a gradient is of the size of dweight
            slack = TOLERANCE if gradient_TE.dtype in (torch.float32, torch.float64) else 1e-2
            off = float((gradient_TE[t].cpu().double() - right_E).norm())
            if not off <= slack * (float(right_E.norm()) + case.scaling_factor * float(dweight_TK[t].norm())):
                lines.append(f"token {t}: gradient off by {off:.1e} of {float(right_E.norm()):.1e}")
    return lines[:4]


def _meaningless(case: RouterCase, row: Tensor) -> bool:
    """Whether a token has no scores; sigmoid(inf) is 1, and of -inf 0."""
    infinite = bool((row == math.inf).any() or (row == -math.inf).all())
    return bool(row.isnan().any()) or (case.score != "sigmoid" and infinite)


def _strange(row: Tensor) -> str:
    return (
        f"with {int(row.isnan().sum())} NaN, {int((row == math.inf).sum())} inf, {int((row == -math.inf).sum())} -inf"
    )


def _specially_large(row: Tensor) -> bool:
    return bool((row.abs() > 1e6).any())


def _scores(case: RouterCase, row: Tensor) -> Tensor:
    computed = {"sigmoid": torch.sigmoid, "softmax": lambda row: torch.softmax(row, 0)}
    return computed[case.score](row)


def _badly_chosen(case: RouterCase, row: Tensor, bias: list[float], chosen: list[int]) -> str | None:
    """Whether some expert that was left out is better, by more than a rounding, than one that was taken."""
    scores = (row if case.score == "topk_softmax" else _scores(case, row)).tolist()
    choice = [score + each for score, each in zip(scores, bias, strict=True)]
    slack = TOLERANCE * max(1e-30, max(abs(each) for each in choice if math.isfinite(each)))
    size = case.experts // case.n_group
    groups = {e // size for e in chosen}
    allowed = range(case.experts)
    if case.topk_group < case.n_group:
        if len(groups) > case.topk_group:
            return f"experts {chosen} of {len(groups)} groups"
        members = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(case.n_group)]
        counted = 1 if case.group_score == "max" else min(2, size)
        rank = [sum(each[:counted]) for each in members]
        best = sorted(range(case.n_group), key=lambda g: -rank[g])[: case.topk_group]
        worst_taken = min(rank[g] for g in best)
        if any(rank[g] < worst_taken - 2 * slack for g in groups):
            return f"experts {chosen} of groups {sorted(groups)}, the best are {sorted(best)}"
        sure = [g for g in range(case.n_group) if rank[g] > sorted(rank)[-case.topk_group] + 2 * slack]
        allowed = [e for e in range(case.experts) if e // size in set(sure) | groups]
    taken = [choice[e] for e in chosen]
    if any(later > earlier + slack for earlier, later in itertools.pairwise(taken)):
        return f"experts {chosen} are not best first"
    left = [choice[e] for e in allowed if e not in chosen]
    if left and max(left) > min(taken) + slack:
        return f"experts {chosen} though a better one was left"
    return None


def _weights(case: RouterCase, row: Tensor, chosen: list[int]) -> Tensor:
    index = torch.tensor(chosen)
    if case.score == "topk_softmax":
        weights = torch.softmax(row[index], 0)
    elif case.score == "softmax" and case.renormalize:
        weights = torch.softmax(row[index], 0)  # p / Σp of the chosen
    else:
        weights = _scores(case, row)[index]
        if case.renormalize:
            weights = weights / (weights.sum() + 1e-20)
    return weights * case.scaling_factor


def _dropped(case: RouterCase, expert_TK: Tensor, meaningless: list[bool]) -> Tensor:
    """First choices are served before second ones, and among equals the earlier token. A NaN is not dropped: it takes
    its place, and where there is none it stays beyond it, for y to show it."""
    dropped_TK = torch.zeros_like(expert_TK, dtype=torch.bool)
    if case.capacity_factor is None:
        return dropped_TK
    room = math.ceil(case.capacity_factor * case.tokens * case.top_k / case.experts)
    taken: dict[int, int] = {}
    for k in range(case.top_k):
        for t in range(case.tokens):
            e = int(expert_TK[t, k])
            dropped_TK[t, k] = taken.get(e, 0) >= room and not meaningless[t]
            taken[e] = taken.get(e, 0) + 1
    return dropped_TK


def _close(found: Tensor, right: Tensor) -> bool:
    return bool(((found - right).abs() <= TOLERANCE * (right.abs() + right.abs().max() + 1e-30)).all())
