"""Quantised experts as the C++ core reads them: in place, or one expert dequantised.

E experts · O out · I in

    codes = scaled_codes(weights.gate_up_EJH)            # no copy
    weights = read_by_core(weights)                      # the same experts, dequantised by the core for a product
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from amoeba.core.weights import AnyExperts
from amoeba.cpu.core import load_core
from amoeba.cpu.pointers import CPU
from amoeba.cpu.weights import ScaledCodes, has_whole_experts, why_not_codes
from amoeba.precision.formats import E2M1, E4M3, E8M0, IN_BLOCKS, ScaleKind
from amoeba.precision.quantised_experts import QuantisedExperts, ReadInBlocks
from amoeba.system.cpu_features import compute_dtype


def why_not(weights: AnyExperts) -> str | None:
    """Why the core does not read these quantised experts, or None."""
    assert isinstance(weights, QuantisedExperts)
    if weights.device.type != "cpu":
        return f"computes on the CPU; these weights are on {weights.device}"
    if weights.products == "w8a8":
        return "quantises no rows; these experts ask for w8a8"
    if weights.format.element is IN_BLOCKS:
        return None
    if weights.format.element not in (E2M1, E4M3):
        return f"reads e4m3, e2m1 and blocks; these weights are in {weights.format.element.name}"
    return why_not_codes(weights.format.block, weights.parts)


def scaled_codes(matrix_EOI: ReadInBlocks) -> ScaledCodes:
    """As they are stored, whichever way round they are read."""
    stored = matrix_EOI.matrix
    data, scales = (each if has_whole_experts(each) else each.contiguous() for each in (stored.data, stored.scales))
    format = stored.format
    if format.element is IN_BLOCKS:
        return ScaledCodes(data, scales, format.block, 1, format.name, stored.columns)
    return ScaledCodes(
        data,
        scales,
        format.block,
        stored.parts,
        "e2m1" if format.element is E2M1 else "e4m3",  # `why_not` refuses others
        stored.columns,
        None if format.scale == "fp32" else _scale_values(format.scale),
        stored.matrix_scale,
    )


@functools.cache
def _scale_values(kind: ScaleKind) -> Tensor:
    every_byte = torch.arange(256, dtype=torch.uint8, device=CPU)
    return E8M0.decode(every_byte) if kind == "e8m0" else E4M3.decode(every_byte)


def read_by_core(weights: QuantisedExperts) -> QuantisedExperts:
    return _ReadByCore(**{each.name: getattr(weights, each.name) for each in fields(weights)})


class _ReadByCore(QuantisedExperts):
    @property
    def gate_up_EJH(self) -> ReadInBlocks:
        return _DequantisedByCore(super().gate_up_EJH.matrix, self.dtype)

    @property
    def down_EHI(self) -> ReadInBlocks:
        return _DequantisedByCore(super().down_EHI.matrix, self.dtype)


@dataclass(frozen=True, eq=False)
class _DequantisedByCore(ReadInBlocks):
    """An expert that is asked for lies where the one before it was: products take one after the other."""

    room: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def __getitem__(self, expert: int) -> Tensor:
        codes, dtype = scaled_codes(self), compute_dtype(self.dtype, self.device)
        if dtype not in self.room:
            self.room[dtype] = torch.empty(codes.shape[1:], dtype=dtype, device=CPU)
        found = self.room[dtype]
        load_core().dequantise(codes, expert, out=found)
        return found.t() if self.transposed else found
