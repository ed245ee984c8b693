"""Blocks in kernels, ggml's and nf4: numbers of rows that are stored as `amoeba.precision.blocks` describes.

R rows · C columns · G groups of columns, each with a scale

    value_RC = load_blocks(rows, there_R, first, 256, MATRIX)      # fp32: the columns `first` to `first + 255`
    packed = load_packed(rows, there_R, first, 256, MATRIX)        # the same columns as they are stored
    value_RP = value_of(packed, 1, 256, MATRIX)                    # fp32: the columns `columns_of(first, 1, ...)`

MATRIX has the constants of `layout_of`. A number's bits lie in one or two fields of its block. A field has `run` bytes
for its first numbers' bits, and above these bits those of the next `run` numbers, until the bytes are full: numbers at
the same bits of their bytes are a plane. Products over columns take plane after plane, so that each byte is loaded once
and by wide loads, and no number has to change its place; who needs the order of columns loads a byte for each number.

Values have the bits of `dequantise_blocks`, however the compiler fuses operations: scale · q is exact in fp32, because
a scale has at most 18 bits and q 6. nf4 has no offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from amoeba.core.errors import bad_value
from amoeba.kernels.launch import cdiv
from amoeba.kernels.quantise import BY_BITS
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
# A byte with these above it is a number in fp32 that is 2^23 larger: four of them to four numbers.
_RAISED = tl.constexpr(8388608.0)
_RAISE = tl.constexpr("".join(f"prmt.b32 ${i}, $4, 0x4B000000, 0x744{i};\n" for i in range(4)))
# The bits that a plane has of each of four bytes, as its lowest: eight planes of a bit, four of two, two of four, one.
_TAKE = tl.constexpr(
    tuple(
        f"shr.b32 $0, $1, {shift};\nand.b32 $0, $0, 0x{((1 << bits) - 1) * 0x01010101:08X};\n"
        for bits in (1, 2, 4, 8)
        for shift in range(0, 8, bits)
    )
)
# Bytes with a mask of ones are shifted right by 1, 2 or 4, others stay. Bits of the next byte come in from above, where
# none are taken from.
_SHIFT_SOME = tl.constexpr(
    tuple(f"{{\n.reg .b32 s;\nshr.b32 s, $1, {shift};\nlop3.b32 $0, s, $1, $2, 0xE4;\n}}\n" for shift in (1, 2, 4))
)
# Of one or two high bits, after two or four low ones; four bytes have the same shift.
_TAKE_HIGH = tl.constexpr(
    tuple(
        f"{{\n.reg .b32 s;\nand.b32 s, $2, 7;\nshr.b32 $0, $1, s;\nand.b32 $0, $0, "
        f"0x{((1 << bits) - 1) * 0x01010101:08X};\nshl.b32 $0, $0, {low_bits};\n}}\n"
        for bits in (1, 2)
        for low_bits in (2, 4)
    )
)


def layout_of(matrix: QuantisedMatrix) -> dict[str, Any]:
    """Constants for `load_blocks` and `load_packed`."""
    kind = matrix.format.name
    found = _LAYOUTS.get(kind)
    if found is None:
        raise bad_value("blocks", f"one of {', '.join(_LAYOUTS)}", kind, "dequantise them")
    high, blocks = found.high or _Field(0, 0, 1), cdiv(matrix.columns, BLOCK_KINDS[kind].numbers)
    planes = 8 // found.low.bits
    # a byte's planes have their high bits in one byte as well
    share = found.low.run % high.run == 0 and high.run * 8 % (found.low.run * planes * max(high.bits, 1)) == 0
    return {
        "BLOCK_BYTES": BLOCK_KINDS[kind].bytes,
        "BLOCKS": blocks,
        "LOW": found.low.place,
        "LOW_BITS": found.low.bits,
        "LOW_RUN": found.low.run,
        "HIGH": high.place,
        "HIGH_BITS": high.bits,
        "HIGH_RUN": high.run,
        "HIGH_TILES": 0 if found.high is None else 1 if share else planes,
        "PLANES": planes,
        "POLICY": "evict_first" if BLOCK_KINDS[kind].bytes % 16 == 0 else "",  # wide loads take a line at once
        "ZERO": found.zero,
        "GROUP": found.group,
        "LINE": min(found.low.run, found.group),
        "SCALES": found.scales,
        "HAS_OFFSETS": found.scales.endswith("offset"),
        "SCALES_AT": found.scale_place,
        "HALF": _HALF.get(kind, 0),
    }


def columns_together(kind: str) -> int:
    """Numbers of a row that `load_packed` takes, at least: those that share bytes."""
    low = _LAYOUTS[kind].low
    return low.run * 8 // low.bits


@triton.jit
def load_blocks(rows, there, first, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """fp32 (R, COLUMNS) in the order of columns, zeros where there is nothing. rows: pointers (R, 1) to the first byte
    of each row, of which `there` (R, 1) tells which exist. COLUMNS: a power of two of at least 32, first a multiple."""
    column = first + tl.arange(0, COLUMNS)
    low = _load_field(rows, there, column, MATRIX.LOW, MATRIX.LOW_BITS, MATRIX.LOW_RUN, MATRIX)
    q = _bits_of(low, column, MATRIX.LOW_BITS, MATRIX.LOW_RUN)
    if MATRIX.HIGH_BITS > 0:
        high = _load_field(rows, there, column, MATRIX.HIGH, MATRIX.HIGH_BITS, MATRIX.HIGH_RUN, MATRIX)
        q |= _bits_of(high, column, MATRIX.HIGH_BITS, MATRIX.HIGH_RUN) << MATRIX.LOW_BITS
    group = first // MATRIX.GROUP + tl.arange(0, COLUMNS // MATRIX.GROUP)
    heads = _load_heads(rows, there, first, group, COLUMNS, MATRIX)
    scale, offset = _scales(heads, _load_scale_bytes(rows, there, group, MATRIX), group, MATRIX)
    return _scaled(_number(q, MATRIX), scale, offset, MATRIX)


@triton.jit
def load_packed(rows, there, first, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """What COLUMNS numbers of each row from `first` on are stored as, each byte loaded once: for `value_of`, or
    `number_of` and `scales_of`. As for `load_blocks`, with COLUMNS of at least `columns_together`."""
    highs, bytes = (), ()
    for plane in tl.static_range(MATRIX.HIGH_TILES):
        high = _load_high(rows, there, first, plane, COLUMNS, MATRIX)
        highs = highs + (high,)  # type: ignore[assignment]  # noqa: RUF005 (Triton does not unpack)
    for plane in tl.static_range(MATRIX.PLANES):
        byte = _load_scale_bytes(rows, there, _groups_of(first, plane, COLUMNS, MATRIX), MATRIX)
        bytes = bytes + (byte,)  # type: ignore[assignment]  # noqa: RUF005
    heads = _load_heads(rows, there, first, _groups_of(first, 0, COLUMNS, MATRIX), COLUMNS, MATRIX)
    return _load_low(rows, there, first, COLUMNS, MATRIX), highs, heads, bytes, first


@triton.jit
def columns_of(first, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """(COLUMNS / PLANES,): the columns of a plane's numbers."""
    RUN: tl.constexpr = MATRIX.LOW_RUN
    byte = tl.arange(0, COLUMNS // MATRIX.PLANES)
    return first + byte // RUN * (RUN * MATRIX.PLANES) + PLANE * RUN + byte % RUN


@triton.jit
def _groups_of(first, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """The groups of each LINE of a plane's numbers."""
    RUN: tl.constexpr = MATRIX.LOW_RUN
    byte = tl.arange(0, COLUMNS // MATRIX.PLANES // MATRIX.LINE) * MATRIX.LINE
    return (first + byte // RUN * (RUN * MATRIX.PLANES) + PLANE * RUN + byte % RUN) // MATRIX.GROUP


@triton.jit
def value_of(packed, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """fp32 (R, COLUMNS / PLANES): a plane's numbers."""
    scale, offset = scales_of(packed, PLANE, COLUMNS, MATRIX)
    return _scaled(number_of(packed, PLANE, COLUMNS, MATRIX), scale, offset, MATRIX)


@triton.jit
def number_of(packed, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """The same without scales and offsets."""
    low, highs, _heads, _bytes, first = packed
    BITS: tl.constexpr = MATRIX.LOW_BITS
    if MATRIX.HIGH_TILES == 0:
        return _number(_take(low, PLANE, BITS), MATRIX)
    else:
        high = highs[PLANE if MATRIX.HIGH_TILES > 1 else 0]
        if MATRIX.HIGH_TILES == 1:
            high = _repeated(high, low.shape[1], MATRIX)
        return _number(_take(low, PLANE, BITS) | _take_high(high, first, PLANE, COLUMNS, MATRIX), MATRIX)


@triton.jit
def _repeated(high, WIDTH: tl.constexpr, MATRIX: tl.constexpr):
    """Each run of a field's bytes for all low ones that it has the high bits of."""
    HEIGHT: tl.constexpr = high.shape[0]
    RUN: tl.constexpr = MATRIX.HIGH_RUN
    RUNS: tl.constexpr = high.shape[1] // RUN
    wide = tl.broadcast_to(tl.reshape(high, (HEIGHT, RUNS, 1, RUN)), (HEIGHT, RUNS, WIDTH // (RUNS * RUN), RUN))
    return tl.reshape(wide, (HEIGHT, WIDTH))


@triton.jit
def _take_high(byte, first, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """A plane's high bits, at their places in its numbers. Which four bytes of a thread share a register is Triton's
    choice, so bytes that may be shifted differently are chosen one by one."""
    BITS: tl.constexpr = MATRIX.HIGH_BITS
    RUN: tl.constexpr = MATRIX.HIGH_RUN
    RUNS: tl.constexpr = 8 // BITS  # with their bits in the same bytes
    run = columns_of(0, 0, COLUMNS, MATRIX) // RUN % RUNS
    for bit in tl.static_range(3):
        byte = _shift_some(byte, run, bit, MATRIX)
    shared = PLANE * MATRIX.LOW_RUN // RUN % RUNS * BITS
    if COLUMNS < RUN * RUNS:
        shared += first // RUN % RUNS * BITS
    if BY_BITS:
        return (byte >> shared & ((1 << BITS) - 1)).to(tl.uint8) << MATRIX.LOW_BITS
    else:
        TAKE: tl.constexpr = _TAKE_HIGH[BITS * 2 + MATRIX.LOW_BITS // 2 - 3]
        given = [byte, tl.full(byte.shape, shared, tl.uint8)]
        return tl.inline_asm_elementwise(TAKE, "=&r,r,r", given, dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def _shift_some(byte, run, BIT: tl.constexpr, MATRIX: tl.constexpr):
    """By 2^BIT, where the run's number has the bit that says so."""
    APART: tl.constexpr = (1 << BIT) // MATRIX.HIGH_BITS * MATRIX.HIGH_RUN
    # a plane's runs lie side by side, or LOW_RUN * PLANES numbers apart
    if APART == 0 or (MATRIX.LOW_RUN <= APART and APART < MATRIX.LOW_RUN * MATRIX.PLANES):
        return byte
    else:
        shifted = tl.broadcast_to((run & (APART // MATRIX.HIGH_RUN) != 0)[None, :], byte.shape)
        if BY_BITS:
            return tl.where(shifted, byte >> (1 << BIT), byte)
        else:
            SHIFT: tl.constexpr = _SHIFT_SOME[BIT]
            given = [byte, tl.where(shifted, 255, 0).to(tl.uint8)]
            return tl.inline_asm_elementwise(SHIFT, "=r,r,r", given, dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def scales_of(packed, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """(R, lines), or (R, 1) where they share one: of a plane's numbers, and what is added where they have offsets."""
    _low, _highs, heads, bytes, first = packed
    return _scales(heads, bytes[PLANE], _groups_of(first, PLANE, COLUMNS, MATRIX), MATRIX)


@triton.jit
def _scaled(number, scale, offset, MATRIX: tl.constexpr):
    HEIGHT: tl.constexpr = number.shape[0]
    WIDTH: tl.constexpr = number.shape[1]
    LINES: tl.constexpr = scale.shape[1]
    value = tl.reshape(number, (HEIGHT, LINES, WIDTH // LINES)) * scale[:, :, None]
    if MATRIX.HAS_OFFSETS:
        value += offset[:, :, None]
    return tl.reshape(value, (HEIGHT, WIDTH))


@triton.jit
def _number(q, MATRIX: tl.constexpr):
    """fp32 of a number's bits."""
    if MATRIX.SCALES == "float":
        return _nf4(q, 0, 8)
    elif MATRIX.LOW_BITS == 8:
        return _raise(q ^ 128) - (_RAISED + 128.0)
    else:
        return _raise(q) - (_RAISED + MATRIX.ZERO)


@triton.jit
def _raise(byte):
    if not BY_BITS:
        return tl.inline_asm_elementwise(_RAISE, "=r,=r,=r,=r,r", [byte], dtype=tl.float32, is_pure=True, pack=4)
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _take(byte, PLANE: tl.constexpr, BITS: tl.constexpr):
    if not BY_BITS:
        TAKE: tl.constexpr = _TAKE[16 - 16 // BITS + PLANE]
        return tl.inline_asm_elementwise(TAKE, "=r,r", [byte], dtype=tl.uint8, is_pure=True, pack=4)
    return (byte >> (PLANE * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _bits_of(byte, column, BITS: tl.constexpr, RUN: tl.constexpr):
    """Those that a field has for these columns, of its bytes."""
    if BITS < 8:
        shift = (column // RUN % (8 // BITS) * BITS).to(tl.uint8)
        byte = (byte >> shift[None, :]) & ((1 << BITS) - 1)
    return byte


@triton.jit
def _load_field(rows, there, column, PLACE: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, MATRIX: tl.constexpr):
    """Bytes with the bits that a field has for these columns."""
    # written so that the compiler sees which bytes lie side by side: of remainders of remainders it does not
    NUMBERS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    SPAN: tl.constexpr = RUN * (8 // BITS)
    place = column // SPAN % (NUMBERS // SPAN) * RUN + column % RUN
    at = rows + (column // NUMBERS * MATRIX.BLOCK_BYTES + PLACE + place)[None, :]
    inside = there & (column < MATRIX.BLOCKS * NUMBERS)[None, :]
    return tl.load(at, mask=inside, other=0)


@triton.jit
def _load_low(rows, there, first, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """Bytes with the low bits of COLUMNS numbers."""
    NUMBERS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    OF_BLOCK: tl.constexpr = NUMBERS // MATRIX.PLANES
    byte = tl.arange(0, COLUMNS // MATRIX.PLANES)
    at = rows + (first // NUMBERS * MATRIX.BLOCK_BYTES + MATRIX.LOW)
    if COLUMNS >= NUMBERS:
        at += (byte // OF_BLOCK * MATRIX.BLOCK_BYTES + byte % OF_BLOCK)[None, :]
    else:
        at += (first % NUMBERS // MATRIX.PLANES + byte)[None, :]
    if MATRIX.BLOCKS * NUMBERS % COLUMNS != 0:
        there = there & (first // NUMBERS + byte // OF_BLOCK < MATRIX.BLOCKS)[None, :]
    return tl.load(at, mask=there, other=0, eviction_policy=MATRIX.POLICY)


@triton.jit
def _load_high(rows, there, first, PLANE: tl.constexpr, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """Bytes with the other bits: each once where all planes have theirs in them, else for each number of a plane."""
    NUMBERS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    SPAN: tl.constexpr = MATRIX.HIGH_RUN * (8 // MATRIX.HIGH_BITS)
    if MATRIX.HIGH_TILES > 1:
        column = columns_of(first, PLANE, COLUMNS, MATRIX)
        return _load_field(rows, there, column, MATRIX.HIGH, MATRIX.HIGH_BITS, MATRIX.HIGH_RUN, MATRIX)
    else:
        OF_BLOCK: tl.constexpr = NUMBERS * MATRIX.HIGH_BITS // 8
        BYTES: tl.constexpr = max(COLUMNS // SPAN, 1) * MATRIX.HIGH_RUN
        byte = tl.arange(0, BYTES)
        at = rows + (first // NUMBERS * MATRIX.BLOCK_BYTES + MATRIX.HIGH)
        if COLUMNS >= NUMBERS:
            at += (byte // OF_BLOCK * MATRIX.BLOCK_BYTES + byte % OF_BLOCK)[None, :]
        else:
            at += (first % NUMBERS // SPAN * MATRIX.HIGH_RUN + byte)[None, :]
        if MATRIX.BLOCKS * NUMBERS % COLUMNS != 0:
            there = there & (first // NUMBERS + byte // OF_BLOCK < MATRIX.BLOCKS)[None, :]
        return tl.load(at, mask=there, other=0, eviction_policy=MATRIX.POLICY)


@triton.jit
def _half(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _lowest_byte(word):
    """In fp32."""
    return ((word & 255) | 0x4B000000).to(tl.float32, bitcast=True) - _RAISED


@triton.jit
def _load_heads(rows, there, first, group, COLUMNS: tl.constexpr, MATRIX: tl.constexpr):
    """What groups have from their whole block: (R, groups), or (R, 1) where all are of one."""
    NUMBERS: tl.constexpr = MATRIX.BLOCK_COLUMNS
    KIND: tl.constexpr = MATRIX.SCALES
    if COLUMNS <= NUMBERS:
        blocks, known = rows + first // NUMBERS * MATRIX.BLOCK_BYTES, there
    else:
        block = group * MATRIX.GROUP // NUMBERS
        blocks, known = rows + (block * MATRIX.BLOCK_BYTES)[None, :], there & (block < MATRIX.BLOCKS)[None, :]
    if KIND == "float":
        return (tl.load(blocks.to(tl.pointer_type(tl.float32)), mask=known, other=0.0),)
    elif KIND == "six bits, offset":
        word = blocks.to(tl.pointer_type(tl.uint32))
        return (
            tl.load(word, mask=known, other=0),
            tl.load(word + 1, mask=known, other=0),
            tl.load(word + 2, mask=known, other=0),
            tl.load(word + 3, mask=known, other=0),
        )
    else:
        half = (blocks + MATRIX.HALF).to(tl.pointer_type(tl.float16))
        scale = tl.load(half, mask=known, other=0.0).to(tl.float32)
        if MATRIX.HAS_OFFSETS:
            return scale, tl.load(half + 1, mask=known, other=0.0).to(tl.float32)
        else:
            return (scale,)


@triton.jit
def _load_scale_bytes(rows, there, group, MATRIX: tl.constexpr):
    """What each group has for itself, (R, groups), where that is a byte or less; else nothing."""
    KIND: tl.constexpr = MATRIX.SCALES
    OF_BLOCK: tl.constexpr = MATRIX.BLOCK_COLUMNS // MATRIX.GROUP
    at = rows + (group // OF_BLOCK * MATRIX.BLOCK_BYTES + MATRIX.SCALES_AT)[None, :]
    known = there & (group < MATRIX.BLOCKS * OF_BLOCK)[None, :]
    group = (group % OF_BLOCK)[None, :]
    if KIND == "bytes" or KIND == "four bits, offset":
        return tl.load(at + group, mask=known, other=0)
    elif KIND == "six bits":
        fine = tl.load(at + group % 8, mask=known, other=0) >> (group // 8 * 4).to(tl.uint8)
        coarse = tl.load(at + 8 + group % 4, mask=known, other=0) >> (group // 4 * 2).to(tl.uint8)
        return (fine & 15) | ((coarse & 3) << 4)
    else:
        return ()


@triton.jit
def _scales(heads, byte, group, MATRIX: tl.constexpr):
    """Of groups: their scales, and what is added to their numbers where they have offsets. Triton negates by
    subtracting from 0, which gives 0 for 0; times -1.0 gives -0.0, as torch does."""
    KIND: tl.constexpr = MATRIX.SCALES
    if KIND == "float" or KIND == "half":
        return heads[0], heads[0]
    elif KIND == "half, offset":
        return heads[0], heads[1]
    elif KIND == "bytes":
        scale = heads[0] * byte.to(tl.int8, bitcast=True).to(tl.float32)
        return scale, scale
    elif KIND == "four bits, offset":
        return heads[0] * (byte & 15).to(tl.float32), heads[1] * (byte >> 4).to(tl.float32) * -1.0
    elif KIND == "six bits":
        scale = heads[0] * (byte.to(tl.int32) - 32).to(tl.float32)
        return scale, scale
    else:  # six bits, of the last four groups in two parts: of four groups at once, a byte each
        group %= 8
        shift, early = (group % 4 * 8).to(tl.uint32)[None, :], (group < 4)[None, :]
        both, one, two, three = heads
        of_scale = tl.where(early, one & 0x3F3F3F3F, (three & 0x0F0F0F0F) | ((one >> 2) & 0x30303030))
        least = tl.where(early, two & 0x3F3F3F3F, ((three >> 4) & 0x0F0F0F0F) | ((two >> 2) & 0x30303030))
        scale = _half(both) * _lowest_byte(of_scale >> shift)
        return scale, _half(both >> 16) * _lowest_byte(least >> shift) * -1.0


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
