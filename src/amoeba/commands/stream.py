"""`amoeba stream simulate`: a routing trace replayed against memory budgets of the expert cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Json, Verbose
from amoeba.commands.output import Output
from amoeba.commands.start import start
from amoeba.commands.typer_app import Typer
from amoeba.core.errors import bad_value

if TYPE_CHECKING:
    from amoeba.stream.cache.expert_cache import Counters
    from amoeba.stream.cache.trace import Trace

stream = Typer(name="stream", help="Tools for experts that do not fit in memory.", no_args_is_help=True)

_SECONDS_BETWEEN_LINES = 5.0
_GB = 1e9


@stream.command()
def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="Routing trace from `amoeba generate --record`. Or use --synthetic.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(
            "--synthetic",
            help="Generate a trace: qwen3-30b, or changes to it, such as layers=4,tokens=500,next=0.45,within=0.8,"
            "skew=0.5,drift=0,seed=0,experts=128,top_k=8.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="Shares of the experts on the GPU, the rest in host memory (default: 10%,25%,50%)."
        ),
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Bytes of experts kept on the GPU, such as 8GiB, instead of --budget.")
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", help="Bytes of experts kept in memory; the rest is on disk (default: all in memory)."),
    ] = None,
    expert_size: Annotated[
        str | None, typer.Option("--expert-size", help="Bytes per expert, such as 9MiB (default: from the trace).")
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, help="Initial tokens that fill the cache and are not counted.")
    ] = 0,
    link: Annotated[float, typer.Option("--link", help="GB/s from memory to the GPU, for the time floor.")] = 55.0,
    disk: Annotated[float, typer.Option("--disk", help="GB/s from disk, for the time floor.")] = 5.0,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Replay a routing trace with several memory budgets: hit rates, bytes per token, time floor."""
    output = start(verbose)
    with usage():
        from amoeba.stream.cache.simulate import check_warm_up

        if not (link > 0 and disk > 0):
            raise bad_value(
                "--link and --disk", "more than 0 GB/s", f"{link:g} and {disk:g}", "use measured values if you can"
            )
        size = _expert_size(expert_size)
        replayed, name = load_trace(trace, synthetic, size)
        check_warm_up(replayed, warm_up)
        settings = choose_budgets(replayed, budget, vram, ram)
        document = run(replayed, name, settings, warm_up, link * _GB, disk * _GB, output)
    finish(output, document, True, json)


class Setting(NamedTuple):
    """Slots of each layer. host: None where memory holds everything."""

    name: str
    top: list[int]
    host: list[int] | None
    on_gpu: bool = True

    def share(self, trace: Trace) -> float:
        return sum(self.top) / sum(layer.experts for layer in trace.layers)


def load_trace(path: Path | None, synthetic: str | None, expert_bytes: int | None) -> tuple[Trace, str]:
    """A trace and what to call it."""
    from amoeba.stream.cache.synthetic import parse_synthetic
    from amoeba.stream.cache.trace import read_trace

    if (path is None) == (synthetic is None):
        got = "neither" if path is None else "both"
        raise bad_value("trace", "a file or --synthetic", got, "write for example --synthetic qwen3-30b")
    if path is not None:
        found, name = read_trace(path), str(path)
    else:
        assert synthetic is not None
        found, name = parse_synthetic(synthetic), f"synthetic {synthetic}"
    if expert_bytes is not None:
        found = found._replace(layers=tuple(layer._replace(expert_bytes=expert_bytes) for layer in found.layers))
    if not found.passes:
        raise bad_value(name, "a trace with at least one pass", "none", "record a longer one")
    return found, name


def choose_budgets(trace: Trace, budget: str | None, vram: str | None, ram: str | None) -> list[Setting]:
    from amoeba.stream.cache.simulate import slots_of_share

    if vram is None and ram is None:
        shares = (budget or "10%,25%,50%").split(",")
        return [Setting(text.strip(), slots_of_share(trace.layers, _share(text)), None) for text in shares]
    if budget is not None:
        raise bad_value("--budget", "shares, or bytes with --vram and --ram", "both", "leave one of them out")
    if any(not layer.expert_bytes for layer in trace.layers):
        remedy = "give --expert-size, or use --budget 25%"
        raise bad_value("trace", "a known expert size, for --vram and --ram", "none", remedy)
    if vram is None:
        assert ram is not None
        return [Setting(f"{ram} RAM", _slots(trace, "--ram", ram, 1), [0] * len(trace.layers), on_gpu=False)]
    top = _slots(trace, "--vram", vram, 1)
    if ram is None:
        return [Setting(f"{vram} VRAM", top, None)]
    return [Setting(f"{vram} VRAM, {ram} RAM", top, _slots(trace, "--ram", ram, 0))]


def run(
    trace: Trace,
    name: str,
    settings: Sequence[Setting],
    warm_up: int,
    link: float,
    disk: float,
    output: Output,
) -> dict[str, Any]:
    """link, disk: bytes/s."""
    from amoeba.stream.cache.simulate import replay
    from amoeba.stream.cache.synthetic import measure_locality

    locality = measure_locality(trace)
    _say_trace(trace, name, locality, output)
    results = []
    with output.working():
        told = _Progress(output, len(settings) * len(trace.passes))
        for setting in settings:
            counters = replay(trace, setting.top, setting.host, warm_up=warm_up, progress=told.one_more)
            results.append(_result(trace, setting, counters, link, disk))
    _print(results, trace, warm_up, output)
    return {
        "document": "amoeba stream simulate",
        "trace": name,
        "layers": len(trace.layers),
        "passes": len(trace.passes),
        "tokens": trace.tokens,
        "warm_up": warm_up,
        "complete": trace.complete,
        "locality": locality._asdict(),
        "link_bytes_per_second": link,
        "disk_bytes_per_second": disk,
        "results": results,
    }


class _Progress:
    def __init__(self, output: Output, total: int) -> None:
        self._output, self._total, self._done = output, total, 0
        self._pause = 0.2 if output.on_terminal else _SECONDS_BETWEEN_LINES
        self._told = time.monotonic()

    def one_more(self) -> None:
        self._done += 1
        if time.monotonic() - self._told >= self._pause:
            self._told = time.monotonic()
            self._output.progress(f"replayed {100 * self._done / self._total:.0f} %")


def _say_trace(trace: Trace, name: str, locality: Any, output: Output) -> None:
    experts, top_k = ({getattr(layer, field) for layer in trace.layers} for field in ("experts", "top_k"))
    output.line(
        f"{name}: {trace.tokens} tokens in {len(trace.passes)} passes, {len(trace.layers)} layers of {_range(experts)} "
        f"experts, {_range(top_k)} per token"
    )
    if not math.isnan(locality.next_token):
        output.line(
            f"{100 * locality.next_token:.0f} % of its selections repeat at the next token, "
            f"{100 * locality.within_window:.0f} % within 8"
        )
    if not trace.complete:
        output.warning(f"{name} is incomplete: its writer did not close it. Replaying the complete part")


def _result(trace: Trace, setting: Setting, counters: Counters, link: float, disk: float) -> dict[str, Any]:
    return {
        "budget": setting.name,
        "share": setting.share(trace),
        "top_slots": setting.top,
        "host_slots": setting.host,
        "hit_rate": counters.top_hit_rate,
        "host_hit_rate": counters.host_hit_rate,
        "host_bytes_per_token": counters.per_token(counters.host_bytes),
        "disk_bytes_per_token": counters.per_token(counters.disk_bytes),
        "written_bytes_per_token": counters.per_token(counters.written_bytes),
        "floor_seconds_per_token": counters.floor_seconds(link if setting.on_gpu else math.inf, disk),
        "misses_of_layer": counters.misses_of_layer,
    }


def _print(results: Sequence[dict[str, Any]], trace: Trace, warm_up: int, output: Output) -> None:
    sized = all(layer.expert_bytes for layer in trace.layers)
    rows = [_row(found, sized) for found in results]
    about = ["slots are per layer", f"after {warm_up} tokens of warm-up" if warm_up else "the cache starts empty"]
    if not sized:
        about.append("--expert-size adds bytes and the time floor")
    output.table("; ".join(about), list(rows[0]), [list(row.values()) for row in rows], text=("budget",))


def _row(found: dict[str, Any], sized: bool) -> dict[str, str]:
    """Memory and disk only where there are such tiers: one run has the same for all its rows."""
    host = found["host_slots"]
    in_memory = host is None or any(host)
    row = {"budget": found["budget"], "slots": _range(set(found["top_slots"]))}
    if host is not None and in_memory:
        row["slots"] += f" + {_range(set(host))}"
    row["hits %"] = f"{100 * found['hit_rate']:.1f}"
    if host is not None and in_memory:
        row["then in memory %"] = f"{100 * found['host_hit_rate']:.1f}"
    if sized:
        if in_memory:
            row["from memory MB/token"] = f"{found['host_bytes_per_token'] / 1e6:.1f}"
        if host is not None:
            row["from disk MB/token"] = f"{found['disk_bytes_per_token'] / 1e6:.1f}"
        if host is not None and in_memory:
            row["written back MB/token"] = f"{found['written_bytes_per_token'] / 1e6:.1f}"
        row["floor ms/token"] = f"{1e3 * found['floor_seconds_per_token']:.2f}"
    return row


def _slots(trace: Trace, option: str, size: str, least: int) -> list[int]:
    from amoeba.stream.cache.budget import share_budget
    from amoeba.stream.sizes import parse_size

    return share_budget(parse_size(option, size), trace.layers, least=[least] * len(trace.layers), name=option)


def _expert_size(text: str | None) -> int | None:
    from amoeba.stream.sizes import parse_size

    if text is None:
        return None
    found = parse_size("--expert-size", text)
    if found < 1:
        raise bad_value("--expert-size", "at least one byte", text, "write for example 9MiB")
    return found


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        if number == text.strip():
            raise ValueError
        return float(number) / 100
    except ValueError:
        raise bad_value("--budget", "shares such as 10%,25%", repr(text), "for bytes, use --vram and --ram") from None


def _range(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)}-{max(numbers)}"
