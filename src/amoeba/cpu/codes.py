"""Frozen weights in e4m3 with a scale for each block, as their owner keeps them: one byte a number, read in place.

E experts · O out · I in

    codes = ScaledCodes(code_EOI, scale, block=(128, 128), parts=2)
    load_core().decode(x_TH, expert_TK, weight_TK, codes, other_codes, None, None, activation)
    NodeExperts(codes, other_codes, None, None, activation)         # as StoredWeights, and without gradients

The core makes numbers of the codes as it reads them. Where it decodes, a scale multiplies the sum of its block in fp32,
and no weight is rounded. Where it packs panels for its products, each weight is code · scale in fp32, rounded to bf16.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.cpu.packed_weights import PackedKind, _Packing
from amoeba.cpu.pointers import address_at_strides
from amoeba.errors import bad_value

LEAST_COLUMNS = 16  # of a block: so many codes are read at once


class CScaleAxis(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("shift", "part", "part_blocks", "stride")]


class CScales(ctypes.Structure):
    """As `Scales` in csrc/codes.h."""

    _fields_ = [("data", ctypes.c_void_p), ("stride_e", ctypes.c_int64), ("row", CScaleAxis), ("column", CScaleAxis)]


def why_not_codes(block: tuple[int, int], parts: int) -> str | None:
    """Why the core does not read codes with such blocks, or None."""
    rows, columns = block
    if any(size < 1 or size & (size - 1) for size in block) or columns < LEAST_COLUMNS:
        return f"reads blocks of powers of two, {LEAST_COLUMNS} columns or more, these are {rows} x {columns}"
    return None if parts in (1, 2) else f"reads one or two parts with blocks of their own, these are {parts}"


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """
    code_EOI: uint8; each expert is contiguous, wherever it lies.
    scale:    fp32 (E, blocks of rows, blocks of columns); the same.
    block:    rows and columns that share a scale.
    parts:    equal parts of the rows, each with blocks of its own.
    """

    code_EOI: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    block: tuple[int, int]
    parts: int = 1

    def __post_init__(self) -> None:
        reason = why_not_codes(self.block, self.parts)
        if reason is None and (self.code_EOI.dim() != 3 or self.code_EOI.shape[1] % self.parts):
            reason = f"takes (experts, out, in) with {self.parts} equal parts, these are {tuple(self.code_EOI.shape)}"
        if reason is None and not (has_whole_experts(self.code_EOI) and has_whole_experts(self.scale)):
            reason = f"takes contiguous experts, codes have strides {self.code_EOI.stride()}"
        if reason is not None:
            raise bad_value("codes", "e4m3 codes that the core reads", reason, "dequantise them")

    @property
    def shape(self) -> torch.Size:
        return self.code_EOI.shape

    def scales(self) -> CScales:
        """For compiled code; the scales have to outlive it."""
        (experts, out_features, in_features), (rows, columns) = self.shape, self.block
        of_part = out_features // self.parts
        down, across = -(-of_part // rows), -(-in_features // columns)
        start = address_at_strides("scale", self.scale, torch.float32, (experts, self.parts * down, across))
        row = CScaleAxis(rows.bit_length() - 1, of_part, down, across)
        column = CScaleAxis(columns.bit_length() - 1, in_features, across, 1)
        return CScales(start, self.scale.stride(0), row, column)

    @property
    def kind(self) -> PackedKind:
        return "bf16"

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def out_features(self) -> int:
        return self.shape[1]

    @property
    def in_features(self) -> int:
        return self.shape[2]

    @property
    def forward(self) -> _Packing:
        strides = (self.code_EOI.stride(0), self.in_features, 1)
        return _Packing(
            self.code_EOI, self.out_features, self.in_features, None, stride_ECD=strides, scales=self.scales()
        )

    @property
    def transposed(self) -> _Packing:
        strides = (self.code_EOI.stride(0), 1, self.in_features)
        return _Packing(
            self.code_EOI,
            self.in_features,
            self.out_features,
            None,
            stride_ECD=strides,
            scales=self.scales(),
            turned=True,
        )


def has_whole_experts(tensor: Tensor) -> bool:
    """Whether each is contiguous; experts of a store lie apart, in their slots."""
    return all(expert.is_contiguous() for expert in tensor[:1])
