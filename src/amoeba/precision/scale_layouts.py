"""Scales of blocks as Blackwell's matrix units and cuBLAS read them: tiles of 128 x 4, swizzled.

    swizzled = swizzle(scales)                       # uint8 (..., rows, columns) -> (..., bytes of whole tiles)
    scales = unswizzle(swizzled, rows, columns)      # the same numbers back
    swizzle(scales_by_row(matrix))                   # of a quantised matrix, one line of scales for each of its rows

A matrix of scales, e8m0 or e4m3, is padded with zeros to whole tiles of 128 rows and 4 columns, which follow each other
along a row of tiles. A tile has 512 bytes: row r and column c of it are at 16 (r mod 32) + 4 (r div 32) + c. Data is
moved, nothing is computed: any device, any dtype of one byte. Our Triton kernels read scales as they are stored and let
the compiler lay them out; this is for libraries that expect them swizzled.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.precision.quantised import QuantisedMatrix

ROWS, COLUMNS = 128, 4  # of a tile
_LINES = 32  # of 16 bytes


def swizzled_bytes(rows: int, columns: int) -> int:
    down, across = _tiles(rows, columns)
    return down * across * ROWS * COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """scales: (..., rows, columns), one byte each; returns (..., swizzled_bytes(rows, columns))."""
    if scales.dim() < 2 or scales.element_size() != 1:
        expected = "(..., rows, columns) of one byte each"
        raise bad_value("scales", expected, f"{scales.dtype} {tuple(scales.shape)}", "take those of mxfp8 or nvfp4")
    rows, columns = scales.shape[-2:]
    down, across = _tiles(rows, columns)
    padded = F.pad(scales, (0, across * COLUMNS - columns, 0, down * ROWS - rows))
    tiles = padded.unflatten(-1, (across, COLUMNS)).unflatten(-3, (down, ROWS // _LINES, _LINES))
    return tiles.movedim(-2, -4).transpose(-3, -2).flatten(-5)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """(..., rows, columns) of what `swizzle` made of it; what fills the last tiles is left out."""
    down, across = _tiles(rows, columns)
    if swizzled.shape[-1] != swizzled_bytes(rows, columns):
        expected = f"{swizzled_bytes(rows, columns)} bytes for {rows} x {columns} scales"
        raise bad_value("swizzled", expected, swizzled.shape[-1], "check the rows and columns")
    tiles = swizzled.unflatten(-1, (down, across, _LINES, ROWS // _LINES, COLUMNS))
    padded = tiles.transpose(-3, -2).movedim(-4, -2).flatten(-2).flatten(-4, -2)
    return padded[..., :rows, :columns].contiguous()


def scales_by_row(matrix: QuantisedMatrix) -> Tensor:
    """(..., rows, blocks of columns): where several rows share a scale, it is repeated for each of them."""
    height, rows = matrix.format.block[0], matrix.shape[-2] // matrix.parts
    of_parts = matrix.scales.unflatten(-2, (matrix.parts, -1))
    return of_parts.repeat_interleave(min(height, rows), dim=-2)[..., :rows, :].flatten(-3, -2)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // ROWS), -(-columns // COLUMNS)
