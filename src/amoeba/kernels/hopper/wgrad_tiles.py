"""Where a tile of a weight gradient lies, and its way to memory.

    tile, expert, h, w, start, end = place_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP)
    store_gradient(acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP, TRANSPOSED)

For `amoeba.kernels.hopper.wgrad`, and for the scheduled backward.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from amoeba.kernels.hopper.epilogue import column_parts, wait_for_buffer
from amoeba.kernels.hopper.tma import bulk_store


@gluon.jit
def place_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP: gl.constexpr):
    """Expert, tile along H and along W, and the expert's rows, of a multiprocessor's turn-th tile.

    Experts come by falling number of rows, and every second turn runs backwards: so each multiprocessor gets its share
    of the long and of the short ones. In the last turn there may be no tile for it: no rows then, and `tile` says so.
    """
    tile = _tile_of_turn(turn)
    expert, h, w = expert_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP)
    start, end = rows_of_turn(expert, owners)
    return tile, expert, h, w, start, gl.where(tile < tiles, end, start)


@gluon.jit
def _tile_of_turn(turn):
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + (program if turn % 2 == 0 else programs - 1 - program)


@gluon.jit
def turns_of_program(tiles):
    """How many tiles a multiprocessor has."""
    all_have = tiles // gl.num_programs(0)
    return all_have + (_tile_of_turn(all_have) < tiles).to(gl.int32)


@gluon.jit
def expert_of_turn(turn, owners, tiles, h_tiles, w_tiles, GROUP: gl.constexpr):
    """Expert, tile along H and along W of a multiprocessor's turn-th tile; of the last tile where it has none."""
    inside = gl.minimum(_tile_of_turn(turn), tiles - 1)
    expert = gl.load(owners[1] + inside // (h_tiles * w_tiles))
    inside = inside % (h_tiles * w_tiles)
    group = inside // (GROUP * w_tiles)
    height = gl.minimum(h_tiles - group * GROUP, GROUP)
    inside = inside % (GROUP * w_tiles)
    return expert, group * GROUP + inside % height, inside // height


@gluon.jit
def rows_of_turn(expert, owners):
    """An expert's first row, and behind its last one."""
    offs_E = owners[0]
    return gl.load(offs_E + expert - 1, mask=expert > 0, other=0), gl.load(offs_E + expert)


@gluon.jit
def store_gradient(
    acc, staging, out, out_desc, expert, h, w, hidden, width, WARPGROUP: gl.constexpr, TRANSPOSED: gl.constexpr,
    BUFFERS: gl.constexpr = 1,
):  # fmt: skip
    """One warpgroup's half of a tile along H, in two parts for each of its buffers, which take turns."""
    HALF: gl.constexpr = acc.shape[0]
    BLOCK_W: gl.constexpr = acc.shape[1]
    parts = column_parts(acc, 2 * BUFFERS)
    for part in gl.static_range(2 * BUFFERS):
        first_h = h * (2 * HALF) + WARPGROUP * HALF
        first_w = w * BLOCK_W + part * (BLOCK_W // (2 * BUFFERS))
        buffer = staging.index(WARPGROUP * BUFFERS + part % BUFFERS)
        if TRANSPOSED:
            transposed = buffer.permute((1, 0))
            store_piece(
                parts[part], out, out_desc, buffer, transposed, expert, first_w, width, first_h, hidden, BUFFERS - 1
            )
        else:
            store_piece(
                parts[part], out, out_desc, buffer, buffer, expert, first_h, hidden, first_w, width, BUFFERS - 1
            )


@gluon.jit
def store_piece(value, out, out_desc, buffer, transposed, expert, row, rows, column, columns, PENDING: gl.constexpr):
    """A part of an expert's (rows, columns) to memory: by the copy engine where it is whole, else under a mask.

    transposed: the buffer as `value` lies. PENDING: as for `store_tile`.
    """
    HEIGHT: gl.constexpr = buffer.shape[0]
    WIDTH: gl.constexpr = buffer.shape[1]
    whole = (row + HEIGHT <= rows) & (column + WIDTH <= columns)
    wait_for_buffer(whole, PENDING)
    transposed.store(value.to(out.dtype.element_ty))
    if whole:
        fence_async_shared()
        bulk_store(out_desc, [expert * rows + row, column], buffer)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
        m = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        pointers = out + (expert.to(gl.int64) * rows + m)[:, None] * columns + n[None, :]
        gl.store(pointers, buffer.load(layout), mask=(m < rows)[:, None] & (n < columns)[None, :])
