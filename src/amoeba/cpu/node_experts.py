"""One NUMA node's share of the experts and its copies of LoRA factors, as compiled code reads them.

E experts · H hidden · I intermediate of this node's block · J = 2I or I · R LoRA rank

    node = NodeExperts(PackedWeights.pack(gate_up_EJH), PackedWeights.pack(down_EHI), None, None, activation)

Weights are packed and frozen, or stored (`StoredWeights`) and then given gradients too, or stored as codes
(`ScaledCodes`), which are frozen.

Copies of factors are in bf16 and in the order of the tiles:

    factors = NodeFactors.pack(node, lora, pool)
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.cpu.node_library import FACTOR_MATRICES, CFactors, CNode, activation_number, load_node
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.pointers import address, address_at_strides, optional_address
from amoeba.cpu.weights import (
    PackedKind,
    PackedWeights,
    ScaledCodes,
    StoredWeights,
    _Packing,
    empty_in_huge_pages,
    packing_address,
)


@dataclass(frozen=True, eq=False)
class NodeExperts:
    """One node's share of the experts: a contiguous block of I."""

    gate_up: PackedWeights | StoredWeights | ScaledCodes  # (E, J, H)
    down: PackedWeights | StoredWeights | ScaledCodes  # (E, H, I)
    gate_up_bias_EJ: Tensor | None  # fp32, contiguous
    down_bias_EH: Tensor | None  # fp32, contiguous; under several nodes only the first has it
    activation: Activation
    of_backward: NodeExperts | None = None  # the same in bf16 as stored, where backward computes with those

    def __post_init__(self) -> None:
        gate_up, down = self.gate_up, self.down
        width = self.activation.width(down.in_features)
        if gate_up.kind != down.kind:
            raise bad_value("down", f"{gate_up.kind}, the kind of gate_up", down.kind, "pack both in one kind")
        got, wanted = (gate_up.experts, gate_up.out_features, gate_up.in_features), (down.experts, width, self.hidden)
        if got != wanted:
            raise bad_value("gate_up", f"shape {wanted}, to go with {down}", got, "check activation.gated")
        self._bias_addresses()

    @property
    def hidden(self) -> int:
        return self.down.out_features

    def _bias_addresses(self) -> tuple[int | None, int | None]:
        experts, width = self.gate_up.experts, self.gate_up.out_features
        return (
            optional_address("gate_up_bias_EJ", self.gate_up_bias_EJ, torch.float32, (experts, width)),
            optional_address("down_bias_EH", self.down_bias_EH, torch.float32, (experts, self.hidden)),
        )

    @functools.cached_property
    def plain_structure(self) -> CNode:
        return self.structure()

    @functools.cached_property
    def spare_memory(self) -> list[Tensor]:
        """Memory of factors that are gone. Factors are packed again after every step of an optimizer, and memory that
        is new to the process costs more time than the packing."""
        return []

    def take_memory(self, size: int) -> Tensor:
        while self.spare_memory:
            memory = self.spare_memory.pop()
            if memory.numel() == size:
                return memory
        return empty_in_huge_pages(size)

    def structure(self) -> CNode:
        """For compiled code: sizes, W of forward and biases; factors and Wᵀ are added by those who need them."""
        c = self.sizes()
        describe_matrix("gate_up", c.gate_up, self.gate_up.kind, self.gate_up.experts, self.gate_up.forward)
        describe_matrix("down", c.down, self.down.kind, self.down.experts, self.down.forward)
        c.gate_up_bias, c.down_bias = self._bias_addresses()
        return c

    def sizes(self) -> CNode:
        """Without any address."""
        down, activation, c = self.down, self.activation, CNode()
        c.int8, c.experts, c.width = down.kind == "int8", down.experts, self.gate_up.out_features
        c.hidden, c.intermediate = down.out_features, down.in_features
        c.activation.kind, c.activation.alpha = activation_number(activation.kind), activation.alpha
        c.activation.gated, c.activation.interleaved = activation.gated, activation.interleaved
        c.activation.limit, c.activation.up_shift = activation.limit, activation.up_shift
        return c


def describe_matrix(name: str, matrix: ctypes.Structure, kind: PackedKind, experts: int, packing: _Packing) -> None:
    """Fills in where and what a packing is, once."""
    if matrix.data is None:
        of_columns, of_depth = (experts, packing.columns), (experts, packing.depth)
        matrix.column_scale = optional_address("column_scale_EC", packing.column_scale_EC, torch.float32, of_columns)
        matrix.sum = optional_address("sum_EC", packing.sum_EC, torch.int32, of_columns)
        matrix.depth_scale = optional_address("depth_scale_ED", packing.depth_scale_ED, torch.float32, of_depth)
        matrix.columns, matrix.depth = packing.columns, packing.depth
        if packing.stride_ECD is not None:
            matrix.stored = 1
            matrix.stride_e, matrix.stride_column, matrix.stride_k = packing.stride_ECD
        if packing.coding is not None:
            matrix.coding, matrix.turned = packing.coding, packing.turned
        matrix.data = packing_address(name, kind, experts, packing)


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
        load_node().amoeba_node_pack_factors(pool.handle, ctypes.byref(c), ctypes.byref(given))
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
