"""Blocks in kernels, ggml's and nf4: numbers of rows that are stored as `amoeba.precision.blocks` describes.

R rows · C columns · G groups of columns, each with a scale

    value_RC = load_blocks(rows, there_R, first, 128, MATRIX)      # fp32: the columns `first` to `first + 127`

MATRIX has the constants of `layout_of`. A number's bits lie in one or two fields of its block. A field has `run` bytes
for its first numbers' bits, and above these bits those of the next `run` numbers, until the bytes are full.

Values have the bits of `dequantise_blocks`, however the compiler fuses operations: scale · q is exact in fp32, because
a scale has at most 18 bits and q 6. nf4 has no offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.kernels.launch import cdiv
from amoeba.precision.blocks import BLOCK_KINDS, NF4
from amoeba.precision.quantised import QuantisedMatrix

# Columns of a tile, at least: those that one scale of any kind belongs to.
NARROWEST = 32


class _Field(NamedTuple):
    place: int
    bits: int
    run: int


class _Layout(NamedTuple):
    """zero: what is subtracted from q; group: columns that share a scale; scales: how they are stored."""

    low: _Field
    high: _Field | None
    zero: int
    group: int
    scales: str
    scale_place: int = 0


_LAYOUTS = {
    "q8_0": _Layout(_Field(2, 8, 32), None, 0, 32, "half"),
    "q5_0": _Layout(_Field(6, 4, 16), _Field(2, 1, 1), 16, 32, "half"),
    "q5_1": _Layout(_Field(8, 4, 16), _Field(4, 1, 1), 0, 32, "half, offset"),
    "q4_0": _Layout(_Field(2, 4, 16), None, 8, 32, "half"),
    "q4_1": _Layout(_Field(4, 4, 16), None, 0, 32, "half, offset"),
    "q6_k": _Layout(_Field(0, 4, 64), _Field(128, 2, 32), 32, 16, "bytes", 192),
    "q5_k": _Layout(_Field(48, 4, 32), _Field(16, 1, 32), 0, 32, "six bits, offset", 4),
    "q4_k": _Layout(_Field(16, 4, 32), None, 0, 32, "six bits, offset", 4),
    "q3_k": _Layout(_Field(32, 2, 32), _Field(0, 1, 32), 4, 16, "six bits", 96),
    "q2_k": _Layout(_Field(16, 2, 32), None, 0, 16, "four bits, offset", 0),
    "nf4": _Layout(_Field(4, 4, 32), None, 0, 32, "float"),
}
_NF4 = tl.constexpr(NF4)
# Where the scale of a whole block is, in fp16; that of its offsets follows.
_HALF = {"q6_k": 208, "q3_k": 108, "q2_k": 80}


def layout_of(matrix: QuantisedMatrix) -> dict[str, Any]:
    """Constants for `load_blocks`."""
    kind = matrix.format.name
    found = _LAYOUTS.get(kind)
    if found is None:
        raise bad_value("blocks", f"one of {', '.join(_LAYOUTS)}", kind, "dequantise them")
    high = found.high or _Field(0, 0, 1)
    return {
        "BLOCK_BYTES": BLOCK_KINDS[kind].bytes,
        "BLOCKS": cdiv(matrix.columns, BLOCK_KINDS[kind].numbers),
        "LOW": found.low.place,
        "LOW_BITS": found.low.bits,
        "LOW_RUN": found.low.run,
        "HIGH": high.place,
        "HIGH_BITS": high.bits,
        "HIGH_RUN": high.run,
        "ZERO": found.zero,
        "GROUP": found.group,
        "SCALES": found.scales,
        "HAS_OFFSETS": found.scales.endswith("offset"),
        "SCALES_AT": found.scale_place,
        "HALF": _HALF.get(kind, 0),
    }


@triton.jit
def load_blocks(rows, there, first, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """fp32 (R, COLUMNS), zeros where there is nothing. rows: pointers (R, 1) to the first byte of each row, of which
    `there` (R, 1) tells which exist; first and COLUMNS: multiples of 32, COLUMNS a power of two."""
    NUMBERS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    GROUP: tl.constexpr = MATRIX.GROUP
    GROUPS: tl.constexpr = COLUMNS // GROUP
    HEIGHT: tl.constexpr = rows.shape[0]
    column = first + tl.arange(0, COLUMNS)
    inside = there & (column < MATRIX.BLOCKS * NUMBERS)[None, :]
    block = rows + (column // NUMBERS * MATRIX.BLOCK_BYTES)[None, :]
    q = _load_bits(block, column, inside, MATRIX.LOW, MATRIX.LOW_BITS, MATRIX.LOW_RUN, NUMBERS)
    if MATRIX.LOW_BITS == 8:
        number = q.to(tl.int8, bitcast=True).to(tl.float32)
    elif MATRIX.SCALES == "float":
        number = _nf4(q, 0, 8)
    else:
        if MATRIX.HIGH_BITS > 0:
            high = _load_bits(block, column, inside, MATRIX.HIGH, MATRIX.HIGH_BITS, MATRIX.HIGH_RUN, NUMBERS)
            q |= high << MATRIX.LOW_BITS
        number = (q.to(tl.int32) - MATRIX.ZERO).to(tl.float32)
    group = first // GROUP + tl.arange(0, GROUPS)
    PER_BLOCK: tl.constexpr = NUMBERS // GROUP
    blocks = rows + (group // PER_BLOCK * MATRIX.BLOCK_BYTES)[None, :]
    known = there & (group < MATRIX.BLOCKS * PER_BLOCK)[None, :]
    scale, offset = _load_scales(blocks, (group % PER_BLOCK)[None, :], known, MATRIX)
    value = tl.reshape(number, (HEIGHT, GROUPS, GROUP)) * scale[:, :, None]
    if MATRIX.HAS_OFFSETS:
        value += offset[:, :, None]
    return tl.reshape(value, (HEIGHT, COLUMNS))


@triton.jit
def _nf4(code, FIRST: tl.constexpr, HALF: tl.constexpr):
    """Of codes that begin with FIRST, of which there are 2 · HALF: chosen bit by bit."""
    upper = (code & HALF) != 0
    if HALF == 1:
        low: tl.constexpr = _NF4[FIRST]
        high: tl.constexpr = _NF4[FIRST + 1]
        found = tl.where(upper, high, low)
    else:
        found = tl.where(upper, _nf4(code, FIRST + HALF, HALF // 2), _nf4(code, FIRST, HALF // 2))
    return found


@triton.jit
def _load_bits(
    block,
    column,
    inside,
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    # written so that the compiler sees which bytes lie side by side: of remainders of remainders it does not
    PLANES: tl.constexpr = 8 // BITS
    place = column // (RUN * PLANES) % (NUMBERS // (RUN * PLANES)) * RUN + column % RUN
    byte = tl.load(block + (PLACE + place)[None, :], mask=inside, other=0)
    if BITS < 8:
        shift = (column // RUN % PLANES * BITS).to(tl.uint8)
        byte = (byte >> shift[None, :]) & ((1 << BITS) - 1)
    return byte


@triton.jit
def _load_half(pointers, there):
    low = tl.load(pointers, mask=there, other=0).to(tl.uint16)
    high = tl.load(pointers + 1, mask=there, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_scales(blocks, group, there, MATRIX: tl.constexpr):
    """Of groups: their scales, and what is added to their numbers where they have offsets. blocks: pointers (R, G).
    Triton negates by subtracting from 0, which gives 0 for 0; times -1.0 gives -0.0, as torch does."""
    if MATRIX.SCALES == "float":
        scale = tl.load(blocks.to(tl.pointer_type(tl.float32)), mask=there, other=0.0)
    else:
        scale = _load_half(blocks + MATRIX.HALF, there)
    offset = scale
    at = blocks + MATRIX.SCALES_AT
    if MATRIX.SCALES == "half, offset":
        offset = _load_half(blocks + 2, there)
    elif MATRIX.SCALES == "bytes":
        scale *= tl.load(at + group, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    elif MATRIX.SCALES == "four bits, offset":
        both = tl.load(at + group, mask=there, other=0)
        offset = _load_half(blocks + MATRIX.HALF + 2, there) * (both >> 4).to(tl.float32) * -1.0
        scale *= (both & 15).to(tl.float32)
    elif MATRIX.SCALES == "six bits, offset":  # of the last four groups in two parts
        first = tl.load(at + group % 4, mask=there, other=0)
        second = tl.load(at + 4 + group % 4, mask=there, other=0)
        third = tl.load(at + 8 + group % 4, mask=there, other=0)
        of_scale = tl.where(group < 4, first & 63, (third & 15) | (first >> 6 << 4))
        least = tl.where(group < 4, second & 63, (third >> 4) | (second >> 6 << 4))
        offset = _load_half(blocks + 2, there) * least.to(tl.float32) * -1.0
        scale *= of_scale.to(tl.float32)
    elif MATRIX.SCALES == "six bits":
        fine = tl.load(at + group % 8, mask=there, other=0) >> (group // 8 * 4).to(tl.uint8)
        coarse = tl.load(at + 8 + group % 4, mask=there, other=0) >> (group // 4 * 2).to(tl.uint8)
        scale *= (((fine & 15) | ((coarse & 3) << 4)).to(tl.int32) - 32).to(tl.float32)
    return scale, offset
