"""Forward and backward of packed experts over all nodes: parts computed at the same time, then added or joined.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · R LoRA rank

    y_TH, left = forward(packed, lora, x_TH, expert_TK, weight_TK, save="h")       # all on the CPU; y fp32
    gradients = backward(packed, lora, left, dy_TH, needs)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from amoeba.core.problem import Gradients, Needs, Save
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu import node as one_node
from amoeba.cpu.node import NodeCache
from amoeba.cpu.node_factors import NodeFactors
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.partition import add_up
from amoeba.cpu.places import run_everywhere

Part = TypeVar("Part")

# A pass that reads no more weights than this is computed by the calling thread alone. 1.6 MB (int8, H=512 I=256, one
# token of 4 experts), best and median us: alone 53 and 63; with one more of torch's threads 42 and 16000, as others
# used the second core and each call waits for both (2-core Xeon, 2026-11-15).
ALONE_BYTES = 2 << 20


class Left(NamedTuple):
    """What a forward leaves for its backward: each node's cache, and the factors it computed with."""

    caches: tuple[NodeCache, ...]
    factors: tuple[NodeFactors | None, ...]


def forward(
    packed: PackedExperts, lora: LoraFactors | None, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, save: Save
) -> tuple[Tensor, Left | None]:
    x_TH, weight_TK = x_TH.detach(), weight_TK.detach().to(torch.float32).contiguous()
    expert_TK = expert_TK.to(torch.int64).contiguous()
    factors: Sequence[NodeFactors | None] = [None] * packed.nodes
    if lora is not None and lora.tensors():
        factors = packed.copies.of(lora, packed.shares, packed.places, packed.partition, expert_TK)

    few = expert_TK.numel() * packed.expert_bytes <= ALONE_BYTES

    def part(node: int) -> tuple[Tensor, NodeCache | None]:
        share, place = packed.shares[node], packed.places[node]
        pool = place.alone if few else place.pool
        return one_node.forward(share, factors[node], x_TH, expert_TK, weight_TK, pool, save=save)

    parts = _on_every_node(packed, part)
    y_TH = add_up([y for y, _ in parts])
    if save == "nothing":
        return y_TH, None
    caches = tuple(cache for _, cache in parts if cache is not None)
    return y_TH, Left(caches, tuple(factors))


def backward(packed: PackedExperts, lora: LoraFactors | None, left: Left, dy_TH: Tensor, needs: Needs) -> Gradients:
    """x and weight in fp32. lora: the factors of the forward, whose gradients come in their shapes and dtypes."""

    def part(node: int) -> Gradients:
        share, pool = packed.shares[node], packed.places[node].pool
        return one_node.backward(share, left.factors[node], left.caches[node], dy_TH.detach(), pool, needs)

    parts = _on_every_node(packed, part)
    sources = {} if lora is None else lora.tensors()

    def merged(name: str) -> Tensor | None:
        found = [getattr(one, name) for one in parts]
        return None if found[0] is None else packed.partition.merge(name, found, sources[name])

    dx_TH = add_up([_present(one.x) for one in parts]) if needs.x else None
    dweight_TK = add_up([_present(one.weight) for one in parts]) if needs.weight else None
    return Gradients(dx_TH, dweight_TK, **{name: merged(name) for name in LORA_NAMES})


def _on_every_node(packed: PackedExperts, part: Callable[[int], Part]) -> list[Part]:
    return run_everywhere(packed.places, [functools.partial(part, node) for node in range(packed.nodes)])


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # as it was asked for
    return tensor
