"""A dense layer for few tokens: y = x · weightᵀ + bias, where reading the weight takes the time.

T tokens · H of x · O of y

    y_TO = linear(x_TH, weight_OH, bias_O)      # by torch where tokens are many

Each program has a few rows of the weight in flight at once and asks for them before it looks at x: where launches
overlap, while the kernel that computes x still runs. The weight must not change meanwhile. Sums are in fp32 and in a
fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

# Of the weight that a program has in flight, and how many programs a launch has if rows allow.
BYTES, PROGRAMS = 16384, 264
MOST_TOKENS, MOST_DEPTH = 4, 8192
WARPS = 4


def is_few(x_TH: Tensor, weight_OH: Tensor, most_tokens: int | None = None) -> bool:
    return (
        x_TH.dtype == weight_OH.dtype
        and x_TH.element_size() == 2
        and 0 < x_TH.shape[0] <= (most_tokens or MOST_TOKENS)
        and x_TH.shape[1] <= MOST_DEPTH
        and weight_OH.is_contiguous()
    )


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None, *, most_tokens: int | None = None) -> Tensor:
    if not is_few(x_TH, weight_OH, most_tokens):
        return torch.nn.functional.linear(x_TH, weight_OH, bias_O)
    tokens, (width, depth) = x_TH.shape[0], weight_OH.shape
    y_TO = x_TH.new_empty((tokens, width))
    block = next_power_of_2(depth)
    columns = columns_of_a_program(width, block)
    overlap = can_overlap(x_TH.device)
    _linear[(cdiv(width, columns),)](
        x_TH.contiguous(), weight_OH, bias_O, y_TO, width, H=depth, TOKENS=tokens, COLUMNS=columns, BLOCK=block,
        OVERLAP=overlap, num_warps=WARPS, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return y_TO


def columns_of_a_program(width: int, block: int) -> int:
    """block: 16-bit numbers of each."""
    columns = max(1, BYTES // (block * 2))
    while columns > 1 and cdiv(width, columns) < PROGRAMS:
        columns //= 2
    return columns


@quick
@triton.jit
def _linear(
    x, weight, bias, y, width, H: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.arange(0, BLOCK)
    inside = (column < width)[:, None] & (h < H)[None, :]
    rows = weight + column.to(tl.int64)[:, None] * H + h[None, :]
    tile = tl.load(rows, mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for token in tl.static_range(TOKENS):
        value = tl.load(x + token * H + h, mask=h < H, other=0.0).to(tl.float32)
        total = tl.sum(tile.to(tl.float32) * value[None, :], axis=1)
        if bias is not None:
            total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
        tl.store(y + token * width + column, total.to(y.dtype.element_ty), mask=column < width)
