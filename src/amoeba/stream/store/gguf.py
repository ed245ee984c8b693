"""A GGUF file read as a store: experts as the file has them, the rest of the model as numbers.

Experts in blocks keep their bits, those in MXFP4 in the order of `mxfp4`. Where gate and up are of two kinds, or blocks
meet plain numbers, they become numbers of the model's dtype as they are read. In the blob all rows of gate come first,
whatever the model's own order.
"""

from __future__ import annotations

import re
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.core import load_core, why_no_core
from amoeba.cpu.weights import ScaledCodes
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.experts_module import described, experts_modules, layout_of
from amoeba.integrations.gguf_families import config_of, sources_of
from amoeba.integrations.gguf_files import (
    AGAIN,
    EXPERTS,
    PLAIN,
    GgufHeader,
    GgufTensor,
    read_header,
    tokenizer_of,
)
from amoeba.integrations.model_folder import load_without_weights
from amoeba.precision.blocks import BLOCK_KINDS, dequantise_blocks, mxfp4_parts
from amoeba.precision.formats import MXFP4, OF_BLOCKS, Format
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.layers import BIASES, CODES, SCALES, Part, layer_entry
from amoeba.stream.store.reading import THREADS, Reader
from amoeba.stream.store.tensor_files import Piece, TensorEntry

_AT_ONCE = 2**18  # numbers that are dequantised together


@dataclass(frozen=True)
class _Blocks(TensorEntry):
    """A tensor in ggml's blocks. gives: its numbers, or the codes or the scales of MXFP4."""

    kind: str = ""
    gives: str = "numbers"

    def values(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        rows = source.view(-1, self.shape[-1])
        if self.gives == "numbers":
            return dequantise_blocks(rows, self.kind)
        if self.kind != "mxfp4":
            return source
        return mxfp4_parts(rows)[0 if self.gives == "codes" else 1]


class GgufStore(FolderStore):
    """folder: the file, or the first part of a split one; its config and tokenizer are in it."""

    rest_is_stored = False

    def __init__(self, file: str | Path, *, threads: int = THREADS, direct: bool = True) -> None:
        self.header = read_header(file)
        self.folder = self.header.path
        config = config_of(self.header)
        model = load_without_weights(config, str(self.folder))
        check_coverage(model, "MODEL", "take a model whose experts aMoEba computes")
        layers = [_Layer(self.header, name, module) for name, module in experts_modules(model).items()]
        self.layers = tuple(layer.entry for layer in layers)
        self.pieces = tuple(tuple(layer.pieces) for layer in layers)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._sources, self._config = sources_of(self.header, config, model), config
        self.rest = {
            name: TensorEntry(first.file, first.start, PLAIN.get(first.kind, self.header.dtype), shapes[name])
            for name, ((first, *_), _) in self._sources.items()
        }
        self._check_rest(shapes)
        taken = {id(tensor) for found in self._sources.values() for tensor in found.tensors}
        self.left_out = tuple(
            name for name, each in self.header.tensors.items() if id(each) not in taken and not EXPERTS.fullmatch(name)
        )
        self._reader = Reader(threads=threads, direct=direct)
        self._scratch = deque()
        self._files: tempfile.TemporaryDirectory | None = None

    @property
    def files(self) -> Path:
        """A folder with the model's config.json and tokenizer, until the store is closed."""
        if self._files is None:
            self._files = tempfile.TemporaryDirectory()
            config_of(self.header).save_pretrained(self._files.name)
            tokenizer_of(self.header).save_pretrained(self._files.name)
        return Path(self._files.name)

    @property
    def rest_bytes(self) -> int:
        return sum(entry.size for entry in self.rest.values())

    def rest_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.rest:
            yield name, self.read_rest(name)

    def read_rest(self, name: str) -> Tensor:
        entry, source = self.rest[name], self._sources[name]
        numbers = [self._numbers(tensor, entry.dtype) for tensor in source.tensors]
        return (numbers[0] if source.make is None else source.make(numbers, self._config)).reshape(entry.shape)

    def kinds_of_rest(self) -> dict[str, str]:
        """Of what is one tensor in blocks, as the model has it: its kind."""
        sources = {name: each for name, each in self._sources.items() if each.make is None}
        single = {name: each.tensors[0] for name, each in sources.items() if len(each.tensors) == 1}
        return {name: tensor.kind.lower() for name, tensor in single.items() if tensor.kind not in PLAIN}

    def read_blocks(self, name: str) -> Tensor:
        """uint8 (rows, bytes of a row), of one of `kinds_of_rest`."""
        (tensor,) = self._sources[name].tensors
        return self._bytes(tensor).view(tensor.shape[0], -1).clone()

    def close(self) -> None:
        super().close()
        if self._files is not None:
            self._files.cleanup()

    def _numbers(self, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
        source = self._bytes(tensor)
        if tensor.kind in PLAIN:
            return (
                (source.clone() if source.storage_offset() % 4 else source).view(PLAIN[tensor.kind]).view(tensor.shape)
            )
        kind, columns = tensor.kind.lower(), tensor.shape[-1]
        numbers, width, _ = BLOCK_KINDS[kind]
        found = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        if kind in OF_BLOCKS and dtype != torch.float16 and why_no_core() is None:
            rows = source.view(1, -1, columns // numbers * width)
            codes = ScaledCodes(rows, rows, (1, numbers), element=kind, columns=columns)
            load_core().dequantise(codes, 0, out=found.view(-1, columns))
            return found
        step = _AT_ONCE // numbers
        for blocks, into in zip(source.view(-1, width).split(step), found.view(-1, numbers).split(step), strict=True):
            into.copy_(dequantise_blocks(blocks, kind))
        return found

    def _bytes(self, tensor: GgufTensor) -> Tensor:
        return self._read_entry(TensorEntry(tensor.file, tensor.start, torch.uint8, (tensor.size,)))[0]

    def _check_rest(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, source in self._sources.items():
            sizes = [tensor.shape for tensor in source.tensors]
            expected = torch.Size(shapes[name])
            if sum(map(torch.Size.numel, map(torch.Size, sizes))) != expected.numel() or (
                len(sizes) == 1 and sizes[0][-1] != expected[-1]
            ):
                got = " and ".join(map(str, sizes))
                raise bad_value(str(self.folder), f"{name} of shape {tuple(expected)}", got, AGAIN)


class _Layer:
    """What a file has of a layer's experts."""

    def __init__(self, header: GgufHeader, name: str, module: Any) -> None:
        self.header, self.name = header, name
        layout, found = layout_of(module), described(module)
        number = re.search(r"\.layers\.(\d+)\.", f".{name}")
        if layout is None or found.fused is None or number is None:
            got = f"those of {type(module).__name__} ({name})"
            raise bad_value(
                "MODEL", "stacked experts whose activation aMoEba computes itself", got, "take another model"
            )
        self.sizes = layout.num_experts, layout.hidden, layout.intermediate
        width = found.fused.width(layout.intermediate)
        matrices = {"gate_up": (width, layout.hidden), "down": (layout.hidden, layout.intermediate)}
        stem, sources = f"blk.{number[1]}.ffn_", {}
        for matrix, shape in matrices.items():
            sources[matrix, "weight"] = self._find(stem, matrix, "weight", shape)
            if found.has_bias:
                sources[matrix, "bias"] = self._find(stem, matrix, "bias", shape[:1])
        format, down_format = _formats_of(sources["gate_up", "weight"], sources["down", "weight"])
        activation = replace(found.fused, interleaved=False)
        self.entry = layer_entry(name, *self.sizes, activation, header.dtype, found.has_bias, format, 1, down_format)
        parts = {part.name: part for part in self.entry.parts}
        self.pieces: list[Piece] = []
        for matrix, numbers in zip(matrices, ("gate_up_JH", "down_HI"), strict=True):
            of_matrix = sources[matrix, "weight"]
            if format is None:
                self._add(parts[numbers], of_matrix)
            else:
                self._add(parts[matrix + CODES], of_matrix, "codes")
            if format is MXFP4:
                self._add(parts[matrix + SCALES], of_matrix, "scales")
        for matrix, bias in zip(matrices, BIASES if found.has_bias else (), strict=False):
            self._add(parts[bias], sources[matrix, "bias"])

    def _find(self, stem: str, matrix: str, suffix: str, shape: tuple[int, ...]) -> list[GgufTensor]:
        """The tensors whose rows follow each other in a matrix of this shape."""
        tensors = self.header.tensors
        names = [f"{stem}{matrix}_exps.{suffix}"]
        if matrix == "gate_up" and names[0] not in tensors:
            names = [f"{stem}{part}_exps.{suffix}" for part in ("gate", "up")]
        missing = next((each for each in names if each not in tensors), None)
        if missing is not None:
            raise bad_value(str(self.header.path), f"a tensor {missing}", "none", AGAIN)
        expected = (self.sizes[0], shape[0] // len(names), *shape[1:])
        for each in names:
            if tensors[each].shape != expected or (suffix == "bias" and tensors[each].kind not in PLAIN):
                got = f"{tensors[each].shape} in {tensors[each].kind}"
                raise bad_value(str(tensors[each].file), f"{each} of shape {expected}", got, AGAIN)
        return [tensors[each] for each in names]

    def _add(self, part: Part, sources: list[GgufTensor], gives: str = "numbers") -> None:
        dtype, rows = self.entry.dtype_of(part.name), part.shape[0] // len(sources)
        shape = (rows, *part.shape[1:])
        for number, tensor in enumerate(sources):
            if tensor.kind in PLAIN:
                stored = TensorEntry(tensor.file, tensor.start, PLAIN[tensor.kind], tensor.shape)
            else:
                width = tensor.size // (tensor.shape[0] * rows)
                stored = _Blocks(
                    tensor.file, tensor.start, torch.uint8, (*tensor.shape[:-1], width), tensor.kind.lower(), gives
                )
            view = torch.empty(shape, dtype=dtype, device="meta")
            offset = part.offset // dtype.itemsize + number * view.numel()
            size = tensor.size // tensor.shape[0]
            self.pieces.append(Piece((stored,), True, size, shape, view.stride(), offset, dtype))


def _formats_of(gate_up: list[GgufTensor], down: list[GgufTensor]) -> tuple[Format | None, Format | None]:
    """Of gate_up, and of down where that is another one. None: they are read as numbers."""
    formats = [{tensor.kind.lower() for tensor in tensors} for tensors in (gate_up, down)]
    first, last = (each.pop() if len(each) == 1 else "" for each in formats)
    if (first, last) == ("mxfp4", "mxfp4"):
        return MXFP4, None
    if first in OF_BLOCKS and last in OF_BLOCKS:
        return OF_BLOCKS[first], None if first == last else OF_BLOCKS[last]
    return None, None
