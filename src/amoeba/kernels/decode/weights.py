"""Weights as the decode kernels read them: strided tensors, or quantised ones with their scales.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    of_up, of_down = stored(weights, x_TH)                      # of both: weights, scales, matrix_scale, bias
    kernel(..., *of_up, ..., *numbers_of(problem, weights.gate_up_EJH), MATRIX=stored_up(problem, tile))

Sizes and strides of strided weights are numbers of a launch, those of quantised ones compile-time constants: the
compiler has to see that 16 bytes side by side are inside or outside of a row together, or it reads them one by one.

Tiles of them in a kernel, and the activation of a tile, where ACTIVATION is `amoeba.kernels.activation.group`.

Codes as they are loaded, and what they stand for:

    code = tl.load(...)                                         # bytes: two numbers each where BITS is 4
    low, high = pair_e2m1(code)                                 # fp16, times 2^-14

Bytes are compared with the row's as they are counted: the compiler has to see that 16 side by side are inside or
outside together, or it reads them one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.problem import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.configuration import Tile
from amoeba.kernels.dequantise import block_constants, load_scales, scale_row, unpack_e4m3
from amoeba.kernels.quantise import BY_BITS
from amoeba.kernels.tile_sizes import capability_of
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.precision.quantised_experts import QuantisedExperts


def is_quantised(weights: Any) -> bool:
    return isinstance(weights, QuantisedExperts)


def stored(weights: Any, x_TH: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Of both matrices. A kernel without a bias looks at none, whatever stands in its place."""

    def given(matrix: Any, bias_EO: Tensor | None) -> tuple[Tensor | None, ...]:
        if isinstance(matrix, Tensor):
            return matrix, None, None, x_TH if bias_EO is None else bias_EO.contiguous()
        kept: QuantisedMatrix = matrix.matrix
        return kept.data, kept.scales, kept.matrix_scale, x_TH if bias_EO is None else _in_lines(bias_EO)

    up = given(weights.gate_up_EJH, weights.gate_up_bias_EJ)
    return up, given(weights.down_EHI, weights.down_bias_EH)


def numbers_of(problem: Problem, matrix: Any) -> tuple[int | None, ...]:
    """Strides of an expert, a row and a column, and E, H and I."""
    if is_quantised(problem.weights):
        return (None,) * 6
    return (*matrix.stride(), *problem.weights.down_EHI.shape)


def stored_up(problem: Problem, tile: Tile) -> Group:
    weights = problem.weights
    return _constants(problem, weights.gate_up_EJH, weights.gate_up_bias_EJ, tile, weights.intermediate, weights.hidden)


def stored_down(problem: Problem, tile: Tile) -> Group:
    weights = problem.weights
    return _constants(problem, weights.down_EHI, weights.down_bias_EH, tile, weights.hidden, weights.intermediate)


def _constants(problem: Problem, matrix: Any, bias_EO: Tensor | None, tile: Tile, columns: int, depth: int) -> Group:
    """columns: of the result; depth: what is summed over."""
    weights, has_bias = problem.weights, bias_EO is not None
    if not is_quantised(weights):
        even_rows, even_depth = columns % tile.columns == 0, depth % tile.depth == 0
        return Group(QUANTISED=False, EVEN_ROWS=even_rows, EVEN_DEPTH=even_depth, HAS_BIAS=has_bias)
    kept: QuantisedMatrix = matrix.matrix
    return Group(
        QUANTISED=True,
        E=weights.num_experts,
        H=weights.hidden,
        I=weights.intermediate,
        K=problem.expert_TK.shape[1],
        REDUCTION=kept.columns,
        **block_constants(kept),
        STRIDE_ROW=kept.data.stride(1),
        STRIDE_EXPERT=kept.data.stride(0),
        STRIDE_SCALE_ROW=kept.scales.stride(1),
        STRIDE_SCALE_EXPERT=kept.scales.stride(0),
        STRIDE_MATRIX_SCALE=0 if kept.matrix_scale is None else kept.matrix_scale.stride(0),
        HARDWARE=_converts_e4m3(problem.x_TH.device),
        HAS_BIAS=has_bias,
        STRIDE_BIAS=0 if bias_EO is None else _in_lines(bias_EO).stride(0),
    )


def _converts_e4m3(device: torch.device) -> bool:
    return (capability_of(device) or (0, 0)) >= (8, 9)


def _in_lines(tensor: Tensor) -> Tensor:
    """Whose rows are contiguous, whatever lies between them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit
def bias_row(bias_EO, expert, outputs, MATRIX: tl.constexpr):
    """Where the expert's begins."""
    if MATRIX.QUANTISED:
        return bias_EO + expert * MATRIX.STRIDE_BIAS
    else:
        return bias_EO + expert * outputs


@triton.jit
def product_alone(left, right):
    """left · right, rounded by itself. Else the compiler makes it a part of the first addition across lanes, where each
    lane adds the rounded product of the other one to its own: lanes then hold one sum that differs in its last bit."""
    return left * right + 0.0


@triton.jit
def load_tile(pointers, row_ok, depth_ok, EVEN_ROWS: tl.constexpr, EVEN_DEPTH: tl.constexpr, POLICY: tl.constexpr):
    """A tile with zeros where there is nothing; without masks where there is nothing to mask."""
    if EVEN_ROWS and EVEN_DEPTH:
        tile = tl.load(pointers, eviction_policy=POLICY)
    elif EVEN_ROWS:
        tile = tl.load(pointers, mask=depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    elif EVEN_DEPTH:
        tile = tl.load(pointers, mask=row_ok[:, None], other=0.0, eviction_policy=POLICY)
    else:
        tile = tl.load(pointers, mask=row_ok[:, None] & depth_ok[None, :], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def rows_of_gate_up(first, I, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The rows of W1 that make columns first .. first + COLUMNS of a, and which of them exist."""
    row = tl.arange(0, 2 * COLUMNS if ACTIVATION.GATED else COLUMNS)
    return row_of_gate_up(first, row, I, COLUMNS, ACTIVATION)


@triton.jit
def row_of_gate_up(first, row, I, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The same for a tile's rows, as the caller counts them."""
    if ACTIVATION.GATED:
        if ACTIVATION.INTERLEAVED:
            column = first + row // 2
            j = 2 * first + row
        else:
            column = first + row % COLUMNS
            j = column + (row // COLUMNS) * I
    else:
        column = first + row
        j = column
    return j, column < I


@triton.jit
def activate(h, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    """a (COLUMNS, ROWS) of h whose rows are in the order of `rows_of_gate_up`."""
    if ACTIVATION.GATED:
        if ACTIVATION.INTERLEAVED:
            pairs = tl.permute(tl.reshape(h, (COLUMNS, 2, ROWS)), (0, 2, 1))
        else:
            pairs = tl.permute(tl.reshape(h, (2, COLUMNS, ROWS)), (1, 2, 0))
        gate, up = tl.split(pairs)
        a = activations.gated(gate, up, ACTIVATION)
    else:
        a = activations.plain(h, ACTIVATION)
    return a


# Bytes b0 b1 b2 b3 to the high bytes of four halves, u and v; of each, both nibbles' sign to bit 15 and the rest to
# where a mask has its bits.
_NIBBLES = """    prmt.b32 u, $4, 0, 0x1404;
    prmt.b32 v, $4, 0, 0x3424;
    shl.b32 s, u, 4;
    and.b32 s, s, 0x80008000;
    {low} $0, u, {low_by};
    lop3.b32 $0, $0, {mask}, s, 0xEA;
    shl.b32 s, v, 4;
    and.b32 s, s, 0x80008000;
    {low} $1, v, {low_by};
    lop3.b32 $1, $1, {mask}, s, 0xEA;
    and.b32 s, u, 0x80008000;
    shr.b32 $2, u, {high_by};
    lop3.b32 $2, $2, {mask}, s, 0xEA;
    and.b32 s, v, 0x80008000;
    shr.b32 $3, v, {high_by};
    lop3.b32 $3, $3, {mask}, s, 0xEA;
"""


def _each(instruction: str, *values: object) -> str:
    """An instruction of each of the four results."""
    return "".join(f"    {instruction.format(i=i, value=value)}\n" for i, value in enumerate(values))


# To bits 9 to 11, as fp16 divided by PAIR_SCALE.
_TO_HALVES = _NIBBLES.format(low="shl.b32", low_by=1, high_by=3, mask="0x0E000E00")
_PAIR_E2M1 = tl.constexpr("\n{\n    .reg .b32 u, v, s;\n" + _TO_HALVES + "}\n")
PAIR_SCALE = tl.constexpr(16384.0)
# To bits 6 to 8, which are the number times 2^-126 in bf16, times a scale that is 2^63 too large: what is multiplied is
# exact from 2^-62 to 2^64 and 2^-63 of what it stands for. Larger scales give infinities.
_NO_ADDEND = "    mov.b32 none, 0x80008000;\n"
_SCALED_PAIR_E2M1 = tl.constexpr(
    "\n{\n    .reg .b32 u, v, s, none;\n"
    + _NO_ADDEND
    + _NIBBLES.format(low="shr.b32", low_by=2, high_by=6, mask="0x01C001C0")
    + _each("fma.rn.bf16x2 ${i}, ${i}, ${value}, none;", 5, 7, 5, 7)
    + "}\n"
)
RAISED = tl.constexpr(2.0**63)
# The same numbers in another order, with nine integer instructions for eight of them instead of sixteen (Hopper starts
# one every other clock; multiplications go elsewhere): of eight numbers the pairs (0, 4), (1, 5), (2, 6) and (3, 7) lie
# at the same place of a word's two halves. One multiplication brings a nibble's sign to bit 15 and the rest to bits 6
# to 8; what else it leaves is masked.
_LANE = """    and.b32 ${i}, {word}, {nibble};
    mul.lo.u32 ${i}, ${i}, {factor};
    and.b32 ${i}, ${i}, 0x81C081C0;
"""
_LOW_NIBBLE, _HIGH_NIBBLE = ("0x000F000F", "0x1040"), ("0x00F000F0", "0x104")
_SCALED_LANES_E2M1 = tl.constexpr(
    "\n{\n    .reg .b32 v, none;\n"
    + _NO_ADDEND
    + "    shr.b32 v, $4, 8;\n"
    + "".join(
        _LANE.format(i=i, word="$4" if i < 2 else "v", nibble=nibble, factor=factor)
        for i, (nibble, factor) in enumerate((_LOW_NIBBLE, _HIGH_NIBBLE) * 2)
    )
    + _each("fma.rn.bf16x2 ${i}, ${i}, $5, none;", *range(4))
    + "}\n"
)
# Four exponents to their powers of two times 2^63, each in both halves of a word: what is too large is infinite. Four
# integer instructions, where a minimum and a multiplication of each byte took sixteen.
_RAISED_E8M0 = tl.constexpr(
    "\n{\n    .reg .b32 raise, none;\n    mov.b32 raise, 0x5F005F00;\n"
    + _NO_ADDEND
    + _each("prmt.b32 ${i}, $4, 0, 0x4{i}4{i};", *range(4))
    + _each("mul.lo.u32 ${i}, ${i}, 128;", *range(4))
    + _each("fma.rn.bf16x2 ${i}, ${i}, raise, none;", *range(4))
    + "}\n"
)


@triton.jit
def number_e4m3(code, HARDWARE: tl.constexpr):
    """fp32, or fp16 where a GPU converts it: exact in both."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return unpack_e4m3(code)


@triton.jit
def pair_e2m1(code):
    """Of the low four bits and of the high ones, in fp16, divided by PAIR_SCALE: as if e2m1's bits were fp16's."""
    if not BY_BITS:
        return tl.inline_asm_elementwise(
            _PAIR_E2M1, "=&r,=&r,=&r,=&r,r", [code], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    low = (((code & 7).to(tl.uint16) << 9) | ((code & 8).to(tl.uint16) << 12)).to(tl.uint16)
    high = (((code & 0x70).to(tl.uint16) << 5) | ((code & 0x80).to(tl.uint16) << 8)).to(tl.uint16)
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton.jit
def is_lowered(dtype: tl.constexpr, BITS: tl.constexpr):
    """Whether `scaled_pair_e2m1` gives numbers times 2^-63."""
    return BITS == 4 and dtype == tl.bfloat16 and not BY_BITS


@triton.jit
def scaled_pair_e2m1(
    code,
    scales,
    there,
    dtype: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of codes (HEIGHT, WIDTH) and pointers to scales (HEIGHT, LINES): the numbers of the low four bits and of the high
    ones, by one instruction for two of them and their scale; see `is_lowered`."""
    if dtype == tl.bfloat16 and not BY_BITS:
        return _by_instructions(code, scales, there, _SCALED_PAIR_E2M1, SCALE, HEIGHT, LINES, WIDTH)
    low, high = pair_e2m1(code)
    scale = load_scales(scales, there, 1.0, SCALE) * PAIR_SCALE
    return scaled(low, scale, HEIGHT, LINES, WIDTH).to(dtype), scaled(high, scale, HEIGHT, LINES, WIDTH).to(dtype)


@triton.jit
def scaled_lanes_e2m1(
    code,
    scales,
    there,
    dtype: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """As `scaled_pair_e2m1`, in the order of `lanes`: of eight numbers 0, 4, 1, 5, and 2, 6, 3, 7."""
    if dtype == tl.bfloat16 and not BY_BITS:
        return _by_instructions(code, scales, there, _SCALED_LANES_E2M1, SCALE, HEIGHT, LINES, WIDTH)
    low, high = scaled_pair_e2m1(code, scales, there, dtype, SCALE, HEIGHT, LINES, WIDTH)
    return lanes(tl.reshape(tl.join(low, high), (HEIGHT, 2 * WIDTH)), HEIGHT, WIDTH)


@triton.jit
def lanes(value, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Of rows of 2 WIDTH numbers two tensors with WIDTH each, as the instructions give them: of eight numbers
    0, 4, 1, 5, and 2, 6, 3, 7."""
    bits = tl.reshape(value, (HEIGHT, WIDTH // 4, 2, 2, 2))  # of a number's place in its eight
    first, second = tl.split(tl.permute(bits, (0, 1, 4, 2, 3)))
    return tl.reshape(first, (HEIGHT, WIDTH)), tl.reshape(second, (HEIGHT, WIDTH))


@triton.jit
def _by_instructions(
    code,
    scales,
    there,
    INSTRUCTIONS: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # the scale in bf16, twice in a word
    if SCALE == "e8m0":
        words = tl.inline_asm_elementwise(
            _RAISED_E8M0,
            "=&r,=&r,=&r,=&r,r",
            [tl.load(scales, mask=there, other=0)],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        raised = load_scales(scales, there, 1.0, SCALE) * RAISED
        half = raised.to(tl.int32, bitcast=True).to(tl.uint32, bitcast=True) >> 16  # exact: e4m3 has 3 bits
        words = (half * 0x00010001).to(tl.int32, bitcast=True)
    words = tl.broadcast_to(words[:, :, None], (HEIGHT, LINES, WIDTH // LINES))
    return tl.inline_asm_elementwise(
        INSTRUCTIONS,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [code, tl.reshape(words, (HEIGHT, WIDTH))],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def scaled(number, scale, HEIGHT: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """fp32, of numbers (HEIGHT, WIDTH) and scales (HEIGHT, LINES)."""
    blocks = tl.reshape(number.to(tl.float32), (HEIGHT, LINES, WIDTH // LINES))
    return tl.reshape(blocks * scale[:, :, None], (HEIGHT, WIDTH))


@triton.jit
def places_of_scales(
    scales, row_R, row_ok, step, DEPTH: tl.constexpr, LINES: tl.constexpr, REDUCTION: tl.constexpr, MATRIX: tl.constexpr
):
    """Pointers (R, LINES) to those of the step-th DEPTH columns, and which there are."""
    if DEPTH >= MATRIX.BLOCK_COLUMNS:
        first = step * LINES
    else:
        first = step * DEPTH // MATRIX.BLOCK_COLUMNS
    line = first + tl.arange(0, LINES)
    of_row = scale_row(row_R, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS).to(tl.int64)
    there = row_ok[:, None]
    if REDUCTION % DEPTH != 0:
        there &= (line < (REDUCTION + MATRIX.BLOCK_COLUMNS - 1) // MATRIX.BLOCK_COLUMNS)[None, :]
    return scales + of_row[:, None] * MATRIX.STRIDE_SCALE_ROW + line[None, :], there
