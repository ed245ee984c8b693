"""The scheduled backward on Hopper: which layers the kernel in Gluon serves, and its launch.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I

    found = hopper_backward(dy_TH, x_TH, h_NJ, expert_TK, weight_TK, gate_up_EJH, down_EHI, activation, maps)

For one rank, without router and LoRA. Gradients have the bits of `HopperRows`, whose tiles these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from amoeba.core.config import Activation
from amoeba.kernels.activate import backward_block, scales_of_row
from amoeba.kernels.activation import constants
from amoeba.kernels.expert_sums import CHUNK
from amoeba.kernels.hopper.gemm_kernel import BLOCK_K, BLOCK_M, BLOCK_N, Constants
from amoeba.kernels.hopper.tma import descriptor, shared_layout
from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.kernels.launch.persistent_grid import multiprocessors
from amoeba.kernels.tiles import slots
from amoeba.tasks.hopper.kernel import backward_kernel
from amoeba.tasks.hopper.task_list import make_list
from amoeba.tasks.sizes import LEAST_WAVE, SUMMED_TOKENS, Sizes, Tiling, bundle_of, is_small, tiling_of
from amoeba.tasks.triton.arrivals import Arrival, make_local_table
from amoeba.tasks.triton.backward import GROUP, Scheduled
from amoeba.tasks.triton.bias_tasks import NO_BIASES, BiasTasks
from amoeba.tasks.triton.tickets import Layout, make_table

_STAGED, _RIGHT, _LEFT = (64, 64), (BLOCK_K, BLOCK_N), (64, 64)
MOST_SLOTS = 16  # of a token: 4 tokens' rows are a stage


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    H: int
    I: int
    EXPERTS: int
    TOP_K: int
    KIND: str
    GATED: bool
    ALPHA: float
    CLAMP: bool
    LIMIT: float
    UP_SHIFT: float
    GROUP: int = GROUP
    TOKENS: int = SUMMED_TOKENS
    # As the functions of the product ask it: rows may be gathered, the matrix lies along its columns.
    GATHER: bool = True
    PAIRED: bool = False
    B_K_MAJOR: bool = False
    SHORT: bool = False
    # Over ranks, where dy of others is still on its way: how many, and the transport's programs that take rows.
    RANKS: int = 1
    TAKERS: int = 1
    SCALED: bool = True  # dA' is kept in fp16, see `amoeba.kernels.activate.new_scales`
    # Of layers with few rows, see `is_small` and `bundle_of`.
    SMALL: bool = False
    BUNDLED: bool = False
    # Whether the experts have them. A bias's gradient is cut into tasks of BIAS_COLUMNS.
    UP_BIAS: bool = False
    DOWN_BIAS: bool = False
    BIAS_COLUMNS: int = Tiling().bias_columns
    BIAS_CHUNK: int = CHUNK

    @property
    def BIASES(self) -> bool:
        return self.UP_BIAS or self.DOWN_BIAS

    @property
    def UP_BIAS_PARTS(self) -> int:
        return cdiv(self.J, self.BIAS_COLUMNS) if self.UP_BIAS else 0

    @property
    def DOWN_BIAS_PARTS(self) -> int:
        return cdiv(self.H, self.BIAS_COLUMNS) if self.DOWN_BIAS else 0

    @property
    def J(self) -> int:
        return 2 * self.I

    @property
    def LISTED(self) -> bool:
        """Whether tasks come from a list; over ranks each ticket is decoded."""
        return self.RANKS == 1

    @property
    def ROW_COUNTERS(self) -> int:
        """Behind the ticket and the experts' counters."""
        return 1 + self.EXPERTS

    @property
    def H_TILES(self) -> int:
        """Of the gradients, along H; those of W1 and W2 along I and J."""
        return cdiv(self.H, BLOCK_M)

    @property
    def I_TILES(self) -> int:
        return cdiv(self.I, BLOCK_N)

    @property
    def J_TILES(self) -> int:
        return cdiv(self.J, BLOCK_N)

    @property
    def TN(self) -> int:
        return cdiv(self.I, BLOCK_N)

    @property
    def TNX(self) -> int:
        return cdiv(self.H, BLOCK_N)

    @property
    def DOWN_TILES(self) -> int:
        return self.H_TILES * self.I_TILES

    @property
    def UP_TILES(self) -> int:
        return self.H_TILES * self.J_TILES

    @property
    def MULTIPLIED(self) -> int:
        """What a row tile's counter shows when dA' is there; each of the two warpgroups adds to it."""
        return 2 * self.TN

    @property
    def ACTIVATED(self) -> int:
        return 2 * (self.TN + 1)

    @property
    def COMPLETE(self) -> int:
        return 2 * (self.TN + 1 + self.TNX)

    @property
    def BLOCK_G(self) -> int:
        """At least the number of waves."""
        return next_power_of_2(cdiv(self.EXPERTS, LEAST_WAVE))

    @property
    def BLOCK_E(self) -> int:
        return next_power_of_2(self.EXPERTS)

    @property
    def WAVE_LAYOUT(self) -> Any:
        return _within_a_warp(self.BLOCK_G)

    @property
    def EXPERT_LAYOUT(self) -> Any:
        return _within_a_warp(self.BLOCK_E)

    @property
    def SLOTS(self) -> int:
        return next_power_of_2(self.TOKENS * self.TOP_K)

    @property
    def HALF_SLOTS(self) -> int:
        return next_power_of_2(self.TOKENS // 2 * self.TOP_K)

    @property
    def TOGETHER(self) -> int:
        """Tokens whose rows of dx are in a stage together."""
        return min(self.TOKENS, next_power_of_2(BLOCK_K // self.TOP_K + 1) // 2)

    @property
    def STAGED_ROWS(self) -> int:
        return next_power_of_2(self.TOGETHER * self.TOP_K)

    @property
    def SUM_LAYOUT(self) -> Any:
        """Of 128 columns of those tokens; of four tokens each warp has one."""
        if self.TOGETHER < 8:
            return gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    @property
    def BLOCK(self) -> int:
        """Columns of a line of the row pass, those of `activate_backward`."""
        return backward_block(self.I, self.SCALED)

    @property
    def SCALES(self) -> int:
        """Of a row of dA'."""
        return scales_of_row(self.I)

    @property
    def LINES(self) -> int:
        """As many as make 16 KB."""
        return BLOCK_M * BLOCK_K // self.BLOCK

    @property
    def OWN_LINES(self) -> int:
        """Of a warpgroup: half of a stage's, whole patterns of 8 lines of the shared memory's layout."""
        return self.LINES // 2

    @property
    def LINE_LAYOUT(self) -> Any:
        """As the compiler lays out a line of `activate_backward`, so that it is added up in the same order."""
        lanes = min(32, self.BLOCK // 8)
        warps = min(4, self.BLOCK // (8 * lanes))
        return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4 // warps, warps], [1, 0])

    @property
    def ROW_LAYOUT(self) -> Any:
        """Of a stage's rows in shared memory, as of all below for both dtypes of 16 bits."""
        return shared_layout((BLOCK_M, BLOCK_K), torch.bfloat16)

    @property
    def MATRIX_LAYOUT(self) -> Any:
        return shared_layout(_RIGHT, torch.bfloat16)

    @property
    def LEFT_LAYOUT(self) -> Any:
        return shared_layout(_LEFT, torch.bfloat16)

    @property
    def LINES_LAYOUT(self) -> Any:
        return shared_layout((self.LINES, self.BLOCK), torch.bfloat16)

    @property
    def OUT_LAYOUT(self) -> Any:
        return shared_layout(_STAGED, torch.bfloat16)

    def layout(self, tokens: int, rows: int, programs: int) -> Layout:
        """programs: how many draw tickets."""
        tiling = tiling_of(Sizes(self.H, self.I, self.EXPERTS, self.TOP_K), rows, programs, self.SMALL)
        parts = (self.TN, self.TNX, cdiv(self.DOWN_TILES, tiling.bundle), cdiv(self.UP_TILES, tiling.bundle))
        return Layout(
            self.EXPERTS,
            tiling.rows,
            *parts,
            cdiv(tokens, tiling.tokens),
            tiling.wave,
            tiling.group,
            tiling.kept,
            tiling.behind,
            self.DOWN_BIAS_PARTS,
            self.UP_BIAS_PARTS,
        )


def _within_a_warp(size: int) -> Any:
    """Every warp has all of it: sums need no shared memory."""
    return gl.BlockedLayout([max(1, size // 32)], [32], [4], [0])


def why_not(top_k: int, activation: Activation) -> str | None:
    """Of a layer that `HopperRows` serves, the reason why plain Triton has to schedule it."""
    if not activation.gated or activation.interleaved:
        return "needs all gate rows before all up rows"
    if top_k > MOST_SLOTS:
        return f"supports up to {MOST_SLOTS} experts per token; these have {top_k}"
    return None


def hopper_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    h_NJ: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    activation: Activation,
    maps: tuple[Tensor, Tensor, Tensor],
    *,
    biases: BiasTasks = NO_BIASES,
    overwrite_h: bool = False,
    trace: Callable[[int, int], Tensor] | None = None,
    arrival: Arrival | None = None,
    small: bool | None = None,
) -> Scheduled:
    """As `scheduled_backward`; the rows of dy and x begin at multiples of 16 bytes. small: None for `is_small`."""
    order_N, slot_row_N, offs_E = maps
    (tokens, hidden), (experts, _, intermediate) = x_TH.shape, down_EHI.shape
    rows, top_k, device = h_NJ.shape[0], expert_TK.shape[1], x_TH.device
    if small is None:
        small = is_small(rows, hidden, intermediate, over_ranks=arrival is not None)
    bundle = bundle_of(rows, experts, small)
    flags = small, bundle > 1, biases.of_gate_up, biases.of_down, x_TH.dtype == torch.bfloat16
    plan = plan_of(hidden, intermediate, experts, top_k, activation, *flags)
    most_tiles = slots(rows, experts, BLOCK_M)
    counters = torch.empty(plan.ROW_COUNTERS + most_tiles, dtype=torch.int32, device=device)
    table, peers, sends = make_table(offs_E, BLOCK_M, counters), None, 0
    if arrival is not None:
        plan = replace(plan, RANKS=arrival.peers.count, TAKERS=arrival.peers.takers)
        local = make_local_table(order_N, offs_E, table, BLOCK_M, top_k, *arrival.rows)
        peers, sends = arrival.context(local), arrival.sends
    programs = multiprocessors(device)
    layout = plan.layout(tokens, rows, programs)
    most_tickets, records = layout.most_tickets(most_tiles), offs_E
    if plan.LISTED:
        records = make_list(table, offs_E, layout, most_tickets, row_counters=plan.ROW_COUNTERS)
    dh_NJ = h_NJ if overwrite_h else torch.empty_like(h_NJ)
    # dA', dx behind it, and fp32 scales of dA' behind that, where the kernel looks for them
    sizes = (rows * intermediate, rows * hidden, 2 * rows * plan.SCALES)
    da_NI, dx_NH = (part.view(rows, -1) for part in h_NJ.new_empty(sum(sizes)).split(sizes)[:2])
    ds_N = torch.empty(rows, dtype=torch.float32, device=device)
    room = (torch.empty_like(each) for each in (x_TH, weight_TK, gate_up_EJH, down_EHI))
    found = Scheduled(*room, *biases.gradients)
    if arrival is not None:
        found = found._replace(x=arrival.room_for_dx())
    lines = (plan.LINES, plan.BLOCK)
    _bound(plan)[(programs,)](
        descriptor(down_EHI.view(-1, intermediate), _RIGHT),
        descriptor(gate_up_EJH.view(-1, hidden), _RIGHT),
        descriptor(dh_NJ, (BLOCK_M, BLOCK_K)),
        descriptor(da_NI, _RIGHT),
        descriptor(dh_NJ, _RIGHT),
        descriptor(da_NI, lines),
        descriptor(h_NJ, lines),
        descriptor(da_NI, _STAGED),
        descriptor(dx_NH, _STAGED),
        descriptor(found.down.view(-1, intermediate), _STAGED),
        descriptor(found.gate_up.view(-1, hidden), _STAGED),
        dy_TH,
        x_TH,
        expert_TK,
        weight_TK,
        da_NI,
        dh_NJ,
        ds_N,
        *found[:4],
        order_N,
        slot_row_N,
        offs_E,
        table.heaviest_E,
        records,
        counters,
        biases.context(),
        peers,
        None if trace is None else trace(sends + most_tickets, BLOCK_M),
        tokens,
        rows,
        intermediate,
        layout.wave,
        layout.late,
        layout.behind,
        bundle,
    )
    return found


@cache
def plan_of(
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    activation: Activation,
    small: bool,
    bundled: bool,
    up_bias: bool = False,
    down_bias: bool = False,
    scaled: bool = True,
) -> Plan:
    flags = {"SMALL": small, "BUNDLED": bundled, "UP_BIAS": up_bias, "DOWN_BIAS": down_bias, "SCALED": scaled}
    return Plan(hidden, intermediate, experts, top_k, **constants(activation), **flags)  # type: ignore[arg-type]


@cache
def _bound(plan: Plan) -> Any:
    return backward_kernel.bound(PLAN=Constants(plan), num_warps=4)
