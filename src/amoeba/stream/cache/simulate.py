"""What a cache would have done: a trace replayed against the same tables that the engine runs on.

counters = replay(trace, top=slots_of_share(trace.layers, 0.25))     # the rest in host memory
counters.top_hit_rate, counters.per_token(counters.host_bytes)

Loads finish before the next request, and nothing is prefetched: hit rates are those of the budget alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amoeba.core.errors import bad_value
from amoeba.stream.cache.expert_cache import Counters, ExpertCache, Fetch
from amoeba.stream.cache.trace import LayerShape, Trace


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
