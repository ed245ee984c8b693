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

import torch
from torch import Tensor

from amoeba.kernels.decode import configuration as configurations
from amoeba.kernels.decode.at_once import down_at_once, up_at_once
from amoeba.kernels.decode.by_expert import down_by_expert, sum_of_slots, up_by_expert
from amoeba.kernels.decode.by_slot import down_by_token, up_by_slot
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.decode.low_rank import low_of_down, low_of_up
from amoeba.problem import Problem


def decode(problem: Problem, *, configuration: Configuration | None = None) -> Tensor:
    """y_TH, in the dtype of x. Meant for T <= 64; right for every T whose N ids fit in one program's registers."""
    tokens, top_k = problem.expert_TK.shape
    num_experts, hidden, intermediate = problem.weights.down_EHI.shape
    x_TH = problem.x_TH.contiguous()
    if tokens * top_k == 0:
        return torch.zeros_like(x_TH)
    chosen = configuration or _chosen(problem)
    expert_TK, weight_TK = problem.expert_TK.contiguous(), problem.weight_TK.contiguous()
    a_NI = x_TH.new_empty((tokens * top_k, intermediate))
    y_TH = torch.empty_like(x_TH)
    of_up = low_of_up(problem, x_TH, expert_TK, chosen.overlap)
    if chosen.by_slot:
        up = up_at_once if chosen.up.at_once else up_by_slot
        up(problem, x_TH, expert_TK, a_NI, of_up, chosen)
        of_down = low_of_down(problem, a_NI, expert_TK, chosen.overlap)
        down = down_at_once if chosen.down.at_once else down_by_token
        down(problem, a_NI, expert_TK, weight_TK, y_TH, of_down, chosen)
        return y_TH
    y_NH = x_TH.new_empty((tokens * top_k, hidden), dtype=torch.float32)
    up_by_expert(problem, x_TH, expert_TK, a_NI, of_up, chosen)
    of_down = low_of_down(problem, a_NI, expert_TK, chosen.overlap)
    down_by_expert(problem, a_NI, expert_TK, y_NH, of_down, chosen)
    sum_of_slots(y_NH, expert_TK, weight_TK, y_TH, num_experts)
    return y_TH


def _chosen(problem: Problem) -> Configuration:
    tokens, top_k = problem.expert_TK.shape
    return configurations.configuration(
        tokens,
        top_k,
        *problem.weights.down_EHI.shape,
        gated=problem.weights.activation.gated,
        itemsize=problem.x_TH.element_size(),
        contiguous_rows=problem.weights.gate_up_EJH.stride(2) == problem.weights.down_EHI.stride(2) == 1,
        overlap=_can_overlap(problem.x_TH.device),
    )


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
