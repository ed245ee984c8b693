"""Where the bytes of an expert are in a checkpoint, and where they belong in its blob."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.precision.formats import E8M0
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.layers import LayerEntry
from amoeba.stream.store.tensor_files import TensorEntry


class Piece(NamedTuple):
    """A tensor of each expert, or a slice of one tensor of all, and where its elements are in the blob."""

    tensors: tuple[TensorEntry, ...]  # one, or one per expert
    stacked: bool  # one tensor with a first dimension over experts
    size: int  # bytes of an expert's, in the file
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the start of the blob
    dtype: torch.dtype  # in the blob
    again: bool = False  # the same numbers are there already, from another tensor

    def range_of(self, expert: int) -> tuple[Path, int]:
        tensor = self.tensors[0 if self.stacked else expert]
        return tensor.file, tensor.start + (expert * self.size if self.stacked else 0)

    def numbers(self, blob: Tensor) -> Tensor:
        """Its own in the blob, a view."""
        all_of_it = blob.view(self.dtype)
        return torch.as_strided(all_of_it, self.shape, self.stride, all_of_it.storage_offset() + self.offset)

    def put(self, source: Tensor, blob: Tensor) -> None:
        """source: the bytes that were read; both are uint8. Codes stay as they are; scales may be wider in the blob.
        StoreError where what is there already differs."""
        there, found = self.numbers(blob), self._read(source)
        if self.again and not torch.equal(there, found):
            expected, got = "one scale for gate and up of an expert", f"two, {there.tolist()} and {found.tolist()}"
            raise StoreError(self.tensors[0].file, expected, got, "quantise the model with amoeba quantise")
        there.copy_(found)

    def is_in(self, blob: Tensor, source: Tensor) -> bool:
        """Whether `put` would leave this blob as it is, bit for bit."""
        there, found = (_as_bytes(each) for each in (self.numbers(blob), self._read(source).to(self.dtype)))
        return torch.equal(there, found)

    def rows(self, begin: int, count: int) -> Piece:
        """Some of the first dimension alone; in the file they follow each other."""
        size = self.size // self.shape[0] * count
        shape, offset = (count, *self.shape[1:]), self.offset + begin * self.stride[0]
        return self._replace(size=size, shape=shape, offset=offset)

    def _read(self, source: Tensor) -> Tensor:
        stored = self.tensors[0].dtype
        if stored.itemsize == 1:
            found = E8M0.decode(source) if self.dtype == torch.float32 else source
        else:
            found = (source.clone() if source.storage_offset() % stored.itemsize else source).view(stored)
        return found.view(self.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class MappedLayer:
    entry: LayerEntry
    pieces: tuple[Piece, ...]
