"""A schedule as an SVG picture: a lane per worker, the whole and a part of it close up. Plain text, no packages.

write_whole(path, draw(records, workers=132, about="sonic_a, bfloat16, NVIDIA H200", unit="us"))

A colour is a kind of task, grey is a wait at a gate, and where there is nothing the worker had no task. In the whole, a
point shows what took most of its time: so the picture's size does not grow with the tasks. The part is the one in which
workers waited longest; there a task says what it is when it is pointed at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

from amoeba.tasks.graph import Kind
from amoeba.tasks.timeline import Record, Summary, summarise

_WIDTH, _LANES_HEIGHT, _TOP = 1180, 396, 132
_WHOLE, _PART = (64, 724), (788, 1156)  # left and right
_POINTS = 660  # of the whole, along time
# Close up: this part of the time, or less, so that a lane shows about this many slices; and this many lanes.
_PART_OF_TIME, _PART_OF_SLICES, _PART_OF_LANES = 16, 40, 24
_WAITS = "waits"
_COLOURS = {
    Kind.SEND: "#8d6e63",
    Kind.DOWN: "#00796b",
    Kind.ACTIVATE: "#e0a030",
    Kind.UP: "#2f6fc4",
    Kind.DOWN_WEIGHTS: "#5fc0ae",
    Kind.UP_WEIGHTS: "#8bb6ee",
    Kind.RETURN: "#b39b92",
    Kind.COMBINE: "#c84f6a",
    Kind.ROUTER: "#7d4fa8",
    Kind.ROUTER_WEIGHTS: "#bf9fdd",
    Kind.DOWN_BIAS: "#a8ddd2",
    Kind.UP_BIAS: "#c5dbf7",
}
_STYLE = """
    svg { --card: #ffffff; --text: #1f2328; --muted: #59636e; --line: #d1d9e0; --waits: #c3c9d0; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #3d444d; --waits: #59616b; } }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
    .head { font-size: 17px; font-weight: 600; } .muted { fill: var(--muted); font-size: 11px; }
    .right { text-anchor: end; } .middle { text-anchor: middle; }
    .card { fill: var(--card); stroke: var(--line); } .axis { stroke: var(--line); }
    .frame { fill: none; stroke: var(--text); stroke-width: 1.2; } path { fill: none; stroke-width: 0.92; }
    path.waits { stroke: var(--waits); } rect.waits { fill: var(--waits); }
"""


class _Slice(NamedTuple):
    name: str
    begin: float
    end: float
    told: str


class _Lane(NamedTuple):
    rank: int
    worker: int
    slices: list[_Slice]


class _Window(NamedTuple):
    """Of time, and of lanes."""

    begin: float
    end: float
    first: int
    last: int


def draw(records: Sequence[Record], workers: int, about: str, unit: str) -> str:
    """workers: of each rank."""
    summary = summarise(records, workers)
    lanes = _lanes(records, workers, unit)
    span = summary.span or 1.0
    everything = _Window(0.0, span, 0, len(lanes))
    part = _longest_wait(lanes, span)
    rows = "\n  ".join(
        (
            *_head(summary, workers, len({lane.rank for lane in lanes}), about, unit),
            *_axis(everything, _WHOLE, unit),
            *_axis(part, _PART, unit),
            *_whole(lanes, span),
            *_part(lanes, part),
            _frame(part, everything),
        )
    )
    height = _TOP + _LANES_HEIGHT + 64
    title = "The scheduled backward, worker by worker"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">
  <title>{title}</title>
  <style>{_STYLE}{_colours()}  </style>
  <rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>
  <text x="24" y="34" class="head">{title}</text>
  {rows}
</svg>
"""


def _colours() -> str:
    lines = (
        f"    path.{_name(kind)} {{ stroke: {colour}; }} rect.{_name(kind)} {{ fill: {colour}; }}\n"
        for kind, colour in _COLOURS.items()
    )
    return "".join(lines)


def _name(kind: Kind) -> str:
    return kind.name.lower()


def _lanes(records: Iterable[Record], workers: int, unit: str) -> list[_Lane]:
    found: dict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.came):
        slices, name = found[record.rank, record.worker], _name(record.task.kind)
        where = f"rank {record.rank}, worker {record.worker}, ticket {record.ticket}"
        if record.started > record.came:
            waited = f"{record.started - record.came:.2f} {unit} before {name} {record.task.item}"
            slices.append(_Slice(_WAITS, record.came, record.started, f"waits {waited}, {where}"))
        told = f"{name} {record.task.item}.{record.task.part}, {record.ended - record.started:.2f} {unit}, {where}"
        slices.append(_Slice(name, record.started, record.ended, told))
    ranks = sorted({rank for rank, _ in found}) or [0]
    return [_Lane(rank, worker, found.get((rank, worker), [])) for rank in ranks for worker in range(workers)]


def _longest_wait(lanes: Sequence[_Lane], span: float) -> _Window:
    """The part of time with most waits, and some lanes next to each other around the end of a rank's, or the first."""
    parts = max(_PART_OF_TIME, max(len(lane.slices) for lane in lanes) // _PART_OF_SLICES)
    length = span / parts
    waited = [0.0] * (2 * parts)  # by halves of a part
    for lane in lanes:
        for each in lane.slices:
            if each.name == _WAITS:
                for at, share in _cells(each, length / 2, len(waited)):
                    waited[at] += share
    pairs = [one + two for one, two in pairwise(waited)]
    begin = pairs.index(max(pairs)) * length / 2
    ranks = len({lane.rank for lane in lanes})
    boundary = len(lanes) // ranks if ranks > 1 else 0
    first = min(max(boundary - _PART_OF_LANES // 2, 0), max(len(lanes) - _PART_OF_LANES, 0))
    return _Window(begin, begin + length, first, min(first + _PART_OF_LANES, len(lanes)))


def _cells(each: _Slice, width: float, count: int) -> Iterator[tuple[int, float]]:
    """(cell, time in it) of the cells of this width that a slice is in."""
    for at in range(min(int(each.begin / width), count - 1), min(int(each.end / width), count - 1) + 1):
        yield at, min(each.end, (at + 1) * width) - max(each.begin, at * width)


def _head(summary: Summary, workers: int, ranks: int, about: str, unit: str) -> Iterator[str]:
    yield f'<text x="{_PART[1]}" y="34" class="muted right">{escape(about)}</text>'
    idle = max(0.0, 1 - summary.busy - summary.waited)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    numbers = f"{summary.span:,.0f} {unit} · {workers} workers{each}: {summary.busy:.0%} busy, {summary.waited:.0%} "
    yield f'<text x="24" y="58">{numbers}waiting at gates, {idle:.0%} idle</text>'
    x, all_time = 24.0, summary.span * workers * ranks or 1.0
    shares = [(_name(kind), each.time / all_time) for kind, each in summary.kinds.items() if each.tasks]
    for name, share in [*shares, (_WAITS, summary.waited)]:
        words = f"{name.replace('_', ' ')} {share:.0%}"
        yield f'<rect class="{name}" x="{x:g}" y="72" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17:g}" y="82">{words}</text>'
        x += 36 + 6.6 * len(words)


def _axis(window: _Window, place: tuple[int, int], unit: str) -> Iterator[str]:
    left, right = place
    bottom = _TOP + _LANES_HEIGHT
    what = "the whole" if place == _WHOLE else "close up, where workers waited longest"
    yield f'<text x="{left}" y="{_TOP - 12}" class="muted">{what}</text>'
    step = _round_step((window.end - window.begin) / 5)
    for number in range(math.ceil(window.begin / step), math.floor(window.end / step) + 1):
        x = left + (number * step - window.begin) * (right - left) / (window.end - window.begin)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom + 6}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" class="muted middle">{number * step:,.10g}</text>'
    yield f'<text x="{(left + right) / 2:g}" y="{bottom + 40}" class="muted middle">time, {unit}</text>'


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _whole(lanes: Sequence[_Lane], span: float) -> Iterator[str]:
    (left, right), height = _WHOLE, _LANES_HEIGHT / len(lanes)
    runs: dict[str, list[str]] = defaultdict(list)
    for index, lane in enumerate(lanes):
        at: dict[str, int] = {}  # where the pen of each colour is
        for name, begin, end in _runs(lane.slices, span):
            move = f"m{begin - at[name]} 0" if name in at else f"M{begin} {index}"
            runs[name].append(f"{move}h{end - begin}")
            at[name] = end
    scale = f"scale({(right - left) / _POINTS:g} {height:g})"
    yield f'<g transform="translate({left} {_TOP + height / 2:g}) {scale}">'
    for name, path in runs.items():
        yield f'<path class="{name}" d="{"".join(path)}"/>'
    yield "</g>"
    every = max(1, round(24 / height))
    for index, lane in enumerate(lanes):
        if lane.worker % every == 0:
            y = _TOP + (index + 0.5) * height + 4
            words = f"{lane.rank}:{lane.worker}" if lanes[-1].rank else str(lane.worker)
            yield f'<text x="{left - 8}" y="{y:g}" class="muted right">{words}</text>'


def _runs(slices: Sequence[_Slice], span: float) -> Iterator[tuple[str, int, int]]:
    """(name, begin, end) in points, of what took most of each point's time; nothing where that was idle."""
    width = span / _POINTS
    of_point: list[dict[str, float]] = [defaultdict(float) for _ in range(_POINTS)]
    for each in slices:
        for at, share in _cells(each, width, _POINTS):
            of_point[at][each.name] += share
    most = [max(found, key=lambda name: found[name]) if sum(found.values()) > width / 2 else "" for found in of_point]
    begin = 0
    for name, points in groupby(most):
        end = begin + len(list(points))
        if name:
            yield name, begin, end
        begin = end


def _part(lanes: Sequence[_Lane], window: _Window) -> Iterator[str]:
    left, right = _PART
    height, wide = _LANES_HEIGHT / (window.last - window.first), (right - left) / (window.end - window.begin)
    for index, lane in enumerate(lanes[window.first : window.last]):
        y = _TOP + index * height
        words = f"{lane.rank}:{lane.worker}" if lanes[-1].rank else str(lane.worker)
        yield f'<text x="{left - 8}" y="{y + height / 2 + 4:.1f}" class="muted right">{words}</text>'
        for each in lane.slices:
            begin, end = max(each.begin, window.begin), min(each.end, window.end)
            if begin < end:
                place = f'x="{left + (begin - window.begin) * wide:.1f}" y="{y + 0.5:.1f}"'
                size = f'width="{max((end - begin) * wide - 0.4, 0.3):.1f}" height="{max(height - 1, 0.5):.1f}"'
                told = f"<title>{escape(each.told)}</title>"
                yield f'<rect class="{each.name}" {place} {size}>{told}</rect>'


def _frame(part: _Window, whole: _Window) -> str:
    left, right = _WHOLE
    wide, height = (right - left) / (whole.end - whole.begin), _LANES_HEIGHT / whole.last
    return (
        f'<rect class="frame" x="{left + part.begin * wide:.1f}" y="{_TOP + part.first * height:.1f}" '
        f'width="{(part.end - part.begin) * wide:.1f}" height="{(part.last - part.first) * height:.1f}"/>'
    )
