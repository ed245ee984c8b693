"""One token or a few through quantised experts on Hopper: a lane has 16 bytes of each row, and the values they meet.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    serves(problem, problem.weights.gate_up_EJH)        # whether these kernels can read that matrix
    tile(matrix, columns, chunks, pieces, warps)
    up(problem, chosen)(x_TH, expert_TK, *stored, bias_EJ, low_NR, gate_b_EIR, up_b_EIR, a_NI)
    down(problem, chosen)(a_NI, expert_TK, weight_TK, *stored, bias_EH, low_NR, b_EHR, y_TH)

The same products in the same grids as in `by_slot`, whose arguments these take; where a tile has `chunks`, they run.
Plain Triton chooses layouts for scales and values by itself, and brings them to the lanes that need them through shared
memory, with a barrier each. Here a row is cut into chunks of 16 bytes. A chunk, its scale and its values are in one
lane: nothing is exchanged before the last sum. Values stay in registers for all rows of a program.

Codes become halves, halves fp32, and all sums are in fp32. For MXFP4, NVFP4 and e4m3, in blocks of 16 numbers of a row
or more.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.core.problem import Problem
from amoeba.kernels import activation as activations
from amoeba.kernels.constants import Group
from amoeba.kernels.decode.configuration import Configuration, Tile
from amoeba.kernels.decode.weights import (
    PAIR_SCALE,
    activate,
    bias_row,
    is_quantised,
    number_e4m3,
    product_alone,
    row_of_gate_up,
    stored_down,
    stored_up,
)
from amoeba.kernels.dequantise import scale_row
from amoeba.kernels.launch import Launch, cdiv, next_power_of_2, quick
from amoeba.kernels.quantise import BY_BITS
from amoeba.kernels.tile_sizes import capability_of
from amoeba.precision.formats import E2M1, E4M3
from amoeba.precision.quantised import QuantisedMatrix

CHUNK_BYTES = 16  # what a lane reads at a time
LANES = 32  # of a warp


def serves(problem: Problem, matrix: Any) -> bool:
    """Whether rows are whole chunks that begin at multiples of 16 bytes, on a GPU that converts e4m3 and overlaps."""
    if not is_quantised(problem.weights) or problem.weights.num_experts == 0 or BY_BITS.value:
        return False
    capability, kept = capability_of(problem.x_TH.device), matrix.matrix
    return (
        capability is not None
        and capability >= (9, 0)
        and problem.x_TH.dtype == torch.bfloat16
        and kept.format.element in (E2M1, E4M3)
        and kept.format.block[1] >= 16
        and _in_whole_chunks(problem, kept)
    )


def _in_whole_chunks(problem: Problem, kept: QuantisedMatrix) -> bool:
    expert, row, column = kept.data.stride()
    numbers = numbers_of_chunk(kept)
    together = gcd(kept.data.data_ptr(), expert, row, problem.x_TH.data_ptr())
    scales = gcd(*kept.scales.stride()[:2], kept.scales.data_ptr())  # of NVFP4 two bytes at a time
    return (
        kept.columns % numbers == 0
        and column == kept.scales.stride(2) == 1
        and together % CHUNK_BYTES == 0
        and (kept.format.block[1] >= numbers or scales % 2 == 0)
    )


def numbers_of_chunk(kept: QuantisedMatrix) -> int:
    return CHUNK_BYTES * 8 // kept.format.element.bits


def chunks_of_row(kept: QuantisedMatrix) -> int:
    return kept.columns // numbers_of_chunk(kept)


def tile(kept: QuantisedMatrix, columns: int, chunks: int, pieces: int, warps: int) -> Tile:
    """A step reads this many pieces of a row, of this many chunks."""
    depth = pieces * chunks * numbers_of_chunk(kept)
    return Tile(columns, depth, warps, at_once=depth >= kept.columns, chunks=chunks)


def up(problem: Problem, chosen: Configuration) -> Launch:
    weights, tile = problem.weights, chosen.up
    rows = tile.columns * (2 if weights.activation.gated else 1)
    return _up.fixed(
        (problem.rows * (weights.intermediate // tile.columns),),
        (),
        TILE=_group(weights.gate_up_EJH.matrix, tile, rows, 1, OVERLAP=chosen.overlap),
        MATRIX=stored_up(problem, tile),
        ACTIVATION=activations.group(weights.activation),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def down(problem: Problem, chosen: Configuration) -> Launch:
    weights, tile, (tokens, top_k) = problem.weights, chosen.down, problem.expert_TK.shape
    return _down.fixed(
        (tokens * (weights.hidden // tile.columns),),
        (),
        TILE=_group(
            weights.down_EHI.matrix, tile, tile.columns, next_power_of_2(top_k), K=top_k, OVERLAP=chosen.overlap
        ),
        MATRIX=stored_down(problem, tile),
        num_warps=tile.warps,
        **({"launch_pdl": True} if chosen.overlap else {}),
    )


def _group(kept: QuantisedMatrix, tile: Tile, rows: int, slots: int, **others: Any) -> Group:
    """rows: of weights, of each slot."""
    numbers = numbers_of_chunk(kept)
    in_row, at_once = chunks_of_row(kept), tile.depth // numbers
    return Group(
        COLUMNS=tile.columns,
        ROWS=rows,
        SLOTS=slots,
        CHUNKS=tile.chunks,
        PIECES=cdiv(at_once, tile.chunks),
        STEPS=cdiv(in_row, at_once),
        IN_ROW=in_row,
        NUMBERS=numbers,
        EVEN=in_row % (cdiv(at_once, tile.chunks) * tile.chunks) == 0,
        TWO_SCALES=kept.format.block[1] < numbers,
        LAYOUT=_layout(slots, tile.chunks, tile.warps),
        ROWS_OF_ONE=gl.BlockedLayout([rows, 1], [1, LANES], [1, tile.warps], [1, 0]),  # all of them in each thread
        **others,
    )


def _layout(slots: int, chunks: int, warps: int) -> Any:
    """Of (rows, slots, chunks, 4) words. Lanes and warps are spread over chunks first, then over slots, then over
    rows."""
    of_chunk = min(chunks, LANES)
    of_slot = min(slots, LANES // of_chunk)
    warps_of_chunk = min(chunks // of_chunk, warps)
    warps_of_slot = min(slots // of_slot, warps // warps_of_chunk)
    return gl.BlockedLayout(
        [1, 1, 1, 4],
        [LANES // (of_chunk * of_slot), of_slot, of_chunk, 1],
        [warps // (warps_of_chunk * warps_of_slot), warps_of_slot, warps_of_chunk, 1],
        [3, 2, 1, 0],
    )


# Eight codes of e2m1, at once as pairs of halves divided by PAIR_SCALE: (0, 4), (1, 5), (2, 6) and (3, 7) lie at the
# same place of a word's two halves.
_E2M1 = """    .reg .b32 a, b, p0, p1, p2, p3;
    shl.b32 a, $2, 12;
    shl.b32 b, $2, 9;
    and.b32 b, b, 0x0E000E00;
    lop3.b32 p0, a, 0x80008000, b, 0xEA;
    shl.b32 a, $2, 8;
    shl.b32 b, $2, 5;
    and.b32 b, b, 0x0E000E00;
    lop3.b32 p1, a, 0x80008000, b, 0xEA;
    shl.b32 a, $2, 4;
    shl.b32 b, $2, 1;
    and.b32 b, b, 0x0E000E00;
    lop3.b32 p2, a, 0x80008000, b, 0xEA;
    shr.b32 b, $2, 3;
    and.b32 b, b, 0x0E000E00;
    lop3.b32 p3, $2, 0x80008000, b, 0xEA;
"""
_E4M3 = """    .reg .b16 c, d;
    .reg .b32 p0, p1;
    mov.b32 {c, d}, $2;
    cvt.rn.f16x2.e4m3x2 p0, c;
    cvt.rn.f16x2.e4m3x2 p1, d;
"""


def _sum_of_word(codes: str, pairs: tuple[tuple[int, int], ...]) -> str:
    """$0 = $1 and the products of the codes in $2 with the values in $3 and on, two in bf16 in each. pairs: of which
    values p0, p1 and so on belong to."""
    text = "{\n    .reg .b16 l, h;\n    .reg .b32 t;\n    .reg .f32 f, g;\n" + codes + "    mov.f32 $0, $1;\n"
    for word in range(len(pairs)):
        text += f"    .reg .f32 x{2 * word}, x{2 * word + 1};\n"
        text += f"    shl.b32 t, ${3 + word}, 16;\n    mov.b32 x{2 * word}, t;\n"
        text += f"    and.b32 t, ${3 + word}, 0xFFFF0000;\n    mov.b32 x{2 * word + 1}, t;\n"
    for pair, (low, high) in enumerate(pairs):
        text += f"    mov.b32 {{l, h}}, p{pair};\n    cvt.f32.f16 f, l;\n    cvt.f32.f16 g, h;\n"
        text += f"    fma.rn.f32 $0, f, x{low}, $0;\n    fma.rn.f32 $0, g, x{high}, $0;\n"
    return text + "}"


_E2M1_SUM = gl.constexpr(_sum_of_word(_E2M1, ((0, 4), (1, 5), (2, 6), (3, 7))))
_E4M3_SUM = gl.constexpr(_sum_of_word(_E4M3, ((0, 1), (2, 3))))


@quick
@gluon.jit
def _up(
    x_TH,
    expert_TK,
    weights,
    scales,
    matrix_scale,
    bias_EJ,
    low_NR,
    gate_b_EIR,
    up_b_EIR,
    a_NI,
    TILE: gl.constexpr,
    MATRIX: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    COLUMNS: gl.constexpr = TILE.COLUMNS
    ROWS: gl.constexpr = TILE.ROWS
    BLOCKS: gl.constexpr = MATRIX.I // COLUMNS
    tile_layout: gl.constexpr = gl.SliceLayout(3, TILE.LAYOUT)
    fence = _fence(TILE)
    if TILE.OVERLAP:  # for x and ids, which the next launch reads before it waits
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = gl.program_id(0) // BLOCKS
    first = (gl.program_id(0) % BLOCKS) * COLUMNS
    there = gl.full((1, 1, 1), 1, gl.int1, layout=tile_layout)
    values = _words(x_TH) + (slot // MATRIX.K).to(gl.int64) * (MATRIX.H // 2)
    values = values + gl.zeros((1, 1, 1), gl.int32, layout=tile_layout)
    value = _load_values(values, there, 0, TILE, MATRIX)
    expert = gl.load(expert_TK + slot)
    if (expert < 0) | (expert >= MATRIX.E):
        return
    expert = expert.to(gl.int64)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, tile_layout)))
    j, _ = row_of_gate_up(first, row, MATRIX.I, COLUMNS, ACTIVATION)
    codes = _words(weights) + expert * (MATRIX.STRIDE_EXPERT // 4) + j.to(gl.int64) * (MATRIX.STRIDE_ROW // 4)
    codes = codes[:, None][:, :, None]
    of_rows = expert * MATRIX.STRIDE_SCALE_EXPERT + _row_of_scales(j, MATRIX) * MATRIX.STRIDE_SCALE_ROW
    of_rows = of_rows[:, None][:, :, None]
    code = _load_codes(codes, there, 0, TILE)
    scale = _load_scales(scales, of_rows, there, 0, TILE, MATRIX)
    of_expert = _scale_of_all(matrix_scale, expert, MATRIX)
    if MATRIX.HAS_BIAS:
        bias = gl.load(bias_row(bias_EJ, expert, 0, MATRIX) + j).to(gl.float32)
    total = _sums(code, scale, value, codes, scales, of_rows, values, there, fence, TILE, MATRIX)
    h = gl.sum(gl.reshape(total, (ROWS, TILE.CHUNKS)), axis=1) * of_expert
    if MATRIX.HAS_BIAS:
        h += gl.convert_layout(bias, h.type.layout)
    h = gl.convert_layout(gl.reshape(h, (ROWS, 1)), TILE.ROWS_OF_ONE)
    a = gl.reshape(activate(h, COLUMNS, 1, ACTIVATION), (COLUMNS,))
    column = first + gl.arange(0, COLUMNS, layout=a.type.layout)
    gl.store(a_NI + slot.to(gl.int64) * MATRIX.I + column, a.to(a_NI.dtype.element_ty))


@quick
@gluon.jit
def _down(
    a_NI,
    expert_TK,
    weight_TK,
    weights,
    scales,
    matrix_scale,
    bias_EH,
    low_NR,
    b_EHR,
    y_TH,
    TILE: gl.constexpr,
    MATRIX: gl.constexpr,
):
    COLUMNS: gl.constexpr = TILE.COLUMNS
    BLOCKS: gl.constexpr = MATRIX.H // COLUMNS
    tile_layout: gl.constexpr = gl.SliceLayout(3, TILE.LAYOUT)
    fence = _fence(TILE)
    token = gl.program_id(0) // BLOCKS
    first = (gl.program_id(0) % BLOCKS) * COLUMNS
    k = gl.arange(0, TILE.SLOTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, tile_layout)))
    h = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, tile_layout)))
    slot = token * TILE.K + k
    expert = gl.load(expert_TK + slot, mask=k < TILE.K, other=-1)
    owned = (expert >= 0) & (expert < MATRIX.E)
    expert = gl.where(owned, expert, 0).to(gl.int64)
    there = owned[None, :][:, :, None]
    codes = (_words(weights) + expert * (MATRIX.STRIDE_EXPERT // 4))[None, :][:, :, None]
    codes = codes + (h.to(gl.int64) * (MATRIX.STRIDE_ROW // 4))[:, None][:, :, None]
    of_rows = (expert * MATRIX.STRIDE_SCALE_EXPERT)[None, :][:, :, None]
    of_rows = of_rows + (_row_of_scales(h, MATRIX) * MATRIX.STRIDE_SCALE_ROW)[:, None][:, :, None]
    code = _load_codes(codes, there, 0, TILE)
    scale = _load_scales(scales, of_rows, there, 0, TILE, MATRIX)
    weight = gl.load(weight_TK + slot, mask=owned, other=0.0).to(gl.float32)
    factor = weight * _scale_of_all(matrix_scale, expert, MATRIX)
    if MATRIX.HAS_BIAS:
        places = bias_row(bias_EH, expert, 0, MATRIX)[None, :] + h[:, None]
        bias = gl.load(places, mask=owned[None, :] & (h >= 0)[:, None], other=0.0).to(gl.float32)
    if TILE.OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # all that was ahead of this launch is done
    values = (_words(a_NI) + slot.to(gl.int64) * (MATRIX.I // 2))[None, :][:, :, None]
    value = _load_values(values, there, 0, TILE, MATRIX)
    total = _sums(code, scale, value, codes, scales, of_rows, values, there, fence, TILE, MATRIX)
    total = gl.where(there, product_alone(total, factor[None, :][:, :, None]), 0.0)  # a sentinel's may be NaN
    y = gl.sum(gl.reshape(total, (COLUMNS, TILE.SLOTS * TILE.CHUNKS)), axis=1)
    if MATRIX.HAS_BIAS:
        y += gl.convert_layout(gl.sum(product_alone(bias, weight[None, :]), axis=1), y.type.layout)
    h = first + gl.arange(0, COLUMNS, layout=y.type.layout)
    gl.store(y_TH + token.to(gl.int64) * MATRIX.H + h, y.to(y_TH.dtype.element_ty))


@gluon.jit
def _words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _row_of_scales(row, MATRIX: gl.constexpr):
    return scale_row(row, MATRIX.BLOCK_ROWS, MATRIX.PART_ROWS, MATRIX.PART_BLOCKS).to(gl.int64)


@gluon.jit
def _scale_of_all(matrix_scale, expert, MATRIX: gl.constexpr):
    """What all sums of an expert are multiplied by."""
    scale = PAIR_SCALE if MATRIX.BITS == 4 else 1.0
    if matrix_scale is not None:
        scale = gl.load(matrix_scale + expert * MATRIX.STRIDE_MATRIX_SCALE) * scale
    return scale


@gluon.jit
def _fence(TILE: gl.constexpr):
    """A zero in shared memory. The assembler moves loads to where they are used, and a program then waits for one after
    the other. So all that is computed depends on this zero, which is read behind a barrier, and that comes behind the
    loads."""
    layout: gl.constexpr = _chunk_layout(TILE.LAYOUT)
    zero = gl.zeros((TILE.CHUNKS,), gl.int32, layout=layout)
    return gl.allocate_shared_memory(gl.int32, [TILE.CHUNKS], gl.SwizzledSharedLayout(1, 1, 1, [0]), zero)


@gluon.constexpr_function
def _chunk_layout(layout):
    return gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))


@gluon.jit
def _chunks(piece, TILE: gl.constexpr):
    """(1, 1, CHUNKS): which of a row."""
    chunk = piece * TILE.CHUNKS + gl.arange(0, TILE.CHUNKS, layout=_chunk_layout(TILE.LAYOUT))
    return chunk[None, :][:, None, :]


@gluon.jit
def _four_words(places, TILE: gl.constexpr):
    """Pointers to four words from each on."""
    four_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, TILE.LAYOUT)))
    word = gl.arange(0, 4, layout=four_layout)
    return places[:, :, :, None] + word[None, :][:, None, :][:, :, None, :]


@gluon.jit
def _inside(there, chunk, TILE: gl.constexpr):
    if TILE.EVEN:
        return there
    else:
        return there & (chunk < TILE.IN_ROW)


@gluon.jit
def _load_codes(codes, there, step, TILE: gl.constexpr):
    """A tuple of (ROWS, SLOTS, CHUNKS, 4) words. codes: pointers to rows (ROWS, SLOTS, 1); what is not there is
    anything."""
    found = ()
    for piece in gl.static_range(TILE.PIECES):
        chunk = _chunks(step * TILE.PIECES + piece, TILE)
        places = _four_words(codes + chunk * 4, TILE)
        inside = _inside(there, chunk, TILE)[:, :, :, None]
        found = found + (gl.load(places, mask=inside, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _load_scales(scales, of_rows, there, step, TILE: gl.constexpr, MATRIX: gl.constexpr):
    """A tuple of (ROWS, SLOTS, CHUNKS), as they are stored, two codes in one where a chunk has two blocks."""
    found = ()
    for piece in gl.static_range(TILE.PIECES):
        chunk = _chunks(step * TILE.PIECES + piece, TILE)
        if TILE.TWO_SCALES:
            places = scales.to(gl.pointer_type(gl.uint16), bitcast=True) + of_rows // 2 + chunk
        else:
            places = scales + of_rows + chunk // (MATRIX.BLOCK_COLUMNS // TILE.NUMBERS)
        found = found + (gl.load(places, mask=_inside(there, chunk, TILE)),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _load_values(values, there, step, TILE: gl.constexpr, MATRIX: gl.constexpr):
    """A tuple of four words (1, SLOTS, CHUNKS) each, of two values: as many for a piece as meet 16 bytes of codes."""
    WORDS: gl.constexpr = TILE.NUMBERS // 2
    found = ()
    for piece in gl.static_range(TILE.PIECES):
        chunk = _chunks(step * TILE.PIECES + piece, TILE)
        inside = _inside(there, chunk, TILE)[:, :, :, None]
        for part in gl.static_range(WORDS // 4):
            places = _four_words(values + chunk * WORDS + part * 4, TILE)
            found = found + (_split(gl.load(places, mask=inside), TILE),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _split(words, TILE: gl.constexpr):
    """(R, S, C, 4) as four of (R, S, C)."""
    even, odd = gl.split(gl.reshape(words, (words.shape[0], words.shape[1], words.shape[2], 2, 2)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _sums(
    code,
    scale,
    value,
    codes,
    scales,
    of_rows,
    values,
    there,
    fence,
    TILE: gl.constexpr,
    MATRIX: gl.constexpr,
):
    """(ROWS, SLOTS, CHUNKS): what each lane's chunks of a row give. code, scale, value: of the first step."""
    tile_layout: gl.constexpr = gl.SliceLayout(3, TILE.LAYOUT)
    total = gl.zeros((TILE.ROWS, TILE.SLOTS, TILE.CHUNKS), gl.float32, layout=tile_layout)
    if TILE.STEPS == 1:
        return _added(total, code, scale, value, 0, fence, TILE, MATRIX)
    else:
        for step in range(TILE.STEPS):
            more = there & (step + 1 < TILE.STEPS)
            next_code = _load_codes(codes, more, step + 1, TILE)
            next_scale = _load_scales(scales, of_rows, more, step + 1, TILE, MATRIX)
            next_value = _load_values(values, more, step + 1, TILE, MATRIX)
            tl.debug_barrier()  # as in `_fence`
            total = _added(total, code, scale, value, step, fence, TILE, MATRIX)
            code, scale, value = next_code, next_scale, next_value
        return total


@gluon.jit
def _added(total, code, scale, value, step, fence, TILE: gl.constexpr, MATRIX: gl.constexpr):
    zero = fence.load(_chunk_layout(TILE.LAYOUT))[None, :][:, None, :]
    PARTS: gl.constexpr = TILE.NUMBERS // 8
    for piece in gl.static_range(TILE.PIECES):
        found = _sums_of_piece(code[piece], scale[piece], value, piece * PARTS, total, zero, TILE, MATRIX)
        if not TILE.EVEN:
            found = gl.where(_chunks(step * TILE.PIECES + piece, TILE) < TILE.IN_ROW, found, 0.0)
        total += found
    return total


@gluon.jit
def _sums_of_piece(code, scale, value, FIRST: gl.constexpr, like, zero, TILE: gl.constexpr, MATRIX: gl.constexpr):
    """Of each chunk, times its scale, (ROWS, SLOTS, CHUNKS)."""
    words = _split(code, TILE)
    none = (words[0] * 0).to(gl.float32)
    none += gl.convert_layout(zero, none.type.layout, assert_trivial=True).to(gl.float32, bitcast=True)
    total = (scale * 0).to(gl.float32)
    found = none
    for word in gl.static_range(4):
        if MATRIX.BITS == 4:
            met = value[FIRST + word]
            found = gl.inline_asm_elementwise(
                _E2M1_SUM,
                "=&f,f,r,r,r,r,r",
                [found, words[word], met[0], met[1], met[2], met[3]],
                dtype=gl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            met = value[FIRST + word // 2]
            found = gl.inline_asm_elementwise(
                _E4M3_SUM,
                "=&f,f,r,r,r",
                [found, words[word], met[2 * (word % 2)], met[2 * (word % 2) + 1]],
                dtype=gl.float32,
                is_pure=True,
                pack=1,
            )
        if TILE.TWO_SCALES and word % 2 == 1:
            part = gl.convert_layout(found, like.type.layout, assert_trivial=True)
            total += part * _e4m3((scale >> 8 if word == 3 else scale) & 255)
            found = none
    if not TILE.TWO_SCALES:
        total = gl.convert_layout(found, like.type.layout, assert_trivial=True) * _number(scale, MATRIX)
    return total


@gluon.jit
def _number(scale, MATRIX: gl.constexpr):
    if MATRIX.SCALE == "fp32":
        return scale
    elif MATRIX.SCALE == "e8m0":
        return _e8m0(scale)
    else:
        return _e4m3(scale)


@gluon.jit
def _e4m3(code):
    return number_e4m3(code.to(gl.uint8), True).to(gl.float32)


@gluon.jit
def _e8m0(code):
    bits = gl.where(code == 0, 1 << 22, code.to(gl.int32) << 23)
    return gl.where(code == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
