"""One node's share of frozen experts: forward, and backward from what forward left, over packed products.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate of this node's block ·
J = 2I or I · R LoRA rank

    y_TH, cache = forward(node, factors, x_TH, expert_TK, weight_TK, pool, keep="h")      # y fp32: this node's part
    gradients = backward(node, factors, cache, dy_TH, pool, needs)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.allocate import empty_rows
from amoeba.backends.low_rank import ByToken
from amoeba.backends.operator import Needs, Problem
from amoeba.backends.rowwise import CHUNK_ELEMENTS, activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.backends.sorted_rows import Groups, ThinProducts
from amoeba.config import Activation
from amoeba.cpu.packed import PackedWeights, multiply_rows, multiply_rows_transposed
from amoeba.cpu.pool import WorkerPool
from amoeba.layout import Layout, build_layout
from amoeba.weights import LoraFactors

Keep = Literal["nothing", "h", "x"]


@dataclass(frozen=True, eq=False)
class NodeExperts:
    """One node's share of frozen experts (a contiguous block of I), packed."""

    gate_up: PackedWeights  # (E, J, H)
    down: PackedWeights  # (E, H, I)
    gate_up_bias_EJ: Tensor | None  # fp32
    down_bias_EH: Tensor | None  # fp32; under several nodes only the first has it
    activation: Activation


@dataclass(frozen=True, eq=False)
class NodeFactors:
    """Copies of one node's part of the factors, in bf16."""

    lora: LoraFactors

    @staticmethod
    def pack(node: NodeExperts, lora: LoraFactors, pool: WorkerPool) -> NodeFactors:
        copies = {name: tensor.detach().to(torch.bfloat16, copy=True) for name, tensor in lora.tensors().items()}
        if lora.up_lora_a is lora.gate_lora_a and lora.up_lora_a is not None:
            copies["up_lora_a"] = copies["gate_lora_a"]
        return NodeFactors(LoraFactors(**copies, scaling=lora.scaling))


@dataclass(frozen=True, eq=False)
class NodeCache:
    """What forward leaves for backward; h_NJ is None where it is to be computed again."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    layout: Layout
    h_NJ: Tensor | None


class NodeNeeds(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    gate_lora_a: bool = False
    gate_lora_b: bool = False
    up_lora_a: bool = False
    up_lora_b: bool = False
    down_lora_a: bool = False
    down_lora_b: bool = False


class NodeGradients(NamedTuple):
    """All fp32, those that were asked for."""

    x_TH: Tensor | None
    weight_TK: Tensor | None
    gate_lora_a: Tensor | None = None
    gate_lora_b: Tensor | None = None
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None
    down_lora_b: Tensor | None = None


def forward(
    node: NodeExperts,
    factors: NodeFactors | None,
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    pool: WorkerPool,
    *,
    keep: Keep,
) -> tuple[Tensor, NodeCache | None]:
    """This node's part of y (T, H) in fp32; x bf16, expert int64, weight fp32."""
    layout = build_layout(expert_TK, node.down.experts)
    groups, thin, problem = _tools(node, factors, x_TH, expert_TK, weight_TK, layout)
    scale_N = weight_TK.reshape(-1)[layout.order_N]
    h_NJ = _up(node, problem, layout, groups, thin)
    a_NI = activate_rows(h_NJ, scale_N, node.activation, empty_rows(problem.rows, node.down.in_features, x_TH))
    y_NH = empty_rows(problem.rows + 1, x_TH.shape[1], x_TH, torch.float32)
    multiply_rows(node.down, a_NI, layout.offs_E, y_NH[:-1])
    low_rank.add_to_y(problem, thin, a_NI, y_NH[:-1])
    if node.down_bias_EH is not None:
        for e, y, scale in groups.each(y_NH[:-1], scale_N):
            y += scale[:, None] * node.down_bias_EH[e]
    y_TH = sum_rows(y_NH, layout.slot_row_N.view_as(expert_TK))
    if keep == "nothing":
        return y_TH, None
    return y_TH, NodeCache(x_TH, expert_TK, weight_TK, layout, h_NJ if keep == "h" else None)


def backward(
    node: NodeExperts,
    factors: NodeFactors | None,
    cache: NodeCache,
    dy_TH: Tensor,
    pool: WorkerPool,
    needs: NodeNeeds,
) -> NodeGradients:
    """From dy (T, H) in bf16; x and weight are this node's parts, which add up over the nodes."""
    x_TH, layout = cache.x_TH, cache.layout
    groups, thin, problem = _tools(node, factors, x_TH, cache.expert_TK, cache.weight_TK, layout)
    scale_N = cache.weight_TK.reshape(-1)[layout.order_N]
    h_NJ = _up(node, problem, layout, groups, thin) if cache.h_NJ is None else cache.h_NJ
    dy_NH = dy_TH.index_select(0, layout.token_N)
    da_NI = empty_rows(problem.rows, node.down.in_features, x_TH, torch.float32)
    multiply_rows_transposed(node.down, dy_NH, layout.offs_E, da_NI)
    dlow_NR = low_rank.add_to_da(problem, thin, dy_NH, da_NI)
    dh_NJ = empty_rows(problem.rows, node.gate_up.out_features, x_TH)
    scaled_a_NI = empty_rows(problem.rows, node.down.in_features, x_TH)
    ds_N = activate_rows_backward(da_NI, h_NJ, scale_N, node.activation, dh_NJ, scaled_a_NI)
    if node.down_bias_EH is not None:
        for e, ds, dy in groups.each(ds_N, dy_NH):
            ds += dy.float() @ node.down_bias_EH[e]
    all_needs = Needs(needs.x, needs.weight, False, False, False, False, *needs[2:])
    found = low_rank.down_gradients(problem, thin, dy_NH, dlow_NR, scaled_a_NI, all_needs)
    dx_NH = empty_rows(problem.rows + 1, x_TH.shape[1], x_TH, torch.float32)
    multiply_rows_transposed(node.gate_up, dh_NJ, layout.offs_E, dx_NH[:-1])
    found |= low_rank.up_gradients(problem, thin, ByToken(x_TH), dh_NJ, dx_NH[:-1], all_needs)
    return NodeGradients(
        sum_rows(dx_NH, layout.slot_row_N.view_as(cache.expert_TK)) if needs.x else None,
        slot_gradient(ds_N, layout, cache.weight_TK) if needs.weight else None,
        **{name: gradient.float() for name, gradient in found.items()},
    )


def workspace_bytes(
    node: NodeExperts, tokens: int, top_k: int, *, ranks: tuple[int, int, int] = (0, 0, 0), keep: Keep = "h"
) -> dict[str, int]:
    """forward, backward: scratch; cache: what `keep` leaves, without the inputs."""
    rows, hidden = tokens * top_k, node.down.out_features
    width, inner = node.gate_up.out_features, node.down.in_features
    maps = 0 if keep == "nothing" else 3 * 8 * rows
    h = 2 * rows * width
    chunks = 7 * 4 * min(CHUNK_ELEMENTS["cpu"], rows * width)  # fp32 temporaries of the activation's backward
    forward = rows * (2 * inner + 4 * hidden) + (0 if keep == "h" else h)
    backward = rows * (2 * hidden + 6 * inner + 2 * width + 4 * hidden) + chunks + (0 if keep == "h" else h)
    return {"forward": forward, "backward": 0 if keep == "nothing" else backward, "cache": maps + (keep == "h") * h}


class _Thin(ThinProducts):
    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        if out_NO.dtype == rows_NI.dtype:
            super().add_product(rows_NI, matrix_EIO, out_NO)
            return
        for e, part, target in self.groups.each(rows_NI, out_NO):
            target += part.float() @ matrix_EIO[e].float()


def _tools(
    node: NodeExperts,
    factors: NodeFactors | None,
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    layout: Layout,
) -> tuple[Groups, _Thin, Problem]:
    groups = Groups(layout.offs_E, layout.order_N.shape[0])
    lora = None if factors is None else factors.lora
    # of the weights low_rank wants nothing, and x stands in for them
    problem = Problem(x_TH, expert_TK, weight_TK, x_TH, x_TH, None, None, node.activation, lora)
    return groups, _Thin(groups, layout), problem


def _up(node: NodeExperts, problem: Problem, layout: Layout, groups: Groups, thin: _Thin) -> Tensor:
    x_TH = problem.x_TH
    h_NJ = empty_rows(problem.rows, node.gate_up.out_features, x_TH, torch.float32)
    multiply_rows(node.gate_up, x_TH, layout.offs_E, h_NJ, index_N=layout.token_N)
    if node.gate_up_bias_EJ is not None:
        for e, h in groups.each(h_NJ):
            h += node.gate_up_bias_EJ[e]
    low_rank.add_to_h(problem, thin, ByToken(x_TH), h_NJ)
    return h_NJ.to(x_TH.dtype)
