"""`python -m benchmarks tasks` as a user meets it."""

import json
import re
from typing import Any

import pytest

from amoeba.tasks.graph import Graph, Kind
from amoeba.tasks.sizes import Sizes, Tiling
from benchmarks.__main__ import app
from benchmarks.schedules.cases import make_case
from benchmarks.schedules.computation import OrderOnly
from benchmarks.schedules.simulator import Pace, Script
from benchmarks.schedules.simulator import simulate as run_schedule
from benchmarks.tasks import microseconds
from called import Called, call

SMALL = ("--shape", "9,8,6,4,2", "--schedules", "3")
TIMED = ("--timing", "--shape", "512,1024,512,16,4", "--passes", 1)


def simulate(*words: object, **options: Any) -> Called:
    return call("tasks", *words, app=app, **options)


def test_schedules_are_run_and_told():
    result = simulate(*SMALL, "--ranks", 2, "--json")
    found = result.document
    assert found["ok"] and found["fault"] is None and found["schedules"] == 3
    assert set(found["errors"]) == {"x", "weight", "gate", "gate_up", "down", "gate_up_bias", "down_bias"}
    for words in (
        "no worker got stuck",
        "ok: gradients within",
        "workers were busy",
        "down_weights",
        "waited steps each",
    ):
        assert words in result.stdout
    for kind in Kind:
        assert (found["kinds"][kind.name.lower()]["tasks"] > 0) == (kind != Kind.RETURN)
    assert 0 < found["idlest"] <= found["busy"] <= found["busiest"] <= 1
    assert found["travelled"]["time"] > 0 and 0 <= found["travelled"]["hidden"] <= 1 and "hidden" in result.stdout


def test_remote_ranks_return_their_sums():
    assert simulate(*SMALL, "--ranks", 3, "--remote", "0,2", "--json").document["kinds"]["return"]["tasks"] > 0


def test_a_fault_is_shown_and_fails(monkeypatch):
    monkeypatch.setattr(Graph, "activated", property(lambda self: self.down_tiles))
    result = simulate(*SMALL, "--json", code=1)
    assert "FAILED, schedule 0: read too early" in result.stdout
    assert not result.document["ok"]


def test_a_layer_of_real_size_is_estimated_without_tensors():
    result = simulate(*TIMED, "--ranks", 1, "--json")
    found = result.document
    assert found["workers"] == 132 and found["kinds"]["down"]["tasks"] >= 2 * 512 * 4 / 128
    assert "errors" not in found and "travelled" not in found
    assert f"{found['span'] / 1e3:.2f} ms per pass: an estimate" in result.stdout and "waited us each" in result.stdout


def test_an_estimate_over_ranks_tells_how_much_of_the_exchange_is_hidden():
    result = simulate(*TIMED, "--ranks", 2, "--json")
    travelled = result.document["travelled"]
    assert travelled["time"] > 0 and 0 <= travelled["hidden"] <= 1
    assert f"dy from other ranks was in transit for {travelled['time']:.1f} us" in result.stdout


def test_small_layers_are_estimated_in_their_own_order():
    """Bundles of tiles in one task, which only one rank has."""
    words = ("--timing", "--shape", "256,1024,256,64,4", "--passes", 1, "--json")
    alone, shared = (simulate(*words, "--ranks", ranks).document["kinds"]["up_weights"]["tasks"] for ranks in (1, 2))
    assert 2 * alone <= shared == 64 * (512 // 128) * (1024 // 256)


def test_a_trace_opens_in_perfetto(tmp_path):
    path = tmp_path / "new" / "tasks.json"
    found = simulate(*SMALL, "--ranks", 2, "--workers", 3, "--trace", path, "--json").document
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"} == {
        (rank, worker) for rank in range(2) for worker in range(3)
    }
    tasks = [event for event in events if event["ph"] == "X" and event["name"] != "waits"]
    assert len(tasks) == sum(each["tasks"] for each in found["kinds"].values())
    starts, ends = ({event["id"]: event for event in events if event["ph"] == ph} for ph in "sf")
    assert starts and starts.keys() == ends.keys()
    for number, start in starts.items():
        around = [
            task
            for task in tasks
            if (task["pid"], task["tid"]) == (start["pid"], start["tid"])
            and task["ts"] <= start["ts"] <= task["ts"] + task["dur"]
        ]
        assert around and start["ts"] <= ends[number]["ts"]


def test_a_schedule_is_drawn(tmp_path):
    path = tmp_path / "tasks.svg"
    assert simulate(*SMALL, "--picture", path, "--json").document["picture"] == str(path)
    assert "T=9 H=8 I=6 E=4 K=2, simulated" in path.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shape", "4096,2048,768,128,8"), "add --timing"),
        (("--shape", "10000000,2048,768,128,8", "--timing"), "at most 400000 tasks; got about"),
        (("--remote", "2"), "ranks from 0 to 1; got 2"),
        (("--remote", "one"), "Count them from 0"),
        (("--trace", "."), "a folder"),
        (("--picture", "."), "a folder"),
        (("--ranks", 1000), "--ranks: expected at most 64; got 1000"),
        (("--passes", 100000), "multiplications in all"),
    ],
)
def test_what_cannot_be_is_refused(words, said):
    result = simulate(*words, code=2)
    assert said in result.output


@pytest.mark.parametrize("remote", [frozenset(), frozenset((1,))])
def test_the_order_alone_takes_as_long_as_with_its_tensors(remote):
    case = make_case(Sizes(64, 32, 6, 2), Tiling(rows=16, sent=8), [[40, 40]] * 2, (0, 0, 0, 1, 1, 1), remote)
    whole = case.job()
    alone = [[Script(OrderOnly(script.graph, epoch)) for script in scripts] for epoch, scripts in enumerate(whole, 1)]
    ran = []
    for job in (whole, alone):
        started: list[int] = []
        pace = Pace(0, [1.0, 1.0], work=microseconds)
        ran.append(run_schedule(job, 4, pace, progress=started.append).records)
        assert started == list(range(1, len(ran[-1]) + 1))
    assert ran[0] == ran[1]


def test_a_long_estimate_tells_how_far_it_is():
    result = simulate(*TIMED, "--ranks", 1)
    assert re.search(r"^[\d,]+ of [\d,]+ tasks$", result.stderr, re.MULTILINE), result.stderr
