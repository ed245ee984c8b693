"""The passes over one NUMA node's experts: forward, and backward from what it saved, each one call of compiled code.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate of this node's block ·
J = 2I or I · R LoRA rank

    y_TH, cache = forward(node, factors, x_TH, expert_TK, weight_TK, pool, save="h")      # y fp32: this node's part
    gradients = backward(node, factors, cache, dy_TH, pool, needs)

Sums are in fp32; h, a, the low-rank products and each expert's rows of y and dx are rounded to bf16 in between. The
same inputs give the same bits, whatever the number of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.core.problem import Gradients, Needs, Save
from amoeba.core.weights import LORA_NAMES
from amoeba.cpu.node_experts import NodeExperts, NodeFactors, describe_matrix, factor_shape, padded
from amoeba.cpu.node_library import CBatch, CGradients, CNode, CWeightTarget, load_node
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.pointers import CPU, address, address_of_lines, address_to_write, optional_address
from amoeba.cpu.weights import PackedWeights, ScaledCodes, StoredWeights, current_path, empty_in_huge_pages, load_packed


@dataclass(frozen=True, eq=False)
class NodeCache:
    """What forward saves for backward; what is None of map, h_NJ and the low-rank products is made again."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    map: Tensor | None  # int32: where each expert's rows begin (E + 1), row -> slot (N), slot -> row (N)
    h_NJ: Tensor | None
    low_NR: Tensor | None  # scaling · x · Aᵀ of gate and up, side by side, zeros up to whole panels
    down_low_NR: Tensor | None


def forward(
    node: NodeExperts,
    factors: NodeFactors | None,
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    pool: WorkerPool,
    *,
    save: Save,
) -> tuple[Tensor, NodeCache | None]:
    """This node's part of y (T, H) in fp32; x bf16, weight fp32, expert int64 (ids outside [0, E) are sentinels).

    Where backward has weights of its own (`of_backward`), h is not saved: backward computes it again, from those.
    """
    save = _saved_of(node, save)
    expert_TK, weight_TK = expert_TK.contiguous(), weight_TK.contiguous()
    c = _node_structure(node, factors)
    batch = _batch(node, x_TH, expert_TK, weight_TK)
    cache, slots = None, expert_TK.numel()
    if save != "nothing":
        row_map = torch.empty(_map_size(node, slots), dtype=torch.int32, device=CPU)
        h, low, down_low = None, None, None
        if save == "h":
            width = node.gate_up.out_features
            h = empty_in_huge_pages(slots, 2 * width).view(torch.bfloat16)
            gate, up, down = (0, 0, 0) if factors is None else factors.ranks
            low, down_low = (x_TH.new_empty(slots, padded(r)) if r else None for r in (gate + up, down))
        cache = NodeCache(x_TH, expert_TK, weight_TK, row_map, h, low, down_low)
        _describe_cache(node, factors, batch, cache)
    y_TH = torch.empty(x_TH.shape, dtype=torch.float32, device=CPU)
    y = address("y_TH", y_TH, torch.float32, (x_TH.shape[0], node.hidden))
    load_node().amoeba_node_forward(pool.handle, ctypes.byref(c), ctypes.byref(batch), y)
    return y_TH, cache


def combine(rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor, pool: WorkerPool) -> Tensor:
    """The last step of `forward` alone, for rows in bf16 that several calls computed: y (T, H) in fp32.

    slot_row_TK: int32, the row of each slot; -1 where it has none.
    """
    (count, hidden), (tokens, top_k) = rows_NH.shape, slot_row_TK.shape
    if slot_row_TK.numel() and int(slot_row_TK.max()) >= count:
        raise bad_value("slot_row_TK", f"rows below {count}", int(slot_row_TK.max()), "pass all rows")
    batch = CBatch(tokens, top_k, weight=address("weight_TK", weight_TK, torch.float32, (tokens, top_k)))
    y_TH = torch.empty((tokens, hidden), dtype=torch.float32, device=CPU)
    load_node().amoeba_node_combine(
        pool.handle,
        ctypes.byref(CNode(hidden=hidden)),
        ctypes.byref(batch),
        address("slot_row_TK", slot_row_TK, torch.int32, (tokens, top_k)),
        address("rows_NH", rows_NH, torch.bfloat16, (count, hidden)),
        address("y_TH", y_TH, torch.float32, (tokens, hidden)),
    )
    return y_TH


def backward(
    node: NodeExperts,
    factors: NodeFactors | None,
    cache: NodeCache,
    dy_TH: Tensor,
    pool: WorkerPool,
    needs: Needs,
) -> Gradients:
    """From dy (T, H) in bf16; those of x and weight are this node's parts and add up. Idle experts get zeros.

    All in fp32, but gate_up and down in bf16 with the strides of the weight.
    """
    dy = address_of_lines("dy_TH", dy_TH, torch.bfloat16, (cache.x_TH.shape[0], node.hidden))
    c = _node_structure(node, factors)
    if node.of_backward is not None:
        node = node.of_backward
        c = _with_weights_of(node, c)
    describe_matrix("down", c.down_transposed, node.down.kind, node.down.experts, node.down.transposed)
    describe_matrix("gate_up", c.gate_up_transposed, node.gate_up.kind, node.gate_up.experts, node.gate_up.transposed)
    batch = _batch(node, cache.x_TH, cache.expert_TK, cache.weight_TK)
    _describe_cache(node, factors, batch, cache)
    gradients = Gradients(
        _empty(dy_TH.shape) if needs.x else None,
        _empty(cache.weight_TK.shape) if needs.weight else None,
        **{
            name: _empty(factor_shape(node, factors.ranks, name))
            for name in LORA_NAMES
            if factors is not None and name in factors.lora_names and getattr(needs, name)
        },
        gate_up=_empty_gradient(node.gate_up) if needs.gate_up else None,
        down=_empty_gradient(node.down) if needs.down else None,
        gate_up_bias=_empty_bias(node.gate_up_bias_EJ) if needs.gate_up_bias else None,
        down_bias=_empty_bias(node.down_bias_EH) if needs.down_bias else None,
    )
    of_weights = gradients.gate_up, gradients.down
    gate_up, down = (None if g is None else _contiguous_inside(g) for g in of_weights)
    factors_and_rows = (gradients.x, gradients.weight, *(getattr(gradients, name) for name in LORA_NAMES))
    biases = gradients.gate_up_bias, gradients.down_bias
    out = CGradients(
        dy, dy_TH.stride(0), *map(_of_gradient, factors_and_rows),
        _target(gate_up), _target(down), *map(_of_gradient, biases),
    )  # fmt: skip
    load_node().amoeba_node_backward(pool.handle, ctypes.byref(c), ctypes.byref(batch), ctypes.byref(out))
    for gradient, written in zip(of_weights, (gate_up, down), strict=True):
        if gradient is not None and written is not None and written is not gradient:
            gradient.copy_(written)
    return gradients


def workspace_bytes(
    node: NodeExperts, tokens: int, top_k: int, *, ranks: tuple[int, int, int] = (0, 0, 0), save: Save = "h"
) -> dict[str, int]:
    """Bytes that one pool holds for passes of this size, and those that each forward leaves for its backward.

    forward, backward: scratch of the pool, which the larger of the two sizes; thread: what the buffers of each of its
    threads grow to where all rows meet in one expert; cache: what `save` leaves, without x. `ranks` are those of gate,
    up and down.
    """
    save, batch = _saved_of(node, save), CBatch(tokens=tokens, top_k=top_k)
    low, down_low = padded(ranks[0] + ranks[1]), padded(ranks[2])
    somewhere = 1  # only whether a pointer is null is looked at
    of_passes = [each.sizes() for each in (node, node.of_backward or node)]
    for c in of_passes:
        c.gate_rank, c.up_rank, c.down_rank = ranks
        c.up_a.data, c.down_a.data = somewhere if low else None, somewhere if down_low else None
    slots = tokens * top_k
    cache = 0
    if save != "nothing":
        batch.map = somewhere
        cache = 4 * _map_size(node, slots)
    if save == "h":
        batch.h = somewhere
        batch.low, batch.down_low = somewhere if low else None, somewhere if down_low else None
        cache += 2 * slots * (node.gate_up.out_features + low + down_low)
    sizes = [
        load_node().amoeba_node_workspace(ctypes.byref(c), ctypes.byref(batch), which)
        for which, c in enumerate(of_passes)
    ]
    trains = save != "nothing"
    thread = max(load_node().amoeba_node_thread_bytes(ctypes.byref(c), slots, trains) for c in of_passes)
    return {"forward": sizes[0], "backward": sizes[1] if trains else 0, "thread": thread, "cache": cache}


def _node_structure(node: NodeExperts, factors: NodeFactors | None) -> CNode:
    if factors is not None and factors.node is not node:
        raise bad_value("factors", "those that were packed for this node", "another node's", "pack them for this one")
    c = node.plain_structure if factors is None else factors.structure
    c.path = current_path()
    return c


def _saved_of(node: NodeExperts, save: Save) -> Save:
    return "inputs" if save == "h" and node.of_backward is not None else save


def _with_weights_of(node: NodeExperts, other: CNode) -> CNode:
    """Its weights with the factors of the other, which points to memory that others keep."""
    c = CNode.from_buffer_copy(other)
    own = node.structure()
    for name in ("int8", "gate_up", "down", "gate_up_transposed", "down_transposed"):
        setattr(c, name, getattr(own, name))
    return c


def _batch(node: NodeExperts, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> CBatch:
    if expert_TK.dim() != 2:
        raise bad_value("expert_TK", "shape (T, K)", tuple(expert_TK.shape), "keep the dimension of the choices")
    tokens, top_k = expert_TK.shape
    if tokens * top_k >= 2**31:
        raise bad_value("expert_TK", "fewer than 2^31 slots, which are counted in 32 bits", tokens * top_k, "split x")
    x = address_of_lines("x_TH", x_TH, torch.bfloat16, (tokens, node.hidden))
    expert = address("expert_TK", expert_TK, torch.int64, (tokens, top_k))
    weight = address("weight_TK", weight_TK, torch.float32, (tokens, top_k))
    return CBatch(tokens, top_k, x, x_TH.stride(0), expert, weight)


def _describe_cache(node: NodeExperts, factors: NodeFactors | None, batch: CBatch, cache: NodeCache) -> None:
    slots = cache.expert_TK.numel()
    gate, up, down = (0, 0, 0) if factors is None else factors.ranks
    batch.map = optional_address("map", cache.map, torch.int32, (_map_size(node, slots),))
    batch.h = optional_address("h_NJ", cache.h_NJ, torch.bfloat16, (slots, node.gate_up.out_features))
    batch.low = optional_address("low_NR", cache.low_NR, torch.bfloat16, (slots, padded(gate + up)))
    batch.down_low = optional_address("down_low_NR", cache.down_low_NR, torch.bfloat16, (slots, padded(down)))


def _map_size(node: NodeExperts, slots: int) -> int:
    return node.down.experts + 1 + 2 * slots


def _empty_gradient(weights: PackedWeights | StoredWeights | ScaledCodes) -> Tensor:
    if not isinstance(weights, StoredWeights):
        raise bad_value(
            "needs", "no gradient of packed or quantised weights, which are frozen", "one", "train stored weights"
        )
    gradient = torch.empty_like(weights.weight_EOI)
    start = address_to_write("gradient", gradient, torch.bfloat16, tuple(gradient.shape))
    load_packed().ask_for_huge_pages(start, gradient.nbytes)
    return gradient


def _empty_bias(bias: Tensor | None) -> Tensor:
    if bias is None:
        raise bad_value("needs", "no gradient of a bias that is not there", "one", "request only those that exist")
    return torch.empty_like(bias)


def _empty(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=CPU)


def _contiguous_inside(gradient: Tensor) -> Tensor:
    """Itself where one of its inner dimensions is contiguous, as it must be to be written."""
    if 1 in gradient.stride()[1:]:
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=CPU)


def _target(gradient: Tensor | None) -> CWeightTarget:
    if gradient is None:
        return CWeightTarget()
    start = address_to_write("gradient", gradient, torch.bfloat16, tuple(gradient.shape))
    return CWeightTarget(start, *gradient.stride())


def _of_gradient(gradient: Tensor | None) -> int | None:
    return None if gradient is None else address("gradient", gradient, torch.float32, tuple(gradient.shape))
