"""The activation's backward with LoRA on Hopper, in Gluon: all results from one pass over memory.

N = T·K routed rows · E experts · I intermediate · J = 2I · R rank of a factor · P ranks, joined and padded

    found = activate_backward(da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, offs_E, table, up=Up(...), down=...)
    found.ds_N, found.dlow_NP                       # <da', a>, and c · dh · B as `Addend` takes it
    found.db.write(gradient_EIR, first=..., rank=...), found.da_down.write(gradient_ERI.mT)

dh and ds are those of `amoeba.kernels.activate.activate_backward`, after which others read dh and s·a again. Here
the matrix unit multiplies them in shared memory: dh · B, and the part that 128 rows have in Σ dhᵀ · low and in
Σ (s·a)ᵀ · dlow_down (`kernels.lora.lora_backward` adds the parts up, without atomics). So dh is written once and not
read, and s·a is not written at all. Rows from offs_E[-1] on are not written and nothing depends on what they hold,
their ds_N is 0. `dh_NJ` may be `h_NJ`: no column of a row is written before it was read.

A persistent kernel as in `amoeba.kernels.hopper.gemm`: one warp has the bulk copy engine fill a ring of stages, each
with 64 columns of 128 rows of da, gate and up and the factors that meet them; two warpgroups take every second stage.
There s·a, dgate and dup replace da, gate and up, the matrix unit and the copy engine (dh) read them, and the stage is
given back. Memory is busy all the while; a warpgroup's sums of a tile are added to the other's at the tile's end.

Stages, by their number n = 0, 1, ... over all tiles of a program, and what says that they may be used:

    full[n % TURNS]     the copy engine has filled stage n % STAGES. Warpgroup n % 2 waits for it, and since TURNS is
                        even it has waited for this barrier's last phase too: a parity is enough to tell them apart.
                        (By n % STAGES, with three stages, each warpgroup would wait for every second phase only. Ahead
                        of the phase between, it would take the one before that for its own, and begin too early.)
    empty[n % STAGES]   warpgroup n % 2 has done with it: the matrix unit has multiplied, the copy engine has read what
                        it stores, no thread reads. The feeding warp waits for every phase, before it fills n + STAGES.
    thin_full, thin_empty[t % THINS]        the same for the thin rows of tile t, which both warpgroups take
    given, taken        warpgroup 1's sums of tile t are there; warpgroup 0 has them

dh may lie where h lies. A stage's columns are stored after they were read, other stages read other columns; rows behind
an expert's end may be read while another program writes them, and are made zeros before anything is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from amoeba.core.config import Activation
from amoeba.kernels.activation import constants, gated_backward
from amoeba.kernels.hopper.gemm_kernel import BLOCK_M, Constants
from amoeba.kernels.hopper.tma import barrier, bulk_load, bulk_store, descriptor, reinterpret, shared_layout
from amoeba.kernels.launch import quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines
from amoeba.kernels.launch.persistent_grid import programs
from amoeba.kernels.lora.epilogue import padded_rank
from amoeba.kernels.lora.lora_backward import Sums
from amoeba.kernels.tile_sizes import Configuration
from amoeba.kernels.tiles import slots


@gluon.jit
def _place(table, turn):
    """Expert, first row and end of the expert's rows, of a program's turn-th tile."""
    entry = table + 4 + (gl.program_id(0) + turn * gl.num_programs(0)) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _produce(
    da_desc, h_desc, factor_desc, low_desc, down_desc, table, ring, thin, intermediate, PLAN: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Fills the stages, tile after tile, as they come free, and ahead of a tile's stages its thin rows."""
    da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty = ring
    low_bufs, down_bufs, thin_full, thin_empty = thin
    tiles = gl.load(table)
    count = 0
    for turn in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        expert, row, _ = _place(table, turn)
        slot = turn % PLAN.THINS
        mbarrier.wait(thin_empty.index(slot), ((turn // PLAN.THINS) & 1) ^ 1)
        bar = thin_full.index(slot)
        mbarrier.expect(bar, PLAN.THIN_BYTES)
        bulk_load(low_desc, [row, 0], bar, low_bufs.index(slot))
        bulk_load(down_desc, [row, 0], bar, down_bufs.index(slot))
        for column in range(0, intermediate, BLOCK):
            stage = count % PLAN.STAGES
            mbarrier.wait(empty.index(stage), ((count // PLAN.STAGES) & 1) ^ 1)
            bar = full.index(count % PLAN.TURNS)
            mbarrier.expect(bar, PLAN.STAGE_BYTES)
            bulk_load(h_desc, [row, column], bar, gate_bufs.index(stage))
            bulk_load(h_desc, [row, column + intermediate], bar, up_bufs.index(stage))
            bulk_load(da_desc, [row, column], bar, da_bufs.index(stage))
            line = expert * 2 * intermediate + column
            bulk_load(factor_desc, [line, 0], bar, gate_factors.index(stage))
            bulk_load(factor_desc, [line + intermediate, 0], bar, up_factors.index(stage))
            count += 1


@gluon.jit
def _chunks(buffers, CHUNK: gl.constexpr):
    """The same memory in chunks of this many rows, which a loop that is not unrolled can index."""
    HEIGHT: gl.constexpr = buffers.shape[1]
    COUNT: gl.constexpr = buffers.shape[0] * (HEIGHT // CHUNK)
    return reinterpret(buffers, buffers.dtype, [COUNT, CHUNK, buffers.shape[2]], buffers.layout)


@gluon.jit
def _clear(buffers, at, rows, CHUNK: gl.constexpr):
    """Zeros from `rows` on: rows of other experts, or of none, may be NaN, which a zero does not cancel."""
    CHUNKS: gl.constexpr = buffers.shape[1] // CHUNK
    WIDTH: gl.constexpr = buffers.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    chunks = _chunks(buffers, CHUNK)
    for chunk in range(rows // CHUNK, CHUNKS):
        buffer = chunks.index(at * CHUNKS + chunk)
        value = buffer.load(layout)
        buffer.store(gl.where(m < rows - chunk * CHUNK, value, gl.zeros_like(value)))


@gluon.jit
def _store_rows(buffers, at, rows, out, stride, CHUNK: gl.constexpr):
    """The first `rows`."""
    CHUNKS: gl.constexpr = buffers.shape[1] // CHUNK
    WIDTH: gl.constexpr = buffers.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    chunks = _chunks(buffers, CHUNK)
    for chunk in range(gl.cdiv(rows, CHUNK)):
        value = chunks.index(at * CHUNKS + chunk).load(layout)
        gl.store(out + chunk * CHUNK * stride + (m * stride + c), value, mask=m < rows - chunk * CHUNK)


@gluon.jit
def _store_part(part, parts, line, FIRST: gl.constexpr, RANKS: gl.constexpr):
    """The ranks from FIRST on of the columns from `line` on."""
    layout: gl.constexpr = part.type.layout
    c = gl.arange(0, part.shape[0], gl.SliceLayout(1, layout))
    r = gl.arange(0, part.shape[1], gl.SliceLayout(0, layout))
    own = (r >= FIRST) & (r < FIRST + RANKS)
    at = parts + line * part.shape[1]
    gl.store(at + ((c * part.shape[1])[:, None] + r[None, :]), part, mask=own[None, :])


@gluon.jit
def _in_threads(tile):
    """Row sums as far as a thread has them, (rows, 8)."""
    return gl.sum(tile.reshape((tile.shape[0], 8, tile.shape[1] // 8)), axis=2)


@gluon.jit
def _store_sums(sums, others, ds, row, end):
    layout: gl.constexpr = sums.type.layout
    n = row + gl.arange(0, sums.shape[0], layout)
    gl.store(ds + n, sums + others.load(layout), mask=n < end)


@gluon.jit
def _differentiate(da_buf, gate_buf, up_buf, scale, PLAN: gl.constexpr, layout: gl.constexpr):
    """s·a, dgate and dup in place of da, gate and up, and da · a summed as far as a thread has it."""
    dtype: gl.constexpr = da_buf.dtype
    da = da_buf.load(layout).to(gl.float32)
    gate = gate_buf.load(layout).to(gl.float32)
    up = up_buf.load(layout).to(gl.float32)
    a, dgate, dup = gated_backward(scale * da, gate, up, PLAN)
    da_buf.store((scale * a).to(dtype))
    gate_buf.store(dgate.to(dtype))
    up_buf.store(dup.to(dtype))
    return _in_threads(da * a)


@gluon.jit
def _consume(
    dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate, dh_stride, ring,
    thin, exchange, WARPGROUP: gl.constexpr, PLAN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of the stages."""
    da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty = ring
    low_bufs, down_bufs, thin_full, thin_empty = thin
    total_buf, ds_bufs, given, taken = exchange
    dtype: gl.constexpr = dh.dtype.element_ty
    CHUNKS: gl.constexpr = BLOCK_M // CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK, BLOCK // 8], [4, 1], [1, 0])
    of_ranks: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.R, 16])
    of_down: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PLAN.D, 16])
    zeros = gl.zeros((BLOCK, PLAN.R), gl.float32, of_ranks)
    down_zeros = gl.zeros((BLOCK, PLAN.D), gl.float32, of_down)
    da_chunks = _chunks(da_bufs, CHUNK)
    gate_chunks = _chunks(gate_bufs, CHUNK)
    up_chunks = _chunks(up_bufs, CHUNK)
    tiles = gl.load(table)
    steps = intermediate // BLOCK
    for turn in range(gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))):
        expert, row, end = _place(table, turn)
        start = gl.load(offs_E + expert - 1, mask=expert > 0, other=0)
        place = (start // BLOCK_M + expert + (row - start) // BLOCK_M).to(gl.int64)  # as `find_tile` numbers them
        rows = gl.minimum(end - row, BLOCK_M)
        m = row + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
        scales = ()  # type: tuple
        ds_rows = ()  # type: tuple
        for i in gl.static_range(CHUNKS):
            own = m + i * CHUNK < end
            slot = gl.load(order + m + i * CHUNK, mask=own, other=0)
            scales += (gl.load(weight + slot, mask=own, other=0.0).to(gl.float32)[:, None],)
            ds_rows += (_in_threads(gl.zeros((CHUNK, BLOCK), gl.float32, layout)),)
        thin_slot = turn % PLAN.THINS
        mbarrier.wait(thin_full.index(thin_slot), (turn // PLAN.THINS) & 1)
        if rows < BLOCK_M:  # both warpgroups do, and write the same
            _clear(low_bufs, thin_slot, rows, CHUNK)
            _clear(down_bufs, thin_slot, rows, CHUNK)
            fence_async_shared()
        total = gl.zeros((BLOCK_M, PLAN.R), gl.float32, of_ranks)
        for step in range((turn * steps + WARPGROUP) & 1, steps, 2):
            count = turn * steps + step
            column = step * BLOCK
            stage = count % PLAN.STAGES
            da_buf = da_bufs.index(stage)
            gate_buf = gate_bufs.index(stage)
            up_buf = up_bufs.index(stage)
            mbarrier.wait(full.index(count % PLAN.TURNS), (count // PLAN.TURNS) & 1)
            if rows < BLOCK_M:
                _clear(da_bufs, stage, rows, CHUNK)
                _clear(gate_bufs, stage, rows, CHUNK)
                _clear(up_bufs, stage, rows, CHUNK)
            for chunk in range(gl.cdiv(rows, CHUNK)):
                at = stage * CHUNKS + chunk
                scale = scales[0]
                for i in gl.static_range(1, CHUNKS):
                    scale = gl.where(chunk == i, scales[i], scale)
                sums = _differentiate(
                    da_chunks.index(at), gate_chunks.index(at), up_chunks.index(at), scale, PLAN, layout
                )
                found = ()  # type: tuple
                for i in gl.static_range(CHUNKS):
                    found += (ds_rows[i] + gl.where(chunk == i, sums, 0.0),)
                ds_rows = found
            fence_async_shared()  # threads wrote, the copy engine and the matrix unit read as other parties
            barrier()
            if rows == BLOCK_M:
                bulk_store(dh_desc, [row, column], gate_buf)
                bulk_store(dh_desc, [row, column + intermediate], up_buf)
            else:
                dh_rows = dh + row.to(gl.int64) * dh_stride + column
                _store_rows(gate_bufs, stage, rows, dh_rows, dh_stride, CHUNK)
                _store_rows(up_bufs, stage, rows, dh_rows + intermediate, dh_stride, CHUNK)
            # The slot found from what changes in this loop: or 16 descriptors stay in registers, and others leave them.
            low = low_bufs.index(count // steps % PLAN.THINS)
            down = down_bufs.index(count // steps % PLAN.THINS)
            total = warpgroup_mma(gate_buf, gate_factors.index(stage), total, is_async=True)
            total = warpgroup_mma(up_buf, up_factors.index(stage), total, is_async=True)
            of_gate = warpgroup_mma(gate_buf.permute((1, 0)), low, zeros, use_acc=False, is_async=True)
            of_up = warpgroup_mma(up_buf.permute((1, 0)), low, zeros, use_acc=False, is_async=True)
            of_a = warpgroup_mma(da_buf.permute((1, 0)), down, down_zeros, use_acc=False, is_async=True)
            total, of_gate, of_up, of_a = warpgroup_mma_wait(0, deps=(total, of_gate, of_up, of_a))
            own_parts = parts + place * 2 * intermediate * PLAN.R
            _store_part(of_gate, own_parts, column, 0, PLAN.GATE_RANK)
            _store_part(of_up, own_parts, column + intermediate, PLAN.UP_FIRST, PLAN.UP_RANK)
            _store_part(of_a, down_parts + place * intermediate * PLAN.D, column, 0, PLAN.D)
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if WARPGROUP == 1:
            mbarrier.wait(taken, (turn & 1) ^ 1)
            total_buf.store(total)
            for i in gl.static_range(CHUNKS):
                ds_bufs.index(i).store(gl.sum(ds_rows[i], axis=1))
            barrier()
            mbarrier.arrive(given, count=1)
        else:
            mbarrier.wait(given, turn & 1)
            total += total_buf.load(of_ranks)
            for i in gl.static_range(CHUNKS):
                _store_sums(gl.sum(ds_rows[i], axis=1), ds_bufs.index(i), ds, row + i * CHUNK, end)
            barrier()
            mbarrier.arrive(taken, count=1)
            n = gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_ranks))
            r = gl.arange(0, PLAN.R, gl.SliceLayout(0, of_ranks))
            own = (n < rows)[:, None]
            dlow_at = dlow + row.to(gl.int64) * PLAN.R + (n[:, None] * PLAN.R + r[None, :])
            gl.store(dlow_at, (total * scaling).to(dtype), mask=own)
        mbarrier.arrive(thin_empty.index(thin_slot), count=1)


@quick
@gluon.jit
def activation_kernel(
    da_desc, h_desc, dh_desc, factor_desc, low_desc, down_desc, weight, order, offs_E, table, dh, ds, dlow, parts,
    down_parts, scaling, intermediate, dh_stride, PLAN: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    FACTOR_LAYOUT: gl.constexpr, LOW_LAYOUT: gl.constexpr, DOWN_LAYOUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """A program owns whole rows of an expert, so that ds and dh · B need no second pass."""
    dtype: gl.constexpr = dh.dtype.element_ty
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    of_total: gl.constexpr = gl.SwizzledSharedLayout(2, 1, PLAN.R // 2 if PLAN.R < 32 else 16, [1, 0])
    da_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    gate_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    up_bufs = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK_M, BLOCK], TILE_LAYOUT)
    gate_factors = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK, PLAN.R], FACTOR_LAYOUT)
    up_factors = gl.allocate_shared_memory(dtype, [PLAN.STAGES, BLOCK, PLAN.R], FACTOR_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [PLAN.TURNS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [PLAN.STAGES, 1], barriers)
    low_bufs = gl.allocate_shared_memory(dtype, [PLAN.THINS, BLOCK_M, PLAN.R], LOW_LAYOUT)
    down_bufs = gl.allocate_shared_memory(dtype, [PLAN.THINS, BLOCK_M, PLAN.D], DOWN_LAYOUT)
    thin_full = gl.allocate_shared_memory(gl.int64, [PLAN.THINS, 1], barriers)
    thin_empty = gl.allocate_shared_memory(gl.int64, [PLAN.THINS, 1], barriers)
    total_buf = gl.allocate_shared_memory(gl.float32, [BLOCK_M, PLAN.R], of_total)
    ds_bufs = gl.allocate_shared_memory(gl.float32, [BLOCK_M // CHUNK, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = gl.allocate_shared_memory(gl.int64, [1], barriers)
    taken = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(PLAN.TURNS):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(PLAN.STAGES):
        mbarrier.init(empty.index(i), count=1)  # the warpgroup whose turn it was
    for i in gl.static_range(PLAN.THINS):
        mbarrier.init(thin_full.index(i), count=1)
        mbarrier.init(thin_empty.index(i), count=2)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    ring = (da_bufs, gate_bufs, up_bufs, gate_factors, up_factors, full, empty)
    thin = (low_bufs, down_bufs, thin_full, thin_empty)
    exchange = (total_buf, ds_bufs, given, taken)
    gl.warp_specialize(
        [
            (_consume, (
                dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate,
                dh_stride, ring, thin, exchange, gl.constexpr(0), PLAN, BLOCK_M, BLOCK, CHUNK,
            )),
            (_consume, (
                dh_desc, weight, order, offs_E, table, dh, ds, dlow, parts, down_parts, scaling, intermediate,
                dh_stride, ring, thin, exchange, gl.constexpr(1), PLAN, BLOCK_M, BLOCK, CHUNK,
            )),
            (_produce, (
                da_desc, h_desc, factor_desc, low_desc, down_desc, table, ring, thin, intermediate, PLAN, BLOCK,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# Columns of a step: the second product has as many rows, and the matrix unit multiplies no fewer.
BLOCK = 64
# Rows that a warpgroup has in registers at a time.
CHUNK = 32
WIDEST_RANK = 64
# Stages, and tiles whose thin rows are there, in order of preference; the memory they may take in addition to the
# barriers.
RINGS = ((3, 2), (2, 2))
SHARED_BYTES = 231_000


class Up(NamedTuple):
    """Of gate and up: b as `join_factors` makes it, c · x Aᵀ, which ranks are gate's and which up's."""

    b_EOP: Tensor
    low_NP: Tensor
    gate_ranks: slice
    up_ranks: slice
    scaling: float


class Down(NamedTuple):
    """Of down: c · dy B, and its rank."""

    dlow_NP: Tensor
    rank: int


class Found(NamedTuple):
    ds_N: Tensor
    dlow_NP: Tensor
    db: Sums  # of (J, R), columns as in h
    da_down: Sums  # of (I, R)


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    GATE_RANK: int  # the first ones
    UP_FIRST: int
    UP_RANK: int
    R: int  # ranks of gate and up that are multiplied
    D: int  # ... and of down
    STAGES: int
    THINS: int  # tiles whose thin rows are there at a time
    KIND: str
    ALPHA: float
    CLAMP: bool
    LIMIT: float
    UP_SHIFT: float

    @property
    def STAGE_BYTES(self) -> int:
        return 2 * (3 * BLOCK_M * BLOCK + 2 * BLOCK * self.R)

    @property
    def THIN_BYTES(self) -> int:
        return 2 * BLOCK_M * (self.R + self.D)

    @property
    def fits(self) -> bool:
        exchange = 4 * BLOCK_M * (self.R + 1)
        return self.STAGES * self.STAGE_BYTES + self.THINS * self.THIN_BYTES + exchange <= SHARED_BYTES

    @property
    def TURNS(self) -> int:
        """The number of fillings after which the same warpgroup takes the same stage again."""
        return 2 * self.STAGES


def serves(activation: Activation, rows: int, experts: int, intermediate: int, rank: int) -> bool:
    """rank: the largest. Where experts have few rows, the parts of the sums would outweigh what is saved."""
    plain = activation.gated and not activation.interleaved and intermediate % BLOCK == 0
    return plain and rank <= WIDEST_RANK and rows >= BLOCK_M * experts


def activate_backward(
    da_NI: Tensor,
    h_NJ: Tensor,
    weight_TK: Tensor,
    order_N: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    offs_E: Tensor,
    table: Tensor,
    *,
    up: Up,
    down: Down,
) -> Found:
    rows, intermediate = da_NI.shape
    experts, width, padded = up.b_EOP.shape
    fit = have_lines(da_NI, h_NJ, dh_NJ, up.low_NP, down.dlow_NP) and order_N.is_contiguous()
    fit = fit and h_NJ.shape[1] == dh_NJ.shape[1] == width == 2 * intermediate and up.b_EOP.is_contiguous()
    check_arguments(fit, "rows that are contiguous inside", da_NI=da_NI, h_NJ=h_NJ, dh_NJ=dh_NJ, b_EOP=up.b_EOP)
    gate, of_up = up.gate_ranks, up.up_ranks
    block_r, block_d = padded_rank(max(gate.stop, of_up.stop)), padded_rank(down.rank)
    tiles = slots(rows, experts, BLOCK_M)
    ds_N = torch.zeros(rows, dtype=torch.float32, device=da_NI.device)
    dlow_NP = torch.empty((rows, block_r), dtype=da_NI.dtype, device=da_NI.device)
    parts = torch.empty((tiles, width, block_r), dtype=torch.float32, device=da_NI.device)
    down_parts = torch.empty((tiles, intermediate, block_d), dtype=torch.float32, device=da_NI.device)
    ranks = (gate.stop, of_up.start, of_up.stop - of_up.start, block_r, block_d)
    bound = _bound(activation, ranks, da_NI.dtype)
    bound[(programs(da_NI.device),)](
        descriptor(da_NI, (BLOCK_M, BLOCK)),
        descriptor(h_NJ, (BLOCK_M, BLOCK)),
        descriptor(dh_NJ, (BLOCK_M, BLOCK)),
        descriptor(up.b_EOP.view(experts * width, padded), (BLOCK, block_r)),
        descriptor(up.low_NP, (BLOCK_M, block_r)),
        descriptor(down.dlow_NP, (BLOCK_M, block_d)),
        weight_TK.contiguous(),
        order_N,
        offs_E,
        table,
        dh_NJ,
        ds_N,
        dlow_NP,
        parts,
        down_parts,
        up.scaling,
        intermediate,
        dh_NJ.stride(0),
    )
    tile = Configuration(BLOCK_M, BLOCK, 0, 1, 8, 1)
    return Found(ds_N, dlow_NP, Sums(parts, offs_E, rows, tile), Sums(down_parts, offs_E, rows, tile))


@cache
def _bound(activation: Activation, ranks: tuple[int, int, int, int, int], dtype: torch.dtype) -> Any:
    """ranks: the first fields of `Plan`."""
    named: Any = constants(activation)
    del named["GATED"]
    plans = (Plan(*ranks, *ring, **named) for ring in RINGS)
    plan = next(plan for plan in plans if plan.fits)
    return activation_kernel.bound(
        PLAN=Constants(plan),
        TILE_LAYOUT=shared_layout((BLOCK_M, BLOCK), dtype),
        FACTOR_LAYOUT=shared_layout((BLOCK, plan.R), dtype),
        LOW_LAYOUT=shared_layout((BLOCK_M, plan.R), dtype),
        DOWN_LAYOUT=shared_layout((BLOCK_M, plan.D), dtype),
        BLOCK_M=BLOCK_M,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        num_warps=4,
    )
