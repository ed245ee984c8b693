"""The epilogue of a product tile on Hopper: parts of it, a bias, and its store to memory.

    left, right = column_parts(acc, 2)
    store_tile(add_bias(left, bias, column, width, 128), out, desc, buffer, stride, row, end, column, width, 0)

Used by every product of Hopper's, and by the weights' gradients.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from amoeba.kernels.activation import gated, plain
from amoeba.kernels.hopper.tma import bulk_store


@gluon.jit
def add_bias(tile, bias, column, width, COLUMNS: gl.constexpr):
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, tile.type.layout))
    return tile + gl.load(bias + n, mask=n < width, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def rounded(sums):
    """To bf16, two at a time: left to itself, the compiler takes an instruction of the slow unit for each."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [sums], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def row_scale(most):
    """Powers of two by which rows of fp32 become fp16 and fp16 becomes them again, for the largest magnitude in each:
    that one comes to lie below 2 ** 15. Rows with inf or NaN are left as they are."""
    exponent = most.to(gl.int32, bitcast=True) >> 23
    exponent = gl.where(exponent == 255, 141, gl.maximum(exponent, 15))
    scale = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    return scale, ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scaled_to_fp16(sums, scale):
    """Rows in fp16, two numbers at a time; in a tensor that says bf16, as the memory they go to does."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [sums * scale[:, None]], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def store_row_scale(scales, inverse, stride, row, end, block):
    """Of one block of columns of a tile's rows; there is room for those of whole tiles (`activate.new_scales`)."""
    m = row + gl.arange(0, inverse.shape[0], inverse.type.layout)
    gl.store(scales + m.to(gl.int64) * stride + block, inverse, mask=m < end)


@gluon.jit
def now(sums):
    """These, computed here: the compiler would do it where they are stored, and keep what the matrix unit gave beside
    them until then."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def column_parts(tile, PARTS: gl.constexpr):
    """A tile's left and right half, or its four quarters."""
    HEIGHT: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    left, right = tile.reshape((HEIGHT, 2, WIDTH // 2)).permute((0, 2, 1)).split()
    if PARTS == 2:
        return left, right
    else:
        first, second = left.reshape((HEIGHT, 2, WIDTH // 4)).permute((0, 2, 1)).split()
        third, fourth = right.reshape((HEIGHT, 2, WIDTH // 4)).permute((0, 2, 1)).split()
        return first, second, third, fourth


@gluon.jit
def wait_for_buffer(whole, PENDING: gl.constexpr):
    """Until the copies by the engine have read their buffers, all but the last PENDING. whole: it copies this, too."""
    if PENDING == 0:
        tma.store_wait(0)
    elif whole:
        tma.store_wait(PENDING)
    else:
        tma.store_wait(0)  # nothing is copied now: the next ones may count on it


@gluon.jit
def store_tile(value, out, desc, buffer, stride, row, end, column, width, shift, PENDING: gl.constexpr = 0):
    """A tile to memory: by the copy engine where it is whole, under a mask where rows or columns end inside it.

    PENDING: the number of last copies by the engine that do not read from this buffer.
    """
    whole = (row + buffer.shape[0] <= end) & (column + buffer.shape[1] <= width)
    wait_for_buffer(whole, PENDING)
    buffer.store(value.to(out.dtype.element_ty))
    store_buffer(out, desc, buffer, stride, row, end, column, width, shift, whole)


@gluon.jit
def store_buffer(out, desc, buffer, stride, row, end, column, width, shift, whole):
    """What a buffer holds to memory, as by `store_tile`. whole: neither rows nor columns end inside it."""
    if whole:
        fence_async_shared()
        bulk_store(desc, [row, column + shift], buffer)
    else:
        store_masked(out, buffer, stride, row, end, column, width, shift)


@gluon.jit
def store_masked(out, buffer, stride, row, end, column, width, shift):
    """What a buffer holds, by threads, up to the last row and column."""
    HEIGHT: gl.constexpr = buffer.shape[0]
    COLUMNS: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = out + m.to(gl.int64)[:, None] * stride + (n + shift)[None, :]
    gl.store(pointers, buffer.load(layout), mask=(m < end)[:, None] & (n < width)[None, :])


@gluon.jit
def finish_tile(
    acc, buffers, results, shape, expert, row, end, n, WARPGROUP: gl.constexpr, PLAN: gl.constexpr
):  # fmt: skip
    """Add the bias, activate, store: the left half, then the right one, through the warpgroup's buffer. acc: of half of
    the tile's rows, or, where PLAN.FEW, of half of its columns."""
    h_desc, out_desc, bias, h, out = results
    _, width, columns, h_stride, out_stride = shape
    HALF: gl.constexpr = acc.shape[1] // 2
    column = n * PLAN.COLUMNS
    if PLAN.FEW:
        column += WARPGROUP * (PLAN.COLUMNS // 2)
    bias_row = bias + expert.to(gl.int64) * width
    halves = column_parts(acc, 2)
    if PLAN.PAIRED:
        gate, up = halves
        buffer = buffers.index(WARPGROUP)
        if PLAN.BIAS:
            gate = add_bias(gate, bias_row, column, columns, HALF)
            up = add_bias(up, bias_row + columns, column, columns, HALF)
        if PLAN.KEEP:
            store_tile(gate, h, h_desc, buffer, h_stride, row, end, column, columns, 0)
            store_tile(up, h, h_desc, buffer, h_stride, row, end, column, columns, columns)
        a = gated(gate, up, PLAN)
        store_tile(a, out, out_desc, buffer, out_stride, row, end, column, columns, 0)
    else:
        if PLAN.SCALED and PLAN.FEW:  # whose halves have one scale
            scale, inverse = row_scale(gl.max(gl.maximum(gl.abs(halves[0]), gl.abs(halves[1])), axis=1))
            store_row_scale(h, inverse, h_stride, row, end, column // 128)
        for i in gl.static_range(2):
            value = halves[i]
            at = column + i * HALF
            if PLAN.BIAS:
                value = add_bias(value, bias_row, at, width, HALF)
            buffer = buffers.index(WARPGROUP)
            if PLAN.SCALED:  # h is where the scales go
                if not PLAN.FEW:
                    scale, inverse = row_scale(gl.max(gl.abs(value), axis=1))
                    store_row_scale(h, inverse, h_stride, row, end, at // 128)
                value = scaled_to_fp16(value, scale)
            if PLAN.ACTIVATE:
                if PLAN.KEEP:
                    store_tile(value, h, h_desc, buffer, h_stride, row, end, at, width, 0)
                value = plain(value, PLAN)
            store_tile(value, out, out_desc, buffer, out_stride, row, end, at, width, 0)
