"""Where the time of a pass over ranks goes: marks on the device's stream, and the time between them.

    with watch_phases(device) as phases:
        step()
    phases.ms()             # [("ids: sent", 0.05), ("ids: waited for", 0.02), ...]

A mark names what has just ended. Usually no timer is active, and a mark does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch

_listening: Phases | None = None  # of all threads: backward has one of its own


class Phases:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []

    def mark(self, name: str) -> None:
        """Without what runs concurrently."""
        if self._stream is None:
            self._marks.append((name, time.perf_counter()))
        elif torch.cuda.current_stream(self._device) == self._stream:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._marks.append((name, event))

    def ms(self) -> list[tuple[str, float]]:
        """From each mark to the next, by the latter's name; what comes before the first is not counted."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        return [(name, _ms(before, after)) for (_, before), (name, after) in pairwise(self._marks)]


def _ms(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    """Both are of one kind."""
    if isinstance(before, float) or isinstance(after, float):
        return (cast(float, after) - cast(float, before)) * 1e3
    return before.elapsed_time(after)


@contextmanager
def watch_phases(device: torch.device) -> Iterator[Phases]:
    global _listening
    _listening = Phases(device)
    try:
        yield _listening
    finally:
        _listening = None


def mark(name: str) -> None:
    if _listening is not None:
        _listening.mark(name)
