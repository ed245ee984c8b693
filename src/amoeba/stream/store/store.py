"""What a packed store and a Hugging Face folder have in common."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.quantised_files import BLOCKS, is_quantised, read_quantised, weight_of
from amoeba.precision.formats import OF_BLOCKS, Format
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.compiled_reads import CompiledLoads, Onward
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.layers import BLOCK, ExpertViews, LayerEntry
from amoeba.stream.store.reading import Range, Reader, crc32_joined, crc32_of_parts
from amoeba.stream.store.tensor_files import TensorEntry

Verify = Literal["first", "always", "never"]


class Store(ABC):
    """A model whose experts are read one by one. Any number of threads may read at the same time.

    folder: where the model's config and tokenizer are.
    layers: one entry per layer with experts, in the model's order; `layer` is an index into it everywhere.
    rest:   the checkpoint's other tensors, by the names it has for them, which transformers maps to the model's; where
            the experts are quantised, some of these may be too, with their scales.
    """

    folder: Path
    layers: tuple[LayerEntry, ...]
    rest: Mapping[str, TensorEntry]
    rest_is_stored = True  # whether its bytes in the files are those that `read_rest` gives
    _reader: Reader

    @property
    def files(self) -> Path:
        """The folder with config.json and the tokenizer's files."""
        return self.folder

    @property
    def format(self) -> Format | None:
        """Of the experts' codes, of the first layer that has such; None: plain numbers."""
        return next((entry.format for entry in self.layers if entry.format is not None), None)

    @property
    def as_codes(self) -> str:
        """For a line that says what is where."""
        return next((f", as {entry.numbers}" for entry in self.layers if entry.format is not None), "")

    def check_plain(self, remedy: str) -> None:
        """ValueError where the experts are codes."""
        if self.format is not None:
            got = f"{self.format.name} ({self.folder})"
            raise bad_value("MODEL", "experts in bfloat16, float16 or float32", got, remedy)

    def expert_bytes(self, layer: int) -> int:
        return self.layers[layer].expert_bytes

    def read(self, layer: int, expert: int, into: Any, on_part: Callable[[int, int], None] | None = None) -> None:
        """One expert's blob. StoreError where it cannot be had whole; what is in `into` is then not to be used.

        into: expert_bytes(layer) of writable memory on the CPU, a uint8 tensor or a buffer; where it does not begin at
              a page, as `aligned_buffer` does, it is read through the page cache.
        on_part: told of each part (begin, bytes) as soon as it is there, in any order and by any thread; not by stores
              that put an expert together. A checksum is compared at the end: until then bytes may be wrong.
        """
        if not (0 <= layer < len(self.layers) and 0 <= expert < self.layers[layer].experts):
            of = f" of {self.layers[layer].experts}" if 0 <= layer < len(self.layers) else ""
            sizes = f"a layer of {len(self.layers)} and one of its experts"
            raise bad_value("read", sizes, f"layer {layer}, expert {expert}{of}", "count both from 0")
        try:
            self._read(layer, expert, Memory(into, self.expert_bytes(layer), on_part))
        except StoreError as error:
            raise error.while_reading(self.layers[layer].name, expert) from error

    def read_stacked(self, layer: int, experts: Iterable[int], parts: Sequence[Tensor | None]) -> None:
        """Experts one after another, into the first entries of stacks of what `views` has."""
        blob = aligned_buffer(self.expert_bytes(layer))
        for place, expert in enumerate(experts):
            self.read(layer, expert, blob)
            for part, view in zip(parts, self.views(layer, blob), strict=True):
                if part is not None and view is not None:
                    part[place].copy_(view.view(part[place].shape))

    @abstractmethod
    def _read(self, layer: int, expert: int, memory: Memory) -> None: ...

    def place(self, layer: int, expert: int) -> tuple[int, int] | None:
        """A descriptor and an offset at which an expert's blob is as it will be in memory, to be read past the page
        cache with nothing to check; None where it takes `read`."""
        return None

    def loads(self, onward: Onward) -> CompiledLoads | None:
        """For blobs that go on to a device while they are read; None where that cannot be."""
        return None

    def scratch_bytes(self, readers: int) -> int:
        """Memory that this many concurrent reads of experts need in addition to their targets."""
        return 0

    def views(self, layer: int, blob: Tensor) -> ExpertViews:
        """The parts of a blob (..., expert_bytes) as tensors that share its memory."""
        return self.layers[layer].views(blob)

    @property
    def rest_bytes(self) -> int:
        """Of all that `rest_tensors` gives."""
        sizes = {name: entry.size for name, entry in self.rest.items()}
        if self.format is None:
            return sum(sizes.values())
        weights = self._rest_weights()
        bits = 4 if self.format is OF_BLOCKS["nf4"] else self.format.element.bits
        widths = {name: 8 * self.layers[0].dtype.itemsize // bits for name in weights if is_quantised(name, self.rest)}
        codes = {name: name + BLOCKS if name + BLOCKS in sizes else name for name in weights}
        return sum(sizes[codes[name]] * widths.get(name, 1) for name in weights)

    def _rest_weights(self) -> list[str]:
        """Without scales, which belong to a weight."""
        return list(
            dict.fromkeys(each if is_quantised(each := weight_of(name), self.rest) else name for name in self.rest)
        )

    def read_rest(self, name: str) -> Tensor:
        """A tensor that is no expert's, as it is stored, on the CPU."""
        return self._read_entry(self.rest[name])[0]

    def _read_entry(self, entry: TensorEntry, *, checksum: bool = False) -> tuple[Tensor, int]:
        """Its numbers, and the CRC-32 of its bytes, computed by the threads that read, or 0."""
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu"), 0
        before = entry.start % BLOCK
        needed = before + entry.size
        buffer = aligned_buffer(-(-needed // BLOCK) * BLOCK)
        memory = Memory(buffer, len(buffer))
        whole = Range(self._reader.file(entry.file), entry.start - before, needed, memory, 0, len(buffer))
        parts, crc32 = self._reader.read([whole], checksums=checksum), 0
        if checksum:
            # without the bytes before the tensor, which belong to the block
            crc32 = crc32_joined(zlib.crc32(memory.bytes[:before]), crc32_of_parts(parts, needed), entry.size)
        found = buffer[before:needed]
        if entry.start % entry.dtype.itemsize:
            found = found.clone()
        return found.view(entry.dtype).view(entry.shape), crc32

    def rest_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As the model takes them: what was quantised, such as the linears of attention, is dequantised."""
        format, dtype = self.format, self.layers[0].dtype
        for name in self.rest if format is None else self._rest_weights():
            if format is not None and is_quantised(name, self.rest):
                yield name, read_quantised(name, format, self.rest, self.read_rest).dequantise(dtype)
            else:
                yield name, self.read_rest(name)

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
