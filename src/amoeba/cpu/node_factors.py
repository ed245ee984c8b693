"""Copies of LoRA factors for one NUMA node, in bf16 and in the order of the tiles.

E experts · H hidden · I intermediate of this node's block · R LoRA rank

    factors = NodeFactors.pack(node, lora, pool)
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.cpu.node_experts import NodeExperts
from amoeba.cpu.node_library import FACTOR_MATRICES, CFactors, CNode, load_node
from amoeba.cpu.pointers import address, address_at_strides
from amoeba.cpu.pool import WorkerPool

_PANEL = 32  # columns that the low-rank products are padded to, and the depth of a tile in bf16


@dataclass(frozen=True, eq=False)
class NodeFactors:
    """Copies of one node's part of the factors in bf16 and in the order of the tiles, for both passes; by `pack`."""

    lora_names: frozenset[str]
    ranks: tuple[int, int, int]  # of gate, up, down
    node: NodeExperts = field(repr=False)
    structure: CNode = field(repr=False)

    @staticmethod
    def pack(node: NodeExperts, lora: LoraFactors, pool: WorkerPool) -> NodeFactors:
        """From bf16 or fp32 at any strides."""
        names = lora.tensors()
        _check_pairs(names, node.activation.gated)
        experts, hidden, intermediate = node.down.experts, node.down.out_features, node.down.in_features
        width = node.gate_up.out_features
        gate, up, down = (0 if a is None else a.shape[1] for a in (lora.gate_lora_a, lora.up_lora_a, lora.down_lora_a))
        both = gate + up
        of_up = (both, hidden), (width, both), (both, width), (hidden, both)
        of_down = (down, intermediate), (hidden, down), (down, hidden), (intermediate, down)
        shapes = dict(zip(FACTOR_MATRICES, (*of_up, *of_down), strict=True))
        sizes = {name: experts * padded(columns) * padded(depth) for name, (columns, depth) in shapes.items()}
        size = 2 * sum(sizes.values())
        memory = node.take_memory(size)
        c, start = node.structure(), address("memory", memory, torch.uint8, (size,))
        c.gate_rank, c.up_rank, c.down_rank, c.scaling = gate, up, down, lora.scaling
        for name, (columns, depth) in shapes.items():
            if sizes[name]:
                matrix = getattr(c, name)
                matrix.data = start
                matrix.columns, matrix.depth = columns, depth
                start += 2 * sizes[name]
        given = CFactors()
        for name, tensor in names.items():
            factor = getattr(given, name.replace("lora_", ""))
            factor.is_float = tensor.dtype == torch.float32
            dtype = torch.float32 if factor.is_float else torch.bfloat16
            factor.data = address_at_strides(name, tensor, dtype, factor_shape(node, (gate, up, down), name))
            factor.stride_e, factor.stride_row, factor.stride_column = tensor.stride()
        load_node().pack_factors(pool.handle, ctypes.byref(c), ctypes.byref(given))
        packed = NodeFactors(frozenset(names), (gate, up, down), node, c)
        weakref.finalize(packed, node.spare_memory.append, memory).atexit = False  # who reads the memory holds `packed`
        return packed


def padded(size: int) -> int:
    return -(-size // _PANEL) * _PANEL


def factor_shape(node: NodeExperts, ranks: tuple[int, int, int], name: str) -> tuple[int, int, int]:
    projection, _, which = name.split("_")
    rank = dict(zip(("gate", "up", "down"), ranks, strict=True))[projection]
    outer, inner = node.down.out_features, node.down.in_features  # H and I
    fan_in, fan_out = (inner, outer) if projection == "down" else (outer, inner)
    return (node.down.experts, rank, fan_in) if which == "a" else (node.down.experts, fan_out, rank)


def _check_pairs(names: Collection[str], gated: bool) -> None:
    for projection in ("gate", "up", "down"):
        pair = {f"{projection}_lora_a", f"{projection}_lora_b"}
        present = pair.intersection(names)
        if present and (present != pair or (projection == "gate" and not gated)):
            allowed = "neither" if projection == "gate" and not gated else "both or neither"
            raise bad_value("lora", f"{allowed} of {' and '.join(sorted(pair))}", sorted(present), "check the factors")
