"""The router of a few tokens and the question behind it in one launch, inside a CUDA graph.

T tokens · K experts per token · E experts

    if why_not(tokens, config) is None:
        found = empty_routed(tokens, config, device)          # expert_TK, weight_TK, slot_TK
        route_and_ask(logits_TE, config, bias_E, *found, shown, talk, due, limit=10.0)

One program of one warp: it holds the rows of all tokens in its registers, as kernels/router.py does, stores ids and
weights, and then is the kernel that asks (kernels/ask.py), which reads them. So ids, slots and what the host is told
are those of the two launches, and the rows are no longer needed while it waits. Weights are the same to the last bit
where rows are laid out alike, as those of one or two tokens and 128 experts are (tests/kernels/test_route_and_ask.py).
Not timed yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.kernels.ask import question, question_of
from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.router import MAX_COLUMNS, MAX_TOP_K, choose_experts, columns, forward_constants
from amoeba.kernels.talk import Handed, Talk, Turn

MOST_ELEMENTS = 2048  # of the rows of all tokens: 64 registers of each thread


def why_not(tokens: int, config: RouterConfig) -> str | None:
    """Why such a pass takes two launches, or None."""
    if columns(config) > MAX_COLUMNS or config.top_k > MAX_TOP_K:
        return "the router's kernel is not for so many experts"
    if config.capacity_factor is not None:
        return "what is over an expert's capacity is dropped behind the router"
    if next_power_of_2(tokens) * columns(config) > MOST_ELEMENTS:
        return f"{tokens} tokens do not fit into one warp's registers"
    return None


def empty_routed(tokens: int, config: RouterConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """expert_TK (int64), weight_TK (fp32), slot_TK."""
    expert_TK = torch.empty(tokens, config.top_k, dtype=torch.int64, device=device)
    return expert_TK, torch.empty_like(expert_TK, dtype=torch.float32), torch.empty_like(expert_TK)


def route_and_ask(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    expert_TK: Tensor,
    weight_TK: Tensor,
    slot_TK: Tensor,
    shown: Tensor,
    talk: Talk,
    due: Tensor,
    limit: float,
    handed: Handed | None = None,
    x_TH: Tensor | None = None,
    turn: Turn | None = None,
) -> None:
    """slot_TK is there once the experts are; the rest as `ask` has it."""
    tokens, experts = logits_TE.shape
    reason = why_not(tokens, config)
    fit = reason is None and expert_TK.shape == weight_TK.shape == (tokens, config.top_k) and weight_TK.is_contiguous()
    check_arguments(fit, reason or "contiguous results of (T, K)", logits_TE=logits_TE, weight_TK=weight_TK)
    given = handed, x_TH, weight_TK, turn
    operands, constants = question_of(expert_TK, slot_TK, shown, experts, talk, due, limit, *given)
    _route_and_ask[(1,)](
        logits_TE.contiguous(),
        None if bias_E is None else bias_E.float().contiguous(),
        weight_TK,
        tokens,
        *operands,
        **constants,
        **forward_constants(config),
        TILE_ROWS=next_power_of_2(tokens),
    )


@quick
@triton.jit(do_not_specialize=["limit", "N", "NUMBERS", "mine"])
def _route_and_ask(
    logits_TE,
    bias_E,
    chosen_weight_N,
    num_tokens,
    expert_N,
    slot_N,
    shown,
    state,
    due,
    turn,
    questions,
    answers,
    trouble,
    times,
    x_TH,
    weight_N,
    handed_x,
    handed_expert,
    handed_weight,
    handed_arrived,
    limit,
    N,
    NUMBERS,
    mine,
    EXPERTS: tl.constexpr,
    RING: tl.constexpr,
    ROW: tl.constexpr,
    MOST: tl.constexpr,
    ENTRIES: tl.constexpr,
    HANDS: tl.constexpr,
    TURNS: tl.constexpr,
    ON_GPU: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RANK_LOGITS: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    SIZE_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    LOG_FLOOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    choose_experts(
        logits_TE,
        bias_E,
        expert_N,
        chosen_weight_N,
        None,
        num_tokens,
        SIGMOID,
        RENORMALIZE,
        RANK_LOGITS,
        SCALE,
        K,
        GROUPS,
        GROUP_SIZE,
        TOPK_GROUP,
        TOP2_SUM,
        GROUP_COLUMNS,
        SIZE_COLUMNS,
        SLOTS,
        LOG_FLOOR,
        TILE_ROWS,
    )
    tl.debug_barrier()  # ids and weights are there for every thread
    question(
        expert_N,
        slot_N,
        shown,
        state,
        due,
        turn,
        questions,
        answers,
        trouble,
        times,
        x_TH,
        weight_N,
        handed_x,
        handed_expert,
        handed_weight,
        handed_arrived,
        limit,
        N,
        NUMBERS,
        mine,
        EXPERTS,
        RING,
        ROW,
        MOST,
        ENTRIES,
        HANDS,
        TURNS,
        ON_GPU,
        BINS,
        PIECE,
    )
