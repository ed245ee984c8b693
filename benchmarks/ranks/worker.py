"""In each process of a group: the same layer without an exchange and with each of them, its numbers and its times.

T tokens of a rank · K experts per token · E experts of all ranks · H hidden · I intermediate · W ranks

    processes.run(prepare, [(job,)] * W)                  # what the others then use
    processes.run(check, [("peers", "collective")] * W)
    processes.run(step_ms, [("peers", 20)] * W)

All ranks call the same in the same order, with the same arguments.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba import experts
from amoeba.bench.timing import peak_bytes
from amoeba.core.phase_timer import mark, watch_phases
from amoeba.core.weights import ExpertWeights
from amoeba.parallel import Owners, Ranks, ShardedExperts
from amoeba.parallel.processes import first_processes
from amoeba.parallel.transports import peers
from amoeba.parallel.transports import symmetric_buffer as buffer
from amoeba.parallel.transports.choice import choose_transport
from amoeba.parallel.transports.transport import Exchange
from amoeba.precision.recipes import UNCHANGED, with_precision
from amoeba.routing.router import Routing

# Own tokens on own experts: as many routed rows as with an exchange, and the least that there can be of all else.
ALONE = "no exchange"
# All tokens of all ranks with the experts of this one: what it computes with an exchange, without one.
RECEIVED = "no exchange, rows as received"
# The same, where the ranks wait for each other on the GPU as often as with an exchange: what keeping step costs alone.
IN_STEP = "no exchange, ranks in step"
# For each, what of `ShardedExperts` makes it so; most_rows is a share of the slots that come on average.
_FIXED: dict[str, Any] = {"transport": "peers", "most_tokens": 1.0, "most_rows": 1.15}
EXCHANGES: dict[str, dict[str, Any]] = {
    "collective": {"transport": "collective"},
    "peers": {"transport": "peers"},
    "peers, sums by rows": {"transport": "peers", "straight": False},
    "peers, overlapped": {"transport": "peers", "overlap": True},
    "peers, fixed room": _FIXED,
    "peers, fixed room, overlapped": _FIXED | {"overlap": True},
    "peers, fixed room, tasks": _FIXED | {"local_backend": "tasks"},  # the scheduled backward sends rows and sums
}
# What of a name says that something is computed while rows travel.
HIDING = (", overlapped", ", tasks")
# Rows there and back and their gradients, with nothing computed; behind the name that of the exchange.
BARE = "exchange alone: "
# Until a rank gives up: compiling kernels takes some seconds.
DEADLINE = 60.0


class RankJob(NamedTuple):
    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    device: str
    dtype: torch.dtype
    precision: str = UNCHANGED  # of the experts' products, see `amoeba.precision.recipes`


class Found(NamedTuple):
    """different: names of results that have other bits than those of the exchange it was compared with."""

    different: list[str]
    peak_bytes: int


@dataclass
class _State:
    job: RankJob
    layer: ShardedExperts
    inputs: dict[str, tuple[Tensor, Routing, Tensor]]  # of ALONE, RECEIVED, IN_STEP and, by "", of an exchange
    steps: dict[str, Callable[[], Any]]
    kept: dict[str, tuple[Tensor, ...]]  # results of the exchange that others are compared with


_state: _State | None = None


def prepare(rank: int, job: RankJob) -> dict[str, Any]:
    """About the device, for the report."""
    global _state
    device, about = torch.device(job.device), dict[str, Any]()
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        found = torch.cuda.get_device_properties(device)
        about = {"name": found.name, "multiprocessors": found.multi_processor_count}
    ranks = Ranks(first_processes(job.ranks), DEADLINE)
    owners = Owners.even(job.experts, job.ranks)
    draw = functools.partial(_drawn, torch.Generator(device).manual_seed(rank), job.dtype)
    own = len(owners.experts_of(rank))
    local = ExpertWeights(
        draw(own, 2 * job.intermediate, job.hidden, scale=0.02).requires_grad_(),
        draw(own, job.hidden, job.intermediate, scale=0.02).requires_grad_(),
    )
    layer = ShardedExperts(with_precision(local, job.precision), owners, ranks)

    def inputs(tokens: int, num_experts: int, only_own: bool) -> tuple[Tensor, Routing, Tensor]:
        scores = torch.rand(tokens, num_experts, generator=draw.args[0], dtype=torch.float32, device=device)
        expert_TK = scores.topk(min(job.top_k, num_experts), 1).indices
        if only_own:
            rank_TK, local_TK = owners.find(expert_TK)
            expert_TK = torch.where(rank_TK == rank, local_TK, -1)
        weight_TK = torch.softmax(draw(*expert_TK.shape).float(), 1).requires_grad_()
        x_TH, dy_TH = (draw(tokens, job.hidden, scale=0.2) for _ in range(2))
        return x_TH.requires_grad_(), Routing(expert_TK, weight_TK, trusted=True), dy_TH

    alone = inputs(job.tokens, own, only_own=False)
    received = inputs(job.tokens * job.ranks, job.experts, only_own=True)
    _state = _State(
        job,
        layer,
        {
            ALONE: alone,
            RECEIVED: received,
            IN_STEP: received,
            "": inputs(job.tokens, job.experts, only_own=False),
        },
        steps={},
        kept={},
    )
    return about


def _drawn(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float32, device=generator.device)
    return (scale * drawn).to(dtype)


def why_not(setting: str) -> str | None:
    """Why it cannot be measured on these ranks."""
    state = _of_state()
    backend = EXCHANGES.get(setting, {}).get("local_backend")
    if backend is not None and state.job.precision != UNCHANGED:
        return f"{backend} does not compute in {state.job.precision}"
    name = "peers" if setting == IN_STEP else EXCHANGES[setting]["transport"]
    transport, refused = choose_transport(name, state.layer.ranks, state.layer.device)
    return None if transport is not None else refused[name]


def check(setting: str, against: str | None) -> Found:
    """A few steps, so that nothing is compiled later; against: whose bits its results have to have."""
    state = _of_state()
    for _ in range(3):
        found = _step(setting)()
    different = []
    if against is not None:
        names = ("output", "x", "weight", "gate_up", "down")
        if against not in state.kept:
            state.kept[against] = _step(against)()
        pairs = zip(names, found, state.kept[against], strict=True)
        different = [name for name, one, other in pairs if not torch.equal(one, other)]
    del found
    return Found(different, peak_bytes(_step(setting), state.layer.device))


def step_ms(setting: str, steps: int) -> float:
    """Of one of so many, back to back."""
    state, step = _of_state(), _step(setting)
    step()
    gc.collect()
    _meet(state)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(state.layer.device)
    return (time.perf_counter() - began) * 1e3 / steps


def phases(setting: str, steps: int) -> list[tuple[str, float]]:
    """Milliseconds from one end of a phase to the next, in the order of a step; the means of so many steps back to
    back, behind one that is not counted: in it a GPU waits for its host."""
    state, step = _of_state(), _step(setting)
    step()
    _meet(state)
    with watch_phases(state.layer.device) as found:
        mark("")
        for _ in range(steps + 1):
            step()
            mark("backward: the rest")
        seen = found.ms()
    each = len(seen) // (steps + 1)
    marks = [seen[first : first + each] for first in range(each, len(seen), each)]
    return [(steps_of[0][0], statistics.fmean(ms for _, ms in steps_of)) for steps_of in zip(*marks, strict=True)]


def heap_bytes() -> int:
    """Which are not in a peak of torch's memory."""
    return sum(0 if each._heap is None else each._heap.nbytes for each in buffer._buffers.values())


def _of_state() -> _State:
    assert _state is not None
    return _state


def _step(setting: str) -> Callable[[], Any]:
    state = _of_state()
    if setting not in state.steps:
        bare = setting.startswith(BARE)
        state.steps[setting] = functools.partial(_travel, setting[len(BARE) :]) if bare else _computed(setting)
    return state.steps[setting]


def _computed(setting: str) -> Callable[[], tuple[Tensor, ...]]:
    state = _of_state()
    x_TH, routing, dy_TH = state.inputs[setting if setting in state.inputs else ""]
    weights = state.layer.local if setting in state.inputs else _layer(setting)
    tensors = [x_TH, routing.weight_TK, *(t for t in state.layer.local.tensors() if t is not None)]
    keep_step = _keeping_step() if setting == IN_STEP else lambda: None

    def step() -> tuple[Tensor, ...]:
        keep_step()
        y_TH = experts(x_TH, routing, weights)
        mark("the rest")
        keep_step()
        return (y_TH.detach(), *torch.autograd.grad(y_TH, tensors, dy_TH))

    return step


def _keeping_step() -> Callable[[], None]:
    """On the GPU, until all ranks have come here."""
    from amoeba.kernels.peer_context import ARRIVED, SLOTS, TAKEN
    from amoeba.kernels.peer_copies import count_everywhere, wait_for_room
    from amoeba.kernels.peer_rows import wait_for_all

    exchange = _exchange("peers", gradients=False)
    assert isinstance(exchange, peers.PeerExchange)
    desk = exchange.buffer

    def keep_step() -> None:
        context = desk.checked()
        wait_for_room(context, SLOTS)
        count_everywhere(context, SLOTS, ARRIVED.value)
        wait_for_all(context, SLOTS)
        count_everywhere(context, SLOTS, TAKEN.value)

    return keep_step


def _layer(setting: str) -> ShardedExperts:
    state = _of_state()
    options = dict(EXCHANGES.get(setting, {}))
    if "most_tokens" in options:
        slots = state.job.tokens * state.job.top_k
        options["most_tokens"] = state.job.tokens
        options["most_rows"] = min(int(slots * options["most_rows"]), slots * state.job.ranks)
    return replace(state.layer, **options)


def _exchange(setting: str, gradients: bool = True) -> Exchange:
    state, layer = _of_state(), _layer(setting)
    x_TH, routing, _ = state.inputs[""]
    transport, _ = choose_transport(layer.transport, layer.ranks, layer.device)
    assert transport is not None
    return transport.plan(layer, x_TH.detach(), routing, gradients)


@torch.no_grad()
def _travel(setting: str) -> None:
    x_TH, routing, dy_TH = _of_state().inputs[""]
    exchange = _exchange(setting)
    x_RH, _, weight_RK = exchange.dispatch(x_TH.detach(), routing.weight_TK.detach())
    exchange.room(None)
    exchange.wait()
    if exchange.under_way:
        exchange.leave(x_RH)
    exchange.give_back(x_RH, "sums of the experts")
    dy_RH = exchange.send(dy_TH, "gradients of sums")
    exchange.wait()
    if exchange.under_way:
        exchange.leave(dy_RH, weight_RK)
    exchange.give_back(dy_RH, "gradients of tokens")
    exchange.rows_read()
    exchange.give_back(weight_RK, "gradients of routing weights")


def _meet(state: _State) -> None:
    _synchronize(state.layer.device)
    state.layer.ranks.gather([0], torch.device("cpu"), "the others to measure")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
