"""Experts in NF4 of bitsandbytes, read one by one: codes and scales of a file become blocks of a blob.

    pieces = nf4_pieces(names, SmallReads(tensors), entry, part, (0, 2))

Scales that are quantised need a table and some numbers of their tensor, which are read at once and kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.nf4_files import (
    ABSMAX,
    NUMBERS,
    Nf4State,
    codes_of,
    nested_of,
    scales_of,
    spread,
    state_of,
)
from amoeba.precision.blocks import BLOCK_KINDS
from amoeba.stream.store.layers import LayerEntry, Part
from amoeba.stream.store.tensor_files import Piece, TensorEntry

_BYTES = BLOCK_KINDS["nf4"].bytes
_OF_CODES = NUMBERS // 2
_NONE = Nf4State((), NUMBERS, 0, 0.0)


class SmallReads:
    """Tensors of a few bytes by their names; equal ones are one."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.tensors = tensors
        self._known: dict[tuple[torch.dtype, bytes], Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        entry = self.tensors[name]
        with open(entry.file, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), entry.size, entry.start)
        if (entry.dtype, data) not in self._known:
            self._known[entry.dtype, data] = torch.frombuffer(bytearray(data), dtype=entry.dtype)
        return self._known[entry.dtype, data]


@dataclass(frozen=True)
class _Codes(TensorEntry):
    def values(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        return codes_of(source)


@dataclass(frozen=True, eq=False)
class _Scales(TensorEntry):
    """first: of all scales of a tensor, the one that this begins with."""

    state: Nf4State = _NONE
    nested: tuple[Tensor, Tensor] | None = None
    first: int = 0

    def values(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        aligned = source.clone() if source.storage_offset() % 4 else source
        return spread(self.state, scales_of(self.state, aligned, self.nested, self.first))


def nf4_pieces(
    names: list[str], small: SmallReads, entry: LayerEntry, part: Part, place: tuple[int, int]
) -> list[Piece]:
    """names: of a tensor of all experts, or of each expert's. place: which of how many equal parts of the rows."""
    number, of = place
    rows, blocks = part.shape[0] // of, part.shape[0] // of * part.shape[1] // _BYTES
    columns = part.shape[1] // _BYTES * NUMBERS
    numbers = rows * columns
    codes: list[_Codes] = []
    scales: list[_Scales] = []
    for name in names:
        state = state_of(name, small.tensors, small)
        stacked = len(names) == 1 and len(state.shape) == 3
        experts = entry.experts if stacked else 1
        expected = ((experts,) if stacked else ()) + (rows, columns)
        stored, absmax = small.tensors[name], small.tensors[name + ABSMAX]
        width = 1 if state.nested else 4
        each, count = blocks * _OF_CODES, numbers // state.block
        sizes = stored.size, absmax.size
        fits = state.shape == expected and sizes == (experts * each, experts * count * width)
        if not fits or count * state.block != numbers:
            got = f"{state.shape}, {sizes[0]} bytes of numbers and {sizes[1]} of scales"
            raise bad_value(name, f"NF4 of shape {expected}", got, f"it does not match config.json ({entry.name})")
        nested = nested_of(name, state, small.tensors, small)
        kind = torch.uint8 if state.nested else torch.float32
        for expert in range(experts):
            codes.append(_Codes(stored.file, stored.start + expert * each, torch.uint8, (each,)))
            start = absmax.start + expert * count * width
            scales.append(_Scales(absmax.file, start, kind, (count,), state, nested, expert * count))
    if len(codes) != entry.experts:
        raise bad_value(entry.name, f"tensors for {entry.experts} experts", len(codes), "download it again")
    offset, dtype = part.offset + number * rows * part.shape[1], torch.uint8
    shape = math.prod(scales[0].shape) * scales[0].dtype.itemsize, (1, blocks, 4)
    return [
        Piece(tuple(codes), False, blocks * _OF_CODES, (blocks, _OF_CODES), (_BYTES, 1), offset + 4, dtype),
        Piece(tuple(scales), False, *shape, (blocks * _BYTES, _BYTES, 1), offset, dtype),
    ]
