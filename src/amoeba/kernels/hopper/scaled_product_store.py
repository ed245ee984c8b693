"""How tiles of Hopper's products in e4m3 leave: in bf16 or quantised, through buffers in shared memory.

The parts of `amoeba.kernels.hopper.scaled_product_kernel` that follow a tile's products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from amoeba.kernels.activation import plain
from amoeba.kernels.hopper.descriptor import bulk_store, reinterpret
from amoeba.kernels.hopper.product_store import (
    add_bias,
    column_parts,
    store_buffer,
    store_masked,
    store_tile,
    wait_for_buffer,
)
from amoeba.kernels.quantise import encode, infinities_to_nan, power_of_two


@gluon.jit
def keep(
    value, h, desc, scale, kept, stride, row, end, column, width, shift, blocks, WARPGROUP: gl.constexpr,
    AGAIN: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of h, rounded to bf16, to memory. AGAIN: right behind another."""
    one = kept.index(WARPGROUP * PLAN.BUFFERS)
    if PLAN.CODED:
        store_codes(value.to(gl.float32), h, desc, scale, one, stride, row, end, column, width, shift, blocks, 0, PLAN)
    elif PLAN.ALTERNATE:
        other = kept.index(WARPGROUP * PLAN.BUFFERS + 1)
        store_halves(value, h, desc, one, other, stride, row, end, column, width, shift, 1 if AGAIN else 0, 1)
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
    scale, inverse = power_of_two(gl.max(gl.abs(value), 1))  # the instruction for a maximum takes sizes by itself
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, value.type.layout))
    at = out_scale + m * blocks + (column + shift) // COLUMNS
    gl.store(at, scale, mask=(m < end) & (column < width))
    value *= inverse[:, None]
    if PLAN.ALONG:
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
    value, bias_row, h, h_desc, h_scale, kept, out, out_desc, out_scale, staging, h_stride, out_stride, row, end,
    column, width, blocks, WARPGROUP: gl.constexpr, FIRST: gl.constexpr, HALF: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """128 columns of a tile that is not gated: with their bias, activated or not, to memory."""
    if PLAN.BIAS:
        value = add_bias(value, bias_row, column, width, value.shape[1])
    buffer = staging.index(FIRST)
    if PLAN.ACTIVATE:
        value = value.to(gl.bfloat16)
        if PLAN.KEEP:
            keep(
                value, h, h_desc, h_scale, kept, h_stride, row, end, column, width, 0, blocks, WARPGROUP, False, PLAN
            )  # fmt: skip
        a = plain(value.to(gl.float32), PLAN.FORM, PLAN.ALPHA, PLAN.CLAMP, PLAN.LIMIT)
        PENDING: gl.constexpr = 1 if PLAN.ALTERNATE else 0
        store_codes(a, out, out_desc, out_scale, buffer, out_stride, row, end, column, width, 0, blocks, PENDING, PLAN)
    else:
        store_tile(value, out, out_desc, staging.index(FIRST + HALF), out_stride, row, end, column, width, 0, 1)
