"""The hit rate over the budget as an SVG picture: a line per policy. Plain text, no packages.

draw({"lru": [(0.1, 0.6), (0.5, 0.88)], "lfru": [(0.1, 0.62), (0.5, 0.9)]}, "48 layers, 128 experts, 8 per token")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 690, 84, 370
_COLOURS = ("ours", "second", "third")
_STYLE = """
    svg { --card: #ffffff; --text: #1f2328; --muted: #59636e; --line: #d1d9e0;
          --ours: #00897b; --second: #d39b3c; --third: #8796ab; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #3d444d;
            --ours: #2ec4b0; --second: #c48f35; --third: #75869c; } }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
    .head { font-size: 17px; font-weight: 600; } .muted { fill: var(--muted); font-size: 11px; }
    .right { text-anchor: end; } .middle { text-anchor: middle; }
    .card { fill: var(--card); stroke: var(--line); } .axis { stroke: var(--line); }
    polyline { fill: none; stroke-width: 2; } .ours { stroke: var(--ours); }
    .second { stroke: var(--second); } .third { stroke: var(--third); }
"""


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], about: str) -> str:
    """curves: (share of the experts that fit, hit rate), both 0 to 1, of each policy."""
    title = "Hit rate of the expert cache over its budget"
    body = "\n  ".join((*_axes(), *_lines(curves)))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">
  <title>{title}</title>
  <style>{_STYLE}  </style>
  <rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="10"/>
  <text x="24" y="34" class="head">{title}</text>
  <text x="{_RIGHT}" y="58" class="muted right">{escape(about)}</text>
  {body}
  <text x="{(_LEFT + _RIGHT) / 2:g}" y="{_BOTTOM + 36}" class="muted middle">share of the experts that fit</text>
</svg>
"""


def _axes() -> Iterator[str]:
    for percent in range(0, 101, 20):
        x, y = _place(percent / 100, percent / 100)
        yield f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:g}" class="muted right">{percent} %</text>'
        yield f'<text x="{x:g}" y="{_BOTTOM + 18}" class="muted middle">{percent} %</text>'


def _lines(curves: Mapping[str, Sequence[tuple[float, float]]]) -> Iterator[str]:
    legend = 24
    for index, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (_place(*point) for point in sorted(points)))
        yield f'<polyline class="{colour}" points="{places}"/>'
        yield f'<line class="{colour}" stroke-width="3" x1="{legend}" x2="{legend + 16}" y1="54" y2="54"/>'
        yield f'<text x="{legend + 22}" y="58">{escape(name)}</text>'
        legend += 44 + 8 * len(name)


def _place(share: float, rate: float) -> tuple[float, float]:
    return _LEFT + share * (_RIGHT - _LEFT), _BOTTOM - rate * (_BOTTOM - _TOP)
