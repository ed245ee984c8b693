"""The router in one kernel each way: logits to scores, chosen experts and weights, and gradients back to the logits.

T tokens · K experts per token · E experts · G groups of experts · S experts in a group, E = G·S ·
C columns of a tile: G and S each rounded up to a power of two

    expert_TK, weight_TK, scores_TE = router_forward(logits_TE, config, bias_E)
    dlogits_TE = router_backward(expert_TK, weight_TK, scores_TE, dweight_TK, dscores_TE, logits_TE, config, dtype)

What is computed is `amoeba.routing.route` without noise and capacity, in fp32 from logits of any width. A program holds
whole rows of logits in registers and takes the best expert K times over.

Among equals the lowest id comes first, for groups too. NaN counts as the largest number, as in torch.topk, so that K
different experts are chosen whatever comes in; where it wins the first place, the token's weights are NaN. Where
neither a bias nor groups take part, experts are ranked by their logits, of which every score is a rising function: this
also tells experts apart whose scores round to the same number.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import DENOMINATOR_FLOOR, RouterConfig
from amoeba.core.errors import bad_value
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

MAX_COLUMNS = 512  # a row stays in registers
SCORES = ("softmax", "sigmoid", "topk_softmax")
MAX_TOP_K = 16  # each choice is a pass over the row
_STEPS = tl.constexpr(MAX_TOP_K.bit_length() - 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Up to WARP_COLUMNS a warp holds whole rows: tiles of TILE_ELEMENTS go to 4 warps, and few registers leave room for 8
# programs on a multiprocessor. Wider rows would be spread over the warps, and every choice would go through shared
# memory, so they go to programs of one warp: 784 instead of 1510 instructions a row for 256 experts in 8 groups, 876
# instead of 1666 for 384 experts with a bias (fp32 logits, PTX of Triton 3.6 for an H200). Not timed yet.
WARP_COLUMNS = 128
TILE_ELEMENTS = 2048
WIDE_TILE_ROWS = 2
MOST_OVERLAPPED = 64  # tokens up to which its launch overlaps with those around it: more fill the GPU


def columns(config: RouterConfig) -> int:
    """C: columns of the tile in which a program holds a row of logits."""
    groups, size = _groups(config)
    return next_power_of_2(groups) * next_power_of_2(size)


def router_forward(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    *,
    scores: bool = True,
    weight_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """expert_TK (int64, best first), weight_TK, scores_TE (fp32; without `scores` empty)."""
    num_tokens, num_experts = logits_TE.shape
    device = logits_TE.device
    expert_TK = torch.empty(num_tokens, config.top_k, dtype=torch.int64, device=device)
    weight_TK = torch.empty(num_tokens, config.top_k, dtype=weight_dtype, device=device)
    scores_TE = torch.empty((num_tokens, num_experts) if scores else 0, dtype=torch.float32, device=device)
    if num_tokens == 0:
        return expert_TK, weight_TK, scores_TE
    tile, overlap = _tile(columns(config)), num_tokens <= MOST_OVERLAPPED and can_overlap(device)
    _forward[(cdiv(num_tokens, tile["TILE_ROWS"]),)](
        logits_TE.contiguous(),
        None if bias_E is None else bias_E.float().contiguous(),
        expert_TK,
        weight_TK,
        scores_TE if scores else None,
        num_tokens,
        ROUTER=forward_constants(config),
        OVERLAP=overlap,
        **tile,
        **({"launch_pdl": True} if overlap else {}),
    )
    return expert_TK, weight_TK, scores_TE


@cache
def forward_constants(config: RouterConfig) -> Group:
    """Of `choose_experts`, but for its tile."""
    groups, size = _groups(config)
    return Group(
        **_constants(config),
        GROUPS=groups,
        GROUP_SIZE=size,
        TOPK_GROUP=config.topk_group,
        TOP2_SUM=config.group_score == "top2_sum" and size > 1,
        GROUP_COLUMNS=next_power_of_2(groups),
        SIZE_COLUMNS=next_power_of_2(size),
        SLOTS=next_power_of_2(config.top_k),
        LOG_FLOOR=math.log(DENOMINATOR_FLOOR),
    )


def router_backward(
    expert_TK: Tensor,
    weight_TK: Tensor,
    scores_TE: Tensor,
    dweight_TK: Tensor | None,
    dscores_TE: Tensor | None,
    logits_TE: Tensor | None,
    config: RouterConfig,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits, in `dtype`. logits_TE is read only where `needs_logits(config)`. scores_TE may be
    empty where they have no gradient and weights are renormalised."""
    num_tokens, num_experts = weight_TK.shape[0], config.num_experts
    dlogits_TE = torch.empty(num_tokens, num_experts, dtype=dtype, device=scores_TE.device)
    if num_tokens == 0:
        return dlogits_TE
    if logits_TE is None and needs_logits(config):
        raise bad_value("logits_TE", f"those of the forward, for {config.score}", None, "keep them for backward")
    tile_columns = next_power_of_2(num_experts)
    tile = _tile(tile_columns)
    _backward[(cdiv(num_tokens, tile["TILE_ROWS"]),)](
        logits_TE.contiguous() if logits_TE is not None and needs_logits(config) else None,
        expert_TK.contiguous(),
        weight_TK.contiguous(),
        scores_TE.contiguous(),
        None if dweight_TK is None else dweight_TK.float().contiguous(),
        None if dscores_TE is None else dscores_TE.float().contiguous(),
        dlogits_TE,
        num_tokens,
        ROUTER=Group(**backward_constants(config)),
        **tile,
    )
    return dlogits_TE


def backward_constants(config: RouterConfig) -> dict[str, object]:
    """Of `router_backward_tile`."""
    columns = next_power_of_2(config.num_experts)
    return _constants(config) | {"EXPERTS": config.num_experts, "COLUMNS": columns}


def needs_logits(config: RouterConfig) -> bool:
    """The slope of a sigmoid has the factor 1 - σ, which a score close to 1 no longer tells."""
    return config.score == "sigmoid"


def _groups(config: RouterConfig) -> tuple[int, int]:
    """G and S; one group where all may be chosen."""
    groups = config.n_group if config.topk_group < config.n_group else 1
    return groups, config.num_experts // groups


def _tile(tile_columns: int) -> dict[str, int]:
    if tile_columns > WARP_COLUMNS:
        return {"TILE_ROWS": WIDE_TILE_ROWS, "num_warps": 1}
    return {"TILE_ROWS": TILE_ELEMENTS // tile_columns, "num_warps": 4}


def _constants(config: RouterConfig) -> dict[str, object]:
    return {
        "SIGMOID": config.score == "sigmoid",
        "RENORMALIZE": config.renormalize or config.score == "topk_softmax",
        "RANK_LOGITS": config.score == "topk_softmax",
        "SCALE": config.scaling_factor,
        "K": config.top_k,
    }


@triton.jit
def ordered(value):
    """int32 keys in the order of these fp32 numbers; NaN the largest, and none as small as the smallest int32."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0: both zeros are equal
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, 0x7FFFFFFF, key)


@triton.jit
def _from_ordered(key):
    """The number of such a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _score(logit, top, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    else:
        return tl.exp(logit - top[:, None]) / total[:, None]


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _allow_best_groups(key, ROUTER: tl.constexpr, TILE_ROWS: tl.constexpr):
    """key, with the smallest int32 for the experts outside the TOPK_GROUP best groups."""
    NOTHING: tl.constexpr = -0x80000000
    GROUP_COLUMNS: tl.constexpr = ROUTER.GROUP_COLUMNS
    SIZE_COLUMNS: tl.constexpr = ROUTER.SIZE_COLUMNS
    key_3d = tl.reshape(key, [TILE_ROWS, GROUP_COLUMNS, SIZE_COLUMNS])
    best = tl.max(key_3d, axis=2)
    group = tl.arange(0, GROUP_COLUMNS)[None, :]
    if ROUTER.TOP2_SUM:
        member = tl.arange(0, SIZE_COLUMNS)[None, None, :]
        first = tl.min(tl.where(key_3d == best[:, :, None], member, SIZE_COLUMNS), axis=2)
        second = tl.max(tl.where(member == first[:, :, None], NOTHING, key_3d), axis=2)
        rank = ordered(_from_ordered(best) + _from_ordered(second))
    else:
        rank = best
    rank = tl.where(group < ROUTER.GROUPS, rank, NOTHING)
    allowed = tl.zeros([TILE_ROWS, GROUP_COLUMNS], tl.int32)
    for _ in tl.static_range(ROUTER.TOPK_GROUP):
        top = tl.max(rank, axis=1)
        chosen = tl.min(tl.where(rank == top[:, None], group, GROUP_COLUMNS), axis=1)
        allowed = tl.where(group == chosen[:, None], 1, allowed)
        rank = tl.where(group == chosen[:, None], NOTHING, rank)
    key_3d = tl.where(allowed[:, :, None] != 0, key_3d, NOTHING)
    return tl.reshape(key_3d, [TILE_ROWS, GROUP_COLUMNS * SIZE_COLUMNS])


@triton.jit
def _sum_of_slots(power, SLOTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Neighbours in pairs, and these in pairs. `tl.sum` follows the layout: other tiles would give other last bits."""
    for step in tl.static_range(_STEPS):
        if (SLOTS >> step) > 1:
            first, second = tl.split(tl.reshape(power, [TILE_ROWS, SLOTS >> (step + 1), 2]))
            power = first + second
    return tl.sum(power, axis=1)  # of one


@triton.jit
def choose_experts(
    logits_TE,
    bias_E,
    expert_TK,
    weight_TK,
    scores_TE,
    num_tokens,
    ROUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Of the program's rows: experts, weights and scores, which are stored. OVERLAP: with the launches around it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NOTHING: tl.constexpr = -0x80000000
    SIGMOID: tl.constexpr = ROUTER.SIGMOID
    K: tl.constexpr = ROUTER.K
    GROUPS: tl.constexpr = ROUTER.GROUPS
    GROUP_SIZE: tl.constexpr = ROUTER.GROUP_SIZE
    SIZE_COLUMNS: tl.constexpr = ROUTER.SIZE_COLUMNS
    SLOTS: tl.constexpr = ROUTER.SLOTS
    LOG_FLOOR: tl.constexpr = ROUTER.LOG_FLOOR
    COLUMNS: tl.constexpr = ROUTER.GROUP_COLUMNS * SIZE_COLUMNS
    EXPERTS: tl.constexpr = GROUPS * GROUP_SIZE
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, COLUMNS)
    if GROUPS == 1:
        expert = column[None, :]
        exists = expert < EXPERTS
    else:
        member = column % SIZE_COLUMNS
        expert = (column // SIZE_COLUMNS * GROUP_SIZE + member)[None, :]
        exists = (member < GROUP_SIZE)[None, :] & (expert < EXPERTS)
    inside = row[:, None] < num_tokens
    at = row[:, None] * EXPERTS + expert
    logit = tl.load(logits_TE + at, mask=inside & exists, other=-float("inf")).to(tl.float32)
    logit = tl.where(inside, logit, 0.0)  # rows past the end would compute with -inf alone

    top = tl.max(logit, axis=1)
    total = tl.sum(tl.exp(logit - top[:, None]), axis=1)
    score = _score(logit, top, total, SIGMOID)
    if scores_TE is not None:
        tl.store(scores_TE + at, score, mask=inside & exists)

    if ROUTER.RANK_LOGITS or (bias_E is None and GROUPS == 1):
        choice = logit
    else:
        choice = score
    if bias_E is not None:
        choice += tl.load(bias_E + expert, mask=exists, other=0.0)
    if GROUPS > 1:  # a group of one open expert among masked ones ranks above a group of masked ones alone
        choice = tl.maximum(choice, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    key = tl.where(exists, ordered(choice), NOTHING)
    if GROUPS > 1:
        key = _allow_best_groups(key, ROUTER, TILE_ROWS)

    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros([TILE_ROWS, SLOTS], tl.int32)
    for k in tl.static_range(K):
        best = tl.max(key, axis=1)
        if k == 0:
            meaningless = best == 0x7FFFFFFF  # the key of NaN: the scores, or the bias, said nothing
        winner = tl.min(tl.where(key == best[:, None], expert, EXPERTS), axis=1)
        chosen = tl.where(slot == k, winner[:, None], chosen)
        key = tl.where(expert == winner[:, None], NOTHING, key)

    # again from memory, or rather from the cache: picking them out of the tile would be a reduction for each slot
    used = inside & (slot < K)
    chosen_at = row[:, None] * EXPERTS + chosen
    chosen_logit = tl.load(logits_TE + chosen_at, mask=used, other=-float("inf")).to(tl.float32)
    chosen_logit = tl.where(inside, chosen_logit, 0.0)
    if ROUTER.RENORMALIZE:
        # the weights are a softmax over the chosen alone (of log σ, and of the log of the floor): amoeba.routing says
        # why
        if SIGMOID:
            chosen_logit = tl.where(slot < K, _log_sigmoid(chosen_logit), -float("inf"))
            top = tl.maximum(tl.max(chosen_logit, axis=1), LOG_FLOOR)
            power = tl.exp(chosen_logit - top[:, None])
            total = _sum_of_slots(power, SLOTS, TILE_ROWS) + tl.exp(LOG_FLOOR - top)
        else:
            power = tl.exp(chosen_logit - tl.max(chosen_logit, axis=1)[:, None])
            total = _sum_of_slots(power, SLOTS, TILE_ROWS)
        weight = tl.div_rn(power, tl.broadcast_to(total[:, None], [TILE_ROWS, SLOTS]))  # exactly 1 for K = 1
    else:
        weight = _score(chosen_logit, top, total, SIGMOID)
    weight = tl.where(meaningless[:, None], float("nan"), weight)
    at = row[:, None] * K + slot
    tl.store(expert_TK + at, chosen.to(tl.int64), mask=used)
    tl.store(weight_TK + at, weight * ROUTER.SCALE, mask=used)


_forward = quick(choose_experts)


@quick
@triton.jit
def _backward(
    logits_TE,
    expert_TK,
    weight_TK,
    scores_TE,
    dweight_TK,
    dscores_TE,
    dlogits_TE,
    num_tokens,
    ROUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    router_backward_tile(
        row, row < num_tokens, logits_TE, expert_TK, weight_TK, scores_TE, dweight_TK, dscores_TE, dlogits_TE, ROUTER,
        TILE_ROWS,
    )  # fmt: skip


@triton.jit
def router_backward_tile(
    row, here, logits_TE, expert_TK, weight_TK, scores_TE, dweight_TK, dscores_TE, dlogits_TE, ROUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of these tokens, int64, those that are `here`."""
    K: tl.constexpr = ROUTER.K
    SIGMOID: tl.constexpr = ROUTER.SIGMOID
    SCALE: tl.constexpr = ROUTER.SCALE
    RENORMALIZE: tl.constexpr = ROUTER.RENORMALIZE
    EXPERTS: tl.constexpr = ROUTER.EXPERTS
    COLUMNS: tl.constexpr = ROUTER.COLUMNS
    expert = tl.arange(0, COLUMNS)[None, :]
    mask = here[:, None] & (expert < EXPERTS)
    at = row[:, None] * EXPERTS + expert

    # what reaches the logits straight, past the scores; and what reaches them through the scores
    dlogit = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    if dscores_TE is None:
        dscore = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
    else:
        dscore = tl.load(dscores_TE + at, mask=mask, other=0.0)
    if dweight_TK is not None:
        if RENORMALIZE:
            # u = w / SCALE, a softmax: its gradient is u_k (g_k - Σ u_j g_j), with g = SCALE · dw
            mean = tl.zeros([TILE_ROWS], tl.float32)
            for k in tl.static_range(K):
                weight = tl.load(weight_TK + row * K + k, mask=here, other=0.0)
                share = tl.div_rn(weight, tl.full([TILE_ROWS], SCALE, tl.float32))  # exactly 1 for K = 1
                mean += share * tl.load(dweight_TK + row * K + k, mask=here, other=0.0)
        for k in tl.static_range(K):
            chosen = tl.load(expert_TK + row * K + k, mask=here, other=0).to(tl.int32)
            dweight = tl.load(dweight_TK + row * K + k, mask=here, other=0.0)
            if RENORMALIZE:
                value = tl.load(weight_TK + row * K + k, mask=here, other=0.0) * (dweight - mean)
                if SIGMOID:  # d log σ(x) = 1 - σ(x) = σ(-x)
                    chosen_logit = tl.load(logits_TE + row * EXPERTS + chosen, mask=here, other=0.0).to(tl.float32)
                    value *= 1.0 / (1.0 + tl.exp(chosen_logit))
                dlogit = tl.where(expert == chosen[:, None], value[:, None], dlogit)
            else:
                dscore = tl.where(expert == chosen[:, None], dscore + (dweight * SCALE)[:, None], dscore)
    if dscores_TE is not None or (dweight_TK is not None and not RENORMALIZE):
        if SIGMOID:
            logit = tl.load(logits_TE + at, mask=mask, other=0.0).to(tl.float32)
            dlogit += dscore / (1.0 + tl.exp(-logit)) * (1.0 / (1.0 + tl.exp(logit)))
        else:
            score = tl.load(scores_TE + at, mask=mask, other=0.0)
            dlogit += score * (dscore - tl.sum(score * dscore, axis=1)[:, None])
    tl.store(dlogits_TE + at, dlogit.to(dlogits_TE.dtype.element_ty), mask=mask)
