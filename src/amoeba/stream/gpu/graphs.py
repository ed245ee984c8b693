"""Passes of a few tokens inside a CUDA graph: rehearsed, captured, and served by the thread that replays them.

    passes over all layers, captured:  router ─> request ─> experts ─> ... ─> router ─> request ─> experts ─> ...
                                                │ ▲                               │
    host, only where something misses:          └─┼─> who leaves ─> copies ─> ... └─> (all there: nothing to do)
    stream of copies:                             └───────────────────┘ "arrived", behind the copies

A request is one kernel (kernels/expert_request.py): it turns ids into slots, tells the host what is missing, and waits
for it on the GPU. The host looks at memory that the GPU writes, request by request (serving.py). Where one misses
experts it has them copied, and behind the copies the word for which the GPU waits. If all of them are in host memory,
that is done ahead of everything else (fast_path.py). Where the CPU may compute experts (host_compute.py), some of them
need not be copied: their sum is added behind the kernels of the others.

**No event keeps copies off slots that are read.** A copy into a slot of layer l is called after the request of layer l
of this replay has been read. All that reads slots of that layer and was enqueued before, the previous replay's experts
among it, comes ahead of that request in the stream, and a kernel begins when those ahead of it have ended; what comes
behind it in this replay reads the slots of experts that this request asks for, and these are held until the answer is
given: none of them is chosen to leave. Passes outside of graphs have events, which are waited for when a replay begins.

**While a replay waits, nothing may synchronise the device** or wait for what is behind the replay: no allocation of
device or pinned memory, no kernel that was never launched (its module would be loaded), no event that was recorded
behind the replay. Copies that were called in their own streams are all that this thread and the loader's do. So first
passes, prompts and training run as ever, and `rehearsing` launches what will be captured before it is captured.

**If something fails** (a read, a copy, an interrupt), the GPU is told to go on without experts, up to the end of the
replay; the map of slots is shown anew, and the error is raised. If the host does not answer in time the GPU goes on by
itself and says so: `check` raises. Either way the results are not to be used, and the next try begins anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.core.graph_replays import CannotCapture
from amoeba.stream.gpu.loader import GroupLoads
from amoeba.stream.gpu.mailbox import Mailbox
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.serving import Passes, Serving

Given = tuple[Tensor, Tensor]  # x_TH and weight_TK of a pass


@dataclass(frozen=True, eq=False)
class _Routed:
    """A captured pass whose router has asked for its experts as well (kernels/expert_request.py): its slots are known.
    given: what the host gets, where it may compute experts."""

    layer: int
    expert_TK: Tensor
    slot_TK: Tensor
    given: Given | None

    def is_of(self, layer: int, expert_TK: Tensor, given: Given | None) -> bool:
        """Whether it is the pass over the experts that comes next."""
        mine = [self.layer, *_places((self.expert_TK, *(self.given or ())))]
        return mine == [layer, *_places((expert_TK, *(given or ())))]


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


class GpuReplays:
    def __init__(self, pool: SlotPool, loads: GroupLoads, serving: Serving) -> None:
        self._pool, self._loads, self.serving = pool, loads, serving
        self._mode = threading.local()  # of the thread that rehearses or captures
        self._two_launches: set[int] = set()  # layers whose experts get something else than their router gave

    @property
    def mailbox(self) -> Mailbox:
        return self.serving.prepared().mailbox

    @property
    def _is_rehearsing(self) -> bool:
        return getattr(self._mode, "rehearses", False)

    # --- before -------------------------------------------------------------------------------------------------------

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        pool = self._pool
        if pool.recorder is not None:
            raise CannotCapture("the routing of every pass is recorded, which the host has to see")
        if (reason := pool.device.why_not_captured()) is not None:
            raise CannotCapture(reason)
        for layer, entry in enumerate(pool.store.layers):
            if pool.slots[layer] == entry.experts and not pool.is_complete(layer):
                with pool.turn(layer):
                    for _ in self._loads.acquire(layer, range(entry.experts)):
                        pass
        self._mode.rehearses, self._mode.routed = True, None
        try:
            yield
        finally:
            self._mode.rehearses = False

    def rehearse(self, layer: int, expert_TK: Tensor, given: Given | None = None) -> None:
        """Called by every pass of a few tokens: where it is a rehearsal, a request is launched once, for nothing."""
        if not self._is_rehearsing:
            return
        if (routed := self._take_routed()) is not None and not routed.is_of(layer, expert_TK, self._own(layer, given)):
            self._two_launches.add(layer)
        pool, ids = self._pool, expert_TK.numel()
        most = min(ids, pool.store.layers[layer].experts)
        if most > pool.slots[layer]:
            tokens = expert_TK.shape[0]
            asked = f"{tokens} {'token' if tokens == 1 else 'tokens'} may ask for {most} experts of a layer"
            raise CannotCapture(f"{asked}, which has {pool.slots[layer]} slots")
        if not pool.is_complete(layer):
            mailbox = self.mailbox
            serial = mailbox.expect(1)
            self.request(layer, torch.full_like(expert_TK, -1), given)
            if given is not None:
                self.add_computed(layer, torch.empty_like(given[0], memory_format=torch.contiguous_format), given)
            mailbox.go_on(serial)  # nothing waits: if a device cannot do it, this must be known now

    @contextmanager
    def capturing(self) -> Iterator[Passes]:
        self._mode.passes, self._mode.routed = (passes := Passes()), None
        try:
            yield passes
        finally:
            self._mode.passes = None

    @property
    def is_capturing(self) -> bool:
        return getattr(self._mode, "passes", None) is not None

    def _take_routed(self) -> _Routed | None:
        routed, self._mode.routed = getattr(self._mode, "routed", None), None
        return routed

    def _own(self, layer: int, given: Given | None) -> Given | None:
        """What the host gets of a pass over the layer."""
        return given if self.computes(layer, given) else None

    def route(
        self, layer: int, x_TH: Tensor, logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """expert_TK and weight_TK of a pass that is rehearsed or captured, by a kernel that asks as well: `slots_of`
        finds that done. None where it takes two kernels. x_TH: what the experts will get."""
        from amoeba.kernels.expert_request import why_not

        pool, computing, tokens = self._pool, self.serving.computing, logits_TE.shape[0]
        is_asked = (self.is_capturing or self._is_rehearsing) and not pool.is_complete(layer)
        if not is_asked or layer in self._two_launches or why_not(tokens, config) is not None:
            return None
        logits_TE, given = _aligned(logits_TE), None
        if computing is not None:
            given = _aligned(x_TH), torch.empty(tokens, config.top_k, dtype=torch.float32, device="meta")
        computes = self.computes(layer, given)
        shown, x_TH = pool.map.shown(layer), given[0] if given is not None else x_TH
        if not self.is_capturing:  # no expert is missing in this map, so nothing waits
            self.mailbox.expect(1)
            shown = torch.zeros_like(shown)
        buffer, own = (computing.buffer, x_TH) if computing is not None and computes else (None, None)
        expert_TK, weight_TK, slot_TK = self.mailbox.route_and_request(
            layer, shown, logits_TE, config, bias_E, buffer, own
        )
        if self.is_capturing:
            self._count_pass(layer, expert_TK, computes)
        self._mode.routed = _Routed(layer, expert_TK, slot_TK, (x_TH, weight_TK) if computes else None)
        return expert_TK, weight_TK

    def slots_of(self, layer: int, expert_TK: Tensor, given: Given | None = None) -> Tensor:
        """Of a pass that is captured, when its experts are there. given: x_TH and weight_TK, of which `add_computed` is
        told as well."""
        passes = self._mode.passes
        if (routed := self._take_routed()) is not None:
            if not routed.is_of(layer, expert_TK, self._own(layer, given)):
                raise CannotCapture("the router of a layer asked, and its experts got another routing, or other rows")
            return routed.slot_TK
        if self._pool.is_complete(layer):  # for ever; and each is in the slot of its number
            passes.tokens = expert_TK.shape[0]
            passes.complete[layer] = expert_TK.numel()
            return _aligned(expert_TK)
        self._count_pass(layer, expert_TK, self.computes(layer, given))
        return self.request(layer, _aligned(expert_TK), given)

    def _count_pass(self, layer: int, expert_TK: Tensor, computes: bool) -> None:
        passes, layers = self._mode.passes, len(self._pool.slots)
        if len(passes.layers) >= layers:
            raise CannotCapture(f"a step passes over some of its {layers} layers more than once")
        passes.tokens = expert_TK.shape[0]
        passes.layers.append(layer)
        passes.computed.append(expert_TK.shape if computes else None)

    def request(self, layer: int, expert_TK: Tensor, given: Given | None = None) -> Tensor:
        computing, entry = self.serving.computing, self._pool.store.layers[layer]
        shown = self._pool.map.shown(layer)
        if computing is None or given is None or not self.computes(layer, given):
            return self.mailbox.request(layer, shown, entry.experts, expert_TK)
        return self.mailbox.request(layer, shown, entry.experts, expert_TK, computing.buffer, *map(_aligned, given))

    def computes(self, layer: int, given: Given | None) -> bool:
        """Whether the host may compute experts of such a pass over the layer."""
        computing = self.serving.computing
        return computing is not None and given is not None and computing.takes(layer, given[1])

    def add_computed(self, layer: int, y_TH: Tensor, given: Given) -> None:
        """Behind the experts in slots: those that the host computes meanwhile, if it may."""
        computing = self.serving.computing
        if computing is not None and not self._pool.is_complete(layer) and self.computes(layer, given):
            self.mailbox.add_computed(y_TH, computing.buffer)

    # --- replays ------------------------------------------------------------------------------------------------------

    def replay(self, passes: Passes, launch: Callable[[], None]) -> None:
        pool = self._pool
        self._check_ready()
        with pool.all_turns():
            pool.wait_for_passes(pool.device.compute)
            first = 0
            if passes.layers:
                first = self.mailbox.expect(len(passes.layers))
            try:
                launch()
                pool.note_replay()
                self.serving.serve(passes, first)
            except BaseException:
                self._give_up()
                raise

    def _check_ready(self) -> None:
        self._pool.check_open()
        if self._pool.recorder is not None:
            raise RuntimeError("captured steps cannot be recorded: begin to record before they are captured")
        self.check()

    def check(self) -> None:
        if (fast := self.serving.fast) is not None and fast.mailbox.in_trouble:
            self._give_up()
            waited = f"waited {fast.mailbox.limit:g} s for experts"
            raise RuntimeError(f"the GPU {waited} and continued without them: its tokens are invalid. Try again.")

    def _give_up(self) -> None:
        """Lets the GPU go on to the end of what was launched, counts on from there, and shows all layers what is there.
        Here the host waits for the device: nothing is served any more."""
        pool, device = self._pool, self._pool.device
        self.serving.later.clear()
        if (fast := self.serving.fast) is None:
            return
        fast.drop_half_served()
        fast.mailbox.give_up()
        device.wait(device.compute, device.record(device.copies))  # of what is shown now
        device.record(device.compute).wait()
        for layer in range(len(pool.slots)):
            pool.show_anew(layer)
        device.record(device.compute).wait()
        fast.mailbox.begin_anew()


def _aligned(tensor: Tensor) -> Tensor:
    """Of kernels for others nothing was rehearsed."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
