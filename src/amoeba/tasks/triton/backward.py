"""The scheduled backward in plain Triton: its launch, for any GPU that Triton serves and for the interpreter.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I

    found = scheduled_backward(dy_TH, x_TH, h_NJ, expert_TK, weight_TK, gate_up_EJH, down_EHI, activation, maps)

For one rank, with the router's backward or without (`router`), or for its share of a layer over ranks (`arrival`).
Without LoRA. Block sizes are those of the
`triton` backend's own kernels, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.kernels.activation import group
from amoeba.kernels.combine import sums_of
from amoeba.kernels.constants import Group
from amoeba.kernels.down_backward import of_epilogue
from amoeba.kernels.gemm_tiles import of_matrix, of_result, of_rows, tile_of
from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.kernels.tile_sizes import Configuration, Product, configuration_on
from amoeba.kernels.tiles import slots
from amoeba.kernels.weight_gradient import product_of
from amoeba.tasks.triton.arrivals import NO_RANKS, Arrival, make_local_table
from amoeba.tasks.triton.bias_tasks import NO_BIASES, BiasTasks
from amoeba.tasks.triton.kernel import backward_kernel
from amoeba.tasks.triton.router_tasks import NO_ROUTER, RouterTasks
from amoeba.tasks.triton.tickets import Layout, make_table

# Experts that go through the steps together, row tiles that sweep the columns together, tokens that are combined by one
# task, columns of a bias. Not measured yet.
WAVE, GROUP, TOKENS, BIAS_COLUMNS = 8, 8, 16, 512


class Scheduled(NamedTuple):
    x: Tensor
    weight: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def scheduled_backward(
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
    router: RouterTasks | None = None,
) -> Scheduled:
    """maps: order_N, slot_row_N and offs_E of the sorted rows. All tensors contiguous.

    arrival: dy of other ranks' rows is still on its way, and this rank's is sent on from here.
    router: its backward comes last, and adds to dx.
    trace: allocates room for a number of tickets, given the rows of a row tile: see `amoeba.tasks.timeline`.
    """
    order_N, _, offs_E = maps
    (tokens, hidden), (experts, width, _), intermediate = x_TH.shape, gate_up_EJH.shape, down_EHI.shape[2]
    rows, top_k, device = h_NJ.shape[0], expert_TK.shape[1], x_TH.device
    of_down, of_up = (Product(rows, experts, *sizes, x_TH.dtype) for sizes in ((hidden, intermediate), (width, hidden)))
    down = configuration_on(device, "down_backward", of_down)
    of_weights = (configuration_on(device, "weight_gradient", each) for each in (of_down, of_up))
    products = configuration_on(device, "product", of_up), *of_weights
    up, down_weights, up_weights = (_narrowed(each, down.num_warps) for each in products)
    layout = Layout(
        experts,
        down.block_m,
        cdiv(intermediate, down.block_n),
        cdiv(hidden, up.block_n),
        cdiv(hidden, down_weights.block_m) * cdiv(intermediate, down_weights.block_n),
        cdiv(width, up_weights.block_m) * cdiv(hidden, up_weights.block_n),
        cdiv(tokens, TOKENS),
        WAVE,
        GROUP,
    ).with_biases(*biases.parts(BIAS_COLUMNS))
    most_tiles = slots(rows, experts, down.block_m)
    if arrival is not None and router is not None:
        raise ValueError("router tasks: expected one rank; over ranks a token's dx is complete behind the kernel")
    router_tickets = 0 if router is None else layout.token_blocks + router.parts
    of_router = 0 if router is None else layout.token_blocks + 1
    counters = torch.empty(1 + experts + most_tiles + of_router, dtype=torch.int32, device=device)
    table = make_table(offs_E, layout.row_block, counters)
    peers, sends = None, 0
    if arrival is not None:
        local = make_local_table(order_N, offs_E, table, layout.row_block, top_k, *arrival.rows)
        peers, sends = arrival.context(local), arrival.sends
    dh_NJ = h_NJ if overwrite_h else torch.empty_like(h_NJ)
    dx_NH, scaled_a_NI = h_NJ.new_empty((rows, hidden)), h_NJ.new_empty((rows, intermediate))
    part_CN = torch.empty((layout.down_parts, rows), dtype=torch.float32, device=device)
    ds_N = torch.empty(rows, dtype=torch.float32, device=device)
    room = (torch.empty_like(each) for each in (x_TH, weight_TK, gate_up_EJH, down_EHI))
    found = Scheduled(*room, *biases.gradients)
    if arrival is not None:
        found = found._replace(x=arrival.room_for_dx())
    plan = Group(
        H=hidden,
        I=intermediate,
        J=width,
        TOP_K=top_k,
        **layout.constants(),
        BLOCK_E=next_power_of_2(experts),
        BLOCK_M=down.block_m,
        DOWN_PRODUCT=Group(
            **of_rows(dy_TH, top_k),
            **of_matrix(down_EHI),
            **tile_of(down, rows, experts, intermediate),
            **of_epilogue(h_NJ, dh_NJ, scaled_a_NI, down, activation),
        ),
        UP_PRODUCT=Group(
            **of_rows(dh_NJ, top_k),
            **of_matrix(gate_up_EJH),
            **of_result(dx_NH),
            SCALED=False,
            **(tile_of(up, rows, experts, hidden) | {"BLOCK_M": down.block_m}),
        ),
        ACTIVATION=group(activation),
        OF_DOWN=product_of(dy_TH, scaled_a_NI, found.down, None, top_k, down_weights),
        OF_UP=product_of(dh_NJ, x_TH, found.gate_up, None, top_k, up_weights),
        BIASES=biases.constants(down.num_warps, down.block_m, BIAS_COLUMNS),
        DOWN_BIAS_FROM=layout.down_weight_parts,
        UP_BIAS_FROM=layout.up_weight_parts,
        ROUTER=NO_ROUTER if router is None else router.constants(),
        TOKEN_COUNTERS=1 + experts + most_tiles if router is not None else 0,
        TOKENS=TOKENS,
        SLOTS=next_power_of_2(TOKENS * top_k),
        SUMS=sums_of(dx_NH, top_k)["SUMS"],
        INTERPRETED=backward_kernel.interpreted,
        **(NO_RANKS if arrival is None else arrival.constants()),
    )
    inputs = dy_TH, x_TH, h_NJ, expert_TK, weight_TK, gate_up_EJH, down_EHI
    between = dh_NJ, scaled_a_NI, part_CN, ds_N, dx_NH
    backward_kernel[(programs(device),)](
        *inputs,
        *between,
        *found[:4],
        *maps,
        table.heaviest_E,
        counters,
        None if trace is None else trace(sends + layout.most_tickets(most_tiles) + router_tickets, layout.row_block),
        peers,
        biases.context(),
        None if router is None else router.context(),
        tokens,
        rows,
        PLAN=plan,
        num_warps=down.num_warps,
        num_stages=max(2, down.num_stages // 2),  # shared memory of two kinds of tasks is held at once
        enable_fp_fusion=False,  # as in `down_backward`
    )
    return found


def _narrowed(chosen: Configuration, warps: int) -> Configuration:
    """For fewer warps than it was chosen for, with as many elements each: how wide a tile is does not change its bits.

    How many warps add up ds does: their number is that of `down_backward`.
    """
    return chosen if chosen.num_warps <= warps else replace(chosen, block_n=chosen.block_n * warps // chosen.num_warps)


def programs(device: torch.device) -> int:
    """The interpreter runs programs one after another: there one does all."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
