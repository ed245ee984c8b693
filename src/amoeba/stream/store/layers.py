"""What a store says of a layer's experts, and where the parts of an expert are in its blob.

E experts · H hidden · I intermediate · J = 2I (gated) or I

An expert is one blob of bytes: gate_up_JH (all rows of gate first, then up), down_HI, and the biases if there are any.
Every blob of a layer has its parts at the same offsets, so a stack of blobs is a stack of each part:

    views = entry.views(blobs)           # (slots, expert_bytes) of uint8 -> gate_up of shape (slots, J, H), and so on
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.config import Activation
from amoeba.errors import bad_value

BLOCK = 4096  # bytes; blobs are multiples of it: O_DIRECT reads whole blocks of the disk
_PART = 256  # bytes; where a part begins: enough for every load a kernel makes
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}


class Part(NamedTuple):
    name: str
    offset: int  # bytes from the start of the blob
    shape: tuple[int, ...]


class ExpertViews(NamedTuple):
    """One expert, or with a leading dimension a stack of them."""

    gate_up_JH: Tensor
    down_HI: Tensor
    gate_up_bias_J: Tensor | None
    down_bias_H: Tensor | None


PARTS = ExpertViews._fields


@dataclass(frozen=True)
class LayerEntry:
    """
    name:       of the experts module in the model.
    activation: of these rows: never interleaved.
    dtype:      of all parts.
    parts:      in the order of the blob.
    expert_bytes: of a blob, a multiple of 4096.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    activation: Activation
    dtype: torch.dtype
    parts: tuple[Part, ...]
    expert_bytes: int

    @property
    def has_bias(self) -> bool:
        return any(part.name == "gate_up_bias_J" for part in self.parts)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """What is after each part, up to the next or to the end: zeros, so that equal experts are equal blobs."""
        ends = [*(part.offset for part in self.parts[1:]), self.expert_bytes]
        for part, end in zip(self.parts, ends, strict=True):
            yield part.offset + math.prod(part.shape) * self.dtype.itemsize, end

    def views(self, blob: Tensor) -> ExpertViews:
        """blob: (..., expert_bytes) of uint8, on any device, contiguous along its last dimension. Nothing is copied."""
        if blob.dtype != torch.uint8 or blob.dim() == 0 or blob.shape[-1] != self.expert_bytes:
            raise bad_value(
                "blob",
                f"uint8 of shape (..., {self.expert_bytes})",
                f"{blob.dtype} of shape {tuple(blob.shape)}",
                "make it with aligned_buffer(store.expert_bytes(layer)), or a stack of these",
            )
        found: dict[str, Tensor | None] = dict.fromkeys(PARTS)
        for part in self.parts:
            size = math.prod(part.shape) * self.dtype.itemsize
            flat = blob[..., part.offset : part.offset + size].view(self.dtype)
            found[part.name] = flat.unflatten(-1, part.shape)
        return ExpertViews(**found)  # type: ignore[arg-type]


def layer_entry(
    name: str, experts: int, hidden: int, intermediate: int, activation: Activation, dtype: torch.dtype, bias: bool
) -> LayerEntry:
    width = activation.width(intermediate)
    shapes: list[tuple[int, ...]] = [(width, hidden), (hidden, intermediate), (width,), (hidden,)]
    parts, end = [], 0
    for part_name, shape in list(zip(PARTS, shapes, strict=True))[: 4 if bias else 2]:
        parts.append(Part(part_name, end, shape))
        end = _up(end + math.prod(shape) * dtype.itemsize, _PART)
    return LayerEntry(name, experts, hidden, intermediate, activation, dtype, tuple(parts), _up(end, BLOCK))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
