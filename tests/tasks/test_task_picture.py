"""The picture of a schedule: self-contained, a lane per worker, and small whatever the number of tasks."""

import re
from xml.etree import ElementTree

import pytest

from amoeba.tasks.graph import Kind, Task
from amoeba.tasks.picture import draw
from amoeba.tasks.timeline import Record
from benchmarks.schedules.simulator import travelled

SVG = "{http://www.w3.org/2000/svg}"


def records(workers: int, tasks: int, ranks: int = 1) -> list[Record]:
    """Each worker does DOWN and UP by turns, a unit of time each, and waits a quarter before each UP."""
    kinds = (Kind.DOWN, Kind.UP)
    return [
        Record(rank, worker, 1, number, Task(kinds[number % 2], number), number, number + number % 2 / 4, number + 1)
        for rank in range(ranks)
        for worker in range(workers)
        for number in range(tasks)
    ]


def lengths(svg: str) -> dict[str, int]:
    """Points of the whole in each colour."""
    found = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        found[path.get("class")] = sum(map(int, re.findall(r"h(\d+)", path.get("d") or "")))
    return found


def test_colours_have_the_shares_of_their_kinds_and_numbers_are_told():
    svg = draw(records(4, 20), 5, "a <layer>", "us")
    found = lengths(svg)
    assert found.keys() == {"down", "up", "waits"} and sum(found.values()) == 4 * 660  # the fifth worker has nothing
    assert found["down"] == pytest.approx(4 * 330, abs=40) and found["waits"] == pytest.approx(4 * 660 / 8, abs=60)
    text = " ".join(ElementTree.fromstring(svg).itertext())
    for words in ("20 us · 5 workers: 70% busy, 10% waiting at gates, 20% idle", "down 40%", "waits 10%", "a <layer>"):
        assert words in text


def test_nothing_is_fetched_and_nothing_runs():
    svg = draw(records(3, 3), 3, "", "us")
    assert not re.search(r"<script|href=|url\(|@import|<image|<foreignObject|\bon[a-z]+=", svg)


def test_its_size_does_not_grow_with_the_tasks():
    few, many = (len(draw(records(8, tasks), 8, "", "us")) for tasks in (500, 2500))
    assert many < 1.2 * few


def test_ranks_lie_below_each_other_and_both_are_close_up():
    root = ElementTree.fromstring(draw(records(20, 4, ranks=2), 20, "", "us"))
    labels = {text.text for text in root.iter(f"{SVG}text") if re.fullmatch(r"\d+:\d+", text.text or "")}
    assert {label.split(":")[0] for label in labels} == {"0", "1"} and "0:19" in labels and "1:0" in labels
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert any("rank 1, worker 0, ticket" in title for title in titles) and any("waits 0.25 us" in t for t in titles)


def test_an_empty_schedule_is_drawn_too():
    ElementTree.fromstring(draw([], 4, "nothing", "us"))


def test_of_what_travels_the_share_is_hidden_in_which_nobody_waits_for_it():
    def record(rank: int, worker: int, kind: Kind, item: int, came: float, started: float, ended: float) -> Record:
        return Record(rank, worker, 1, 0, Task(kind, item), came, started, ended)

    sends = [record(0, 0, Kind.SEND, 1, 0, 10, 15), record(0, 1, Kind.SEND, 1, 0, 12, 20)]  # to rank 1, from 10 to 20
    waits = [record(1, 0, Kind.DOWN, 0, 5, 14, 30), record(1, 1, Kind.DOWN, 1, 25, 25, 30)]
    waits.append(record(1, 1, Kind.UP, 1, 12, 19, 30))  # for something else
    assert travelled(sends + waits, workers=2) == (10.0, 1 - 4 / 20)
    assert travelled(waits, workers=2) is None
