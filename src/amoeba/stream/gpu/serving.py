"""Serving requests of a replay, in order: the host's side, and the slow path for misses.

    serving.prepared().mailbox           # whose requests are served
    serving.serve(passes, first)         # all of a replay that was launched, from that serial on
    serving.wait_for(layer, serial)      # one of them
    serving.count_one()                  # of what can be done later

A GPU that asks waits, so tables and counters follow while it computes: what each pass found, and who would leave next.

The slow path, for a request whose experts are not all in host memory, or for which nothing was prepared: tables first,
then copies.

    group, answer = serving.begin_load(layer, missing, there)           # reads and copies have begun
    ...                                                                 # the answer is given, the reads waited for
    pool.note_shown(layer, answer); loads.let_go(layer, group)

What is on the disk begins ahead of the tables where one request is served at a time (`reads.DirectLoads`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from amoeba.stream.gpu.fast_path import SERVED, FastPath
from amoeba.stream.gpu.host_compute import HostCompute
from amoeba.stream.gpu.loader import Group, GroupLoads
from amoeba.stream.gpu.mailbox import Mailbox
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.reads import DirectLoad, DirectLoads

# Looks at a word between two moments at which other threads may run: 20 microseconds.
_LOOKS = 512
_SOON = 3  # times that, in which a layer is computed


@dataclass(eq=False)
class Passes:
    """Over which layers, in order; of how many tokens."""

    layers: list[int] = field(default_factory=list)  # that ask
    computed: list[torch.Size | None] = field(default_factory=list)  # T, K of each where the host may compute experts
    complete: dict[int, int] = field(default_factory=dict)  # layers that have all of their experts, and ids of a pass
    tokens: int = 0


class Serving:
    """
    fast:  None until something asks.
    later: layers, and what they found, to be counted.
    """

    def __init__(self, pool: SlotPool, loads: GroupLoads, direct: DirectLoads, computing: HostCompute | None) -> None:
        self._pool, self._loads, self._direct, self.computing = pool, loads, direct, computing
        self.fast: FastPath | None = None
        self.later: deque[tuple[int, list[int]]] = deque()

    def prepared(self) -> FastPath:
        """Requests may come from now on."""
        if self.fast is None:
            pool, experts = self._pool, max(entry.experts for entry in self._pool.store.layers)
            mailbox = Mailbox(pool.device, experts, pool.ids, len(pool.slots))
            self.fast = FastPath(pool, mailbox, self.computing)
        return self.fast

    def serve(self, passes: Passes, first: int) -> None:
        pool = self._pool
        self.count_passes(passes)
        was_long = False
        for serial, (layer, shape) in enumerate(zip(passes.layers, passes.computed, strict=True), first):
            if self.computing is not None:
                self.computing.expect(shape)
            assert self.fast is not None
            is_served = self.wait_for(layer, serial, soon=was_long)
            with pool.lock:
                missing, there = self.fast.mailbox.read(serial)
            was_long = bool(missing) and not is_served
            if not missing:
                self.fast.forget_who_leaves(layer)
            elif is_served:
                self.fast.write_down(layer, serial, missing, there)
            else:
                self.count_all(layer)  # of an earlier pass over the same layer
                self.load(layer, serial, missing, there)
            self.later.append((layer, [] if missing else there))
        self.count_all()
        if self.computing is not None:  # promoted experts are there for passes outside of graphs too
            pool.promoted = pool.device.record(pool.device.copies)

    def wait_for(self, layer: int, serial: int, soon: bool = False) -> bool:
        """Looks until the request is there, and does in between what can be done later. Whether it was served.
        soon: the GPU went on just now, so that looking comes first for a while."""
        fast, replayed, turns, waits = self.fast, self._pool.replayed, 0, _SOON if soon else 0
        assert fast is not None and replayed is not None
        has_ended = False
        while not (found := fast.look(layer, serial, 1 if self.later and not waits else _LOOKS)):
            if waits:
                waits -= 1
                continue
            if self.later:
                self.count_one()
                continue
            if has_ended:
                raise RuntimeError("a replay ended without a request: was it captured with another memory?")
            turns += 1
            fast.rest()
            has_ended = not turns % 16 and replayed.done()
        return found == SERVED

    def count_one(self) -> None:
        """That a pass found experts; or what is prepared for a pass that misses something. One of both at a time:
        somebody may be asking."""
        assert self.fast is not None
        layer, found = self.later.popleft()
        if found:
            self._pool.used(layer, found)
            self.later.appendleft((layer, []))
        else:
            self.fast.prepare(layer)

    def count_all(self, layer: int | None = None) -> None:
        if layer is None or any(other == layer for other, _ in self.later):
            while self.later:
                self.count_one()

    def count_passes(self, passes: Passes) -> None:
        with self._pool.lock:
            self._pool.cache.count_tokens(passes.tokens)
            for layer, ids in passes.complete.items():
                self._pool.cache.count_hits(layer, ids)

    # --- the slow path ------------------------------------------------------------------------------------------------

    def load(self, layer: int, serial: int, missing: list[int], there: list[int]) -> None:
        """All of it; what can be done later is done while reads run."""
        assert self.fast is not None
        mailbox, loads = self.fast.mailbox, self._loads
        direct = self._direct.begin(layer, missing)
        try:
            group, answer = self.begin_load(layer, missing, there, direct)
        except BaseException:
            if direct is not None:
                direct.drop()
            raise
        try:
            mailbox.answer(serial, list(answer), list(answer.values()))
            if direct is not None:  # of others Python has to see that they are there
                direct.open(*(() if group.jobs else (mailbox.arrived_word, mailbox.wrapped(serial))))
            if group.jobs or direct is not None:
                self.count_all()
            loads.wait_for_reads(layer, group)  # their copies are called when this returns
            if direct is None or not direct.has_told:
                mailbox.go_on(serial)
            self._pool.note_shown(layer, answer)
        finally:
            loads.let_go(layer, group)

    def begin_load(
        self, layer: int, missing: list[int], there: list[int], direct: DirectLoad | None = None
    ) -> tuple[Group, dict[int, int]]:
        """What is loaded, to be let go of when that is done; and which slots change, as an answer has it."""
        self._pool.forget(layer)
        group = self._loads.begin(layer, [*there, *missing], direct)
        shown, now = self._pool.shown[layer], self._pool.cache.top(layer)
        answer = {expert: -1 for expert in shown if expert not in now}
        answer |= {expert: group.slot_of[expert] for expert in missing}
        if len(answer) > 2 * len(missing):  # for more the kernel does not look
            self._loads.let_go(layer, group)
            raise RuntimeError(f"layer {layer}: {len(answer)} slots changed, {len(missing)} experts were missing")
        return group, answer
