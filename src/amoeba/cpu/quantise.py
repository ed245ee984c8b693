"""Quantises a matrix with the C++ core, bit for bit as `amoeba.precision.quantised` does it with torch.

    quantise = load_quantise()                  # CoreUnavailable where nothing can be compiled
    quantise(matrix, 4, "e8m0", (1, 32), 1, data, scales, None, threads=2)  # False where a number is not finite

All cores, one pass over the matrix (two where it has a scale of its own), nothing allocated but that scale's maxima.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from amoeba.cpu.build import load, with_library
from amoeba.cpu.pointers import address, address_of_lines, optional_address

_SOURCES = {torch.float32: 1, torch.bfloat16: 0}
_SCALES = {"fp32": 0, "e8m0": 1, "e4m3": 2}  # `enum ScaleKind` in csrc/quantise.cpp
# bits of a code, kind of scale, columns of a block, and whether a block may have several rows
_COMPILED = {(8, "fp32", 128): True, (8, "e8m0", 32): False, (4, "e8m0", 32): False, (4, "e4m3", 16): False}
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# fmt: off
_SIGNATURES = {
    "amoeba_quantise": (_INT, (
        _INT, _INT64, _INT64, _INT64, _POINTER,     # fp32, rows, columns, stride of rows, matrix
        _INT, _INT, _INT64, _INT64,                 # bits of a code, kind of scale, parts, rows of a block
        _POINTER, _INT64, _POINTER, _INT64,         # codes, bytes of a row, scales, scales of a row
        _POINTER, _INT, _INT,                       # matrix_scale, closest, threads
    )),
}
# fmt: on


def is_compiled(dtype: torch.dtype, bits: int, scale: str, block: tuple[int, int]) -> bool:
    """Whether the core quantises matrices of this dtype to this format."""
    several = _COMPILED.get((bits, scale, block[1]))
    return dtype in _SOURCES and several is not None and (several or block[0] == 1)


class Quantise:
    """The loaded library."""

    def __init__(self, file: Path) -> None:
        self._run = load(file, _SIGNATURES).amoeba_quantise

    def __call__(
        self,
        matrix: Tensor,
        bits: int,
        scale: str,
        block: tuple[int, int],
        parts: int,
        data: Tensor,
        scales: Tensor,
        matrix_scale: Tensor | None,
        *,
        closest: bool = False,
        threads: int,
    ) -> bool:
        """Whether all numbers are finite; where not, codes and scales are not to be used.

        matrix: (rows, columns), contiguous along rows, of what `is_compiled` says; not empty.
        data, scales, matrix_scale: as in a `QuantisedMatrix`. closest: as `precision.quantised.quantise`.
        """
        rows, columns = matrix.shape
        kind = torch.float32 if scale == "fp32" else torch.uint8
        across = -(-columns // block[1])
        stored = columns if bits == 8 else across * block[1] // 2
        down = parts * -(-(rows // parts) // block[0])
        return bool(
            self._run(
                _SOURCES[matrix.dtype], rows, columns, matrix.stride(0),
                address_of_lines("matrix", matrix, matrix.dtype, (rows, columns)),
                bits, _SCALES[scale], parts, block[0],
                address("data", data, torch.uint8, (rows, stored)), stored,
                address("scales", scales, kind, (down, across)), across,
                optional_address("matrix_scale", matrix_scale, torch.float32, ()), closest, threads,
            )
        )  # fmt: skip


@functools.cache
def load_quantise() -> Quantise:
    return with_library("quantise", Quantise)
