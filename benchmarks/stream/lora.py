"""A fine-tuning step over streamed experts: forward and backward with LoRA factors beside them, all experts in each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.bench.workload import relative_error
from amoeba.core.weights import LoraFactors
from amoeba.experts import experts
from amoeba.proof.conformance import TOLERANCE
from amoeba.routing.router import Routing
from amoeba.stream.store.layers import StoredExperts
from amoeba.stream.store.store import Store
from benchmarks.stream.decode import fill
from benchmarks.stream.place import Place
from benchmarks.stream.problem import StreamProblem

_STEPS = 2  # that are timed, behind one that is compared


@dataclass(frozen=True)
class LoraMeasurement:
    """share_of_link: of its rate, by the bytes that came over it; without a link, of the disk's."""

    layers: int
    slots: int
    host_slots: int
    tokens: int
    rank: int
    error: float  # the worst of output and gradients, against the resident step
    same_bits: bool
    reason: str | None = None
    ms: float | None = None
    resident_ms: float | None = None
    bytes_per_step: float | None = None
    share_of_link: float | None = None


class _Step:
    def __init__(self, problem: StreamProblem, layers: int) -> None:
        size, device = problem.size, problem.device
        generator = torch.Generator(device).manual_seed(2)

        def drawn(*shape: int) -> Tensor:
            numbers = torch.empty(shape, dtype=problem.dtype, device=device)
            return numbers.normal_(0, shape[-1] ** -0.5, generator=generator).requires_grad_()

        self._x_TH = drawn(size.lora_tokens, size.hidden)
        sizes = size.lora_tokens, size.experts
        chosen = torch.empty(sizes, dtype=torch.float32, device=device).uniform_(generator=generator)
        weight_TK = torch.full((size.lora_tokens, size.top_k), 1 / size.top_k, dtype=torch.float32, device=device)
        self._routing = Routing(chosen.topk(size.top_k, dim=1).indices, weight_TK, trusted=True)
        e, r, h, i = size.experts, size.rank, size.hidden, size.intermediate
        shapes = ((e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r))
        self._factors = []
        for _ in range(layers):
            gate_a, gate_b, up_a, up_b, down_a, down_b = (drawn(*shape) for shape in shapes)
            self._factors.append(LoraFactors(gate_a, gate_b, up_a, up_b, down_a, down_b))

    def run(self, kinds: Sequence, backend: str = "auto") -> list[Tensor]:
        """Each layer gets what the one before gave, as in a model: output, then the gradients of x and all factors."""
        y_TH = self._x_TH
        for kind, factors in zip(kinds, self._factors, strict=True):
            y_TH = y_TH + experts(y_TH, self._routing, kind, lora=factors, backend=backend)
        leaves = [self._x_TH, *(tensor for each in self._factors for tensor in each.tensors().values())]
        return [y_TH.detach(), *torch.autograd.grad(y_TH, leaves, torch.ones_like(y_TH))]

    def seconds(self, place: Place, kinds: Sequence, backend: str = "auto") -> float:
        place.wait()
        began = time.perf_counter()
        for _ in range(_STEPS):
            self.run(kinds, backend)
        place.wait()
        return (time.perf_counter() - began) / _STEPS


def measure(
    problem: StreamProblem,
    place: Place,
    store: Store,
    resident: Sequence[StoredExperts],
    rate: float | None,
    ready: Callable[[], object] = lambda: None,
) -> LoraMeasurement:
    """rate: bytes/s of the link, or where there is none of the disk. A quarter of the experts have slots.
    ready: called ahead of what is timed."""
    size, layers = problem.size, len(store.layers)
    slots, host_slots = max(1, size.experts // 4), size.experts if place.has_link else 0
    step = _Step(problem, layers)
    with closing(place.memory(store, slots, host_slots)) as memory:
        fill(memory)
        truth, found = step.run(resident, place.backend), step.run(memory.layers)
        worst = max(map(relative_error, found, truth))
        same_bits = all(map(torch.equal, found, truth))
        begun = layers, slots, host_slots, size.lora_tokens, size.rank, worst, same_bits
        if not worst <= TOLERANCE[problem.dtype]:
            return LoraMeasurement(*begun, reason=f"out of tolerance: {worst:.1e} from the resident step")
        del truth, found
        ready()
        memory.cache.restart_counters()
        seconds = step.seconds(place, memory.layers)
        counters = memory.cache.restart_counters()
        resident_seconds = step.seconds(place, resident, place.backend)
    moved = (counters.host_bytes + counters.disk_bytes) / _STEPS
    return LoraMeasurement(
        *begun,
        ms=seconds * 1e3,
        resident_ms=resident_seconds * 1e3,
        bytes_per_step=moved,
        share_of_link=None if rate is None else moved / rate / seconds,
    )
