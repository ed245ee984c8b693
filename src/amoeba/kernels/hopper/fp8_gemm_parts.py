"""Parts of Hopper's e4m3 products: where scales are, products of alternating warpgroups, and how a tile is stored.

    begin_turns(WARPGROUP, PLAN)                                    # once
    found = product_in_turn(rows, matrix, zero, WARPGROUP, PLAN)    # begun, as by warpgroup_mma
    end_turns(WARPGROUP, PLAN)                                      # once

Left to themselves both warpgroups begin when a stage is full, share the matrix unit, and are done at the same time:
then it waits for both while they add up. Alternating (ping-pong), it has one product to work on while the other is
added up. Both begin as many products, the first warpgroup's first.

Tiles leave in bf16 or quantised, through buffers in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from amoeba.kernels.activation import plain
from amoeba.kernels.hopper.epilogue import (
    add_bias,
    column_parts,
    store_buffer,
    store_masked,
    store_tile,
    wait_for_buffer,
)
from amoeba.kernels.hopper.tma import bulk_store, reinterpret
from amoeba.kernels.quantise import encode, infinities_to_nan, power_of_two


@gluon.jit
def load_scales(row_scales, left_scales, right_scales, far_scales, PLAN: gl.constexpr):
    of_row, of_left, of_right = gl.load(row_scales), gl.load(left_scales), gl.load(right_scales)
    of_far = of_right
    if PLAN.SHIFTED:
        of_far = gl.load(far_scales)
    return of_row, of_left, of_right, of_far


@gluon.jit
def first_scales(
    row_scale, matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr
):  # fmt: skip
    """Of a tile's rows and columns, as `_multiply_tile` takes them."""
    left, right, far = scales_of_columns(matrix_scale, m, expert, n, columns, blocks, steps, PLAN)
    return load_scales(row_scale + m * steps, left, right, far, PLAN)


@gluon.jit
def token_rows(order, row, end, top_k, PLAN: gl.constexpr, HEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which row of the scales belongs to each of a warpgroup's rows; behind the last one, that of the last one."""
    m = gl.minimum(row + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT)), end - 1)
    if PLAN.GATHER:
        m = gl.load(order + m) // top_k
    return m


@gluon.jit
def scales_of_columns(
    matrix_scale, m, expert, n, columns, blocks, steps, PLAN: gl.constexpr
):  # fmt: skip
    """Pointers along the depth to the scales of a tile's left half, its right half, and that one's last 64 columns."""
    first, second, far = blocks_of_columns(n, columns, blocks, PLAN)
    of_expert = matrix_scale + expert * blocks * steps  # scales are few: their number fits 32 bits
    if PLAN.PREFETCHED:  # one for each row, by a zero: as single numbers they are waited for between products
        of_expert += m >> 31
    return of_expert + first * steps, of_expert + second * steps, of_expert + far * steps


@gluon.jit
def blocks_of_columns(n, columns, blocks, PLAN: gl.constexpr):
    """Of an expert's matrix those that a tile's left half, its right half, and that one's last 64 columns lie in."""
    BLOCK: gl.constexpr = PLAN.BLOCK
    if PLAN.APART:
        second = n + gl.cdiv(columns, BLOCK)
        return n, second, second
    elif PLAN.PAIRED:
        return n, n + columns // BLOCK, gl.minimum(n + (columns + BLOCK // 2) // BLOCK, blocks - 1)
    else:
        second = gl.minimum(2 * n + 1, blocks - 1)
        return 2 * n, second, second


@gluon.jit
def blocks_of_matrix(width, columns, PLAN: gl.constexpr):
    """Of scales, down an expert's matrix."""
    if PLAN.APART:
        return 2 * gl.cdiv(columns, PLAN.BLOCK)
    else:
        return gl.cdiv(width, PLAN.BLOCK)


@gluon.jit
def begin_turns(WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    if PLAN.PINGPONG and WARPGROUP == 1:
        _do("bar.arrive 8, 256; mov.b32 $0, 0;")


@gluon.jit
def product_in_turn(rows, matrix, zero, WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The other warpgroup's next product comes behind this one."""
    if PLAN.PINGPONG:
        if WARPGROUP == 0:
            _do("bar.sync 8, 256; mov.b32 $0, 0;")
        else:
            _do("bar.sync 9, 256; mov.b32 $0, 0;")
    found = warpgroup_mma(rows, matrix, zero, use_acc=False, is_async=True)
    if PLAN.PINGPONG:
        if WARPGROUP == 0:
            _do("bar.arrive 9, 256; mov.b32 $0, 0;")
        else:
            _do("bar.arrive 8, 256; mov.b32 $0, 0;")
    return found


@gluon.jit
def end_turns(WARPGROUP: gl.constexpr, PLAN: gl.constexpr):
    """The first warpgroup takes the turn that the other one has left to it: no barrier stays half full."""
    if PLAN.PINGPONG and WARPGROUP == 0:
        _do("bar.sync 8, 256; mov.b32 $0, 0;")


@gluon.jit
def _do(INSTRUCTIONS: gl.constexpr):
    """By each thread. Gluon has no barrier of two warpgroups; the compiler numbers its own ones from 0."""
    gl.inline_asm_elementwise(INSTRUCTIONS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep(
    value, h, desc, scale, kept, stride, row, end, column, width, shift, blocks, WARPGROUP: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of h, rounded to bf16, to memory."""
    one = kept.index(WARPGROUP * PLAN.BUFFERS)
    if PLAN.CODED:
        store_codes(value.to(gl.float32), h, desc, scale, one, stride, row, end, column, width, shift, blocks, 0, PLAN)
    else:
        store_halves(value, h, desc, one, one, stride, row, end, column, width, shift, 0, 0)


@gluon.jit
def store_halves(
    value, out, desc, one, other, stride, row, end, column, width, shift, BEFORE: gl.constexpr, BETWEEN: gl.constexpr
):  # fmt: skip
    """A tile to memory through buffers that have half as many columns. BEFORE, BETWEEN: copies that each half need not
    wait for, see `store_tile`."""
    COLUMNS: gl.constexpr = one.shape[1]
    left, right = column_parts(value, 2)
    store_tile(left, out, desc, one, stride, row, end, column, width, shift, BEFORE)
    store_tile(right, out, desc, other, stride, row, end, column + COLUMNS, width, shift, BETWEEN)


@gluon.jit
def store_both_halves(value, out, desc, one, other, stride, row, end, column, width, shift):
    """As `store_halves` without copies under way, with one fence for both."""
    COLUMNS: gl.constexpr = one.shape[1]
    left, right = column_parts(value, 2)
    tma.store_wait(0)
    one.store(left)
    other.store(right)
    if (row + one.shape[0] <= end) & (column + 2 * COLUMNS <= width):
        fence_async_shared()
        bulk_store(desc, [row, column + shift], one)
        bulk_store(desc, [row, column + COLUMNS + shift], other)
    else:
        store_masked(out, one, stride, row, end, column, width, shift)
        store_masked(out, other, stride, row, end, column + COLUMNS, width, shift)


@gluon.jit
def store_codes(
    value, out, desc, out_scale, buffer, stride, row, end, column, width, shift, blocks, PENDING: gl.constexpr,
    PLAN: gl.constexpr,
):  # fmt: skip
    """128 columns of a tile to memory, in e4m3, and a scale for each of its rows, of which a whole row has `blocks`."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    if PLAN.CUT:
        n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, value.type.layout))
        value = gl.where((n < width)[None, :], value, 0.0)
    value = infinities_to_nan(value)
    largest = gl.max(gl.abs(value), 1)  # the instruction for a maximum takes sizes by itself
    if PLAN.POWER_OF_TWO:
        scale, inverse = power_of_two(largest)
    else:
        # as `exact_scale` up to the last bit: a division that rounds takes registers that there are not
        scale = gl.where(largest > 0, gl.maximum(largest * (1.0 / 448.0), 1.1754943508222875e-38), 1.0)
        inverse = 1.0 / scale
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, value.type.layout))
    at = out_scale + m * blocks + (column + shift) // COLUMNS
    gl.store(at, scale, mask=(m < end) & (column < width))
    value *= inverse[:, None]
    if PLAN.SCALES_IN_STAGE:
        whole = (row + HEIGHT <= end) & (column + COLUMNS <= width)
        wait_for_buffer(whole, PENDING)
        _write_pairs(value, buffer)
        store_buffer(out, desc, buffer, stride, row, end, column, width, shift, whole)
    else:
        codes = encode(value).to(gl.float8e4nv, bitcast=True)
        store_tile(codes, out, desc, buffer, stride, row, end, column, width, shift, PENDING)


@gluon.jit
def _write_pairs(value, buffer):
    """Codes, two at a time as one instruction makes them: as bytes they are taken apart and put together again."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    PAIRS: gl.constexpr = buffer.shape[1] // 2
    even, odd = value.reshape((HEIGHT, PAIRS, 2)).split()
    pairs = gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even, odd], dtype=gl.int16, is_pure=True, pack=1
    )
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    reinterpret(buffer, gl.int16, [HEIGHT, PAIRS], layout).store(pairs)


@gluon.jit
def store_half(
    value, bias_row, buffers, descs, results, strides, row, end, column, width, blocks, WARPGROUP: gl.constexpr,
    HALF: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """128 columns of a tile that is not gated: with their bias, activated or not, to memory."""
    staging, kept = buffers
    h_desc, out_desc = descs
    _, h, h_scale, out, out_scale = results
    h_stride, out_stride = strides
    FIRST: gl.constexpr = WARPGROUP * PLAN.BUFFERS
    if PLAN.BIAS:
        value = add_bias(value, bias_row, column, width, value.shape[1])
    buffer = staging.index(FIRST)
    if PLAN.ACTIVATE:
        value = value.to(gl.bfloat16)
        if PLAN.KEEP:
            keep(value, h, h_desc, h_scale, kept, h_stride, row, end, column, width, 0, blocks, WARPGROUP, PLAN)
        a = plain(value.to(gl.float32), PLAN)
        store_codes(a, out, out_desc, out_scale, buffer, out_stride, row, end, column, width, 0, blocks, 0, PLAN)
    else:
        store_tile(value, out, out_desc, staging.index(FIRST + HALF), out_stride, row, end, column, width, 0, 1)
