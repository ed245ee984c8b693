"""`python -m benchmarks cache`: what the expert cache would have done with a routing trace and these memory budgets.

counters = replay(trace, top=slots_of_share(trace.layers, 0.25))     # the rest in host memory
counters.top_hit_rate, counters.per_token(counters.host_bytes)

A trace is replayed against the same tables that the engine runs on. Loads finish before the next request, and nothing
is prefetched: hit rates are those of the budget alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.stream.attaching import share_budget
from amoeba.stream.cache.expert_cache import Counters, ExpertCache, Fetch
from amoeba.stream.cache.trace import LayerShape, Trace, read_trace
from amoeba.stream.sizes import parse_size
from benchmarks.stream.synthetic import measure_locality, parse_synthetic

_SECONDS_BETWEEN_LINES = 5.0


def slots_of_share(layers: Sequence[LayerShape], share: float) -> list[int]:
    """That share of each layer's experts, at least one."""
    if not 0 < share <= 1:
        raise bad_value("budget", "more than 0 %, at most 100 %", f"{100 * share:g} %", "it is a share of the experts")
    return [max(1, int(layer.experts * share + 1e-9)) for layer in layers]


def check_warm_up(trace: Trace, warm_up: int) -> None:
    most = trace.tokens - trace.passes[-1].tokens if trace.passes else 0
    if not 0 <= warm_up <= most:
        wanted = f"0 to {most} tokens, after which this trace has another pass"
        raise bad_value("warm-up", wanted, warm_up, "record a longer trace")


def replay(
    trace: Trace,
    top: Sequence[int],
    host: Sequence[int] | None = None,
    *,
    warm_up: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Counters:
    """top, host: slots of each layer, as ExpertCache takes them.

    warm_up:  tokens that fill the cache, which is empty at first, and are not counted.
    progress: called after each pass.
    """
    check_warm_up(trace, warm_up)
    cache = ExpertCache(trace.layers, top, host)
    seen = 0
    for each in trace.passes:
        for layer in range(len(trace.layers)):
            for wave in cache.waves(layer, each.distinct(layer)):
                settle(cache, layer, wave)
        cache.count_tokens(each.tokens)
        if seen < warm_up:
            cache.restart_counters()
        seen += each.tokens
        progress()
    return cache.counters


def settle(cache: ExpertCache, layer: int, ids: list[int]) -> Fetch:
    """A pass that asks for these, gets them and is done with them."""
    fetch = cache.request(layer, ids)
    for expert, _, _ in fetch.writes:
        cache.arrived(layer, expert)
    for expert, *_ in (*fetch.from_host, *fetch.from_disk):
        cache.loaded(layer, expert)
    cache.release(layer, ids)
    return fetch


class Setting(NamedTuple):
    """Slots of each layer. host: None where memory holds everything."""

    name: str
    top: list[int]
    host: list[int] | None
    on_gpu: bool = True

    def share(self, trace: Trace) -> float:
        return sum(self.top) / sum(layer.experts for layer in trace.layers)


def load_trace(path: Path | None, synthetic: str | None, expert_size: str | None) -> tuple[Trace, str]:
    """A trace and what to call it."""
    expert_bytes = _expert_bytes(expert_size)
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
        "document": "benchmarks cache",
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
    return share_budget(parse_size(option, size), trace.layers, least=[least] * len(trace.layers), name=option)


def _expert_bytes(text: str | None) -> int | None:
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
