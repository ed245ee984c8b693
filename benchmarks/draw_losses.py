"""Draws the held-out losses of runs that differ in their precision alone, from the documents in benchmarks/results.

    python benchmarks/draw_losses.py     # rewrites docs/images/fp8_losses.svg

A document holds what runs of `amoeba train --precision bf16` and `fp8` found at their evaluations: {"model": "120m",
"tokens_per_step": 8192, "seed": 1, "runs": {"bf16": [[step, loss], ...], "fp8": ...}}. It may hold "bf16 again", a run
that began with one number of all weights moved to its neighbour: how far rounding alone takes a run. All seeds are
drawn. Plain Python, no packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "fp8_losses.svg"
DOCUMENTS = ("*fp8-losses-preset*.json", "*fp8-losses-seed*.json")

# Sizes in pixels; left and right of the first panel (losses), top and bottom of both, the second shows differences.
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 720, 90, 268
BELOW_TOP, BELOW_BOTTOM = 308, 382
COLOURS = {"bf16": "grouped", "fp8": "ours"}
AGAIN = "bf16 again"
BELOW = "over bf16: fp8, and in circles bf16 again with one number of its first weights moved by its last bit"
STYLE = """
    svg { --card: #ffffff; --text: #1f2328; --muted: #59636e; --line: #d1d9e0; --ours: #00897b; --grouped: #8796ab; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #3d444d;
            --ours: #2ec4b0; --grouped: #75869c; } }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
    .head { font-size: 17px; font-weight: 600; } .muted { fill: var(--muted); font-size: 11px; }
    .right { text-anchor: end; }
    .card { fill: var(--card); stroke: var(--line); } .axis { stroke: var(--line); }
    .curve { fill: none; stroke-width: 2; } .curve.ours { stroke: var(--ours); stroke-dasharray: 6 3; }
    .curve.grouped { stroke: var(--grouped); } .dot.ours { fill: var(--ours); }
    .dot.grouped { fill: none; stroke: var(--grouped); }
"""


def all_seeds() -> list[dict[str, Any]]:
    paths = sorted(path for pattern in DOCUMENTS for path in RESULTS.glob(pattern))
    found = [json.loads(path.read_text()) for path in paths]
    if not found:
        raise SystemExit(f"draw_losses: expected a document {' or '.join(DOCUMENTS)} in {RESULTS}, found none")
    return sorted(found, key=lambda document: (-document["tokens_per_step"], document["seed"]))


def chart(documents: list[dict[str, Any]]) -> str:
    """One pair of curves for each document, that is for each seed."""
    pairs = [
        {name: [(step, loss) for step, loss in curve if step] for name, curve in document["runs"].items()}
        for document in documents
    ]
    points = [point for runs in pairs for curve in runs.values() for point in curve]
    last, lowest, highest = max(step for step, _ in points), min(loss for _, loss in points), max(p[1] for p in points)
    apart = [
        (colour, step, 100 * (loss / dict(runs["bf16"])[step] - 1))
        for runs in pairs
        for name, colour in (("fp8", "ours"), (AGAIN, "grouped"))
        for step, loss in runs.get(name, ())
        if step in dict(runs["bf16"])
    ]
    widest = max(0.5, *(abs(each) for *_, each in apart))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - lowest) / ((highest - lowest) or 1)

    def below(percent: float) -> float:
        return (BELOW_TOP + BELOW_BOTTOM) / 2 - (BELOW_BOTTOM - BELOW_TOP) / 2 * percent / widest

    drawn = [*_frame(lowest, highest, last, widest)]
    for runs in pairs:
        for name, colour in COLOURS.items():
            places = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in runs[name])
            drawn.append(f'<polyline class="curve {colour}" points="{places}"/>')
    drawn += [
        f'<circle class="dot {colour}" cx="{x(step):.1f}" cy="{below(each):.1f}" r="3"/>'
        for colour, step, each in apart
    ]
    title = f"{documents[0]['model']}: held-out loss in bf16 and in fp8"
    ends: dict[int, list[str]] = {}
    for document, runs in zip(documents, pairs, strict=True):
        apart_at_end = 100 * (runs["fp8"][-1][1] / runs["bf16"][-1][1] - 1)
        ends.setdefault(document["tokens_per_step"], []).append(f"{apart_at_end:+.2f}")
    told = ", ".join(f"{', '.join(each)} % from bf16 with {tokens} tokens a step" for tokens, each in ends.items())
    body = "\n  ".join(drawn)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">
  <title>{title}</title>
  <style>{STYLE}  </style>
  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"/>
  <text x="24" y="32" class="head">{title}</text>
  <text x="24" y="50" class="muted">{last} steps, equal seeds and data; fp8 dashed</text>
  <text x="24" y="66" class="muted">fp8 ends {told}</text>
  {body}
</svg>
"""


def _frame(lowest: float, highest: float, last: int, widest: float) -> Iterator[str]:
    middle = (BELOW_TOP + BELOW_BOTTOM) / 2
    for line in (BOTTOM, middle):
        yield f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{line:g}" y2="{line:g}"/>'
    for value, at in ((highest, float(TOP)), (lowest, BOTTOM)):
        yield f'<text class="muted right" x="{LEFT - 8}" y="{at + 4:g}">{value:.2f}</text>'
    for value, at in ((widest, BELOW_TOP), (0.0, middle), (-widest, BELOW_BOTTOM)):
        yield f'<text class="muted right" x="{LEFT - 8}" y="{at + 4:g}">{value:+.1f} %</text>'
    yield f'<text class="muted" x="{LEFT}" y="{BELOW_TOP - 14}">{BELOW}</text>'
    for step in (0, last // 2, last):
        at = LEFT + (RIGHT - LEFT) * step / last
        yield f'<text class="muted right" x="{at:g}" y="{HEIGHT - 20}">{step}</text>'


if __name__ == "__main__":
    CHART.write_text(chart(all_seeds()))
