"""Made traces have the locality that was asked for, exactly."""

import math
from collections import Counter

import pytest

from amoeba.stream.cache.trace import LayerShape, Trace
from benchmarks.stream.synthetic import WINDOW, Locality, measure_locality, parse_synthetic, synthetic_trace
from selection import each_value_once

QWEN3_30B, GPT_OSS_20B = LayerShape(128, 8), LayerShape(32, 4)


@each_value_once()
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.5, 8.0])
@pytest.mark.parametrize("drift", [0, 50])
def test_the_locality_of_qwen3_30b_45_percent_at_the_next_token_80_within_8(skew, drift):
    trace = synthetic_trace(Locality(0.45, 0.80, skew, drift), [QWEN3_30B] * 3, tokens=300, seed=1)
    found = measure_locality(trace)
    # whole selections: at either end a part of one may be missing
    two = 2 / ((300 - WINDOW) * 8)
    assert abs(found.next_token - 0.45) <= two and abs(found.within_window - 0.80) <= two < 0.001


@pytest.mark.parametrize(
    ("shape", "next_token", "within"),
    [
        (QWEN3_30B, 0.3, 0.6),
        (QWEN3_30B, 0.0, 0.5),
        (QWEN3_30B, 1.0, 1.0),
        (GPT_OSS_20B, 0.5, 0.85),
        (LayerShape(24, 2), 0.2, 0.7),
    ],
)
def test_other_localities_and_shapes(shape, next_token, within):
    tokens = 400
    trace = synthetic_trace(Locality(next_token, within), [shape], tokens)
    found, two = measure_locality(trace), 2 / ((tokens - WINDOW) * shape.top_k)
    assert abs(found.next_token - next_token) <= two and abs(found.within_window - within) <= two
    for each in trace.passes:
        assert len(each.distinct(0)) == shape.top_k, "never one expert twice"


def test_the_measure_counts_by_hand():
    trace = synthetic_trace(Locality(), [LayerShape(64, 1)], tokens=10)
    starts = trace.passes[0].starts
    ids = [0, 1, 2, 3, 4, 5, 6, 7, 7, 0]  # 7 repeats at once, the last 0 is nine tokens old
    passes = [
        each._replace(ids=type(each.ids)("H", [expert]), starts=starts)
        for each, expert in zip(trace.passes, ids, strict=True)
    ]
    assert measure_locality(Trace(trace.layers, passes)) == (0.5, 0.5)
    assert all(map(math.isnan, measure_locality(Trace(trace.layers, passes[:8]))))


def test_skew_makes_some_experts_popular_and_drift_makes_others_so_later():
    def counts(trace: Trace, first: int, last: int) -> Counter[int]:
        return Counter(expert for each in trace.passes[first:last] for expert in each.of_layer(0))

    level, skewed = (synthetic_trace(Locality(skew=skew), [QWEN3_30B], tokens=2000) for skew in (0.0, 1.0))
    share = [sum(count for _, count in counts(each, 0, 2000).most_common(16)) / 16000 for each in (level, skewed)]
    assert share[0] < 0.25 and share[1] > 0.35
    drifting = synthetic_trace(Locality(skew=1.5, drift=1000), [QWEN3_30B], tokens=2000)
    favourites = [
        {expert for expert, _ in counts(drifting, *part).most_common(8)} for part in ((0, 1000), (1000, 2000))
    ]
    assert len(favourites[0] & favourites[1]) <= 4
    steady = synthetic_trace(Locality(skew=1.5), [QWEN3_30B], tokens=2000)
    favourites = [{expert for expert, _ in counts(steady, *part).most_common(8)} for part in ((0, 1000), (1000, 2000))]
    assert len(favourites[0] & favourites[1]) >= 6


def test_the_same_seed_makes_the_same_trace_and_layers_differ():
    one, same, other = (synthetic_trace(Locality(), [QWEN3_30B] * 2, 40, seed) for seed in (3, 3, 4))
    assert one == same and one != other
    assert one.passes[5].of_layer(0) != one.passes[5].of_layer(1)


@pytest.mark.parametrize(
    "locality",
    [
        Locality(0.5, 0.4),
        Locality(-0.1),
        Locality(0.4, 1.1),
        Locality(skew=-1),
        Locality(skew=9),
        Locality(drift=-1),
        Locality(math.nan),
    ],
)
def test_a_locality_that_cannot_be_is_an_error(locality):
    with pytest.raises(ValueError, match="locality: expected 0 <= next_token <= within_window <= 1"):
        synthetic_trace(locality, [QWEN3_30B], 10)


def test_a_locality_that_a_layer_has_too_few_experts_for_is_an_error():
    with pytest.raises(ValueError, match="expected one that 8 experts with 8 per token can have"):
        synthetic_trace(Locality(), [LayerShape(8, 8)], 20)
    with pytest.raises(ValueError, match="expected one that 16 experts with 4 per token can have"):
        synthetic_trace(Locality(0.0, 0.1), [LayerShape(16, 4)], 20)


def test_the_command_line_names_what_differs_from_qwen3_30b():
    trace = parse_synthetic("layers=2, tokens=20,next=0.5,experts=64,seed=3")
    assert trace.layers == (LayerShape(64, 8, 9 << 20),) * 2 and trace.tokens == 20
    assert trace == synthetic_trace(Locality(0.5), [LayerShape(64, 8, 9 << 20)] * 2, 20, seed=3)


@pytest.mark.parametrize("text", ["", "qwen", "layers", "layers=x", "layers=1.5", "colour=3", "layers=2;tokens=4"])
def test_what_the_command_line_does_not_understand_is_named(text):
    with pytest.raises(
        ValueError, match=r"--synthetic: expected qwen3-30b or name=value,\.\.\.; got .* The names are layers"
    ):
        parse_synthetic(text)


@pytest.mark.parametrize(
    "text", ["layers=0", "layers=-1", "tokens=0", "experts=0", "top_k=0", "experts=70000", "skew=inf"]
)
def test_numbers_that_cannot_be_are_errors(text):
    with pytest.raises(ValueError, match="expected"):
        parse_synthetic(f"layers=1,tokens=3,{text}")
