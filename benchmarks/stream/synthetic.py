"""Traces with a locality that is given, for tests, benchmarks and the simulator.

trace = synthetic_trace(Locality(next_token=0.45, within_window=0.80), [LayerShape(128, 8)] * 48, tokens=1000)
measure_locality(trace)     # Measured(next_token=0.45, within_window=0.80)

Shares are of a token's K selections: those that the token before had selected too, and those that at least one of the
`WINDOW` tokens before had. Each token takes as many of each sort as the shares say, and carries what is left of a whole
selection over to the next: the shares come out exact. Within a sort the choice is random, and a popular expert is
chosen more often.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from amoeba.core.cost import expert_bytes
from amoeba.core.errors import bad_value
from amoeba.stream.cache.trace import NO_EXPERT, LayerShape, Pass, Trace, check_layers, starts_of

WINDOW = 8
_ROUNDING = 1e-9  # ten times 0.1 is a whole one
_MOST_SKEW = 8
_TRIES = 50
_MOST_DUE = 4  # tokens' selections; beyond that it is not a matter of one token


class Locality(NamedTuple):
    """Qwen3-30B-A3B repeats 45 % of its selections at the next token and 80 % within eight (docs/streaming_cache.md).

    skew:  of popularity: the n-th most popular expert of a layer has the weight n**-skew; 0 makes all alike.
    drift: tokens after which a layer has other favourites (another subject); 0 for never.
    """

    next_token: float = 0.45
    within_window: float = 0.80
    skew: float = 0.5
    drift: int = 0


class Measured(NamedTuple):
    """Both NaN where no token has a whole window before it."""

    next_token: float
    within_window: float


def synthetic_trace(locality: Locality, layers: Sequence[LayerShape], tokens: int, seed: int = 0) -> Trace:
    """Passes of one token each; the same arguments make the same trace."""
    shares_are_right = 0 <= locality.next_token <= locality.within_window <= 1
    if not (shares_are_right and 0 <= locality.skew <= _MOST_SKEW and locality.drift >= 0):
        wanted = f"0 <= next_token <= within_window <= 1, 0 <= skew <= {_MOST_SKEW}, drift >= 0"
        got = ", ".join(f"{name}={value:g}" for name, value in locality._asdict().items())
        raise bad_value("locality", wanted, got, "the selections of the token before are in the window too")
    if tokens < 1:
        raise bad_value("tokens", "at least 1", tokens, "a few hundred show what a cache does")
    check_layers(layers)
    columns = []
    for index, layer in enumerate(layers):
        columns.append(list(_of_layer(locality, layer, tokens, random.Random(f"{seed} {index}"))))
    starts = starts_of(layers)
    of_tokens = zip(*columns, strict=True)
    return Trace(tuple(layers), [Pass(1, array("H", chain(*of_layers)), starts) for of_layers in of_tokens])


def measure_locality(trace: Trace) -> Measured:
    """Over all layers and all passes of one token that have a whole window of such passes before them."""
    next_token = within = selections = 0
    for layer in range(len(trace.layers)):
        window: deque[set[int]] = deque(maxlen=WINDOW)
        for each in trace.passes:
            if each.tokens != 1:
                window.clear()
                continue
            chosen = set(each.of_layer(layer)) - {NO_EXPERT}
            if len(window) == WINDOW:
                next_token += len(chosen & window[-1])
                within += len(chosen & set().union(*window))
                selections += len(chosen)
            window.append(chosen)
    if not selections:
        return Measured(math.nan, math.nan)
    return Measured(next_token / selections, within / selections)


def _of_layer(locality: Locality, layer: LayerShape, tokens: int, dice: random.Random) -> Iterator[list[int]]:
    window: deque[list[int]] = deque(maxlen=WINDOW)
    due_next = due_within = 0.0  # parts of a selection that were not made yet
    for token in range(tokens):
        if token == 0 or (locality.drift and token % locality.drift == 0):
            weight = _popularity(layer.experts, locality.skew, dice)
            summed = list(accumulate(weight))
        before = window[-1] if window else []
        seen = dict.fromkeys(expert for chosen in window for expert in chosen)
        earlier = [expert for expert in seen if expert not in before]
        due_next += locality.next_token * layer.top_k
        due_within += (locality.within_window - locality.next_token) * layer.top_k
        repeats = min(int(due_next + _ROUNDING), len(before))
        again = min(int(due_within + _ROUNDING), len(earlier), layer.top_k - repeats)
        due_next, due_within = due_next - repeats, due_within - again
        fresh = layer.top_k - repeats - again
        if len(window) < WINDOW:  # the first tokens have little behind them, and nobody measures them
            due_next, due_within = due_next % 1, due_within % 1
        if fresh > layer.experts - len(seen) or max(due_next, due_within) > _MOST_DUE * layer.top_k:
            wanted = f"one that {layer.experts} experts with {layer.top_k} per token can have"
            remedy = "take more experts, more repeats at the next token or fewer within the window"
            raise bad_value("locality", wanted, tuple(locality), remedy)
        chosen = _choose(repeats, before, weight, dice) + _choose(again, earlier, weight, dice)
        chosen += _choose_fresh(fresh, weight, summed, seen, dice)
        window.append(chosen)
        yield chosen


def _popularity(experts: int, skew: float, dice: random.Random) -> list[float]:
    weight = [rank**-skew for rank in range(1, experts + 1)]
    dice.shuffle(weight)
    return weight


def _choose(count: int, among: Iterable[int], weight: Sequence[float], dice: random.Random) -> list[int]:
    """`count` different ones by weight (Efraimidis and Spirakis: the largest of random ** (1 / weight))."""
    return sorted(among, key=lambda expert: math.log(1 - dice.random()) / weight[expert], reverse=True)[:count]


def _choose_fresh(
    count: int, weight: Sequence[float], summed: Sequence[float], seen: Collection[int], dice: random.Random
) -> list[int]:
    """The same among all that were not seen: by trial, which is quick unless the popular ones were all seen."""
    found: list[int] = []
    for _ in range(_TRIES):
        if len(found) == count:
            return found
        expert = bisect(summed, dice.random() * summed[-1], hi=len(summed) - 1)
        if expert not in seen and expert not in found:
            found.append(expert)
    others = (expert for expert in range(len(weight)) if expert not in seen and expert not in found)
    return found + _choose(count - len(found), others, weight, dice)


_SETTINGS = {
    **{"layers": int, "experts": int, "top_k": int, "tokens": int, "seed": int, "drift": int},
    **{"next": float, "within": float, "skew": float},
}
_QWEN3_30B = {"layers": 48, "experts": 128, "top_k": 8, "tokens": 500, "seed": 0}
_QWEN3_30B_EXPERT_BYTES = expert_bytes(hidden=2048, intermediate=768, itemsize=2)


def parse_synthetic(text: str) -> Trace:
    """A trace as the command line asks for it: "qwen3-30b", or `name=value` of what differs from it, with commas."""
    given: dict[str, float] = {}
    for word in text.split(",") if text != "qwen3-30b" else []:
        name, _, value = word.strip().partition("=")
        try:
            given[name] = _SETTINGS[name](value)
        except (KeyError, ValueError):
            remedy = f"the names are {', '.join(_SETTINGS)}"
            raise bad_value("--synthetic", "qwen3-30b or name=value,...", repr(word), remedy) from None
    counts = {name: int(given.get(name, default)) for name, default in _QWEN3_30B.items()}
    usual = Locality()
    locality = Locality(
        given.get("next", usual.next_token),
        given.get("within", usual.within_window),
        given.get("skew", usual.skew),
        int(given.get("drift", usual.drift)),
    )
    shape = LayerShape(counts["experts"], counts["top_k"], _QWEN3_30B_EXPERT_BYTES)
    return synthetic_trace(locality, [shape] * counts["layers"], counts["tokens"], counts["seed"])
