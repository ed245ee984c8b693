"""What a layer of experts costs: operations, bytes kept between the passes, bytes of weights read. Pure arithmetic.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

    flops = forward_flops(rows=T * K, hidden=H, intermediate=I) + backward_flops(rows=T * K, hidden=H, intermediate=I)
    tera_per_second = flops / seconds / 1e12

Only matrix products are counted, a multiplication and an addition as two; rows of sentinels cost nothing,
so pass the rows that are computed. Whoever states a rate or a size (benchmarks, progress lines, planning) calls these.
"""

from __future__ import annotations

_ID_BYTES = 8  # row maps and expert ids are int64
_OFFSET_BYTES = 4  # offs_E is int32


def forward_flops(*, rows: int, hidden: int, intermediate: int, gated: bool = True) -> int:
    """x W1ᵀ and a W2ᵀ: 2·N·J·H + 2·N·H·I, which is 6·N·I·H gated and 4·N·I·H plain."""
    return 2 * rows * hidden * (_width(intermediate, gated) + intermediate)


def backward_flops(*, rows: int, hidden: int, intermediate: int, gated: bool = True, frozen: bool = False) -> int:
    """dA', dW2, dx and dW1: twice the forward; dA' and dx beside frozen weights: once. What `recompute` does again and
    what LoRA factors cost is not counted."""
    forward = forward_flops(rows=rows, hidden=hidden, intermediate=intermediate, gated=gated)
    return forward if frozen else 2 * forward


def kept_bytes(
    *,
    tokens: int,
    rows: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    gated: bool = True,
    recompute: bool = False,
) -> int:
    """x_TH and h_NJ, all that has to live from forward to backward; x alone with recompute."""
    x = tokens * hidden * itemsize
    return x if recompute else x + rows * _width(intermediate, gated) * itemsize


def row_map_bytes(*, rows: int, experts: int, weight_itemsize: int = 4, map_itemsize: int = _ID_BYTES) -> int:
    """What says which row is whose: expert ids and weights as routed, the sorted order, the way back, the offsets."""
    return rows * (_ID_BYTES + 2 * map_itemsize + weight_itemsize) + experts * _OFFSET_BYTES


def expert_bytes(*, hidden: int, intermediate: int, itemsize: int, gated: bool = True) -> int:
    """The two matrices of one expert."""
    return hidden * (_width(intermediate, gated) + intermediate) * itemsize


def weight_bytes(*, experts: int, hidden: int, intermediate: int, itemsize: int, gated: bool = True) -> int:
    """Weights read by a forward in which `experts` experts got rows. Decoding a token can be no faster than this."""
    return experts * expert_bytes(hidden=hidden, intermediate=intermediate, itemsize=itemsize, gated=gated)


def gathered_weight_bytes(*, rows: int, hidden: int, intermediate: int, itemsize: int, gated: bool = True) -> int:
    """The copy of the weights for every routed row, N·J·H + N·H·I, that a batched product of gathered weights makes."""
    return rows * expert_bytes(hidden=hidden, intermediate=intermediate, itemsize=itemsize, gated=gated)


def _width(intermediate: int, gated: bool) -> int:
    return 2 * intermediate if gated else intermediate
