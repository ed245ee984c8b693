"""How much memory packed experts will take, before anything is allocated, and whether there is that much.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I (gated) or I ·
R LoRA rank

    print(plan(LayerSizes(128, 2048, 768), kind="int8", ranks=(8, 8, 8), max_len=2048, top_k=8, layers=48))
    check_memory(found)                                     # raises MemoryError: needed, there, and what to change

Nothing in here is a guess: packed sizes and scratch are asked of the code that allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from amoeba.core.config import Activation
from amoeba.core.errors import counted
from amoeba.core.placement import LayerSizes
from amoeba.core.problem import Save
from amoeba.cpu.node_experts import NodeExperts
from amoeba.cpu.node_passes import workspace_bytes
from amoeba.cpu.partition import Partition
from amoeba.cpu.pointers import CPU
from amoeba.cpu.weights import PackedKind, PackedWeights, _Packing, load_packed
from amoeba.system.machine import available_memory

_TILE = 32  # copies of factors are padded to whole tiles in both dimensions


class Item(NamedTuple):
    name: str
    bytes: int  # of all layers
    formula: str


@dataclass(frozen=True)
class Plan:
    """Bytes by name; `str(plan)` is a table."""

    items: tuple[Item, ...]
    title: str

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    def bytes_of(self, name: str) -> int:
        return sum(item.bytes for item in self.items if item.name == name)

    def __str__(self) -> str:
        width = max(len(item.name) for item in self.items)
        lines = [f"  {item.name:<{width}}  {readable(item.bytes):>10}  {item.formula}" for item in self.items]
        return "\n".join((self.title, *lines, f"  {'total':<{width}}  {readable(self.total):>10}"))


def plan(
    sizes: LayerSizes,
    *,
    kind: PackedKind = "bf16",
    nodes: int = 1,
    ranks: tuple[int, int, int] = (0, 0, 0),
    max_len: int,
    top_k: int,
    recompute: bool = False,
    factor_itemsize: int = 2,
    training: bool = True,
    layers: int = 1,
    backward: PackedKind | None = None,
) -> Plan:
    """Bytes of `layers` equal layers on one machine, the factors themselves left out: they are the caller's.

    ranks: of gate, up and down. training: with Wᵀ, caches and gradients; else forward alone. Layers have their own
    weights, copies of factors and caches; they take turns with the scratch memory. backward: as in `pack_experts`.
    """
    activation = sizes.activation or Activation()
    partition = Partition.of(sizes.intermediate, nodes, activation)
    has_stored = backward not in (None, kind)
    shells = [_shell(sizes, activation, kind, size, node, has_stored) for node, size in enumerate(partition.sizes)]
    rows = max_len * top_k
    save: Save = "nothing" if not training else "inputs" if recompute else "h"
    scratch = [workspace_bytes(shell, max_len, top_k, ranks=ranks, save=save) for shell in shells]
    one_row_of_each = 2 * max_len * sizes.hidden
    items = [
        Item("packed W", layers * sum(_packed_bytes(shell, False) for shell in shells), f"E·(J·H + H·I), {kind}, tiles")
    ]
    if has_stored:
        stored = 2 * sizes.experts * sizes.hidden * (activation.width(sizes.intermediate) + sizes.intermediate)
        items.append(Item("stored W", layers * stored, "E·(J·H + H·I), bf16, for backward"))
    elif training:
        item = layers * sum(_packed_bytes(shell, True) for shell in shells)
        items.append(Item("packed Wᵀ", item, "the same again, by the first backward"))
    if any(ranks):
        copies = layers * sum(_factor_copies(shell, ranks) for shell in shells)
        items.append(Item("factor copies", copies, "A and B, for both passes, in tiles of bf16"))
    if training:
        inputs = one_row_of_each + rows * (8 + 4)
        items.append(Item("saved inputs", layers * inputs, "2·T·H + 12·N"))
        caches = sum(used["cache"] for used in scratch)
        items.append(Item("caches", layers * caches, "2·N·J and maps" if save == "h" and not has_stored else "maps"))
    used = sum(max(each["forward"], each["backward"]) for each in scratch)
    items.append(Item("scratch", used, "the rows between the products, of one pass"))
    rows_out = (2 * nodes + 1) * one_row_of_each  # each node's part in fp32, and the sum in bf16
    items.append(Item("rows in and out", rows_out + (one_row_of_each if training else 0), "y or dx, dy"))
    if training and any(ranks):
        found = _gradients(sizes, partition, ranks, factor_itemsize)
        items.append(Item("factor gradients", found, "of one layer, fp32 and as the factors are"))
    title = (
        f"{counted(layers, 'layer')} of {sizes.experts} experts, H={sizes.hidden} "
        f"I={sizes.intermediate}, {kind}, {counted(nodes, 'node')}, "
        f"{max_len} tokens of {top_k} experts{', recompute' if recompute else ''}"
    )
    return Plan(tuple(items), title)


REMEDY = "Pack in int8 in place of bf16, use a smaller max_len, or save x alone (recompute)."


def check_memory(found: Plan, *, already: int = 0, available: int | None = None, remedy: str = REMEDY) -> None:
    """Raises MemoryError where the plan asks for more than there is. already: bytes of it that are allocated."""
    if available is None:
        available = available_memory(torch.device("cpu"))
    needed = found.total - already
    if available is not None and needed > available:
        raise MemoryError(
            f"memory: expected {readable(needed)} to be free for what follows; got {readable(available)}. "
            f"{remedy}\n{found}"
        )


def readable(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _shell(
    sizes: LayerSizes, activation: Activation, kind: PackedKind, intermediate: int, node: int, has_stored: bool
) -> NodeExperts:
    """A node's experts without their numbers. has_stored: those in bf16, too, with which backward computes."""

    nothing = torch.empty(0, dtype=torch.uint8, device=CPU)

    def empty(columns: int, depth: int, kind: PackedKind = kind) -> PackedWeights:
        return PackedWeights(kind, sizes.experts, columns, depth, _Packing(nothing, columns, depth, None))

    width, experts = activation.width(intermediate), sizes.experts
    bias_EJ = torch.empty((experts, width), dtype=torch.float32, device=CPU) if sizes.bias else None
    has_down_bias = sizes.bias and node == 0
    bias_EH = torch.empty((experts, sizes.hidden), dtype=torch.float32, device=CPU) if has_down_bias else None
    of_up, of_down, of_backward = (width, sizes.hidden), (sizes.hidden, intermediate), None
    if has_stored:
        of_backward = NodeExperts(empty(*of_up, "bf16"), empty(*of_down, "bf16"), bias_EJ, bias_EH, activation)
    return NodeExperts(empty(*of_up), empty(*of_down), bias_EJ, bias_EH, activation, of_backward)


def _packed_bytes(shell: NodeExperts, transposed: bool) -> int:
    total = 0
    for packed in (shell.gate_up, shell.down):
        sides = (packed.out_features, packed.in_features)
        columns, depth = sides[::-1] if transposed else sides
        int8 = packed.kind == "int8"
        total += packed.experts * load_packed().bytes_per_expert(int8, columns, depth)
        if int8:  # sums of the columns, and with W their scales
            total += packed.experts * columns * (4 if transposed else 8)
    biases = () if transposed else (shell.gate_up_bias_EJ, shell.down_bias_EH)
    return total + sum(bias.nbytes for bias in biases if bias is not None)


def _factor_copies(shell: NodeExperts, ranks: tuple[int, int, int]) -> int:
    """Of gate and up together and of down; A, B and both transposed."""
    up, down = _tiles(ranks[0] + ranks[1]), _tiles(ranks[2])
    width, hidden, inner = (
        _tiles(n) for n in (shell.gate_up.out_features, shell.down.out_features, shell.down.in_features)
    )
    return 2 * 2 * shell.down.experts * (up * (hidden + width) + down * (inner + hidden))


def _gradients(sizes: LayerSizes, partition: Partition, ranks: tuple[int, int, int], itemsize: int) -> int:
    """Each node's in fp32, and what autograd gets of them."""
    gate, up, down = ranks
    shared = (gate + up + down) * sizes.hidden
    divided = (gate + up + down) * sizes.intermediate
    merged = shared + divided if partition.nodes > 1 or itemsize != 4 else 0
    return sizes.experts * (4 * (partition.nodes * shared + divided) + itemsize * merged)


def _tiles(size: int) -> int:
    return -(-size // _TILE) * _TILE
