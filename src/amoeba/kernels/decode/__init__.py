"""Decode kernels: experts for few tokens without gradients, where reading the chosen experts' weights takes the time.

T tokens · K experts per token · N = T·K slots (t, k) · E experts · H hidden · I intermediate · J = 2I or I

    y_TH = decode(problem)                                              # x's dtype: bf16, fp16 or fp32
    y_TH = decode(problem, configuration=Configuration(up=..., ...))    # for sweeps

Nothing is sorted: every program reads all N expert ids and finds the slots of its expert itself. There are two ways,
and `configuration` chooses:

by slot     up: one program per (slot, columns of a); down: one per (token, columns of y), with the sum over k inside.
            2 launches, products by multiply and add. Where a program's share of the weights fits in registers, all of
            it is in flight at once, and down's before `a` is looked at, while up still runs. Two slots of one expert
            read its weights twice: made for T = 1, and for T <= 4 with many experts. On Hopper most quantised ones have
            kernels of their own, `one_token`.
by expert   up and down: one program per (touched expert, columns), the expert's slots in chunks of `rows` on the tensor
            cores, weights as the left operand; then a launch that sums over k. 3 launches, weights read once (the
            second and later chunks of an expert with more than `rows` slots find them in the L2 cache, mostly).

Quantised weights (`QuantisedExperts`) go the same two ways, and the time is the reading of their bytes: see `weights`
for what kernels are told of either kind. With LoRA factors two small launches are added, see `low_rank`.

Slots whose id lies outside [0, E) are sentinels: their rows of the buffers are neither written nor read, and they
add nothing. Sums are in fp32 and in a fixed order: bitwise equal from run to run. No host synchronisation, and grids
follow from shapes alone: all of it can be captured in a CUDA graph. The weights' two inner strides are free; one of
them must be 1 for speed (rows of W1 and W2 contiguous as in transformers is the fastest).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.problem import Problem
from amoeba.kernels.decode import configuration as configurations
from amoeba.kernels.decode import quantised_configuration
from amoeba.kernels.decode.by_expert import down_by_expert, sum_of_slots, up_by_expert
from amoeba.kernels.decode.by_slot import down_by_token, up_by_slot
from amoeba.kernels.decode.configuration import Configuration, Like, can_overlap, candidates, decode_key
from amoeba.kernels.decode.low_rank import LowLaunches, kind_of, low_launches, ranks_of
from amoeba.kernels.decode.slot_lists import list_slots, lists_are
from amoeba.kernels.decode.weights import is_quantised, stored
from amoeba.kernels.launch import Launch
from amoeba.kernels.quantise_blocks import quantise_rows
from amoeba.kernels.tile_sizes import capability_of
from amoeba.precision.formats import FP8_128_ROWS
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.system import tuned

__all__ = ["Configuration", "Like", "can_overlap", "decode", "decode_rows", "is_by_slot", "sum_rows"]


class Plan(NamedTuple):
    """The launches of a layer for one number of tokens: found once, since the host has less time than the GPU."""

    up: Launch
    down: Launch
    sum: Launch | None  # None by slot: down has it inside
    low: LowLaunches  # of LoRA factors
    activation: Activation  # kept, so that no other comes to its address, by which the plan is found
    list: Launch | None = None
    has_lists: bool = False
    e4m3: bool = False


_plans: dict[tuple, Plan] = {}


def decode(
    problem: Problem, *, configuration: Configuration | None = None, like: Like | None = None, e4m3: bool = False
) -> Tensor:
    """y_TH, in the dtype of x. Meant for T <= 64, or few slots of an expert; right for every T whose N ids fit in one
    program's registers. e4m3: by expert, with quantised rows."""
    x_TH, expert_TK, weight_TK, weights, lora = problem[:5]
    x_TH, expert_TK, weight_TK = x_TH.contiguous(), expert_TK.contiguous(), weight_TK.contiguous()
    slots = expert_TK.numel()
    if slots == 0:
        return torch.zeros_like(x_TH)
    if configuration is not None:
        plan = _plan(problem, configuration)
    else:
        key = (
            x_TH.device,
            expert_TK.shape,
            x_TH.dtype,
            expert_TK.dtype,
            weight_TK.dtype,
            *_layout_of(weights),
            _is_aligned(x_TH),
            None if lora is None else kind_of(lora),
            like,
            e4m3,
        )
        found = _plans.get(key)
        if found is None:
            chosen = quantised_configuration.in_e4m3(problem) if e4m3 else _chosen(problem, like)
            found = _plans[key] = _plan(problem, chosen)
        plan = found
    y_TH = torch.empty_like(x_TH)
    if plan.sum is None:
        a_NI = x_TH.new_empty((slots, weights.intermediate))
        of_up, of_down = stored(weights, x_TH)
        plan.up(x_TH, expert_TK, *of_up, *plan.low.before_up(lora, x_TH, expert_TK), a_NI)
        plan.down(a_NI, expert_TK, weight_TK, *of_down, *plan.low.before_down(lora, a_NI, expert_TK), y_TH)
        return y_TH
    y_NH = x_TH.new_empty((slots, weights.hidden), dtype=torch.float32)
    _rows(plan, problem, x_TH, expert_TK, y_NH)
    plan.sum(y_NH, expert_TK, weight_TK, y_TH)
    return y_TH


def is_by_slot(problem: Problem, like: Like) -> bool:
    """Whether a token's experts are all needed at once."""
    return _chosen(problem, like).by_slot


def decode_rows(problem: Problem, y_NH: Tensor, like: Like) -> None:
    """By expert, without the sum: fp32 rows of the slots whose experts are here; the rows of sentinels stay as they
    are. Where the pass would go by slot, its numbers may differ in the last bits."""
    if is_quantised(problem.weights):
        chosen = quantised_configuration.by_expert(problem, like)
    else:
        chosen = _chosen(problem, like)
        chosen = configurations.by_expert(_layer(problem, like)) if chosen.by_slot else chosen
    _rows(_plan(problem, chosen), problem, problem.x_TH.contiguous(), problem.expert_TK.contiguous(), y_NH)


def sum_rows(y_NH: Tensor, problem: Problem) -> Tensor:
    """y_TH of rows that `decode_rows` made, of all experts."""
    y_TH = torch.empty_like(problem.x_TH, memory_format=torch.contiguous_format)
    sum_of_slots(problem)(y_NH, problem.expert_TK.contiguous(), problem.weight_TK.contiguous(), y_TH)
    return y_TH


def _rows(plan: Plan, problem: Problem, x_TH: Tensor, expert_TK: Tensor, y_NH: Tensor) -> None:
    weights, lora = problem[3:5]
    slots, (of_up, of_down) = expert_TK.numel(), stored(weights, x_TH)
    a_NI = x_TH.new_empty((slots, weights.intermediate))
    lists = expert_TK
    if plan.has_lists:
        lists = expert_TK.new_empty(min(slots, weights.num_experts) * (slots + 1), dtype=torch.int32)
    if plan.list is not None:
        plan.list(expert_TK, lists)
    x, x_scales = _quantised(x_TH, problem.quantised_x) if plan.e4m3 else (x_TH, None)
    plan.up(x, x_scales, expert_TK, lists, *of_up, *plan.low.before_up(lora, x_TH, expert_TK), a_NI)
    a, a_scales = _quantised(a_NI) if plan.e4m3 else (a_NI, None)
    plan.down(a, a_scales, expert_TK, lists, *of_down, *plan.low.before_down(lora, a_NI, expert_TK), y_NH)


def _quantised(rows: Tensor, kept: QuantisedMatrix | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales. Rows of sentinels are whatever was there."""
    found = quantise_rows(rows, FP8_128_ROWS) if kept is None else kept
    return found.data, found.scales


def _layout_of(weights: Any) -> tuple:
    """What a plan depends on, of weights."""
    if is_quantised(weights):
        tensors = weights.tensors()
        strides = (None if tensor is None else tensor.stride() for tensor in tensors)
        return weights.num_experts, *strides, *map(_is_aligned, tensors), *weights.constants()
    gate_up_EJH, down_EHI, gate_up_bias_EJ, down_bias_EH = weights.tensors()
    of_bias = gate_up_bias_EJ is None, down_bias_EH is None
    return down_EHI.shape, down_EHI.stride(), gate_up_EJH.stride(), *of_bias, id(weights.activation)


def _is_aligned(tensor: Tensor | None) -> bool:
    """To what a lane reads at a time."""
    return tensor is None or tensor.data_ptr() % 16 == 0


def _plan(problem: Problem, chosen: Configuration) -> Plan:
    activation, ranks = problem.weights.activation, ranks_of(problem.lora)
    low = low_launches(problem, ranks, chosen.overlap)
    if chosen.by_slot:
        up, down = up_by_slot(problem, chosen, ranks), down_by_token(problem, chosen, ranks)
        return Plan(up, down, None, low, activation)
    lists = lists_are(problem, chosen)
    listing = list_slots(problem, chosen) if lists == "ahead" else None
    up, down = up_by_expert(problem, chosen, ranks), down_by_expert(problem, chosen, ranks)
    total = sum_of_slots(problem, chosen.overlap and chosen.early)
    return Plan(up, down, total, low, activation, listing, lists != "", chosen.e4m3)


def _layer(problem: Problem, like: Like | None) -> configurations.Layer:
    weights, top_k = problem.weights, problem.expert_TK.shape[1]
    tokens, experts = like or (problem.expert_TK.shape[0], weights.num_experts)
    return configurations.Layer(
        tokens,
        top_k,
        experts,
        weights.hidden,
        weights.intermediate,
        gated=weights.activation.gated,
        itemsize=problem.x_TH.element_size(),
        contiguous_rows=weights.gate_up_EJH.stride(2) == weights.down_EHI.stride(2) == 1,
        overlap=can_overlap(problem.x_TH.device),
    )


def _chosen(problem: Problem, like: Like | None = None) -> Configuration:
    if is_quantised(problem.weights):
        return quantised_configuration.configuration_of(problem, like)
    layer, device, measured = _layer(problem, like), problem.x_TH.device, None
    if layer.contiguous_rows:
        key, allowed = decode_key(problem.x_TH.dtype, layer), lambda: candidates(layer, capability_of(device))
        measured = tuned.choose(device, key, allowed)
    return configurations.configuration(layer) if measured is None else measured
