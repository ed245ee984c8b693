"""bf16 passes of `cpu` over weights as they are stored, in bf16 or in codes: the node's fused passes, which pack the
panels of a weight as they go.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    if cpu_fused.serves(problem): y_TH, saved = cpu_fused.forward(problem, save)

Nothing is saved for backward but x and h: backward sorts the rows again and packs the LoRA factors again.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from amoeba.backends.backend import RowsApart
from amoeba.backends.read_quantised import scaled_codes
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.cpu import node_passes as one_node
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.node_experts import NodeExperts, NodeFactors
from amoeba.cpu.node_library import load_node
from amoeba.cpu.node_passes import NodeCache
from amoeba.cpu.numa import NumaNode, numa_nodes
from amoeba.cpu.pointers import CPU, has_lines
from amoeba.cpu.weights import Path, ScaledCodes, StoredWeights, current_path
from amoeba.precision.quantised_experts import ReadInBlocks

logger = logging.getLogger("amoeba")

Result = TypeVar("Result")


def serves(problem: Problem) -> bool:
    """bf16 on a CPU that multiplies it; elsewhere torch computes in fp32, which is faster than plain vectors here."""
    return problem.weights.gate_up_EJH.dtype == torch.bfloat16 and _multiplies_bf16()


def forward(problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
    x_TH, expert_TK, weight_TK = _rows(problem)

    def run(node: NumaNode) -> tuple[Tensor, NodeCache | None]:
        experts, factors = _experts(problem, node)
        what: Save = "h" if save == "h" else "nothing"
        return one_node.forward(experts, factors, x_TH, expert_TK, weight_TK, node.pool, save=what)

    y_TH, cache = _here(run)
    y_TH = y_TH.to(problem.x_TH.dtype)
    if cache is None:
        return y_TH, None
    assert cache.h_NJ is not None
    return y_TH, Saved.without_maps(cache.h_NJ)


def apart() -> RowsApart:
    return RowsApart(_rows_alone, _combine, lambda problem, expert_TK: forward(problem, "nothing")[0])


def _rows_alone(problem: Problem, save: Save) -> tuple[Tensor, Tensor | None]:
    """Each token's one row, which is in bf16 before it is weighted."""
    problem = problem._replace(weight_TK=torch.ones_like(problem.weight_TK))
    y_NH, saved = forward(problem.with_factors_as_weights(), save)
    return y_NH, None if saved is None else saved.h_NJ


def _combine(rows_NH: Tensor, problem: Problem) -> Tensor:
    _, expert_TK, weight_TK = _rows(problem)
    slot_TK = torch.arange(problem.rows, dtype=torch.int32, device=CPU).view_as(expert_TK)
    slot_TK = slot_TK.masked_fill((expert_TK < 0) | (expert_TK >= problem.weights.num_experts), -1)
    y_TH = _here(lambda node: one_node.combine(rows_NH, slot_TK, weight_TK, node.pool))
    return y_TH.to(problem.x_TH.dtype)


def backward(problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
    cache = NodeCache(*_rows(problem), None, None if saved is None else saved.h_NJ, None, None)

    def run(node: NumaNode) -> Gradients:
        experts, factors = _experts(problem, node)
        return one_node.backward(experts, factors, cache, dy_TH, node.pool, needs)

    found = _here(run)
    sources = problem.differentiable()
    of_weights = {"gate_up": found.gate_up, "down": found.down}
    others = {name: _as(getattr(found, name), sources[name]) for name in sources if name not in of_weights}
    return Gradients(**others, **of_weights)


def _multiplies_bf16() -> bool:
    return _path_multiplies_bf16(os.environ.get("AMOEBA_CPU_PATH"))


@functools.cache
def _path_multiplies_bf16(asked_for: str | None) -> bool:
    try:
        load_node()
        return current_path() > Path.GENERIC
    except CoreUnavailable as error:
        logger.warning("torch computes bf16 experts, one product at a time: %s", error)
        return False


@functools.cache
def _node() -> NumaNode:
    (node,) = numa_nodes(1)
    return node


def _here(run: Callable[[NumaNode], Result]) -> Result:
    node = _node()
    return node.run(functools.partial(run, node))


def _rows(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    x_TH, expert_TK, weight_TK = (tensor.detach() for tensor in problem[:3])
    if not has_lines(x_TH):
        x_TH = x_TH.contiguous()
    return x_TH, expert_TK.to(torch.int64).contiguous(), weight_TK.to(torch.float32).contiguous()


def _experts(problem: Problem, node: NumaNode) -> tuple[NodeExperts, NodeFactors | None]:
    gate_up, down = (_stored(weight) for weight in (problem.weights.gate_up_EJH, problem.weights.down_EHI))
    gate_up_bias, down_bias = (
        None if bias is None else bias.detach().to(torch.float32).contiguous()
        for bias in (problem.weights.gate_up_bias_EJ, problem.weights.down_bias_EH)
    )
    experts = NodeExperts(gate_up, down, gate_up_bias, down_bias, problem.weights.activation)
    if problem.lora is None:
        return experts, None
    return experts, NodeFactors.pack(experts, problem.lora, node.pool)


def _stored(weight_EOI: Tensor | ReadInBlocks) -> StoredWeights | ScaledCodes:
    return scaled_codes(weight_EOI) if isinstance(weight_EOI, ReadInBlocks) else StoredWeights(weight_EOI.detach())


def _as(gradient: Tensor | None, source: Tensor | None) -> Tensor | None:
    """In the dtype and with the strides of what it is the gradient of."""
    if gradient is None:
        return None
    assert source is not None
    return torch.empty_like(source).copy_(gradient)
