"""Expert weights as the compiled passes read them: packed, as the caller stores them, or quantised with scales.

E experts · O out · I in

Packed once for the matrix units of this CPU, and frozen:

    packed = PackedWeights.pack(weight_EOI, kind="int8")    # bf16 or fp32 in; the original may go
    packed.transposed                                       # the same values for rows · W; made when first asked for

Products with them are in node_passes.py. int8 is symmetric: one scale per output channel of a weight, one per row. AMX
tiles are used where the CPU has them, AVX-512 dot products where it has those, plain vectors elsewhere;
AMOEBA_CPU_PATH=generic|avx512|amx asks for one of them.

As the caller stores them; each job of a pass packs the panels it reads, and forgets them:

    node = NodeExperts(StoredWeights(gate_up_EJH), StoredWeights(down_EHI), None, None, activation)

For weights that change between the passes: nothing of them is kept, and they can be given gradients.

Quantised, with a scale for each block, and frozen; eight or four bits per number, read in place:

    codes = ScaledCodes(code_EOI, scale, block=(128, 128), parts=2)                           # e4m3, scales in fp32
    codes = ScaledCodes(bytes_EOB, scale, (1, 32), element="e2m1", columns=2880, scale_values=powers_of_two)
    load_core().decode(x_TH, expert_TK, weight_TK, codes, other_codes, None, None, activation)
    NodeExperts(codes, other_codes, None, None, activation)         # as StoredWeights, and without gradients

The core makes numbers of the codes as it reads them. Where it decodes, a scale multiplies the sum of its block in fp32,
and no weight is rounded. Where it packs panels for its products, each weight is code · scale in fp32, rounded to bf16.
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


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """(E, O, I) in bf16 on the CPU, at any strides; fast where one of the inner strides is 1."""

    weight_EOI: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        weight = self.weight_EOI
        if weight.dim() != 3 or weight.dtype != torch.bfloat16 or not weight.is_cpu:
            raise bad_value(
                "weight_EOI",
                "(experts, out, in) in bfloat16 on the CPU",
                f"{tuple(weight.shape)} in {weight.dtype} on {weight.device}",
                "cast and move it first",
            )

    @property
    def kind(self) -> PackedKind:
        return "bf16"

    @property
    def experts(self) -> int:
        return self.weight_EOI.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight_EOI.shape[1]

    @property
    def in_features(self) -> int:
        return self.weight_EOI.shape[2]

    @property
    def forward(self) -> _Packing:
        stride_e, stride_out, stride_in = self.weight_EOI.stride()
        return self._read(self.out_features, self.in_features, (stride_e, stride_out, stride_in))

    @property
    def transposed(self) -> _Packing:
        stride_e, stride_out, stride_in = self.weight_EOI.stride()
        return self._read(self.in_features, self.out_features, (stride_e, stride_in, stride_out))

    def _read(self, columns: int, depth: int, stride_ECD: tuple[int, int, int]) -> _Packing:
        return _Packing(self.weight_EOI, columns, depth, None, stride_ECD=stride_ECD)


LEAST_COLUMNS = 16  # of a block: this many numbers are read at once

# `enum ElementKind` in csrc/codes.h: codes, and blocks, which have their scales among their numbers.
_BLOCKS = ("q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "nf4")
ELEMENTS = {name: number for number, name in enumerate(("e4m3", "e2m1", *_BLOCKS))}
_ONE = torch.ones((1, 1, 1), dtype=torch.float32, device=CPU)  # the scale of what has its own


class CScaleAxis(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("shift", "part", "part_blocks", "stride")]


class CCoding(ctypes.Structure):
    """As `Coding` in csrc/codes.h."""

    _fields_ = [
        ("element", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scales", "scale_values", "matrix_scale")),
        ("stride_e", ctypes.c_int64),
        ("matrix_stride_e", ctypes.c_int64),
        ("row", CScaleAxis),
        ("column", CScaleAxis),
    ]


def why_not_codes(block: tuple[int, int], parts: int) -> str | None:
    """Why the core does not read codes with such blocks, or None."""
    rows, columns = block
    if any(size < 1 or size & (size - 1) for size in block) or columns < LEAST_COLUMNS:
        return f"reads blocks of powers of two, {LEAST_COLUMNS} columns or more; these are {rows} x {columns}"
    return None if parts in (1, 2) else f"reads one or two parts with blocks of their own; these are {parts}"


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """
    code_EOI: uint8; each expert is contiguous, wherever it lies. Codes of e2m1 are two to a byte, the first in the low
              bits, and fill whole blocks: (E, O, bytes of a row).
    scale:    fp32, or uint8 (E, blocks of rows, blocks of columns); each expert contiguous, too.
    block:    rows and columns that share a scale.
    parts:    equal parts of the rows, each with blocks of its own.
    element:  one of ELEMENTS. Blocks have no scales of their own: rows are runs of whole blocks.
    columns:  I, where it is not the number of bytes of a row.
    scale_values: fp32 (256,), what a scale in uint8 stands for.
    matrix_scale_E: fp32, at any stride, by which all of what they stand for is multiplied, in fp32.
    """

    code_EOI: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    block: tuple[int, int]
    parts: int = 1
    element: str = "e4m3"
    columns: int | None = None
    scale_values: Tensor | None = field(default=None, repr=False)
    matrix_scale_E: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.element in _BLOCKS:
            reason = None if self.columns is not None else "takes the number of columns with blocks"
        else:
            reason = why_not_codes(self.block, self.parts)
        if reason is None and (self.code_EOI.dim() != 3 or self.code_EOI.shape[1] % self.parts):
            reason = f"takes (experts, out, in) with {self.parts} equal parts; these are {tuple(self.code_EOI.shape)}"
        if reason is None and self.element not in _BLOCKS and self.code_EOI.shape[2] != self._row_bytes():
            reason = f"takes {self._row_bytes()} bytes per row of {self.in_features}, not {self.code_EOI.shape[2]}"
        tensors = (self.code_EOI,) if self.element in _BLOCKS else (self.code_EOI, self.scale)
        if reason is None and not all(map(has_whole_experts, tensors)):
            reason = f"takes contiguous experts; these have strides {self.code_EOI.stride()}"
        if reason is not None:
            raise bad_value(
                "quantised weights", f"{self.element} weights that the core reads", reason, "dequantise them"
            )

    def _row_bytes(self) -> int:
        if self.element == "e4m3":
            return self.in_features
        return -(-self.in_features // self.block[1]) * self.block[1] // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.out_features, self.in_features

    def coding(self) -> CCoding:
        """For compiled code; what it points to has to outlive it."""
        if self.element in _BLOCKS:
            everything = CScaleAxis(62, 2**62, 0, 0)  # one scale
            one = address("one", _ONE, torch.float32, (1, 1, 1))
            return CCoding(ELEMENTS[self.element], one, None, None, 0, 0, everything, everything)
        (experts, out_features, in_features), (rows, columns) = self.shape, self.block
        of_part = out_features // self.parts
        down, across = -(-of_part // rows), -(-in_features // columns)
        kind = torch.float32 if self.scale_values is None else torch.uint8
        of_matrix = self.matrix_scale_E
        return CCoding(
            ELEMENTS[self.element],
            address_at_strides("scale", self.scale, kind, (experts, self.parts * down, across)),
            optional_address("scale_values", self.scale_values, torch.float32, (256,)),
            None if of_matrix is None else address_at_strides("matrix_scale_E", of_matrix, torch.float32, (experts,)),
            self.scale.stride(0),
            0 if of_matrix is None else of_matrix.stride(0),
            CScaleAxis(rows.bit_length() - 1, of_part, down, across),
            CScaleAxis(columns.bit_length() - 1, in_features, across, 1),
        )

    @property
    def kind(self) -> PackedKind:
        return "bf16"

    @property
    def experts(self) -> int:
        return self.code_EOI.shape[0]

    @property
    def out_features(self) -> int:
        return self.code_EOI.shape[1]

    @property
    def in_features(self) -> int:
        return self.code_EOI.shape[2] if self.columns is None else self.columns

    @property
    def forward(self) -> _Packing:
        return self._read(self.out_features, self.in_features, (self.code_EOI.shape[2], 1))

    @property
    def transposed(self) -> _Packing:
        return self._read(self.in_features, self.out_features, (1, self.code_EOI.shape[2]), turned=True)

    def _read(self, columns: int, depth: int, stride_CD: tuple[int, int], *, turned: bool = False) -> _Packing:
        stride_ECD, coding = (self.code_EOI.stride(0), *stride_CD), self.coding()
        return _Packing(self.code_EOI, columns, depth, None, stride_ECD=stride_ECD, coding=coding, turned=turned)


def has_whole_experts(tensor: Tensor) -> bool:
    """Whether each is contiguous; experts of a store lie apart, in their slots."""
    return all(expert.is_contiguous() for expert in tensor[:1])
