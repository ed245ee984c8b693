"""Draws the chart of README.md and writes the table of docs/benchmarks.md, from the documents in benchmarks/results.

    python benchmarks/draw_chart.py     # rewrites docs/images/results.svg and the table between the marks

Within a group of bars, and within a row of the table, all figures come from one run. Plain Python, no packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "results.svg"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- results: written by benchmarks/draw_chart.py -->\n", "<!-- end of results -->\n"

# Colour classes of the bars, in the order of the legend.
SERIES = {
    "aMoEba": "ours",
    "transformers grouped_mm": "grouped",
    "transformers eager": "eager",
    "SonicMoE": "sonic",
    "kt-kernel": "kt",
}


UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9}


class Bars(NamedTuple):
    """One group of a panel: a result of one document, and which of its implementations are shown as which series."""

    label: str
    document: str  # the file's name in benchmarks/results
    shape: str
    dtype: str
    shown: dict[str, str]  # series -> implementation; "auto" is the backend that aMoEba chose by itself
    passes: str = ""  # which of them, where a document has several


class Panel(NamedTuple):
    title: str
    about: str
    unit: str  # of UNITS
    ceiling: bool  # whether the dense product that the run measured is drawn
    groups: tuple[Bars, ...]


H200_SONIC = "2026-11-17_nvidia-h200_1a0ceba38f_sonicmoe"
H200_LAYERS = "2026-11-17_nvidia-h200_1a0ceba38f_fp8-layers"
H200_DECODE = "2026-11-17_nvidia-h200_1a0ceba38f_decode-codes"
XEON_16 = "2026-11-15_nvidia-h200-host-16-cores_b6cf00aadc_lora-kt-kernel-passive"
XEON_2 = "2026-11-15_intel-xeon-2-cores_bc353d2b03_training"
XEON_2_DECODE = "2026-11-15_intel-xeon-2-cores_bc353d2b03_decode"

GROUPED = "transformers grouped_mm"
_ON_GPU = {"aMoEba": "auto", GROUPED: GROUPED}
_WITH_EAGER = {**_ON_GPU, "transformers eager": "transformers eager"}


def _beside_sonic(label: str, shape: str) -> Bars:
    return Bars(label, H200_SONIC, shape, "bfloat16", {"aMoEba": "auto", "SonicMoE": "SonicMoE"})


def _step(shape: str) -> Bars:
    return Bars("", H200_LAYERS, shape, "bfloat16", _ON_GPU, "training")


def _kt(kind: str) -> dict[str, str]:
    return {"aMoEba": f"amoeba packed {kind}", "kt-kernel": f"kt-kernel {kind}"}


LEFT = (
    Panel(
        "One H200: a training step of one layer, bf16",
        "forward and backward",
        "TFLOP/s",
        True,
        (
            _beside_sonic("Qwen3-30B, 32k tokens", "qwen3_30b"),
            _beside_sonic("Qwen3-30B, 8k tokens", "qwen3_small"),
            _beside_sonic("Qwen3-30B, skewed routing", "qwen3_zipf"),
            _beside_sonic("OLMoE", "olmoe"),
            _beside_sonic("Mixtral 8x7B", "mixtral"),
            _beside_sonic("DeepSeek-V3, 32 experts", "dsv3"),
            _beside_sonic("H 1536, I 256, E 128, K 8", "sonic_a"),
            _beside_sonic("H 4096, I 256, E 256, K 16", "sonic_b"),
            _beside_sonic("H 4096, I 1024, E 128, K 8", "sonic_c"),
        ),
    ),
)
RIGHT = (
    Panel(
        "16-core Xeon with AMX: a LoRA step",
        "Qwen3-30B layer, frozen experts, 512 tokens",
        "TFLOP/s",
        False,
        (
            Bars("experts in bf16", XEON_16, "lora_qwen3_512", "bfloat16", _kt("bf16")),
            Bars("experts in int8", XEON_16, "lora_qwen3_512", "bfloat16", _kt("int8")),
        ),
    ),
    Panel(
        "2-core Xeon with AMX: a training step",
        "512 tokens, H 512, I 256, E 32, K 4",
        "GFLOP/s",
        False,
        (
            Bars("bf16", XEON_2, "small", "bfloat16", _WITH_EAGER),
            Bars("fp32", XEON_2, "small", "float32", _WITH_EAGER),
        ),
    ),
)


class Row(NamedTuple):
    """One row of the table."""

    what: str
    machine: str
    ours: Bars
    peer: str  # a series of `ours`


TABLE = (
    Row("training step, Qwen3-30B layer, 32k tokens, bf16", "H200", _step("qwen3_30b"), GROUPED),
    Row("the same, another run", "H200", LEFT[0].groups[0], "SonicMoE"),
    Row("training step, Mixtral 8x7B layer, 8k tokens, bf16", "H200", _step("mixtral"), GROUPED),
    Row("the same, another run", "H200", LEFT[0].groups[4], "SonicMoE"),
    Row(
        "decoding 1 token, Qwen3-30B layer, bf16",
        "H200",
        Bars("", H200_DECODE, "qwen3_decode1", "bfloat16", _ON_GPU),
        GROUPED,
    ),
    Row("LoRA step, Qwen3-30B layer, 512 tokens, bf16", "16-core Xeon, AMX", RIGHT[0].groups[0], "kt-kernel"),
    Row("LoRA step, the same, experts in int8", "16-core Xeon, AMX", RIGHT[0].groups[1], "kt-kernel"),
    Row("training step, small layer, 512 tokens, bf16", "2-core Xeon, AMX", RIGHT[1].groups[0], GROUPED),
    Row(
        "decoding 1 token, H 2048, I 768, E 32, K 8, bf16",
        "2-core Xeon, AMX",
        Bars("", XEON_2_DECODE, "1,2048,768,32,8", "bfloat16", _ON_GPU),
        GROUPED,
    ),
)


@cache
def document(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(bars: Bars, series: str) -> dict[str, Any]:
    """The measurement behind one bar. KeyError where the document has none, or none that passed its check."""
    implementation = bars.shown[series]
    for result in document(bars.document)["results"]:
        if (result["shape"]["name"], result["dtype"]) != (bars.shape, bars.dtype):
            continue
        if bars.passes and result["pass"] != bars.passes:
            continue
        wanted = f"amoeba {result['auto']}" if implementation == "auto" else implementation
        for measurement in result["measurements"]:
            if measurement["implementation"] == wanted and measurement["status"] == "timed":
                return measurement
    raise KeyError(f"{implementation} on {bars.shape} in {bars.dtype} is not in {bars.document}")


def table() -> str:
    lines = ["| one layer, median in ms | machine | aMoEba | named peer | times as fast |", "|---|---|---|---|---|"]
    for what, machine, bars, peer in TABLE:
        ours, theirs = measured(bars, "aMoEba")["median_ms"], measured(bars, peer)["median_ms"]
        lines.append(f"| {what} | {machine} | {ours:#.3g} | {peer}: {theirs:#.3g} | {theirs / ours:#.2g} |")
    return "\n".join(lines).replace(". |", " |") + "\n"


# --- the drawing; sizes in pixels

WIDTH, TOP, LABEL, BAR, GAP = 980, 92, 176, 10, 9
COLUMN = {"left": (24, 540), "right": (592, 956)}  # first and last x of a panel
STYLE = """
    svg { --card: #ffffff; --text: #1f2328; --muted: #59636e; --line: #d1d9e0;
          --ours: #00897b; --grouped: #8796ab; --eager: #c2cbd6; --kt: #d39b3c;
          --sonic: #7a86d8; }
    @media (prefers-color-scheme: dark) {
      svg { --card: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #3d444d;
            --ours: #2ec4b0; --grouped: #75869c; --eager: #4b5969; --kt: #c48f35;
            --sonic: #8f9af0; } }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
    .head { font-size: 17px; font-weight: 600; } .title { font-size: 13px; font-weight: 600; }
    .muted { fill: var(--muted); font-size: 11px; } .value { font-size: 10.5px; } .right { text-anchor: end; }
    .card { fill: var(--card); stroke: var(--line); } .axis { stroke: var(--line); }
    .ceiling { stroke: var(--muted); stroke-dasharray: 4 3; }
    .ours { fill: var(--ours); }
    .grouped { fill: var(--grouped); } .eager { fill: var(--eager); } .kt { fill: var(--kt); }
    .sonic { fill: var(--sonic); }
"""


def chart() -> str:
    left, left_end = _column(LEFT, *COLUMN["left"])
    right, right_end = _column(RIGHT, *COLUMN["right"])
    height = max(left_end, right_end) + 20
    head = [
        '<text x="24" y="34" class="head">Speed of one mixture-of-experts layer; longer is faster</text>',
        f'<text x="{WIDTH - 24}" y="34" class="muted right">medians, one run per group of bars, {_dates()}</text>',
        *_legend(24, 58),
    ]
    title = "Bar chart: TFLOP/s of aMoEba next to SonicMoE, transformers and kt-kernel on an H200 and on two CPUs"
    body = "\n  ".join((*head, *left, *right))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">
  <title>{title}</title>
  <style>{STYLE}  </style>
  <rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>
  {body}
</svg>
"""


def _dates() -> str:
    return ", ".join(sorted({document(g.document)["date"][:10] for panel in (*LEFT, *RIGHT) for g in panel.groups}))


def _legend(x: float, y: float) -> Iterator[str]:
    for name, colour in SERIES.items():
        yield f'<rect class="{colour}" x="{x}" y="{y - 9}" width="10" height="10" rx="2"/>'
        yield f'<text x="{x + 15}" y="{y}">{name}</text>'
        x += 40 + 6.9 * len(name)


def _column(panels: tuple[Panel, ...], first: float, last: float) -> tuple[list[str], float]:
    y, drawn = float(TOP), []
    for panel in panels:
        lines, y = _panel(panel, first, last, y)
        drawn += lines
        y += 26
    return drawn, y - 26


def _panel(panel: Panel, first: float, last: float, y: float) -> tuple[list[str], float]:
    unit = UNITS[panel.unit]
    speeds = {(bars.label, series): _speed(bars, series) / unit for bars in panel.groups for series in bars.shown}
    ceiling = _ceiling(panel.groups[0]) / unit if panel.ceiling else 0.0
    longest = max(*speeds.values(), ceiling)
    zero, room = first + LABEL, last - first - LABEL - (34 if not panel.ceiling else 6)
    lines = [f'<text x="{first}" y="{y}" class="title">{panel.title}</text>']
    lines.append(f'<text x="{first}" y="{y + 16}" class="muted">{panel.about}, {panel.unit}</text>')
    y += 30
    begin = y
    for bars in panel.groups:
        middle = y + len(bars.shown) * BAR / 2 + 4
        lines.append(f'<text x="{zero - 8}" y="{middle:g}" class="right">{bars.label}</text>')
        for series in bars.shown:
            speed = speeds[bars.label, series]
            length = room * speed / longest
            colour = SERIES[series]
            lines.append(f'<rect class="{colour}" x="{zero}" y="{y:g}" width="{length:.1f}" height="{BAR - 1}"/>')
            lines.append(f'<text x="{zero + length + 5:.1f}" y="{y + BAR - 1:g}" class="value">{_number(speed)}</text>')
            y += BAR
        y += GAP
    y -= GAP / 2
    lines.append(f'<line class="axis" x1="{zero}" x2="{zero}" y1="{begin - 4:g}" y2="{y:g}"/>')
    if panel.ceiling:
        x = zero + room
        lines.append(f'<line class="ceiling" x1="{x:g}" x2="{x:g}" y1="{begin - 4:g}" y2="{y:g}"/>')
        note = f"a dense product, measured the same way: {_number(ceiling)}"
        lines.append(f'<text x="{x:g}" y="{y + 13:g}" class="muted right">{note}</text>')
        y += 14
    return lines, y


def _speed(bars: Bars, series: str) -> float:
    return measured(bars, series)["flops_per_second"]


def _ceiling(bars: Bars) -> float:
    return document(bars.document)["ceilings"]["matmul"][bars.dtype]["flops_per_second"]


def _number(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    CHART.write_text(chart())
    PAGE.write_text(with_table(PAGE.read_text()))
