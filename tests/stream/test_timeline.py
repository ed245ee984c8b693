"""`amoeba generate --trace`: a timeline that ui.perfetto.dev loads, of passes, requests, waits and loads."""

import json
import logging
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_device import SimulatedDevice
from stored_models import SIZES, TOP_K, save
from test_gpu_streamed_models import RepeatedSteps, vram

import amoeba
from amoeba.jobs.generate import token_steps
from amoeba.stream import attaching, timeline
from amoeba.stream.store import StoreError, open_store, reading
from amoeba.stream.store.packing import pack
from amoeba.stream.timeline import GpuSpans, Timeline
from called import call
from selection import without_a_gpu_thorough
from tiny_models import LAYERS

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save(folder / "model", "qwen3_moe", dtype=torch.float32, **SIZES)
    return Path(pack(folder / "model", folder / "store").store)


def checked(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Events of each row, if the file is as the format wants it: ordered, and in a row each within another or apart."""
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    events = document["traceEvents"]
    described = [event for event in events if event["ph"] == "M"]
    others = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in others} <= {"X", "i"} and events == described + others
    assert [event["ts"] for event in others] == sorted(event["ts"] for event in others)
    names = {event["tid"]: event["args"]["name"] for event in described if event["name"] == "thread_name"}
    assert [event["args"]["name"] for event in described if event["name"] == "process_name"]
    rows = defaultdict(list)
    for event in others:
        assert event["ts"] >= 0 and event["name"] and event["cat"] and isinstance(event["args"], dict)
        rows[names[event["tid"]]].append(event)
    for row in rows.values():
        ends: list[float] = []  # of those that are under way
        for event in row:
            while ends and ends[-1] <= event["ts"] + 1e-3:  # a sum of decimals may be above the number that it was
                ends.pop()
            end = event["ts"] + event.get("dur", 0)
            assert end >= event["ts"] and (not ends or end <= ends[-1] + 1e-3), event
            if event["ph"] == "X":
                ends.append(end)
    return dict(rows)


def named(row: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    return [event for event in row if all(word in event["name"] for word in words)]


def test_what_several_threads_do_is_in_rows_of_their_own(tmp_path) -> None:
    found = Timeline(tmp_path / "run.json")

    def work() -> None:
        began = found.now()
        for number in range(3):
            inner = found.now()
            found.note("request", f"asks {number}", {"missing": [number]})
            found.add("wait", f"waits {number}", inner, {})
        found.add("pass", "a pass", began, {"layer": 1})

    loads = threading.Thread(target=work, name="amoeba-load-1")
    loads.start()
    work()
    loads.join()
    found.add("run", "decode", found.now() - 1000, {}, row="the run")
    found.close()
    rows = checked(tmp_path / "run.json")
    assert rows.keys() == {"the run", "the model", "loads experts 1"}
    assert [event["name"] for event in rows["the model"]][:1] == ["a pass"] and len(rows["the model"]) == 7
    assert rows["the model"][0]["args"] == {"layer": 1}


def test_a_timeline_that_grows_too_long_ends_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(timeline, "MOST_EVENTS", 2)
    found = Timeline(tmp_path / "run.json")
    with caplog.at_level(logging.WARNING, "amoeba"):
        for number in range(5):
            found.note("request", str(number), {})
    found.close()
    assert [event["name"] for event in checked(tmp_path / "run.json")["the model"]] == ["0", "1"]
    assert len([record for record in caplog.records if "are kept" in record.message]) == 1


def generated(packed: Path, *options: str) -> dict[str, Any]:
    asked = ["generate", str(packed), "abc", "--max-new-tokens", "3", "--temperature", "0", "--json", *options]
    done = call(*asked)
    return done.document


@without_a_gpu_thorough
def test_generating_on_a_gpu_shows_passes_waits_and_loads_of_every_layer(packed, tmp_path, monkeypatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(attaching, "gpu", lambda: SimulatedDevice(inline=True))
    path, budgets = tmp_path / "run.json", ("--vram", str(vram(packed, TOP_K)), "--ram", "128KiB", "--no-compile")
    plain = generated(packed, *budgets)
    traced = generated(packed, *budgets, "--trace", str(path))
    assert plain["streaming"]["timeline"] is None and traced["streaming"]["timeline"] == str(path)
    assert traced["generated_ids"] == plain["generated_ids"]
    assert traced["streaming"]["requested"] == plain["streaming"]["requested"]
    rows = checked(path)
    assert [event["name"] for event in rows["the run"]] == ["prefill", "decode"]
    model = rows["the model"]
    loaded = [event for name, row in rows.items() if name.startswith("loads experts") for event in named(row, "disk")]
    for layer in range(LAYERS):
        passes = [event for event in model if event["name"] == f"layer {layer}"]
        if traced["steps"] == "plain":
            assert [event["args"]["tokens"] for event in passes] == [1, traced["prompt_tokens"], 1, 1]
        assert named(model, f"layer {layer} waits for its ids") and named(model, f"layer {layer} waits for the disk")
        assert [event for event in loaded if event["args"]["layer"] == layer]
    if traced["steps"] != "plain":
        return  # captured steps show requests: see below
    called = named(model, "has", "copied from host memory")
    assert sum(len(event["args"]["from_host"]) for event in called) == traced["streaming"]["host_hits"] > 0


def test_captured_steps_show_each_question(packed, tmp_path, monkeypatch) -> None:
    if not ON_GPU:
        RepeatedSteps(monkeypatch)
    with amoeba.stream.attach(packed, vram=vram(packed, TOP_K), ram="64KiB") as streamed:
        streamed.trace(tmp_path / "run.json")
        model = streamed.model
        model.generation_config.update(eos_token_id=None, do_sample=False)
        steps = token_steps.choose_steps(model, {"do_sample": False}, batch=1, prompt_tokens=3, new_tokens=3)
        assert steps.decoder is not None, steps.reason
        assert len(list(steps.decoder.generate([[5, 6, 7]], 3))) == 3
    rows = checked(tmp_path / "run.json")
    replays = named(rows["the model"], "captured step")
    asked = [event for event in rows["the model"] if event["cat"] == "request"]
    assert len(asked) == LAYERS * len(replays) > 0
    assert [event["args"]["layer"] for event in asked] == list(range(LAYERS)) * len(replays)
    assert all(len(event["args"]["missing"]) + len(event["args"]["there"]) == TOP_K for event in asked)
    assert len(named(rows["the model"], "until layer")) == len(asked)
    if ON_GPU:
        waits = [event for event in rows[timeline.GPU_ROW] if event["cat"] == "wait"]
        missed = [event["args"]["layer"] for event in asked[:-1] if event["args"]["missing"]]
        assert [event["args"]["layer"] for event in waits] == missed


@pytest.mark.thorough
def test_experts_that_are_copied_ahead_of_the_tables_are_shown_as_loads(packed, tmp_path, monkeypatch) -> None:
    if not ON_GPU:
        RepeatedSteps(monkeypatch)
    with amoeba.stream.attach(packed, vram=vram(packed, TOP_K), ram="64MiB") as streamed:
        streamed.trace(tmp_path / "run.json")
        model = streamed.model
        model.generation_config.update(eos_token_id=None, do_sample=False)
        steps = token_steps.choose_steps(model, {"do_sample": False}, batch=1, prompt_tokens=3, new_tokens=6)
        assert steps.decoder is not None, steps.reason
        list(steps.decoder.generate([[5, 6, 7]], 6))
        hits = streamed.report().host_hits
    rows = checked(tmp_path / "run.json")
    called = named(rows["the model"], "has", "copied from host memory")
    assert sum(len(event["args"]["from_host"]) for event in called) == hits
    assert named(rows["the model"], "tables follow")


def test_spans_of_the_gpu_are_shown_at_the_times_of_the_host(tmp_path) -> None:
    """Requests are seen 3 to 90 microseconds after they were asked; the clock wraps in the middle."""
    found = Timeline(tmp_path / "run.json")
    spans, began = timeline.GpuSpans(found), found.now()
    # layer, missing, asked and waited, in microseconds, and how late it was seen
    steps = [[(0, 2, 10, 100, 3), (1, 0, 130, 0, 90)], [(0, 0, 200, 0, 10), (1, 1, 230, 50, 20)]]
    for step in steps:
        spans.begin_step()
        for layer, missing, asked, waited, late in step:
            clock = [(2**31 - 150 + each + 2**31) % 2**32 - 2**31 for each in (asked, asked + waited)]
            spans.add(layer, missing, *clock, began + 1000 * (asked + late))
    spans.add(5, 1, 0, 0, found.now())  # no clock
    found.close()
    (row,) = checked(tmp_path / "run.json").values()
    start = row[0]["ts"] - 13
    assert [(event["name"], round(event["ts"] - start), round(event["dur"])) for event in row] == [
        ("layer 0 waits for 2", 13, 100),
        ("experts of layer 0, then up to layer 1's router", 113, 20),
        ("experts of layer 0, then up to layer 1's router", 203, 30),
        ("layer 1 waits for 1", 233, 50),
    ]


def test_without_a_gpu_passes_reads_and_waits_are_shown(packed, tmp_path) -> None:
    with open_store(packed) as store:
        ram = sum(entry.size for entry in store.rest.values()) + 2 * sum(each.expert_bytes for each in store.layers)
    path = tmp_path / "run.json"
    traced = generated(packed, "--device", "cpu", "--ram", f"{ram}B", "--trace", str(path))
    rows = checked(path)
    passes = [event for event in rows["the model"] if event["cat"] == "pass"]
    assert [event["name"] for event in passes[:LAYERS]] == [f"layer {layer}" for layer in range(LAYERS)]
    assert sum(event["args"]["tokens"] for event in passes) == LAYERS * traced["streaming"]["tokens"]
    assert named(rows["the model"], "waits for the disk")
    reads = [event for name, row in rows.items() if name.startswith("loads experts") for event in named(row, "disk")]
    assert len(reads) == traced["streaming"]["requested"] - traced["streaming"]["hits"]


def test_a_generation_that_fails_leaves_its_timeline(packed, tmp_path, monkeypatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    path = tmp_path / "run.json"
    with amoeba.stream.attach(packed, ram="auto") as streamed, torch.no_grad():
        streamed.trace(path)
        monkeypatch.setattr(reading, "_read_once", failing)
        with pytest.raises(StoreError):
            streamed.model(input_ids=torch.tensor([[5, 6, 7]]))
    assert named(checked(path)["the model"], "waits for the disk")


# ---- Spans of the GPU's clock brought to the host's: by the request that was seen soonest, and past 32 bits


class Kept:
    """A timeline that keeps (kind, first, last) in nanoseconds of the host's clock."""

    def __init__(self) -> None:
        self.at_close, self.spans = [], []

    def add(self, kind, name, began, details, *, row, ended):
        self.spans.append((kind, began, ended))


def test_the_clocks_differ_by_the_least_that_a_question_took_to_be_seen():
    kept, apart = Kept(), 7_000_000_000
    spans = GpuSpans(kept)
    for asked, went_on, late in ((100, 150, 9_000), (300, 310, 2_000), (400, 400, 5_000)):  # microseconds, nanoseconds
        spans.add(0, int(went_on > asked), asked, went_on, seen=apart + 1000 * asked + late)
    kept.at_close[0]()
    began = apart + 2_000
    waits = [span for span in kept.spans if span[0] == "wait"]
    assert waits == [("wait", began + 100_000, began + 150_000), ("wait", began + 300_000, began + 310_000)]
    between = [span for span in kept.spans if span[0] == "pass"]
    assert between == [("pass", began + 150_000, began + 300_000), ("pass", began + 310_000, began + 400_000)]


def test_a_clock_that_passes_32_bits_goes_on():
    kept = Kept()
    spans = GpuSpans(kept)
    spans.add(0, 1, 2**32 - 30, 2**32 - 20, seen=0)
    spans.add(1, 1, 2**32 - 10, 5, seen=20_000)  # went on beyond the last number
    spans.add(2, 1, 40, 60, seen=70_000)
    kept.at_close[0]()
    waits = [(began, ended) for kind, began, ended in kept.spans if kind == "wait"]
    assert waits == [(0, 10_000), (20_000, 35_000), (70_000, 90_000)]
