"""The simulator against a replay that is written down the long way."""

import pytest

from amoeba.stream.cache.slot_table import LFRU
from amoeba.stream.cache.trace import LayerShape, Trace, TraceWriter, read_trace
from benchmarks.stream.cache import replay, slots_of_share
from benchmarks.stream.synthetic import Locality, synthetic_trace

LAYERS = [LayerShape(32, 4, 10), LayerShape(16, 2, 3)]


class Replay:
    """Everything is looked up in the whole past; no table, no slots, no incremental counts."""

    def __init__(self, top: int, host: int | None) -> None:
        self.top_room, self.host_room = top, host
        self.past: list[list[int]] = []
        self.top: list[int] = []  # in the order of their slots
        self.host: list[int] = []
        self.hits = self.from_host = self.from_disk = self.written = 0

    def value(self, expert: int) -> float:
        now = len(self.past)
        uses = [index for index, ids in enumerate(self.past, start=1) if expert in ids]
        count = sum(2.0 ** ((each - now) / LFRU.half_life) for each in uses)
        return count / (now + 1 - max(uses, default=0)) ** 2

    def put(self, tier: list[int], arriving: list[int], room: int, leaving: list[int]) -> list[int]:
        """The n-th arrival takes the place of the last that leaves, and so on; then places at the end."""
        short = max(0, len([e for e in tier if e >= 0]) + len(arriving) - room)
        gone = leaving[:short][::-1]
        for expert, old in zip(arriving, gone, strict=False):
            tier[tier.index(old)] = expert
        tier += arriving[len(gone) :]
        return gone

    def room_on_host(self, busy: list[int]) -> list[int]:
        """Who leaves first."""
        free = [expert for expert in self.host if expert not in busy]
        copies = sorted((e for e in free if e in self.top), key=self.value)[::-1]
        return copies + sorted((e for e in free if e not in self.top), key=self.value)

    def run(self, ids: list[int]) -> None:
        missing = [expert for expert in ids if expert not in self.top]
        self.hits += len(ids) - len(missing)
        order = sorted((expert for expert in self.top if expert not in ids), key=self.value)
        gone = self.put(self.top, missing, self.top_room, order)
        self.past.append(ids)
        if self.host_room is None:
            self.from_host += len(missing)
            return
        unread = [expert for expert in missing if expert not in self.host]
        self.from_host += len(missing) - len(unread)
        self.from_disk += len(unread)
        leaving = self.room_on_host(busy=missing)
        self.put(self.host, unread[: self.host_room - len(self.host) + len(leaving)], self.host_room, leaving)
        back = [expert for expert in gone if expert not in self.host]
        leaving = self.room_on_host(busy=missing + back)
        back = back[: self.host_room - len(self.host) + len(leaving)]
        self.written += len(back)
        self.put(self.host, back, self.host_room, leaving)


@pytest.mark.parametrize(("top", "host"), [((8, 4), None), ((8, 4), (8, 8)), ((12, 3), (2, 16)), ((5, 16), (0, 0))])
def test_the_simulator_counts_what_a_replay_by_hand_counts(top, host):
    trace = synthetic_trace(Locality(0.4, 0.7, skew=0.8, drift=60), LAYERS, tokens=150)
    found = replay(trace, top, host)
    hands = [Replay(*each) for each in zip(top, host or (None, None), strict=True)]
    for each in trace.passes:
        for layer, hand in enumerate(hands):
            hand.run(each.distinct(layer))
    assert found.tokens == 150 and found.requested == 150 * 6
    assert found.hits == sum(hand.hits for hand in hands)
    assert (found.from_host, found.from_disk) == tuple(
        sum(getattr(hand, name) for hand in hands) for name in ("from_host", "from_disk")
    )
    assert found.misses_of_layer == [hand.from_host + hand.from_disk for hand in hands]
    assert found.disk_bytes == 10 * hands[0].from_disk + 3 * hands[1].from_disk
    assert found.written_bytes == 10 * hands[0].written + 3 * hands[1].written


def test_a_pass_of_many_tokens_asks_for_each_expert_once_and_in_waves(tmp_path):
    with TraceWriter(tmp_path / "trace", [LayerShape(8, 2, 1)]) as writer:
        writer.add(0, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5])  # five tokens, six experts
        writer.add(0, [5, -1])
    found = replay(read_trace(tmp_path / "trace"), [4])
    assert (found.tokens, found.requested, found.hits, found.from_host) == (6, 7, 1, 6)


def test_with_room_for_all_only_the_first_use_misses():
    trace = synthetic_trace(Locality(), LAYERS, tokens=100)
    found = replay(trace, [32, 16], [0, 0])
    assert found.from_disk == sum(len({e for each in trace.passes for e in each.distinct(l)}) for l in (0, 1))


def test_two_tiers_read_less_from_the_disk_than_their_sizes_apart():
    trace = synthetic_trace(Locality(), [LayerShape(64, 8, 1)], tokens=400)
    both, top_alone, as_much = (replay(trace, [slots], [host]) for slots, host in ((16, 16), (16, 0), (32, 0)))
    assert both.from_disk < 0.7 * top_alone.from_disk
    assert both.from_disk < 1.15 * as_much.from_disk, "nearly as good as one tier of both sizes"


def test_a_warm_up_fills_the_cache_and_is_not_counted():
    trace = synthetic_trace(Locality(), LAYERS, tokens=100)
    whole, first = replay(trace, [8, 4]), replay(Trace(trace.layers, trace.passes[:40]), [8, 4])
    warm = replay(trace, [8, 4], warm_up=40)
    assert (warm.tokens, warm.hits) == (60, whole.hits - first.hits)
    with pytest.raises(
        ValueError, match="warm-up: expected 0 to 99 tokens, after which this trace has another pass; got 100"
    ):
        replay(trace, [8, 4], warm_up=100)


def test_progress_is_told_after_each_pass():
    trace, calls = synthetic_trace(Locality(), LAYERS, tokens=7), []
    replay(trace, [4, 2], progress=lambda: calls.append(1))
    assert len(calls) == 7


def test_an_empty_trace_counts_nothing():
    assert replay(Trace(tuple(LAYERS), []), [4, 2]).requested == 0


def test_a_share_of_the_experts_is_at_least_a_slot():
    assert slots_of_share(LAYERS, 0.25) == [8, 4]
    assert slots_of_share(LAYERS, 0.01) == [1, 1]
    assert slots_of_share([LayerShape(10, 1)], 0.3) == [3], "not 2.9999999999999996"
    for share in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match=r"budget: expected more than 0 %, at most 100 %"):
            slots_of_share(LAYERS, share)
