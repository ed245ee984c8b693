"""The host's side of a replay: its questions are looked at in order, and answered where they miss experts.

    fast = serving.by(channel)           # whose questions come next
    serving.serve(passes, first)         # all of a replay that was launched, from that serial on
    serving.wait_for(layer, serial)      # one of them
    serving.count_one()                  # of what can be done later

A GPU that asks waits, so tables and counters follow while it computes: what each pass found, and who would leave next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from amoeba.stream.gpu.channel import Channel
from amoeba.stream.gpu.fast_path import SERVED, FastPath
from amoeba.stream.gpu.long_way import load
from amoeba.stream.gpu.predictions import Predictions

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory

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
    ids: int = 0  # of one pass, at most
    group: int = 0


class Serving:
    """
    fast:  of the channel that is served.
    later: layers, and what they found, to be counted.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._channel: Channel | None = None
        self.fast: FastPath | None = None
        self.predictions: Predictions | None = None
        self.most_ids = 0  # of a question of this replay
        self.later: deque[tuple[int, list[int]]] = deque()

    def prepare_for(self, channel: Channel) -> FastPath:
        """Questions of it may come, and of others."""
        if self.fast is None:
            self.fast = FastPath(self._memory, channel, self._memory.computing)
        return self.fast

    def by(self, channel: Channel) -> FastPath:
        """Questions of that one are looked at and answered from now on."""
        fast = self.prepare_for(channel)
        if channel is not self._channel:
            self._channel = channel
            fast.serve(channel)
        return fast

    def forget(self, layer: int) -> None:
        """What was prepared: the layer is about to change."""
        if self.fast is not None:
            self.fast.forget(layer)

    def forget_who_leaves(self, layer: int) -> None:
        if self.fast is not None:
            self.fast.forget_who_leaves(layer)

    def serve(self, passes: Passes, first: int) -> None:
        memory, channel = self._memory, self._channel
        with memory._counting:
            memory.cache.count_tokens(passes.tokens)
            for layer, ids in passes.complete.items():
                memory.cache.count_hits(layer, ids)
        self.most_ids, was_long = passes.ids, False
        for serial, (layer, shape) in enumerate(zip(passes.layers, passes.computed, strict=True), first):
            if memory.computing is not None:
                memory.computing.expect(shape)
            assert channel is not None and self.fast is not None
            is_served = self.wait_for(layer, serial, soon=was_long)
            with memory._counting:
                missing, there = channel.read(serial)
            was_long = bool(missing) and not is_served
            if not missing:
                self.forget_who_leaves(layer)
                self.fast.early.drop(layer)
            elif is_served:
                self.fast.write_down(layer, serial, missing, there)
            else:
                self.count_all(layer)  # of an earlier pass over the same layer
                load(memory, channel, layer, serial, missing, there, self.fast.held(layer), self.count_all)
            self.later.append((layer, [] if missing else there))
        self.count_all()
        if memory.computing is not None:  # promoted experts are there for passes outside of graphs too
            memory._promoted = memory.device.record(memory.device.copies)

    def wait_for(self, layer: int, serial: int, soon: bool = False) -> bool:
        """Looks until the question is there, and does in between what can be done later. Whether it was served.
        soon: the GPU went on just now, so that looking comes first for a while."""
        fast, replayed, turns, waits = self.fast, self._memory._replayed, 0, _SOON if soon else 0
        assert fast is not None and replayed is not None
        has_ended = False
        while not (found := fast.look(layer, serial, 1 if self.later and not waits else _LOOKS)):
            if self._expects(layer):
                continue
            if waits:
                waits -= 1
                continue
            if self.later:
                self.count_one()
                continue
            if has_ended:
                raise RuntimeError("a replay ended without asking: was it captured by another memory?")
            turns += 1
            fast.rest()
            has_ended = not turns % 16 and replayed.done()
        if self.predictions is not None:
            self.predictions.read(layer)  # too late
            self.predictions.judge()
        return found == SERVED

    def _expects(self, layer: int) -> bool:
        """Whether copies of experts have begun that the layer will probably ask for."""
        guesses = self.predictions
        if guesses is None or not guesses.pays or not (expected := guesses.read(layer)):
            return False
        assert self.fast is not None
        self.fast.early.begin(layer, expected)
        return True

    def count_one(self) -> None:
        """That a pass found experts; or who would leave next, so that it is known when a pass misses something. One of
        both at a time: somebody may be asking."""
        assert self.fast is not None
        layer, found = self.later.popleft()
        if found:
            self._memory.used(layer, found)
            self.later.appendleft((layer, []))
        else:
            self.fast.prepare(layer, self.most_ids)

    def count_all(self, layer: int | None = None) -> None:
        if layer is None or any(other == layer for other, _ in self.later):
            while self.later:
                self.count_one()
