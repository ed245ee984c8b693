"""The down projection of few tokens with all its weights in flight at once, before `a` is looked at.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate

    down_at_once(problem, a_NI, expert_TK, weight_TK, y_TH, chosen)

What a program reads of the weights fits in its registers. On Hopper the launch may begin while the one that computes
`a` still runs (`chosen.overlap`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.backends.operator import Problem
from amoeba.kernels.decode_configuration import Configuration
from amoeba.kernels.decode_tiles import bias_or
from amoeba.kernels.launch import cdiv, next_power_of_2, quick


def down_at_once(
    problem: Problem, a_NI: Tensor, expert_TK: Tensor, weight_TK: Tensor, y_TH: Tensor, chosen: Configuration
) -> None:
    (tokens, hidden), intermediate, tile = y_TH.shape, a_NI.shape[1], chosen.down
    bias_EH, has_bias = bias_or(y_TH, problem.down_bias_EH)
    _down_at_once[(tokens * cdiv(hidden, tile.columns),)](
        a_NI,
        expert_TK,
        weight_TK,
        problem.down_EHI,
        bias_EH,
        y_TH,
        *problem.down_EHI.stride(),
        problem.down_EHI.shape[0],
        hidden,
        intermediate,
        K=expert_TK.shape[1],
        SLOTS=next_power_of_2(expert_TK.shape[1]),
        BLOCK_H=tile.columns,
        BLOCK_I=next_power_of_2(intermediate),
        HAS_BIAS=has_bias,
        OVERLAP=chosen.overlap,
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


@quick
@triton.jit
def _down_at_once(
    a_NI,
    expert_TK,
    weight_TK,
    down_EHI,
    bias_EH,
    y_TH,
    stride_e,
    stride_h,
    stride_i,
    E,
    H,
    I,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All that a program reads of the weights is on its way before it looks at `a`: with OVERLAP, while the launch that
    computes `a` still runs."""
    blocks = tl.cdiv(H, BLOCK_H)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    k = tl.arange(0, SLOTS)
    expert = tl.load(expert_TK + token * K + k, mask=k < K, other=-1)
    owned = (expert >= 0) & (expert < E)
    expert = tl.where(owned, expert, 0).to(tl.int64)
    i = tl.arange(0, BLOCK_I)
    row = expert[:, None] * stride_e + h.to(tl.int64)[None, :] * stride_h
    inside = owned[:, None] & (h < H)[None, :]
    tile = tl.load(
        down_EHI + row[:, :, None] + (i.to(tl.int64) * stride_i)[None, None, :],
        mask=inside[:, :, None] & (i < I)[None, None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    scale = tl.load(weight_TK + token * K + k, mask=owned, other=0.0).to(tl.float32)
    bias = tl.zeros((SLOTS, BLOCK_H), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_EH + expert[:, None] * H + h[None, :], mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    slot = (token * K + k).to(tl.int64)
    a = tl.load(a_NI + slot[:, None] * I + i[None, :], mask=owned[:, None] & (i < I)[None, :], other=0.0)
    total = tl.sum(tile.to(tl.float32) * (a.to(tl.float32) * scale[:, None])[:, None, :], axis=0)
    y = tl.sum(total, axis=1) + tl.sum(bias * scale[:, None], axis=0)
    tl.store(y_TH + token.to(tl.int64) * H + h, y.to(y_TH.dtype.element_ty), mask=h < H)
