"""What the GPU did in captured steps, by its own clock: where it waited for experts, and what it computed between.

    spans = GpuSpans(timeline)
    spans.add(layer, missing, asked, went_on, seen)      # of each question, in order
    spans.begin_step()

The two clocks differ by an unknown amount, and a question is seen some microseconds after it was asked, so the least
difference of all is taken for theirs. That is known at the end: then the row is added.
"""

from __future__ import annotations

from typing import NamedTuple

from amoeba.stream.timeline import MOST_EVENTS, Timeline

ROW = "the GPU, captured steps"


class _Question(NamedTuple):
    layer: int
    missing: int
    asked: int  # microseconds of the GPU's clock
    went_on: int
    is_first: bool  # of a step


class GpuSpans:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._questions = timeline, list[_Question]()
        self._behind: int | None = None  # nanoseconds from the GPU's clock to ours, and the way of a question
        self._latest = 0  # of the GPU's clock, as many bits as it takes
        self._is_first = True
        timeline.at_close.append(self._write)

    def begin_step(self) -> None:
        self._is_first = True

    def add(self, layer: int, missing: int, asked: int, went_on: int, seen: int) -> None:
        """asked, went_on: 32 bits of microseconds. seen: by our clock, in nanoseconds."""
        if (asked, went_on) == (0, 0) or 2 * len(self._questions) >= MOST_EVENTS:
            return
        self._latest += (asked - self._latest + 2**31) % 2**32 - 2**31
        lasted = (went_on - asked) % 2**32 if missing else 0
        behind = seen - 1000 * self._latest
        self._behind = behind if self._behind is None else min(self._behind, behind)
        self._questions.append(_Question(layer, missing, self._latest, self._latest + lasted, self._is_first))
        self._is_first = False

    def _write(self) -> None:
        before: _Question | None = None
        for here in self._questions:
            if before is not None and not here.is_first:
                name = f"experts of layer {before.layer}, then up to layer {here.layer}'s router"
                self._span("pass", name, before.went_on, here.asked, before.layer)
            if here.missing:
                self._span("wait", f"layer {here.layer} waits for {here.missing}", here.asked, here.went_on, here.layer)
            before = here

    def _span(self, kind: str, name: str, began: int, ended: int, layer: int) -> None:
        assert self._behind is not None
        first, last = (1000 * each + self._behind for each in (began, ended))
        self._timeline.add(kind, name, first, {"layer": layer}, row=ROW, ended=last)
