"""Groups of sequences whose captured steps pass over the same layers in turns (turns.py): a channel of each.

    with groups.member(0, of=2): ...        # what this thread rehearses and captures is a step of the first of two
    groups.channel                          # of that group; elsewhere of the first
    groups.turn(layer)                      # for the kernel that asks; None where there is one group

Each group counts its own questions, and copies write its own word. `whose` turn it is, is a word of each layer for all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from amoeba.stream.gpu.channel import Channel

if TYPE_CHECKING:
    from amoeba.kernels.talk import Turn
    from amoeba.stream.gpu.memory import DeviceMemory

NOBODY = -1  # waits for a turn


class Groups:
    def __init__(self, memory: DeviceMemory, ids: int) -> None:
        self._memory, self._ids = memory, ids
        self._thread = threading.local()
        self.channels: list[Channel] = []
        # each where a kernel may expect it
        self.whose = torch.full((len(memory.slots), 4), NOBODY, dtype=torch.int32, device=memory.device.device)

    @property
    def mine(self) -> tuple[int, int]:
        """Which of how many the calling thread rehearses or captures."""
        return getattr(self._thread, "mine", (0, 1))

    @contextmanager
    def member(self, number: int, of: int) -> Iterator[None]:
        self._thread.mine = number, of
        try:
            yield
        finally:
            self._thread.mine = 0, 1

    @property
    def channel(self) -> Channel:
        return self.channel_of(self.mine[0])

    def channel_of(self, number: int) -> Channel:
        memory, experts = self._memory, max(entry.experts for entry in self._memory.store.layers)
        while len(self.channels) <= number:
            self.channels.append(Channel(memory.device, experts, self._ids, len(memory.slots)))
        return self.channels[number]

    def turn(self, layer: int) -> Turn | None:
        from amoeba.kernels.talk import Turn

        number, groups = self.mine
        return Turn(self.whose[layer, :1], number, groups) if groups > 1 else None

    def set_turns(self, whose: int) -> None:
        """Of all layers, in the order of the stream that computes."""

        def fill() -> None:
            self.whose.fill_(whose)

        self._memory.device.launch(fill)

    @property
    def in_trouble(self) -> bool:
        return any(channel.in_trouble for channel in self.channels)

    def give_up(self) -> None:
        for channel in self.channels:
            channel.give_up()

    def begin_anew(self) -> None:
        self.whose.fill_(NOBODY)
        for channel in self.channels:
            channel.begin_anew()
