"""The experts for few tokens, without gradients: the time is the reading of the touched experts' weights, once each.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    y_TH = decode(problem)                                              # x's dtype: bf16, fp16 or fp32
    y_TH = decode(problem, configuration=Configuration(up=..., ...))    # for sweeps

Nothing is sorted: every program reads all N expert ids and finds the slots of its expert itself. There are two ways,
and `configuration` chooses:

by slot     up: one program per (slot, columns of a); down: one per (token, columns of y), with the sum over k inside.
            2 launches, products by multiply and add. Where a program's share of the weights fits in registers, all of
            it is in flight at once, and down's before `a` is looked at, while up still runs. Two slots of one expert
            read its weights twice: made for T = 1, and for T <= 4 with many experts.
by expert   up and down: one program per (touched expert, columns), the expert's slots in chunks of `rows` on the tensor
            cores, weights as the left operand; then a launch that sums over k. 3 launches, weights read once (the
            second and later chunks of an expert with more than `rows` slots find them in the L2 cache, mostly).

With LoRA factors two small launches are added, see `low_rank`.

Slots whose id lies outside [0, E) are sentinels: their rows of the buffers are neither written nor read, and they
add nothing. Sums are in fp32 and in a fixed order: bitwise equal from run to run. No host synchronisation, and grids
follow from shapes alone: all of it can be captured in a CUDA graph. The weights' two inner strides are free; one of
them must be 1 for speed (rows of W1 and W2 contiguous as in transformers is the fastest).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.problem import Problem
from amoeba.kernels.choice import capability_of
from amoeba.kernels.decode import configuration as configurations
from amoeba.kernels.decode.at_once import down_at_once, up_at_once
from amoeba.kernels.decode.by_expert import down_by_expert, sum_of_slots, up_by_expert
from amoeba.kernels.decode.by_slot import down_by_token, up_by_slot
from amoeba.kernels.decode.candidates import candidates, decode_key
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import LowLaunches, kind_of, low_launches, ranks_of
from amoeba.kernels.launch import Launch, next_power_of_2
from amoeba.system import tuned


class Plan(NamedTuple):
    """The launches of a layer for one number of tokens: found once, since the host has less time than the GPU."""

    up: Launch
    down: Launch
    sum: Launch | None  # None by slot: down has it inside
    low: LowLaunches  # of LoRA factors
    activation: Activation  # kept, so that no other comes to its address, by which the plan is found


_plans: dict[tuple, Plan] = {}


class Like(NamedTuple):
    """The pass by which a configuration is chosen: where only some of its tokens, or of its experts, are at hand, they
    are computed as in the whole."""

    tokens: int
    experts: int


def decode(problem: Problem, *, configuration: Configuration | None = None, like: Like | None = None) -> Tensor:
    """y_TH, in the dtype of x. Meant for T <= 64; right for every T whose N ids fit in one program's registers."""
    x_TH, expert_TK, weight_TK, weights, lora = problem[:5]
    x_TH, expert_TK, weight_TK = x_TH.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
    slots = expert_TK.numel()
    if slots == 0:
        return torch.zeros_like(x_TH)
    gate_up_EJH, down_EHI, gate_up_bias_EJ, down_bias_EH = weights.tensors()
    if configuration is not None:
        plan = _plan(problem, configuration)
    else:
        key = (
            x_TH.device,
            expert_TK.shape,
            x_TH.dtype,
            expert_TK.dtype,
            weight_TK.dtype,
            down_EHI.shape,
            down_EHI.stride(),
            gate_up_EJH.stride(),
            gate_up_bias_EJ is None,
            down_bias_EH is None,
            id(weights.activation),
            None if lora is None else kind_of(lora),
            like,
        )
        found = _plans.get(key)
        plan = _plans[key] = _plan(problem, _chosen(problem, like)) if found is None else found
    a_NI = x_TH.new_empty((slots, down_EHI.shape[2]))
    y_TH = torch.empty_like(x_TH)
    # a kernel without a bias or factors looks at none, whatever stands in its place
    bias_EJ = x_TH if gate_up_bias_EJ is None else gate_up_bias_EJ.contiguous()
    bias_EH = x_TH if down_bias_EH is None else down_bias_EH.contiguous()
    plan.up(x_TH, expert_TK, gate_up_EJH, bias_EJ, *plan.low.before_up(lora, x_TH, expert_TK), a_NI)
    factors = plan.low.before_down(lora, a_NI, expert_TK)
    if plan.sum is None:
        plan.down(a_NI, expert_TK, weight_TK, down_EHI, bias_EH, *factors, y_TH)
        return y_TH
    y_NH = x_TH.new_empty((slots, down_EHI.shape[1]), dtype=torch.float32)
    plan.down(a_NI, expert_TK, down_EHI, bias_EH, *factors, y_NH)
    plan.sum(y_NH, expert_TK, weight_TK, y_TH)
    return y_TH


def is_by_slot(problem: Problem, like: Like) -> bool:
    """Whether a token's experts are all needed at once."""
    return _chosen(problem, like).by_slot


def decode_rows(problem: Problem, y_NH: Tensor, like: Like) -> None:
    """By expert, without the sum: fp32 rows of the slots whose experts are here; the rows of sentinels stay as they
    are. Where the pass would go by slot, its numbers may differ in the last bits."""
    x_TH, expert_TK, _, weights, lora = problem[:5]
    x_TH, expert_TK = x_TH.contiguous(), expert_TK.contiguous()
    chosen = _chosen(problem, like)
    plan = _plan(problem, configurations.by_expert(_layer(problem, like)) if chosen.by_slot else chosen)
    a_NI = x_TH.new_empty((expert_TK.numel(), weights.intermediate))
    bias_EJ = x_TH if weights.gate_up_bias_EJ is None else weights.gate_up_bias_EJ.contiguous()
    bias_EH = x_TH if weights.down_bias_EH is None else weights.down_bias_EH.contiguous()
    plan.up(x_TH, expert_TK, weights.gate_up_EJH, bias_EJ, *plan.low.before_up(lora, x_TH, expert_TK), a_NI)
    factors = plan.low.before_down(lora, a_NI, expert_TK)
    plan.down(a_NI, expert_TK, weights.down_EHI, bias_EH, *factors, y_NH)


def sum_rows(y_NH: Tensor, problem: Problem) -> Tensor:
    """y_TH of rows that `decode_rows` made, of all experts."""
    y_TH = torch.empty_like(problem.x_TH, memory_format=torch.contiguous_format)
    sum_of_slots(problem)(y_NH, problem.expert_TK.contiguous(), problem.weight_TK.contiguous(), y_TH)
    return y_TH


def _plan(problem: Problem, chosen: Configuration) -> Plan:
    activation, ranks = problem.weights.activation, ranks_of(problem.lora)
    low = low_launches(problem, ranks, chosen.overlap)
    if not chosen.by_slot:
        up, down = up_by_expert(problem, chosen, ranks), down_by_expert(problem, chosen, ranks)
        return Plan(up, down, sum_of_slots(problem), low, activation)
    up = (up_at_once if chosen.up.at_once else up_by_slot)(problem, chosen, ranks)
    down = (down_at_once if chosen.down.at_once else down_by_token)(problem, chosen, ranks)
    return Plan(up, down, None, low, activation)


def _layer(problem: Problem, like: Like | None) -> configurations.Layer:
    weights, top_k = problem.weights, problem.expert_TK.shape[1]
    tokens, experts = like or (problem.expert_TK.shape[0], weights.num_experts)
    return configurations.Layer(
        tokens,
        top_k,
        experts,
        weights.hidden,
        weights.intermediate,
        rows_per_column=2 if weights.activation.gated else 1,
        itemsize=problem.x_TH.element_size(),
        contiguous_rows=weights.gate_up_EJH.stride(2) == weights.down_EHI.stride(2) == 1,
        overlap=can_overlap(problem.x_TH.device),
    )


def _chosen(problem: Problem, like: Like | None = None) -> Configuration:
    layer, device, gated = _layer(problem, like), problem.x_TH.device, problem.weights.activation.gated
    sizes = layer.top_k, layer.num_experts, layer.hidden, layer.intermediate
    options: dict[str, Any] = {"gated": gated, "itemsize": layer.itemsize, "overlap": layer.overlap}
    if layer.contiguous_rows:
        few = next_power_of_2(layer.tokens)
        measured = tuned.choose(
            device,
            decode_key(problem.x_TH.dtype, layer.tokens, *sizes, gated=gated),
            lambda: candidates(few, *sizes, **options, capability=capability_of(device)),
        )
        if measured is not None:
            return measured
    return configurations.configuration(layer.tokens, *sizes, **options, contiguous_rows=layer.contiguous_rows)


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
