"""Eviction judged on traces: rules that can be followed by hand, and a best possible that none of them beats."""

from array import array

import pytest

from amoeba.stream.cache.trace import LayerShape, Pass, Trace
from benchmarks.stream.cache import Setting
from benchmarks.stream.policies import hit_rates
from benchmarks.stream.synthetic import parse_synthetic


def of_one_layer(experts: int, ids: list[int]) -> Trace:
    passes = [Pass(1, array("H", [expert]), (0, 1)) for expert in ids]
    return Trace((LayerShape(experts, 1),), passes)


def test_hits_of_a_short_trace_are_those_counted_by_hand() -> None:
    # two slots: 0 and 1 come first; 2 drives out the one that was used least recently, or least often, or is last again
    trace = of_one_layer(3, [0, 0, 1, 2, 0, 1])
    rates = hit_rates(trace, Setting("two", [2], None))
    assert rates["LRU"] == pytest.approx(1 / 6)  # 0 again; then 2 drives out 0, 0 drives out 1, 1 drives out 2
    assert rates["LFU"] == pytest.approx(2 / 6)  # 2 drives out 1, 0 stays
    assert rates["best possible"] == pytest.approx(2 / 6)  # 0 stays
    assert hit_rates(trace, Setting("two", [2], None), warm_up=4)["best possible"] == pytest.approx(1 / 2)


def test_no_rule_is_better_than_the_best_possible() -> None:
    trace = parse_synthetic("next=0.45,within=0.8,skew=1,drift=300,layers=2,experts=32,top_k=4,tokens=300")
    for slots in (6, 8, 16):
        rates = hit_rates(trace, Setting("some", [slots] * 2, None))
        assert max(rates.values()) == rates["best possible"] > min(rates.values())
    whole = hit_rates(trace, Setting("all", [32, 32], None))
    assert len(set(whole.values())) == 1
