"""How tiles of Hopper's products in e4m3 leave: in fp32, as h in bf16 or quantised, by the copy engine or by threads.

The parts of `amoeba.kernels.hopper.scaled_product_kernel` that follow a tile's products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from amoeba.kernels.activation import plain
from amoeba.kernels.hopper.product_store import add_bias, column_parts, store_tile
from amoeba.kernels.quantise import encode, finite_size, power_of_two

# A warpgroup's 64 rows by 128 columns as the matrix unit leaves them, but for two bits of the columns that change
# places, or four: each thread has four numbers side by side, or eight.
_ROWS, _WARPS = [[1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
FOURS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], [[0, 8], [0, 4], *_ROWS], _WARPS, [], [64, 128]
    )
)
EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], *_ROWS], _WARPS, [], [64, 128]
    )
)


@gluon.jit
def keep(
    value, h, desc, scale, kept, stride, row, end, column, width, shift, blocks, WARPGROUP: gl.constexpr,
    AGAIN: gl.constexpr, PLAN: gl.constexpr,
):  # fmt: skip
    """A tile of h, rounded to bf16, to memory. AGAIN: right behind another."""
    one = kept.index(WARPGROUP * PLAN.BUFFERS)
    if PLAN.CODED:
        PENDING: gl.constexpr = 1 if PLAN.LATE and AGAIN else 0  # the codes of a, which have a buffer of their own
        store_codes(
            value.to(gl.float32), h, desc, scale, one, stride, row, end, column, width, shift, blocks, PENDING, PLAN
        )  # fmt: skip
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
def store_straight(value, out, stride, row, end, column, width, shift, LIMITED: gl.constexpr):
    """A tile to memory without a buffer: four threads side by side hand numbers to each other, so that each has 16
    bytes of a row and they have 64. LIMITED: columns may end inside it."""
    HEIGHT: gl.constexpr = value.shape[0]
    COLUMNS: gl.constexpr = value.shape[1]
    layout: gl.constexpr = FOURS if out.dtype.element_ty == gl.float32 else EIGHTS
    value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = out + m.to(gl.int64)[:, None] * stride + (n + shift)[None, :]
    there = (m < end)[:, None]
    if LIMITED:
        there = there & (n < width)[None, :]
    gl.store(pointers, value, mask=there)


@gluon.jit
def store_by_threads(value, out, buffer, stride, row, end, column, width, shift, LIMITED: gl.constexpr):
    """A tile to memory through a buffer, from which threads store rows of it, 16 bytes each."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    PIECE: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 * PIECE // COLUMNS, COLUMNS // PIECE], [4, 1], [1, 0])
    buffer.store(value.to(out.dtype.element_ty))
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    there = (m < end)[:, None]
    if LIMITED:
        there = there & (n < width)[None, :]
    gl.store(out + m.to(gl.int64)[:, None] * stride + (n + shift)[None, :], buffer.load(layout), mask=there)


@gluon.jit
def store_halves_by_threads(value, out, one, other, stride, row, end, column, width, shift, LIMITED: gl.constexpr):
    COLUMNS: gl.constexpr = one.shape[1]
    left, right = column_parts(value, 2)
    store_by_threads(left, out, one, stride, row, end, column, width, shift, LIMITED)
    store_by_threads(right, out, other, stride, row, end, column + COLUMNS, width, shift, LIMITED)


@gluon.jit
def store_quarters(value, out, desc, staging, stride, row, end, column, width, FIRST: gl.constexpr):
    """A tile to memory through two buffers that have a quarter of its columns, in turns."""
    COLUMNS: gl.constexpr = staging.shape[2]
    first, second, third, fourth = column_parts(value, 4)
    one, other = staging.index(FIRST), staging.index(FIRST + 1)
    store_tile(first, out, desc, one, stride, row, end, column, width, 0, 1)
    store_tile(second, out, desc, other, stride, row, end, column + COLUMNS, width, 0, 1)
    store_tile(third, out, desc, one, stride, row, end, column + 2 * COLUMNS, width, 0, 1)
    store_tile(fourth, out, desc, other, stride, row, end, column + 3 * COLUMNS, width, 0, 1)


@gluon.jit
def _largest_finite(value):
    """Of each row, as by `finite_size`, in two instructions for three: no maximum takes NaN, as infinity times 0 is."""
    finite = gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, 0f00000000, $1;", "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1
    )
    largest = gl.max(gl.abs(finite), 1)
    return gl.where(largest == largest, largest, 0.0)  # nothing but NaN and infinities


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
    if PLAN.ALONG:
        largest = _largest_finite(value)
    else:
        largest = gl.max(finite_size(value), 1)
    scale, inverse = power_of_two(largest)
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, value.type.layout))
    at = out_scale + m * blocks + (column + shift) // COLUMNS
    if not PLAN.LATE:
        gl.store(at, scale, mask=(m < end) & (column < width))
    codes = encode(value * inverse[:, None]).to(gl.float8e4nv, bitcast=True)
    if PLAN.CODES_BY_THREADS:
        store_by_threads(codes, out, buffer, stride, row, end, column, width, shift, PLAN.CUT)
    else:
        store_tile(codes, out, desc, buffer, stride, row, end, column, width, shift, PENDING)
    if PLAN.LATE:  # behind the fence in front of the copy, which would wait for them
        gl.store(at, scale, mask=(m < end) & (column < width))


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
    elif PLAN.WIDE and PLAN.ALTERNATE:
        store_quarters(value, out, out_desc, staging, out_stride, row, end, column, width, FIRST)
    elif PLAN.WIDE:
        store_halves(value, out, out_desc, buffer, buffer, out_stride, row, end, column, width, 0, 0, 0)
    else:
        store_tile(value, out, out_desc, staging.index(FIRST + HALF), out_stride, row, end, column, width, 0, 1)
