"""Quantised frozen weights with a scale for each block, as their owner keeps them: eight or four bits per number, read
in place.

E experts · O out · I in

    codes = ScaledCodes(code_EOI, scale, block=(128, 128), parts=2)                           # e4m3, scales in fp32
    codes = ScaledCodes(bytes_EOB, scale, (1, 32), element="e2m1", columns=2880, scale_values=powers_of_two)
    load_core().decode(x_TH, expert_TK, weight_TK, codes, other_codes, None, None, activation)
    NodeExperts(codes, other_codes, None, None, activation)         # as StoredWeights, and without gradients

The core makes numbers of the codes as it reads them. Where it decodes, a scale multiplies the sum of its block in fp32,
and no weight is rounded. Where it packs panels for its products, each weight is code · scale in fp32, rounded to bf16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.packed_weights import PackedKind, _Packing
from amoeba.cpu.pointers import address_at_strides, optional_address

LEAST_COLUMNS = 16  # of a block: this many numbers are read at once

ElementName = Literal["e4m3", "e2m1"]
ELEMENTS: dict[ElementName, int] = {"e4m3": 0, "e2m1": 1}  # `enum ElementKind` in csrc/codes.h


class CScaleAxis(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("shift", "part", "part_blocks", "stride")]


class CCoding(ctypes.Structure):
    """As `Coding` in csrc/codes.h."""

    _fields_ = [
        ("element", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scales", "scale_values", "matrix_scale")),
        ("stride_e", ctypes.c_int64),
        ("matrix_stride_e", ctypes.c_int64),
        ("row", CScaleAxis),
        ("column", CScaleAxis),
    ]


def why_not_codes(block: tuple[int, int], parts: int) -> str | None:
    """Why the core does not read codes with such blocks, or None."""
    rows, columns = block
    if any(size < 1 or size & (size - 1) for size in block) or columns < LEAST_COLUMNS:
        return f"reads blocks of powers of two, {LEAST_COLUMNS} columns or more; these are {rows} x {columns}"
    return None if parts in (1, 2) else f"reads one or two parts with blocks of their own; these are {parts}"


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """
    code_EOI: uint8; each expert is contiguous, wherever it lies. Codes of e2m1 are two to a byte, the first in the low
              bits, and fill whole blocks: (E, O, bytes of a row).
    scale:    fp32, or uint8 (E, blocks of rows, blocks of columns); each expert contiguous, too.
    block:    rows and columns that share a scale.
    parts:    equal parts of the rows, each with blocks of its own.
    columns:  I, where it is not the number of bytes of a row.
    scale_values: fp32 (256,), what a scale in uint8 stands for.
    matrix_scale_E: fp32, at any stride, by which all of what they stand for is multiplied, in fp32.
    """

    code_EOI: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    block: tuple[int, int]
    parts: int = 1
    element: ElementName = "e4m3"
    columns: int | None = None
    scale_values: Tensor | None = field(default=None, repr=False)
    matrix_scale_E: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        reason = why_not_codes(self.block, self.parts)
        if reason is None and (self.code_EOI.dim() != 3 or self.code_EOI.shape[1] % self.parts):
            reason = f"takes (experts, out, in) with {self.parts} equal parts; these are {tuple(self.code_EOI.shape)}"
        if reason is None and self.code_EOI.shape[2] != self._row_bytes():
            reason = f"takes {self._row_bytes()} bytes per row of {self.in_features}, not {self.code_EOI.shape[2]}"
        if reason is None and not (has_whole_experts(self.code_EOI) and has_whole_experts(self.scale)):
            reason = f"takes contiguous experts; these have strides {self.code_EOI.stride()}"
        if reason is not None:
            raise bad_value(
                "quantised weights", f"{self.element} weights that the core reads", reason, "dequantise them"
            )

    def _row_bytes(self) -> int:
        if self.element == "e4m3":
            return self.in_features
        return -(-self.in_features // self.block[1]) * self.block[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.out_features, self.in_features

    def coding(self) -> CCoding:
        """For compiled code; what it points to has to outlive it."""
        (experts, out_features, in_features), (rows, columns) = self.shape, self.block
        of_part = out_features // self.parts
        down, across = -(-of_part // rows), -(-in_features // columns)
        kind = torch.float32 if self.scale_values is None else torch.uint8
        of_matrix = self.matrix_scale_E
        return CCoding(
            ELEMENTS[self.element],
            address_at_strides("scale", self.scale, kind, (experts, self.parts * down, across)),
            optional_address("scale_values", self.scale_values, torch.float32, (256,)),
            None if of_matrix is None else address_at_strides("matrix_scale_E", of_matrix, torch.float32, (experts,)),
            self.scale.stride(0),
            0 if of_matrix is None else of_matrix.stride(0),
            CScaleAxis(rows.bit_length() - 1, of_part, down, across),
            CScaleAxis(columns.bit_length() - 1, in_features, across, 1),
        )

    @property
    def kind(self) -> PackedKind:
        return "bf16"

    @property
    def experts(self) -> int:
        return self.code_EOI.shape[0]

    @property
    def out_features(self) -> int:
        return self.code_EOI.shape[1]

    @property
    def in_features(self) -> int:
        return self.code_EOI.shape[2] if self.columns is None else self.columns

    @property
    def forward(self) -> _Packing:
        strides = (self.code_EOI.stride(0), self.code_EOI.shape[2], 1)
        return _Packing(
            self.code_EOI, self.out_features, self.in_features, None, stride_ECD=strides, coding=self.coding()
        )

    @property
    def transposed(self) -> _Packing:
        strides = (self.code_EOI.stride(0), 1, self.code_EOI.shape[2])
        return _Packing(
            self.code_EOI,
            self.in_features,
            self.out_features,
            None,
            stride_ECD=strides,
            coding=self.coding(),
            turned=True,
        )


def has_whole_experts(tensor: Tensor) -> bool:
    """Whether each is contiguous; experts of a store lie apart, in their slots."""
    return all(expert.is_contiguous() for expert in tensor[:1])
