"""Frozen expert weights packed once for the matrix units of this CPU, and which of those units products use.

E experts · O out · I in

    packed = PackedWeights.pack(weight_EOI, kind="int8")    # bf16 or fp32 in; the original may go
    packed.transposed                                       # the same values for rows · W; made when first asked for

Products with them are in node.py. int8 is symmetric: one scale per output channel of a weight, one per row. AMX tiles
are used where the CPU has them, AVX-512 dot products where it has those, plain vectors elsewhere;
AMOEBA_CPU_PATH=generic|avx512|amx asks for one of them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path as FilePath
from typing import Literal

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.build import CoreUnavailable, load, with_library
from amoeba.cpu.pointers import CPU, address, address_at_strides, optional_address, place_of

logger = logging.getLogger("amoeba")

PackedKind = Literal["bf16", "int8"]
_STORAGE: dict[PackedKind, torch.dtype] = {"bf16": torch.bfloat16, "int8": torch.int8}
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

# fmt: off
_SIGNATURES = {
    "amoeba_packed_best_path": (_INT, ()),
    "amoeba_request_amx": (_INT, ()),
    "amoeba_ask_for_huge_pages": (None, (_POINTER, _INT64)),    # memory, bytes
    "amoeba_packed_bytes": (_INT64, (_INT, _INT64, _INT64)),    # int8, columns, depth
    "amoeba_pack": (None, (
        _INT, _INT, _INT64, _INT64, _INT64,                     # int8, fp32, experts, columns, depth
        _POINTER, _INT64, _INT64, _INT64,                       # weight, its strides
        _POINTER, _POINTER, _POINTER, _INT,                     # packed, scale, sum, threads
    )),
    "amoeba_pack_transposed": (None, (
        _INT, _INT64, _INT64, _INT64,                           # int8, experts, columns, depth
        _POINTER, _POINTER, _POINTER, _INT,                     # packed, transposed, sum, threads
    )),
}
# fmt: on


class Path(IntEnum):
    """How the sums are formed, slowest first; the order of `enum Path`."""

    GENERIC = 0
    AVX512 = 1
    AMX = 2


class PackedLibrary:
    """Handle of the loaded library."""

    def __init__(self, file: FilePath) -> None:
        library = load(file, _SIGNATURES)
        self.best_path = Path(library.amoeba_packed_best_path())
        self.request_amx = library.amoeba_request_amx
        self.ask_for_huge_pages = library.amoeba_ask_for_huge_pages
        self.bytes_per_expert = library.amoeba_packed_bytes
        self.pack = library.amoeba_pack
        self.pack_transposed = library.amoeba_pack_transposed


@functools.cache
def load_packed() -> PackedLibrary:
    return with_library("packed", PackedLibrary)


def current_path() -> Path:
    """The path that products take here: the best that compiler and CPU have, or the one AMOEBA_CPU_PATH names."""
    return _choose_path(os.environ.get("AMOEBA_CPU_PATH"))


@functools.cache
def _choose_path(name: str | None) -> Path:
    library = load_packed()
    names = {path.name.lower(): path for path in Path}
    if name is not None and name not in names:
        raise ValueError(f"AMOEBA_CPU_PATH is one of {', '.join(names)}, got {name!r}")
    wanted = library.best_path if name is None else names[name]
    if wanted > library.best_path:
        raise CoreUnavailable(
            f"AMOEBA_CPU_PATH={name}, but this CPU with this compiler has {library.best_path.name.lower()} at best; "
            "unset it, or name a newer compiler in CXX"
        )
    if wanted is not Path.AMX:
        return wanted
    refusal = library.request_amx()
    if not refusal:
        return Path.AMX
    reason = (
        f"Linux refused the AMX tile registers ({os.strerror(refusal)}): kernel 5.16 or newer and a sandbox that "
        "admits arch_prctl(ARCH_REQ_XCOMP_PERM) are needed"
    )
    if name is not None:
        raise CoreUnavailable(f"AMOEBA_CPU_PATH=amx, but {reason}")
    logger.warning("%s; using AVX-512 dot products", reason)
    return Path.AVX512


@dataclass(frozen=True)
class _Packing:
    """What one direction of the product reads. `columns` are those of the product, `depth` is summed over."""

    data: Tensor
    columns: int
    depth: int
    sum_EC: Tensor | None  # int8: Σ over the depth, for the offset of the unsigned rows
    column_scale_EC: Tensor | None = None
    depth_scale_ED: Tensor | None = None
    stride_ECD: tuple[int, int, int] | None = None  # data is the weight as it is stored, at these strides
    coding: ctypes.Structure | None = None  # data is codes, of these (see codes.py)
    turned: bool = False  # the columns of the product are those of the stored codes


@dataclass(frozen=True)
class PackedWeights:
    """(E, O, I) weights in the order of the tiles; made by `pack`."""

    kind: PackedKind
    experts: int
    out_features: int
    in_features: int
    forward: _Packing = field(repr=False)

    @staticmethod
    def pack(weight_EOI: Tensor, kind: PackedKind = "bf16") -> PackedWeights:
        """From bf16 or fp32 at any strides."""
        if kind not in _STORAGE:
            raise ValueError(f"kind is one of {', '.join(_STORAGE)}, got {kind!r}")
        if weight_EOI.dtype not in (torch.bfloat16, torch.float32) or weight_EOI.device.type != "cpu":
            raise ValueError(
                f"weights are packed from bfloat16 or float32 on the CPU, got {weight_EOI.dtype} on "
                f"{weight_EOI.device}; convert them first"
            )
        if weight_EOI.dim() != 3 or 0 in weight_EOI.shape:
            raise ValueError(f"weights are (experts, out, in) and not empty, got {tuple(weight_EOI.shape)}")
        experts, columns, depth = weight_EOI.shape
        library, int8 = load_packed(), kind == "int8"
        data = _empty_packing(kind, experts, columns, depth)
        size = experts, columns
        scale_EO = torch.empty(size, dtype=torch.float32, device=CPU) if int8 else None
        sum_EO = torch.empty(size, dtype=torch.int32, device=CPU) if int8 else None
        library.pack(
            int8, weight_EOI.dtype == torch.float32, experts, columns, depth,
            address_at_strides("weight_EOI", weight_EOI, weight_EOI.dtype, (experts, columns, depth)),
            *weight_EOI.stride(),
            address("data", data, _STORAGE[kind], _packing_shape(kind, experts, columns, depth)),
            optional_address("scale_EO", scale_EO, torch.float32, size),
            optional_address("sum_EO", sum_EO, torch.int32, size),
            torch.get_num_threads(),
        )  # fmt: skip
        if scale_EO is not None:
            _check_scales(scale_EO)
        return PackedWeights(kind, experts, columns, depth, _Packing(data, columns, depth, sum_EO, scale_EO))

    @functools.cached_property
    def transposed(self) -> _Packing:
        """For rows · W: the same values again, so that backward differentiates what forward computed."""
        int8, forward = self.kind == "int8", self.forward
        data = _empty_packing(self.kind, self.experts, self.in_features, self.out_features)
        size = self.experts, self.in_features
        sum_EI = torch.empty(size, dtype=torch.int32, device=CPU) if int8 else None
        load_packed().pack_transposed(
            int8, self.experts, self.out_features, self.in_features,
            packing_address("W", self.kind, self.experts, forward),
            address("data", data, _STORAGE[self.kind], _packing_shape(self.kind, *size, self.out_features)),
            optional_address("sum_EI", sum_EI, torch.int32, size), torch.get_num_threads(),
        )  # fmt: skip
        return _Packing(data, self.in_features, self.out_features, sum_EI, depth_scale_ED=forward.column_scale_EC)


def packing_address(name: str, kind: PackedKind, experts: int, packing: _Packing) -> int:
    """Where that memory begins, in tiles or, where the weight is read as it is stored, at its strides."""
    if packing.coding is not None:
        return address_at_strides(name, packing.data, torch.uint8, tuple(packing.data.shape))
    if packing.stride_ECD is not None:
        return address_at_strides(name, packing.data, _STORAGE[kind], tuple(packing.data.shape))
    return address(name, packing.data, _STORAGE[kind], _packing_shape(kind, experts, packing.columns, packing.depth))


def _packing_shape(kind: PackedKind, experts: int, columns: int, depth: int) -> tuple[int, int]:
    bytes_per_expert = load_packed().bytes_per_expert(kind == "int8", columns, depth)
    return experts, bytes_per_expert // _STORAGE[kind].itemsize


def _check_scales(scale_EO: Tensor) -> None:
    """int8 has no NaN and no infinity: a channel that holds one has no scale, and is refused."""
    if not torch.isfinite(scale_EO).all():
        expert, channel = (~torch.isfinite(scale_EO)).nonzero()[0].tolist()
        raise bad_value(
            "weights",
            "finite numbers, which int8 can hold",
            f"a NaN or an infinity in expert {expert}, output channel {channel}",
            'correct the checkpoint, or pack with kind="bf16", which preserves them',
        )


def _empty_packing(kind: PackedKind, experts: int, columns: int, depth: int) -> Tensor:
    shape = _packing_shape(kind, experts, columns, depth)
    return empty_in_huge_pages(shape[0], shape[1] * _STORAGE[kind].itemsize).view(_STORAGE[kind])


def empty_in_huge_pages(*shape: int) -> Tensor:
    """uint8, aligned to cache lines: tiles are read by them."""
    memory = torch.empty(shape, dtype=torch.uint8, device=CPU)
    if place_of(memory) % 64:
        raise RuntimeError(f"expected memory aligned to cache lines from torch; got {place_of(memory):#x}")
    load_packed().ask_for_huge_pages(address("memory", memory, torch.uint8, shape), memory.numel())
    return memory
