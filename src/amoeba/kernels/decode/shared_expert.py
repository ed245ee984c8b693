"""A shared expert and its sum with the routed ones for few tokens: two launches, which read its weights.

T tokens · H hidden · S of the shared expert · J = 2S + 1: its gate, its up projection and, last, what scales it

    y_TH = add_shared_expert(x_TH, joined_JH, down_HS, routed_TH)

y = routed + sigmoid(x · joined[2S])·shared(x), rounded where transformers rounds. As in `linear`, weights are asked for
before the launch ahead has ended, and must not change meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.decode.linear import WARPS, columns_of_a_program, is_few, linear
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments

MOST_TOKENS = 8  # torch's ten launches take 27 us, ours 4 with one token (H200, H=2048, S=512)


def serves(x_TH: Tensor, joined_JH: Tensor, down_HS: Tensor) -> bool:
    return all(is_few(x_TH, each, MOST_TOKENS) for each in (joined_JH, down_HS))


def add_shared_expert(x_TH: Tensor, joined_JH: Tensor, down_HS: Tensor, routed_TH: Tensor) -> Tensor:
    tokens, (width, depth) = x_TH.shape[0], down_HS.shape
    check_arguments(
        serves(x_TH, joined_JH, down_HS)
        and joined_JH.shape == (2 * depth + 1, width)
        and routed_TH.shape == x_TH.shape
        and routed_TH.is_contiguous()
        and routed_TH.dtype == x_TH.dtype,
        "a few tokens, weights and sums in the same 16 bits",
        x_TH=x_TH,
        joined_JH=joined_JH,
        down_HS=down_HS,
        routed_TH=routed_TH,
    )
    h_TJ, y_TH = linear(x_TH, joined_JH, most_tokens=MOST_TOKENS), x_TH.new_empty((tokens, width))
    block, overlap = next_power_of_2(depth), can_overlap(x_TH.device)
    columns = columns_of_a_program(width, block)
    _add_down[(cdiv(width, columns),)](
        h_TJ, down_HS, routed_TH, y_TH, width, S=depth, TOKENS=tokens, COLUMNS=columns, BLOCK=block, OVERLAP=overlap,
        num_warps=WARPS, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y_TH


@quick
@triton.jit
def _add_down(
    h, weight, routed, y, width, S: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = y.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    s = tl.arange(0, BLOCK)
    rows = weight + column.to(tl.int64)[:, None] * S + s[None, :]
    tile = tl.load(
        rows, mask=(column < width)[:, None] & (s < S)[None, :], other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        row = h + token * (2 * S + 1)
        gate = tl.load(row + s, mask=s < S, other=0.0).to(tl.float32)
        up = tl.load(row + S + s, mask=s < S, other=0.0).to(tl.float32)
        a = ((gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32) * up).to(DTYPE).to(tl.float32)
        out = tl.sum(tile * a[None, :], axis=1).to(DTYPE).to(tl.float32)
        scale = tl.sigmoid(tl.load(row + 2 * S).to(tl.float32)).to(DTYPE).to(tl.float32)
        place = token * width + column
        others = tl.load(routed + place, mask=column < width, other=0.0).to(tl.float32)
        tl.store(y + place, (others + (scale * out).to(DTYPE).to(tl.float32)).to(DTYPE), mask=column < width)
