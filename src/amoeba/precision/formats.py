"""Number formats of quantised weights (fp8, mxfp8, mxfp4, nvfp4): elements, blocks, scales, and how numbers are
rounded.

    codes = E4M3.encode(values)              # uint8; round to nearest, ties to even, saturating if finite
    values = E4M3.decode(codes)              # fp32, exact
    scale = E8M0.decode(exponent_bytes)

Plain torch on any device. These are the definitions: kernels are compared with them bit by bit.

| format  | element | block of a weight | scale                                     |
|---------|---------|-------------------|-------------------------------------------|
| fp8-128 | e4m3    | 128 x 128         | fp32                                      |
| mxfp8   | e4m3    | 1 x 32            | e8m0, a power of two, rounded down (OCP)  |
| mxfp4   | e2m1    | 1 x 32            | e8m0, the same                            |
| nvfp4   | e2m1    | 1 x 16            | e4m3, times one fp32 number of the matrix |

Blocks of GGUF files (`q8_0`, `q4_k` and so on) and `nf4` of bitsandbytes are formats as well: their scales are among
the numbers of a row (`amoeba.precision.blocks`).

Experts that train (`amoeba.precision.recipes`) have square blocks, so that a transposed weight is the same numbers, and
rows with a block of a row. Their e8m0 scales are rounded up, and each nvfp4 row has an fp32 number of its own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.precision.blocks import BLOCK_KINDS

ScaleKind = Literal["fp32", "e8m0", "e4m3", "inside"]


class Element(ABC):
    """
    largest:  the largest finite number.
    exponent: of the largest power of two.
    bits:     of a code; codes narrower than a byte are packed two to a byte, the first in the low bits.
    """

    name: ClassVar[str]
    largest: ClassVar[float]
    exponent: ClassVar[int]
    bits: ClassVar[int]

    @staticmethod
    @abstractmethod
    def encode(values: Tensor) -> Tensor:
        """One code in a uint8 for each fp32 number: nearest, ties to even. A finite number that is too large becomes
        the largest, the sign of a zero stays. NaN and infinities become NaN, where the element has one."""

    @staticmethod
    @abstractmethod
    def decode(codes: Tensor) -> Tensor:
        """fp32."""

    @staticmethod
    def pack(codes: Tensor) -> Tensor:
        """Two codes of four bits to a byte along the last dimension, of an even length."""
        return codes[..., 0::2] | codes[..., 1::2] << 4

    @staticmethod
    def unpack(packed: Tensor) -> Tensor:
        """The codes that `pack` packed."""
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

    @classmethod
    def decode_packed(cls, packed: Tensor) -> Tensor:
        """fp32, twice as long as the packed codes of four bits."""
        every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
        table = cls.decode(cls.unpack(every_byte[:, None]))
        values = table.index_select(0, packed.flatten().to(torch.int32))
        return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


class _E4M3(Element):
    """OCP's e4m3 (torch.float8_e4m3fn): no infinities, NaN is 0x7f and 0xff."""

    name, largest, exponent, bits = "e4m3", 448.0, 8, 8

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        largest = _E4M3.largest  # torch's cast gives NaN for what is beyond it
        saturated = values.clamp(-largest, largest).masked_fill(values.isinf(), torch.nan)
        return saturated.to(torch.float8_e4m3fn).view(torch.uint8)

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)


class _E2M1(Element):
    """OCP's e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. It has no NaN: a block's scale says that."""

    name, largest, exponent, bits = "e2m1", 6.0, 2, 4
    VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        size = values.abs()
        codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
        for code, (lower, upper) in enumerate(zip(_E2M1.VALUES[:-1], _E2M1.VALUES[1:], strict=True)):
            middle = (lower + upper) / 2  # of which an even code gets the tie
            codes += size > middle if code % 2 == 0 else size >= middle
        return codes + values.signbit().to(torch.uint8) * 8

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        signed = (*_E2M1.VALUES, *(-value for value in _E2M1.VALUES))
        table = torch.tensor(signed, dtype=torch.float32, device=codes.device)
        return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


class E8M0:
    """Exponents with a bias of 127: powers of two from 2^-127 on; 255 is NaN."""

    bias, nan = 127, 255

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        """fp32, exact: 2^-127 is below its smallest normal number."""
        bits = codes.to(torch.int32) << 23
        bits = bits.masked_fill(codes == 0, 1 << 22).masked_fill(codes == E8M0.nan, 0x7FC00000)
        return bits.view(torch.float32)


class _InBlocks(Element):
    """Of numbers that have no codes of their own: a row is a run of `amoeba.precision.blocks`."""

    name, largest, exponent, bits = "blocks", 0.0, 0, 8

    @staticmethod
    def encode(values: Tensor) -> Tensor:
        raise bad_value("encode", "a format with codes", "blocks", "use quantise_blocks")

    @staticmethod
    def decode(codes: Tensor) -> Tensor:
        raise bad_value("decode", "a format with codes", "blocks", "use dequantise_blocks")


E4M3, E2M1, IN_BLOCKS = _E4M3(), _E2M1(), _InBlocks()


@dataclass(frozen=True)
class Format:
    """
    name:    as users write it.
    element: of the numbers.
    block:   rows and columns of a matrix that share a scale.
    scale:   what a scale is; those of "e4m3" are times one number of the whole matrix, or of its row. "inside": a block
             has scales of its own among its numbers.
    power_of_two: whether scales are rounded up to one, a normal number, 1 for zeros: such a scale costs no precision of
             its own, and nothing saturates. Without it, fp32 has other numbers, and e8m0 is rounded down.
    by_row:  whether each row has the number that a matrix has otherwise: it depends on no other row.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: ScaleKind
    power_of_two: bool = False
    by_row: bool = False

    @property
    def has_matrix_scale(self) -> bool:
        return self.scale == "e4m3"

    def stored_columns(self, columns: int) -> int:
        """Bytes of a row: codes narrower than a byte fill whole blocks."""
        if self.scale == "inside":
            return -(-columns // self.block[1]) * BLOCK_KINDS[self.name].bytes
        if self.element.bits == 8:
            return columns
        return -(-columns // self.block[1]) * self.block[1] * self.element.bits // 8

    def __reduce__(self) -> tuple:
        return format_named, (self.name,)  # copies and pickles are this one


FP8_128 = Format("fp8-128", E4M3, (128, 128), "fp32")
FP8_128_ROWS = Format("fp8-128-rows", E4M3, (1, 128), "fp32")  # of activations, token by token
FP8_TRAINING = Format("fp8-128-training", E4M3, (128, 128), "fp32", power_of_two=True)  # of weights that train
FP8_TRAINING_ROWS = Format("fp8-128-training-rows", E4M3, (1, 128), "fp32", power_of_two=True)
FP8_TRAINING_COLUMNS = Format("fp8-128-training-columns", E4M3, (128, 1), "fp32", power_of_two=True)
MXFP8 = Format("mxfp8", E4M3, (1, 32), "e8m0")
MXFP4 = Format("mxfp4", E2M1, (1, 32), "e8m0")
NVFP4 = Format("nvfp4", E2M1, (1, 16), "e4m3")
MXFP8_TRAINING = Format("mxfp8-training", E4M3, (32, 32), "e8m0", power_of_two=True)
MXFP8_TRAINING_ROWS = Format("mxfp8-training-rows", E4M3, (1, 32), "e8m0", power_of_two=True)
NVFP4_TRAINING = Format("nvfp4-training", E2M1, (16, 16), "e4m3")
NVFP4_TRAINING_ROWS = Format("nvfp4-training-rows", E2M1, (1, 16), "e4m3", by_row=True)
OF_BLOCKS = {
    name: Format(name, IN_BLOCKS, (1, kind.numbers), "inside") for name, kind in BLOCK_KINDS.items() if name != "mxfp4"
}
_TRAINING = (
    *(FP8_TRAINING, FP8_TRAINING_ROWS, FP8_TRAINING_COLUMNS),
    *(MXFP8_TRAINING, MXFP8_TRAINING_ROWS, NVFP4_TRAINING, NVFP4_TRAINING_ROWS),
)
FORMATS = {each.name: each for each in (FP8_128, FP8_128_ROWS, *_TRAINING, MXFP8, MXFP4, NVFP4)}


def format_named(name: str) -> Format:
    """One of FORMATS, or "fp8-64x32": as fp8-128, with blocks of another size."""
    found = FORMATS.get(name) or OF_BLOCKS.get(name)
    if found is not None:
        return found
    sizes = re.fullmatch(r"fp8-(\d+)x(\d+)", name)
    if sizes is None:
        raise bad_value("format", f"one of {', '.join(FORMATS | OF_BLOCKS)}", repr(name), "choose one of them")
    return fp8_blocks(*map(int, sizes.groups()))


def fp8_training_columns(rows: int) -> Format:
    """e4m3 with a power of two as scale for each column of a matrix of this many rows."""
    return Format(f"fp8-{rows}-training-columns", E4M3, (max(rows, 1), 1), "fp32", power_of_two=True)


def fp8_blocks(rows: int, columns: int) -> Format:
    """e4m3 with a scale in fp32 for each block of this size, as files have it."""
    block = (rows, columns)
    if any(size < 1 or size & (size - 1) for size in block):
        remedy = "load the checkpoint dequantised, or its unquantised one"
        raise bad_value("block of scales", "powers of two, such as 128 x 128", f"{rows} x {columns}", remedy)
    same = (each for each in (FP8_128, FP8_128_ROWS) if each.block == block)
    return next(same, Format(f"fp8-{rows}x{columns}", E4M3, block, "fp32"))
