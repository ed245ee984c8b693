"""Sorted rows times expert matrices on Hopper, in Gluon: one warpgroup feeds shared memory, two multiply.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    table = tile_table(offs_E, rows=N)                                          # once a pass
    up(x_TH, order_N, K, gate_up_EJH, table, activation, h_NJ=h, a_NI=a)        # gathers rows of x as it loads them
    multiply(a, down_EHI, table, out=y_NH)                                      # y[n] = a[n] · down[e]ᵀ
    multiply(dh, gate_up_EJH.transpose(1, 2), table, out=dx_NH)

A persistent kernel: each multiprocessor walks over tiles of 128 rows, or 64, by 256 columns, no tile crosses from one
expert to the next. Weights come by the bulk copy engine, rows likewise or gathered by asynchronous copies; a full tile
leaves by the bulk copy engine, an expert's last one under a mask. Nothing is padded and the host knows no row count.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import erfc, sqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels.activation import constants
from amoeba.kernels.hopper.gemm_kernel import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    STAGES,
    Constants,
    Plan,
    gemm_kernel,
)
from amoeba.kernels.hopper.tile_order import FEW_ROWS, KEPT_BYTES, list_tiles, order_of_product
from amoeba.kernels.hopper.tma import descriptor
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.persistent_grid import halvings, programs, programs_in_halves, sharing
from amoeba.kernels.lora.epilogue import Addend, padded_rank

# Rows of an expert up to which tiles have FEW_ROWS. A pass over sorted rows without gradients on an H200, tiles of 128
# against 64 (dev/log, 2026-11-18): at 32 rows of each 358 : 338 us for Qwen3-30B's layer, 1526 : 1428 for DeepSeek-V3's
# and 808 : 720 for Mixtral's, 346 : 303 for Qwen3-30B's in MXFP4. At 64 rows neither is the better one in bf16, and
# MXFP4 takes 349 : 430.
MOST_FEW = 48
# Of long rows of weights the less tall tile, too, where many second tiles of 128 would be nearly empty: Mixtral's layer
# with 128 rows of each expert took 1156 : 1024 us in that run. It multiplies FEW_COSTS times slower (estimated), and is
# only taken where tall tiles have more than COMPUTE_ROWS: below, reading the weights takes longer than multiplying.
LONG_DEPTH, FEW_COSTS, COMPUTE_ROWS = 4096, 1.12, 155


@quick
@triton.jit
def _tile_table(
    offs_E, table, first_expert, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    e = tl.arange(0, EXPERTS)
    end = tl.load(offs_E + first_expert + e, mask=e < experts, other=0)
    start = tl.load(offs_E + first_expert + e - 1, mask=(first_expert + e > 0) & (e < experts), other=0)
    tiles = tl.where(e < experts, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    tile_end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)  # experts that end at or before the tile
    mine = owner[:, None] == e[None, :]
    first = tl.sum(tl.where(mine, (start - (tile_end - tiles) * BLOCK_M)[None, :], 0), 1) + tile * BLOCK_M
    last = tl.sum(tl.where(mine, end[None, :], 0), 1)
    of_owner = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
    at = table + 4 + tile * 4
    real = tile < total
    tl.store(at, owner, mask=real)
    tl.store(at + 1, first, mask=real)
    tl.store(at + 2, last, mask=real)
    tl.store(at + 3, of_owner, mask=real)
    if tl.program_id(0) == 0:
        tl.store(table, total)


def tile_table(offs_E: Tensor, rows: int, first: int = 0, last: int | None = None, block_m: int = BLOCK_M) -> Tensor:
    """The number of tiles and three unused places; then for each tile: expert, first row, expert's end and tiles.

    first, last: of some experts alone, which are counted from the first one on. block_m: rows of a tile, as the
    products that are given the table are told.
    """
    experts = (offs_E.shape[0] if last is None else last) - first
    most = rows // block_m + min(experts, rows)
    table = torch.empty(4 + 4 * most, dtype=torch.int32, device=offs_E.device)
    block = 64
    _tile_table[(cdiv(most, block),)](
        offs_E, table, first, experts, EXPERTS=next_power_of_2(experts), BLOCK_M=block_m, BLOCK=block
    )
    return table


def rows_of_tile(rows: int, experts: int, depth: int = 0) -> int:
    """The less tall tile where it has room for an expert's average and one standard deviation of even routing, or where
    tall ones would stay empty. depth: of the products, where their weights are read as they are."""
    expected = rows / max(experts, 1)
    if expected + sqrt(expected) <= MOST_FEW:
        return FEW_ROWS
    tall = _rows_in_tiles(expected, BLOCK_M) if depth >= LONG_DEPTH else 0.0
    fewer = COMPUTE_ROWS < tall > FEW_COSTS * _rows_in_tiles(expected, FEW_ROWS)
    return FEW_ROWS if fewer else BLOCK_M


@cache
def _rows_in_tiles(expected: float, block_m: int) -> float:
    """Of an expert's tiles, empty rows too: on average over even routing, as if normally distributed."""
    tiles = range(int((expected + 6 * sqrt(expected)) // block_m) + 1)
    return block_m * sum(erfc((tile * block_m - expected) / sqrt(2 * expected)) / 2 for tile in tiles)


@cache
def _bound(plan: Plan) -> Any:
    """The kernel for this plan."""
    return gemm_kernel.bound(PLAN=Constants(plan), num_warps=4)


class Operands(NamedTuple):
    """What a product reads and writes besides its matrix, see `multiply` and `up`."""

    rows: Tensor
    table: Tensor
    out: Tensor
    order_N: Tensor | None
    top_k: int
    bias_EO: Tensor | None
    h: Tensor | None
    addend: Addend | None
    block_m: int
    scaled: bool = False  # h is where the scales of rows go

    def plan(self, activation: Activation | None) -> dict[str, Any]:
        """Fields of the plan that follow."""
        return {
            "ACTIVATE": activation is not None,
            "GATHER": self.order_N is not None,
            "BIAS": self.bias_EO is not None,
            "KEEP": self.h is not None and not self.scaled,
            "SCALED": self.scaled,
            # of the addend's depth, which the matrix unit takes in 16s: no more than there is, if one step takes it all
            "LOW": 0 if self.addend is None else min(BLOCK_K, padded_rank(self.addend.rank)),
            "BLOCK_M": self.block_m,
            **({} if activation is None else constants(activation, fast=True)),
        }

    def arguments(
        self, plan: Plan, matrix_desc: Any, width: int, depth: int, pointers: tuple = (), numbers: tuple = ()
    ) -> tuple[Any, ...]:
        """As the kernel takes them. pointers, numbers: of what else the matrix has, where the kernel has them."""
        rows, table, out, order_N, top_k, bias_EO, h, addend, *_ = self
        if plan.ORDER > 0:
            table = list_tiles(table, cdiv(width, BLOCK_N), plan.ORDER, plan.BLOCK_M)
        # None for what this plan does not read: Triton makes each descriptor anew at each launch, in microseconds
        of_rows = plan.BLOCK_M, BLOCK_K
        row_desc = None if plan.GATHER else descriptor(rows, of_rows)
        h_desc = None if h is None or self.scaled else descriptor(h, plan.STAGED)
        low_desc, factor_desc, rank = None, None, 0
        if addend is not None:
            low_desc, rank = descriptor(addend.low_NR, of_rows), addend.low_NR.shape[1]
            factor_desc = descriptor(_flat(addend.factor_EOR, plan.B_K_MAJOR), plan.COPIED, plan.MATRIX_LAYOUT)
        h = out if h is None else h
        # the table stands for what this plan does not read
        order_N, bias_EO = table if order_N is None else order_N, table if bias_EO is None else bias_EO
        descriptors = row_desc, matrix_desc, low_desc, factor_desc, h_desc, descriptor(out, plan.STAGED)
        sizes = depth, rank, width, width // 2 if plan.PAIRED else width
        strides = rows.stride(0), h.stride(0), out.stride(0)
        return *descriptors, rows, order_N, table, *pointers, bias_EO, h, out, *sizes, *numbers, *strides, top_k


def _launch(matrix_EOW: Tensor, operands: Operands, activation: Activation | None, whole_table: bool) -> None:
    _, width, depth = matrix_EOW.shape
    k_major = activation is not None or matrix_EOW.stride(2) == 1
    chosen = _chosen(matrix_EOW, operands.addend, activation is not None, whole_table, operands.block_m)
    plan, count = Plan(B_K_MAJOR=k_major, **operands.plan(activation), **chosen), programs
    if halvings():
        plan, count = replace(plan, HALVINGS=halvings()), programs_in_halves
    matrix_desc = descriptor(_flat(matrix_EOW, k_major), plan.COPIED, plan.MATRIX_LAYOUT)
    _bound(plan)[(count(matrix_EOW.device),)](*operands.arguments(plan, matrix_desc, width, depth))


def _chosen(
    matrix_EOW: Tensor, addend: Addend | None, activated: bool, whole_table: bool, block_m: int
) -> dict[str, Any]:
    """Fields of the plan that depend on the sizes."""
    _, width, depth = matrix_EOW.shape
    unrolled = addend is None and depth % (STAGES * BLOCK_K) == 0
    if not whole_table or sharing() != (1, 0):
        return {"UNROLLED": unrolled}
    matrix_bytes = width * depth * matrix_EOW.element_size()
    order = order_of_product(matrix_bytes, cdiv(width, BLOCK_N), activated)
    sync = block_m == BLOCK_M and order > 0 and matrix_bytes > KEPT_BYTES
    return {"UNROLLED": unrolled, "ORDER": order, "TILE_SYNC": sync}


def _flat(matrix_EOW: Tensor, k_major: bool) -> Tensor:
    """All experts' matrices one below the other, stored (O, W) or (W, O); a copy where they are stored otherwise."""
    stored = (matrix_EOW if k_major else matrix_EOW.transpose(1, 2)).contiguous()
    return stored.view(-1, stored.shape[2])


def multiply(
    rows_NW: Tensor,
    matrix_EOW: Tensor,
    table: Tensor,
    out_NO: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
    addend: Addend | None = None,
    whole_table: bool = True,
    block_m: int = BLOCK_M,
    scales_NB: Tensor | None = None,
) -> None:
    """out[n] = rows[n] · matrix[e]ᵀ + bias[e] + addend; with order_N the rows are gathered, rows[order[n] // top_k].

    The addend's rank is padded as `padded_rank` says. whole_table: an expert's tiles follow one another in it.
    block_m: as the table was made for, BLOCK_M or FEW_ROWS; the bits are the same.
    scales_NB: fp32, for blocks of 128 columns; then out holds fp16, which these powers of two make the product again.
    """
    operands = Operands(
        rows_NW, table, out_NO, order_N, top_k, bias_EO, scales_NB, addend, block_m, scales_NB is not None
    )
    _launch(matrix_EOW, operands, None, whole_table)


def up(
    x_TH: Tensor,
    order_N: Tensor,
    top_k: int,
    gate_up_EJH: Tensor,
    table: Tensor,
    activation: Activation,
    a_NI: Tensor,
    *,
    h_NJ: Tensor | None = None,
    bias_EJ: Tensor | None = None,
    addend: Addend | None = None,
    whole_table: bool = True,
    block_m: int = BLOCK_M,
) -> None:
    """h = gathered x · gate_upᵀ + bias + addend and a = act(h); h is written where it is given.

    The weights are stored (J, H), all gates before all ups. whole_table, block_m: as for `multiply`.
    """
    operands = Operands(x_TH, table, a_NI, order_N, top_k, bias_EJ, h_NJ, addend, block_m)
    _launch(gate_up_EJH, operands, activation, whole_table)
