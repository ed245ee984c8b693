"""The activation's backward with LoRA on Hopper, in Gluon: all that is made of dh and of a, from one pass over memory.

N = T·K routed rows · E experts · I intermediate · J = 2I · R rank of a factor · P ranks, joined and padded

    found = activate_backward(da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, offs_E, table, up=Up(...), down=...)
    found.ds_N, found.dlow_NP                       # <da', a>, and c · dh · B as `Addend` takes it
    found.db.write(gradient_EIR, first=..., rank=...), found.da_down.write(gradient_ERI.mT)

dh and ds are those of `amoeba.kernels.activate.activate_backward`, after which others read dh and s·a again. Here
the matrix unit multiplies them in shared memory: dh · B, and the part that 128 rows have in Σ dhᵀ · low and in
Σ (s·a)ᵀ · dlow_down (`amoeba.kernels.thin_pair` adds the parts up, without atomics). So dh is written once and not
read, and s·a is not written at all. Rows from offs_E[-1] on are not written and nothing depends on what they hold,
their ds_N is 0. `dh_NJ` may be `h_NJ`: no column of a row is written before it was read.

A persistent kernel as in `amoeba.kernels.hopper.product`: one warp has the bulk copy engine fill a ring of stages, each
with 64 columns of 128 rows of da, gate and up and the factors that meet them; two warpgroups take every second stage.
There s·a, dgate and dup replace da, gate and up, the matrix unit and the copy engine (dh) read them, and the stage is
given back. Memory is busy all the while; a warpgroup's sums of a tile are added to the other's at the tile's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels.activation import constants
from amoeba.kernels.addend import padded_rank
from amoeba.kernels.arguments import check_arguments, have_lines
from amoeba.kernels.configuration import Configuration
from amoeba.kernels.hopper.activation_kernel import activation_kernel
from amoeba.kernels.hopper.descriptor import descriptor, shared_layout
from amoeba.kernels.hopper.product_kernel import BLOCK_M, Constants
from amoeba.kernels.programs import programs
from amoeba.kernels.thin_pair import Sums
from amoeba.kernels.tiles import slots

# Columns of a step: the second product has as many rows, and the matrix unit multiplies no fewer.
BLOCK = 64
# Rows that a warpgroup has in registers at a time.
CHUNK = 32
WIDEST_RANK = 64
# Stages, and tiles whose thin rows are there, in order of preference; what they may take beside the barriers.
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
        """After so many fillings, the same warpgroup takes the same stage."""
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
