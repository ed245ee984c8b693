"""Where the tensors of a checkpoint are, by the headers of its safetensors files, read without their data; where the
bytes of an expert are among them, and where they belong in its blob. And such files written, from tensors of any
device, at the speed of the disk.

    tensors = checkpoint_tensors(folder)            # name -> TensorEntry
    digests = save_tensors(path, tensors)           # the bytes that safetensors.torch.save_file would write
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.errors import one_line
from amoeba.precision.formats import E8M0
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.layers import LayerEntry
from amoeba.system.files import whole_file
from amoeba.system.machine import usable_cores
from amoeba.system.pipeline import Segment, write_segments

ONE_FILE, SHARDS = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100 * 2**20  # as the safetensors package has it
_AGAIN = "copy or download it again"
_NAMED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _NAMED.items()}
# As the safetensors package orders tensors: the last ones first, so that each begins at a multiple of its width.
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
_COPIERS = 8  # threads that copy and digest chunks, at most


@dataclass(frozen=True)
class TensorEntry:
    file: Path
    start: int  # bytes from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def values(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """What bytes of it stand for in a blob whose part is of this dtype; source: uint8."""
        if self.dtype.itemsize == 1:
            return E8M0.decode(source) if dtype == torch.float32 else source
        return (source.clone() if source.storage_offset() % self.dtype.itemsize else source).view(self.dtype)


def checkpoint_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Of a Hugging Face folder, as transformers reads it: of its one file, or of the shards that its index names."""
    index = folder / SHARDS
    if (folder / ONE_FILE).is_file():
        return tensors_of(folder / ONE_FILE)
    if not index.is_file():
        expected = f"a folder with {ONE_FILE} or {SHARDS}"
        raise StoreError(folder, expected, "neither", "give the folder that save_pretrained wrote")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(index, "an index of safetensors files", one_line(error), _AGAIN) from error
    found: dict[str, TensorEntry] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise StoreError(index, "names of files in the same folder", repr(file), _AGAIN)
        there = tensors_of(folder / file)
        wanted = [name for name, its_file in names.items() if its_file == file]
        missing = [name for name in wanted if name not in there]
        if missing:
            raise StoreError(folder / file, f"{missing[0]}, as {SHARDS} says", "a file without it", _AGAIN)
        found |= there
    return found


def tensors_of(path: Path) -> dict[str, TensorEntry]:
    """Of one safetensors file, whose length is checked."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        size = path.stat().st_size
        header.pop("__metadata__", None)
        found = {name: _entry(path, 8 + length, facts) for name, facts in header.items()}
    except OSError as error:
        raise StoreError(path, "a file that can be read", one_line(error), _AGAIN) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(path, "a complete safetensors file", f"a damaged one ({one_line(error)})", _AGAIN) from error
    end = max((entry.start + entry.size for entry in found.values()), default=8 + length)
    if size != end:
        raise StoreError(path, f"{end} bytes, as its header says", size, _AGAIN)
    return found


def save_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    digest: Callable[[memoryview], Any] = lambda data: None,
) -> list[Any]:
    """The file appears whole or not at all. Chunks of it are copied from the device, digested and written at the same
    time. The digests of its chunks of `amoeba.system.pipeline.CHUNK` bytes are returned."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-_ORDER.index(NAMES[item[1].dtype]), item[0])))
    entries = {name: TensorEntry(path, 0, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered.items()}
    header = header_of(entries, metadata)
    start = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    flat = [start, *(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in ordered.values())]
    pinned = any(tensor.is_cuda for tensor in flat)
    segments = [Segment(len(tensor), _Copy(tensor)) for tensor in flat]
    memory = {"memory": _pinned} if pinned else {}
    if pinned:
        torch.cuda.synchronize()  # the threads that copy are in no stream
    threads = min(_COPIERS, usable_cores())
    with whole_file(path, sum(map(len, flat))) as file:
        return [found for _, found in write_segments(file, segments, digest=digest, threads=threads, **memory)]


class _Copy:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self, begin: int, into: memoryview) -> None:
        torch.frombuffer(into, dtype=torch.uint8).copy_(self._tensor[begin : begin + len(into)])


def _pinned(size: int) -> memoryview:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data


def header_of(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a safetensors file with these tensors, one after another, begins with."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, entry in tensors.items():
        offsets = [end, end + entry.size]
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(path: Path, data: int, facts: dict[str, Any]) -> TensorEntry:
    if facts["dtype"] not in _NAMED:
        raise ValueError(f"dtype {facts['dtype']!r}, which is not known here")
    begin, end = facts["data_offsets"]
    entry = TensorEntry(path, data + begin, _NAMED[facts["dtype"]], tuple(map(int, facts["shape"])))
    if begin < 0 or min(entry.shape, default=0) < 0 or end - begin != entry.size:
        raise ValueError(f"offsets {begin} and {end} for {entry.size} bytes")
    return entry


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

    def tensor_of(self, expert: int) -> TensorEntry:
        return self.tensors[0 if self.stacked else expert]

    def range_of(self, expert: int) -> tuple[Path, int]:
        tensor = self.tensor_of(expert)
        return tensor.file, tensor.start + (expert * self.size if self.stacked else 0)

    def numbers(self, blob: Tensor) -> Tensor:
        """Its own in the blob, a view."""
        all_of_it = blob.view(self.dtype)
        return torch.as_strided(all_of_it, self.shape, self.stride, all_of_it.storage_offset() + self.offset)

    def put(self, expert: int, source: Tensor, blob: Tensor) -> None:
        """source: its bytes that were read; both are uint8. Codes stay as they are; scales may be wider in the blob.
        StoreError where what is there already differs."""
        there, found = self.numbers(blob), self._read(expert, source)
        if self.again and not torch.equal(there, found):
            expected, got = "one scale for gate and up of an expert", f"two, {there.tolist()} and {found.tolist()}"
            raise StoreError(self.tensors[0].file, expected, got, "quantise the model with amoeba quantise")
        there.copy_(found)

    def is_in(self, blob: Tensor, expert: int, source: Tensor) -> bool:
        """Whether `put` would leave this blob as it is, bit for bit."""
        there, found = self.numbers(blob), self._read(expert, source).to(self.dtype)
        return torch.equal(_as_bytes(there), _as_bytes(found))

    def rows(self, begin: int, count: int) -> Piece:
        """Some of the first dimension alone; in the file they follow each other."""
        size = self.size // self.shape[0] * count
        shape, offset = (count, *self.shape[1:]), self.offset + begin * self.stride[0]
        return self._replace(size=size, shape=shape, offset=offset)

    def _read(self, expert: int, source: Tensor) -> Tensor:
        return self.tensor_of(expert).values(source, self.dtype).view(self.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class MappedLayer:
    entry: LayerEntry
    pieces: tuple[Piece, ...]
