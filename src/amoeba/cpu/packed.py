"""Frozen expert weights packed once for the matrix units of this CPU, and products of sorted rows with them.

N routed rows · E experts · O out · I in; rows of one expert lie together, offs_E (int32) holds where each expert's end

    packed = PackedWeights.pack(weight_EOI, kind="int8")            # bf16 or fp32 in; the original may go
    multiply_rows(packed, x_TI, offs_E, h_NO, index_N=token_N)      # h[n] = x[token[n]] · Wᵀ of n's expert
    multiply_rows_transposed(packed, dh_NO, offs_E, dx_NI)          # dx[n] = dh[n] · W; packs it first

Sums are in fp32 (bf16) or int32 (int8). int8 is symmetric: one scale per output channel of a weight, one per row.
AMX tiles are used where the CPU has them, AVX-512 dot products where it has those, plain vectors elsewhere;
AMOEBA_CPU_PATH=generic|avx512|amx asks for one of them. Rows past offs_E[-1] are neither read nor written.
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

from amoeba.cpu.build import CoreUnavailable, compiled_library, load

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
    "amoeba_packed_rows": (None, (
        _INT, _INT, _INT64, _POINTER,                           # path, int8, experts, offs
        _POINTER, _INT64, _POINTER,                             # rows, stride, index
        _POINTER, _POINTER, _POINTER, _POINTER,                 # packed, scale, sum, scale of the summed dimension
        _INT64, _INT64, _POINTER, _INT64, _INT, _INT,           # depth, columns, out, stride, fp32, threads
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
        self.rows = library.amoeba_packed_rows


@functools.cache
def load_packed() -> PackedLibrary:
    return PackedLibrary(compiled_library("packed"))


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
        scale_EO = torch.empty(experts, columns) if int8 else None
        sum_EO = torch.empty(experts, columns, dtype=torch.int32) if int8 else None
        library.pack(
            int8, weight_EOI.dtype == torch.float32, experts, columns, depth,
            weight_EOI.data_ptr(), *weight_EOI.stride(),
            data.data_ptr(), _address(scale_EO), _address(sum_EO), torch.get_num_threads(),
        )  # fmt: skip
        return PackedWeights(kind, experts, columns, depth, _Packing(data, columns, depth, sum_EO, scale_EO))

    @functools.cached_property
    def transposed(self) -> _Packing:
        """For rows · W: the very same values again, so that backward differentiates what forward computed."""
        int8, forward = self.kind == "int8", self.forward
        data = _empty_packing(self.kind, self.experts, self.in_features, self.out_features)
        sum_EI = torch.empty(self.experts, self.in_features, dtype=torch.int32) if int8 else None
        load_packed().pack_transposed(
            int8, self.experts, self.out_features, self.in_features,
            forward.data.data_ptr(), data.data_ptr(), _address(sum_EI), torch.get_num_threads(),
        )  # fmt: skip
        return _Packing(data, self.in_features, self.out_features, sum_EI, depth_scale_ED=forward.column_scale_EC)


def multiply_rows(
    packed: PackedWeights, rows: Tensor, offs_E: Tensor, out: Tensor, index_N: Tensor | None = None
) -> None:
    """out[n] (O) = rows[n] or rows[index[n]] (I) · Wᵀ of n's expert; rows bf16, out bf16 or fp32."""
    _multiply(packed, packed.forward, rows, offs_E, out, index_N)


def multiply_rows_transposed(
    packed: PackedWeights, rows: Tensor, offs_E: Tensor, out: Tensor, index_N: Tensor | None = None
) -> None:
    """out[n] (I) = rows[n] or rows[index[n]] (O) · W of n's expert; rows bf16, out bf16 or fp32."""
    _multiply(packed, packed.transposed, rows, offs_E, out, index_N)


def _multiply(
    packed: PackedWeights, packing: _Packing, rows: Tensor, offs_E: Tensor, out: Tensor, index_N: Tensor | None
) -> None:
    _check_offs(offs_E, packed.experts, out.shape[0])
    _check_matrix("rows", rows, packing.depth, (torch.bfloat16,))
    _check_matrix("out", out, packing.columns, (torch.bfloat16, torch.float32))
    _check_index(rows, index_N, owned=int(offs_E[-1]), count=out.shape[0])
    load_packed().rows(
        current_path(), packed.kind == "int8", packed.experts, offs_E.data_ptr(),
        rows.data_ptr(), rows.stride(0), _address(index_N),
        packing.data.data_ptr(), _address(packing.column_scale_EC), _address(packing.sum_EC),
        _address(packing.depth_scale_ED), packing.depth, packing.columns,
        out.data_ptr(), out.stride(0), out.dtype == torch.float32, torch.get_num_threads(),
    )  # fmt: skip


def _empty_packing(kind: PackedKind, experts: int, columns: int, depth: int) -> Tensor:
    size = load_packed().bytes_per_expert(kind == "int8", columns, depth)
    return empty_in_huge_pages(experts, size).view(_STORAGE[kind])


def empty_in_huge_pages(*shape: int) -> Tensor:
    """uint8, aligned to cache lines: tiles are read by them."""
    memory = torch.empty(*shape, dtype=torch.uint8)
    assert memory.data_ptr() % 64 == 0, "torch aligns its memory to cache lines"
    load_packed().ask_for_huge_pages(memory.data_ptr(), memory.numel())
    return memory


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_offs(offs_E: Tensor, experts: int, count: int) -> None:
    assert offs_E.shape == (experts,) and offs_E.dtype == torch.int32 and offs_E.is_contiguous(), (
        f"offs_E is int32 ({experts},), contiguous, got {offs_E.dtype} {tuple(offs_E.shape)}"
    )
    ends = offs_E.tolist()
    assert all(a <= b for a, b in zip([0, *ends], [*ends, count], strict=True)), (
        f"offs_E rises from 0 to at most {count}, got {ends}"
    )


def _check_matrix(name: str, matrix: Tensor, columns: int, dtypes: tuple[torch.dtype, ...]) -> None:
    assert matrix.dtype in dtypes and matrix.device.type == "cpu", (
        f"{name}: {' or '.join(map(str, dtypes))} on the CPU, got {matrix.dtype} on {matrix.device}"
    )
    assert matrix.dim() == 2 and matrix.shape[1] == columns, f"{name}: (rows, {columns}), got {tuple(matrix.shape)}"
    assert matrix.stride(1) == 1 or columns == 1, f"{name}: contiguous along a row, strides are {matrix.stride()}"
    assert not matrix.requires_grad or not torch.is_grad_enabled(), f"{name}: autograd does not see these products"


def _check_index(rows: Tensor, index_N: Tensor | None, owned: int, count: int) -> None:
    if index_N is None:
        assert rows.shape[0] >= owned, f"{owned} rows belong to experts, got {rows.shape[0]}"
        return
    assert index_N.shape == (count,) and index_N.dtype == torch.int64 and index_N.is_contiguous(), (
        f"index_N is int64 ({count},), contiguous, got {index_N.dtype} {tuple(index_N.shape)}"
    )
    if owned:
        low, high = index_N[:owned].aminmax()
        assert low >= 0 and high < rows.shape[0], f"index_N points into {rows.shape[0]} rows, got {low} to {high}"
