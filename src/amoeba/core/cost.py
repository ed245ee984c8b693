"""What a layer of experts costs: operations, bytes kept between the passes, bytes of weights read. Pure arithmetic.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

    flops = forward_flops(rows=T * K, hidden=H, intermediate=I) + backward_flops(rows=T * K, hidden=H, intermediate=I)
    tera_per_second = flops / seconds / 1e12

Only matrix products are counted, a multiplication and an addition as two; rows of sentinels cost nothing,
so pass the rows that are computed. Everything that states a rate or a size (benchmarks, progress lines, planning) calls
these. Weights in a quantised format have as many bytes as their codes and scales: pass `format` instead of
`itemsize`.
"""

from __future__ import annotations

from typing import Protocol

_ID_BYTES = 8  # row maps and expert ids are int64
_OFFSET_BYTES = 4  # offs_E is int32
_SCALE_BYTES = {"fp32": 4, "e8m0": 1, "e4m3": 1, "inside": 0}
# Numbers saved in e4m3 have one fp32 scale per this many of a row, and start at a multiple of this many bytes.
_SAVED_BLOCK, _SAVED_ALIGNED = 128, 128


class Format(Protocol):
    """What sizes need to know of a `precision.formats.Format`."""

    @property
    def block(self) -> tuple[int, int]: ...

    @property
    def scale(self) -> str: ...

    @property
    def has_matrix_scale(self) -> bool: ...

    def stored_columns(self, columns: int) -> int: ...


def forward_flops(*, rows: int, hidden: int, intermediate: int, gated: bool = True) -> int:
    """x W1ᵀ and a W2ᵀ: 2·N·J·H + 2·N·H·I, which is 6·N·I·H gated and 4·N·I·H plain."""
    return 2 * rows * hidden * (_width(intermediate, gated) + intermediate)


def backward_flops(*, rows: int, hidden: int, intermediate: int, gated: bool = True, frozen: bool = False) -> int:
    """dA', dW2, dx and dW1: twice the forward; dA' and dx with frozen weights: once. What `recompute` does again and
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
    precision: str = "bf16",
) -> int:
    """x_TH and h_NJ, all that has to live from forward to backward; x alone with recompute. precision: the recipe of
    experts that train (`amoeba.precision.recipes`): of "fp8-saved", h in e4m3 with its scales; others keep what they
    keep without one."""
    x, width = tokens * hidden * itemsize, _width(intermediate, gated)
    if recompute:
        return x
    if precision != "fp8-saved":
        return x + rows * width * itemsize
    scales = rows * -(-width // _SAVED_BLOCK) * _SCALE_BYTES["fp32"]
    return x + -(-scales // _SAVED_ALIGNED) * _SAVED_ALIGNED + rows * width


def row_map_bytes(*, rows: int, experts: int, weight_itemsize: int = 4, map_itemsize: int = _ID_BYTES) -> int:
    """What says which row is whose: expert ids and weights as routed, the sorted order, the way back, the offsets."""
    return rows * (_ID_BYTES + 2 * map_itemsize + weight_itemsize) + experts * _OFFSET_BYTES


def matrix_bytes(*, rows: int, columns: int, format: Format, parts: int = 1) -> int:
    """Codes and scales of one matrix. parts: of its rows, each with blocks of its own."""
    block_rows, block_columns = format.block
    blocks = parts * -(-(rows // parts) // block_rows) * -(-columns // block_columns)
    of_matrix = _SCALE_BYTES["fp32"] if format.has_matrix_scale else 0
    return rows * format.stored_columns(columns) + blocks * _SCALE_BYTES[format.scale] + of_matrix


def expert_bytes(
    *,
    hidden: int,
    intermediate: int,
    itemsize: int | None = None,
    gated: bool = True,
    interleaved: bool = False,
    format: Format | None = None,
) -> int:
    """The two matrices of one expert, of numbers of `itemsize` bytes or in a format. interleaved: gate and up take
    turns, row by row, and share blocks of a format."""
    width = _width(intermediate, gated)
    if format is not None:
        parts = 2 if gated and not interleaved else 1
        up = matrix_bytes(rows=width, columns=hidden, format=format, parts=parts)
        return up + matrix_bytes(rows=hidden, columns=intermediate, format=format)
    assert itemsize is not None, "expert_bytes: give itemsize, or format"
    return hidden * (width + intermediate) * itemsize


def weight_bytes(*, experts: int, hidden: int, intermediate: int, itemsize: int, gated: bool = True) -> int:
    """Weights read by a forward in which `experts` experts got rows. Decoding a token can be no faster than this."""
    return experts * expert_bytes(hidden=hidden, intermediate=intermediate, itemsize=itemsize, gated=gated)


def factor_numbers(*, hidden: int, intermediate: int, rank: int, gated: bool = True) -> int:
    """Of the LoRA factors of one expert: gate and up share one A (r, H) and have a B (I, r) each; then down's two."""
    return rank * (2 * hidden + (3 if gated else 2) * intermediate)


def code_bytes(*, experts: int, hidden: int, intermediate: int, format: Format, gated: bool = True) -> int:
    """What training with a recipe keeps in addition to the weights: quantised copies, as stored and transposed.
    Blocks are counted through gate and up."""
    matrices = (_width(intermediate, gated), hidden), (hidden, intermediate)
    both = (matrix_bytes(rows=m, columns=n, format=format) for one in matrices for m, n in (one, one[::-1]))
    return experts * sum(both)


def _width(intermediate: int, gated: bool) -> int:
    return 2 * intermediate if gated else intermediate
