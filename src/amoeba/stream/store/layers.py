"""What a store says of a layer's experts, and where the parts of an expert are in its blob.

E experts · H hidden · I intermediate · J = 2I (gated) or I

An expert is one blob of bytes: gate_up_JH (all rows of gate first, then up), down_HI, and the biases if there are any.
In a quantised format each matrix is two parts, its codes and its scales, in the order of the checkpoint's rows, and
in NVFP4 a third one, the number by which all of its scales are multiplied.
Every blob of a layer has its parts at the same offsets, so a stack of blobs is a stack of each part:

    views = entry.views(blobs)           # (slots, expert_bytes) of uint8 -> gate_up of shape (slots, J, H), and so on
    weights = entry.weights(blobs)       # the same as experts to compute with, in whatever format
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import ExpertWeights
from amoeba.precision.formats import Format
from amoeba.precision.quantised import block_counts
from amoeba.precision.quantised_experts import QuantisedExperts, Stored

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
# What the parts of a matrix are called in a quantised format.
CODES, SCALES, MATRIX_SCALE = "_codes", "_scales", "_matrix_scale"
BIASES = PARTS[2:]


@dataclass(frozen=True)
class LayerEntry:
    """
    name:       of the experts module in the model.
    activation: of these rows: never interleaved, unless they are codes.
    dtype:      of all parts; for quantised experts, that of the biases, of x and of y.
    parts:      in the order of the blob.
    expert_bytes: of a blob, a multiple of 4096.
    format:     of the codes; None: plain numbers. down_format: of those of down, where that is another one.
    row_parts:  of the rows of gate_up, each with blocks of its own (see `QuantisedMatrix`).
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    activation: Activation
    dtype: torch.dtype
    parts: tuple[Part, ...]
    expert_bytes: int
    format: Format | None = field(default=None, repr=False)
    row_parts: int = field(default=1, repr=False)
    down_format: Format | None = field(default=None, repr=False)

    @property
    def has_bias(self) -> bool:
        return any(part.name == "gate_up_bias_J" for part in self.parts)

    @property
    def numbers(self) -> str:
        """How they are kept, in a word."""
        if self.format is None:
            return str(self.dtype).removeprefix("torch.")
        return self.format.name + (f"+{self.down_format.name}" if self.down_format else "")

    def dtype_of(self, part: str) -> torch.dtype:
        if self.format is None or part in BIASES:
            return self.dtype
        is_wide = part.endswith(MATRIX_SCALE) or (part.endswith(SCALES) and self.format.scale == "fp32")
        return torch.float32 if is_wide else torch.uint8

    def size_of(self, part: Part) -> int:
        """In bytes."""
        return math.prod(part.shape) * self.dtype_of(part.name).itemsize

    def gaps(self) -> Iterator[tuple[int, int]]:
        """What is after each part, up to the next or to the end: zeros, so that equal experts are equal blobs."""
        ends = [*(part.offset for part in self.parts[1:]), self.expert_bytes]
        for part, end in zip(self.parts, ends, strict=True):
            yield part.offset + self.size_of(part), end

    def views(self, blob: Tensor) -> ExpertViews:
        """Of plain numbers; blob as in `tensors`."""
        found = dict.fromkeys(PARTS) | self.tensors(blob)
        if self.format is not None:
            got = f"quantised ones, in {self.format.name} ({self.name})"
            raise bad_value("views", "plain numbers", got, "use `tensors` or `weights` of the layer's entry")
        return ExpertViews(**found)  # type: ignore[arg-type]

    def tensors(self, blob: Tensor) -> dict[str, Tensor]:
        """All parts by their names. blob: (..., expert_bytes) of uint8, on any device, contiguous along its last
        dimension. Nothing is copied."""
        if blob.dtype != torch.uint8 or blob.dim() == 0 or blob.shape[-1] != self.expert_bytes:
            raise bad_value(
                "blob",
                f"uint8 of shape (..., {self.expert_bytes})",
                f"{blob.dtype} of shape {tuple(blob.shape)}",
                "make it with aligned_buffer(store.expert_bytes(layer)), or a stack of these",
            )
        found = {}
        for part in self.parts:
            flat = blob[..., part.offset : part.offset + self.size_of(part)].view(self.dtype_of(part.name))
            found[part.name] = flat.unflatten(-1, part.shape)
        return found

    def weights(self, blobs: Tensor) -> StoredExperts:
        """A stack of blobs as experts that share its memory."""
        return self.weights_of(self.tensors(blobs))

    def weights_of(self, stacks: Mapping[str, Tensor]) -> StoredExperts:
        """stacks: of each part, by its name."""
        biases = stacks.get(BIASES[0]), stacks.get(BIASES[1])
        if self.format is None:
            return ExpertWeights(stacks["gate_up_JH"], stacks["down_HI"], *biases, self.activation)
        gate_up, down = (_stored(stacks, name) for name in ("gate_up", "down"))
        sizes = self.hidden, self.intermediate, self.row_parts
        found = QuantisedExperts(gate_up, down, *biases, self.format, *sizes, self.activation, self.dtype)
        return replace(found, down_format=self.down_format) if self.down_format else found

    def parts_of(self, weights: StoredExperts) -> dict[str, Tensor]:
        """Stacks of each part by its name: what `weights_of` takes, of experts that are kept as these are."""
        *_, gate_up_bias, down_bias = weights.tensors()
        biases = {BIASES[0]: gate_up_bias, BIASES[1]: down_bias}
        found: dict[str, Tensor | None] = {}
        if isinstance(weights, ExpertWeights):
            found = {"gate_up_JH": weights.gate_up_EJH, "down_HI": weights.down_EHI}
        else:
            for name, (codes, scales, of_matrix) in (
                ("gate_up", weights.stored_gate_up),
                ("down", weights.stored_down),
            ):
                found |= {name + CODES: codes, name + SCALES: scales if scales.numel() else None}
                found[name + MATRIX_SCALE] = None if of_matrix is None else of_matrix[..., None]
        parts = {name: stack.detach() for name, stack in (found | biases).items() if stack is not None}
        return {name: stack.view(self.dtype_of(name)) for name, stack in parts.items()}


StoredExperts = ExpertWeights | QuantisedExperts


def _stored(stacks: Mapping[str, Tensor], name: str) -> Stored:
    """A matrix as quantised experts keep it."""
    codes, scales, of_matrix = (stacks.get(name + part) for part in (CODES, SCALES, MATRIX_SCALE))
    assert codes is not None
    if scales is None:  # they are among the codes
        scales = codes.new_empty((codes.shape[0], 0, 0))
    scales = scales.view(torch.int32) if scales.dtype == torch.float32 else scales
    return codes, scales, None if of_matrix is None else of_matrix[..., 0].view(torch.int32)


def layer_entry(
    name: str,
    experts: int,
    hidden: int,
    intermediate: int,
    activation: Activation,
    dtype: torch.dtype,
    bias: bool,
    format: Format | None = None,
    row_parts: int = 1,
    down_format: Format | None = None,
) -> LayerEntry:
    entry = LayerEntry(name, experts, hidden, intermediate, activation, dtype, (), 0, format, row_parts, down_format)
    parts, end = [], 0
    for part_name, shape in part_shapes(entry, bias).items():
        parts.append(Part(part_name, end, shape))
        end = _up(end + entry.size_of(parts[-1]), _PART)
    return replace(entry, parts=tuple(parts), expert_bytes=_up(end, BLOCK))


def part_shapes(entry: LayerEntry, bias: bool) -> dict[str, tuple[int, ...]]:
    """Of the parts of an expert, in the order of the blob."""
    hidden, intermediate, format = entry.hidden, entry.intermediate, entry.format
    width = entry.activation.width(intermediate)
    shapes: dict[str, tuple[int, ...]] = {}
    biases: dict[str, tuple[int, ...]] = {"gate_up_bias_J": (width,), "down_bias_H": (hidden,)} if bias else {}
    if format is None:
        return {"gate_up_JH": (width, hidden), "down_HI": (hidden, intermediate)} | biases
    of_down = ("down", hidden, intermediate, 1, entry.down_format or format)
    for name, rows, columns, parts, codes in (("gate_up", width, hidden, entry.row_parts, format), of_down):
        shapes[name + CODES] = rows, codes.stored_columns(columns)
        if codes.scale == "inside":
            continue
        shapes[name + SCALES] = block_counts(rows, columns, format, parts)
        if format.has_matrix_scale:
            shapes[name + MATRIX_SCALE] = (1,)
    return shapes | biases


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
