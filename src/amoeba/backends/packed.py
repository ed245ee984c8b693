"""Packed experts inside torch: the backend `cpu` for the kind of weights PackedExperts.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · R LoRA rank

    y_TH, left = forward(packed, lora, x_TH, expert_TK, weight_TK, save="h")       # all on the CPU; y fp32
    gradients = backward(packed, lora, left, dy_TH, needs)

The weights are no tensors, so the operator gets a handle by which it finds them. A GPU's x comes through pinned memory,
and y, dx and the gradient of the routing weights go back. Parts on several NUMA nodes are computed at the same time,
then added or joined. A submitted pass is computed in another thread, which waits for the GPU's rows in the place of
the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import Whole
from amoeba.backends.submitted import Ticket, submit
from amoeba.core.problem import Gradients, Needs, Problem, Save
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu import node_passes as one_node
from amoeba.cpu.node_experts import NodeFactors
from amoeba.cpu.node_passes import NodeCache
from amoeba.cpu.numa import HostThread, run_on_nodes
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.partition import add_up
from amoeba.cpu.pointers import CPU

Part = TypeVar("Part")

# A pass that reads no more weights than this is computed by the calling thread alone. 1.6 MB (int8, H=512 I=256, one
# token of 4 experts), best and median us: alone 53 and 63; with one more of torch's threads 42 and 16000, as others
# used the second core and each call waits for both (2-core Xeon, 2026-11-15).
ALONE_BYTES = 2 << 20


_THREAD = HostThread("amoeba-experts")  # of all layers: their passes would only be in each other's way


class PackedBackend(PassesBackend):
    name, summary, kinds = "cpu", "the CPU's matrix units, where the experts are packed", (PackedExperts,)
    operator_name = "packed"

    def why_not(self, request: Request) -> str | None:
        return None

    def why_waits(self, request: Request, trains: bool) -> str | None:
        return "are computed on the CPU, and the host waits for their rows in every layer"

    def prepared(self, problem: Problem, gradient: bool) -> Problem:
        return problem  # copies of the factors are packed and kept, see `FactorCopies`

    def submit(self, request: Request) -> Ticket:
        return submit(self.operator, *self.problem_of(request), _THREAD)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, tuple | None]:
        x_TH = problem.x_TH
        rows_TH, id_TK, scale_TK = to_host(x_TH, problem.expert_TK, problem.weight_TK)
        lora = problem.lora or LoraFactors()
        y_TH, left = forward(problem.weights, lora, rows_TH.contiguous(), id_TK, scale_TK, save)
        saved = None if left is None else (left.caches, Whole(left.factors))
        return deliver(y_TH, x_TH.dtype, x_TH.device), saved

    def backward(self, problem: Problem, saved: tuple | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        assert saved is not None  # with save="inputs", too: x stays on the host
        caches, factors = saved
        (rows_TH,) = to_host(dy_TH)
        left, lora = Left(caches, factors.value), problem.lora or LoraFactors()
        found = backward(problem.weights, lora, left, rows_TH.contiguous(), needs)
        x_TH, weight_TK = problem.x_TH, problem.weight_TK
        return found._replace(
            x=None if found.x is None else deliver(found.x, x_TH.dtype, x_TH.device),
            weight=None if found.weight is None else deliver(found.weight, weight_TK.dtype, weight_TK.device),
        )


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
        factors = packed.copies.of(lora, packed.shares, packed.numa_nodes, packed.partition, expert_TK)

    few = expert_TK.numel() * packed.expert_bytes <= ALONE_BYTES

    def part(node: int) -> tuple[Tensor, NodeCache | None]:
        share, numa = packed.shares[node], packed.numa_nodes[node]
        pool = numa.alone if few else numa.pool
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
        share, pool = packed.shares[node], packed.numa_nodes[node].pool
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
    return run_on_nodes(packed.numa_nodes, [functools.partial(part, node) for node in range(packed.nodes)])


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # as it was asked for
    return tensor


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, when the device has come so far; those that are there already as they are."""
    staged, events = zip(*(_stage(tensor) for tensor in tensors), strict=True)
    for event in events:
        if event is not None:
            event.synchronize()
    return list(staged)


def _stage(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A pinned copy of a GPU's tensor and the event after which it may be read; a CPU's tensor is itself."""
    if tensor.device.type != "cuda":
        return tensor, None
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)
    copied.copy_(tensor.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return copied, event


def deliver(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In that dtype on that device; a GPU gets it in its own time, while the host goes on."""
    if device.type != "cuda":
        return tensor.to(dtype)
    pinned = torch.empty(tensor.shape, dtype=dtype, device=CPU, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


BACKEND = PackedBackend()
