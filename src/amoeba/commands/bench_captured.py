"""The table of `amoeba bench --graphs`: forward and backward in CUDA graphs, and what a backward takes of the host."""

from __future__ import annotations

from collections.abc import Sequence

from amoeba.bench.suite import Measurement
from amoeba.commands.output import Output


def print_captured(title: str, timed: Sequence[Measurement], output: Output) -> None:
    """Nothing where nothing of it was measured."""
    found = [each for each in timed if each.backward_host is not None]
    if not found:
        return
    names = [each.implementation for each in found if each.in_graphs is not None]
    rows = [_row(each, names) for each in found]
    output.table(f"{title}, in CUDA graphs", list(rows[0]), [list(row.values()) for row in rows])
    layers = next(each.backward_host.layers for each in found if each.backward_host is not None)
    output.line(
        "  forward, backward: device ms, eager and as graphs, replayed in turns; vs: backward so many times as fast; "
        f"host: ms until a backward returns, median (least), alone and each of {layers} layers"
    )
    for each in found:
        if each.not_in_graphs is not None:
            output.line(f"  {each.implementation}: not captured, {each.not_in_graphs}")


def _row(measurement: Measurement, names: Sequence[str]) -> dict[str, str]:
    graphs, host = measurement.in_graphs, measurement.backward_host
    assert host is not None
    row = {
        "": measurement.implementation,
        "forward": _ms(measurement.forward_median_ms),
        "in graph": "-" if graphs is None else _ms(graphs.forward_median_ms),
        "backward": _ms(measurement.backward_median_ms),
        "in graph ": "-" if graphs is None else _ms(graphs.backward_median_ms),
        "host": f"{_ms(host.median_ms)} ({_ms(host.min_ms)})",
        f"of {host.layers}": f"{_ms(host.of_several_median_ms)} ({_ms(host.of_several_min_ms)})",
    }
    faster = {} if graphs is None else graphs.backward_times_faster_than
    return row | {
        f"vs {name.removeprefix('amoeba ')}": f"{faster[name]:.3f}x" if name in faster else "-" for name in names
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
