"""Spans of the GPU's clock brought to the host's: by the request that was seen soonest, and past 32 bits."""

from __future__ import annotations

from amoeba.stream.timeline import GpuSpans


class Kept:
    """A timeline that keeps (kind, first, last) in nanoseconds of the host's clock."""

    def __init__(self) -> None:
        self.at_close, self.spans = [], []

    def add(self, kind, name, began, details, *, row, ended):
        self.spans.append((kind, began, ended))


def test_the_clocks_differ_by_the_least_that_a_question_took_to_be_seen():
    kept, apart = Kept(), 7_000_000_000
    spans = GpuSpans(kept)
    for asked, went_on, late in ((100, 150, 9_000), (300, 310, 2_000), (400, 400, 5_000)):  # microseconds, nanoseconds
        spans.add(0, int(went_on > asked), asked, went_on, seen=apart + 1000 * asked + late)
    kept.at_close[0]()
    began = apart + 2_000
    waits = [span for span in kept.spans if span[0] == "wait"]
    assert waits == [("wait", began + 100_000, began + 150_000), ("wait", began + 300_000, began + 310_000)]
    between = [span for span in kept.spans if span[0] == "pass"]
    assert between == [("pass", began + 150_000, began + 300_000), ("pass", began + 310_000, began + 400_000)]


def test_a_clock_that_passes_32_bits_goes_on():
    kept = Kept()
    spans = GpuSpans(kept)
    spans.add(0, 1, 2**32 - 30, 2**32 - 20, seen=0)
    spans.add(1, 1, 2**32 - 10, 5, seen=20_000)  # went on beyond the last number
    spans.add(2, 1, 40, 60, seen=70_000)
    kept.at_close[0]()
    waits = [(began, ended) for kind, began, ended in kept.spans if kind == "wait"]
    assert waits == [(0, 10_000), (20_000, 35_000), (70_000, 90_000)]
