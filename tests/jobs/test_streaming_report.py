"""The floor beside the time that a run took: bytes over bandwidths, measured once, and never below the run's own."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import amoeba
from amoeba.jobs import model_cost as kept_measurements
from amoeba.jobs import streaming_report as stream_parts
from amoeba.jobs.streaming_report import StreamParts
from amoeba.stream.attaching import Streamed
from amoeba.stream.report import Rate, StreamReport
from amoeba.stream.store import StoreError, open_store
from amoeba.stream.store.packing import pack
from tiny_models import EXPERTS, LAYERS, build


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    build("qwen3_moe").save_pretrained(folder / "model")
    return Path(pack(folder / "model", folder / "store").store)


@pytest.fixture
def streamed(store, tmp_path, monkeypatch) -> Iterator[Streamed]:
    """One slot per layer; what is measured is kept where only this test looks."""
    monkeypatch.setattr(kept_measurements, "default_folder", lambda: tmp_path)
    with open_store(store) as opened:
        rest = sum(entry.size for entry in opened.rest.values())
        ram = rest + sum(entry.expert_bytes for entry in opened.layers)
    with amoeba.stream.attach(store, ram=ram) as found:
        yield found


def run(streamed: Streamed, tokens: int = 5) -> StreamReport:
    parts = StreamParts(streamed)
    parts.begin("prompts")
    with torch.no_grad():
        streamed.model(input_ids=torch.arange(3, 3 + tokens)[None])
    report = parts.report()
    assert report is not None
    return report


def test_what_was_measured_is_kept_for_the_next_run(streamed, monkeypatch) -> None:
    monkeypatch.setattr(stream_parts, "read_rate", lambda store: Rate(1e15, 2**30))
    (part,) = (first := run(streamed)).parts
    assert first.disk.source == "measured now" and part.tokens == 5
    read = part.read_bytes_per_token * part.tokens
    assert math.isclose(part.floor_seconds, read / 1e15) and part.link_seconds == 0
    monkeypatch.setattr(stream_parts, "read_rate", lambda store: pytest.fail("measured again"))
    assert run(streamed).disk == stream_parts.Bandwidth(1e15, "measured before")


def test_a_measurement_of_a_few_bytes_is_not_kept(streamed, monkeypatch) -> None:
    monkeypatch.setattr(stream_parts, "read_rate", lambda store: Rate(1e15, 2**10))
    assert [run(streamed).disk.source for _ in range(2)] == ["measured now"] * 2


@pytest.mark.parametrize("known", [Rate(1.0, 2**30), None])
def test_a_run_that_was_faster_than_what_is_known_or_knows_nothing_says_so(known, streamed, monkeypatch) -> None:
    def measure(store: object) -> Rate:
        if known is None:
            raise StoreError("a layer", "its file", "none", "pack it again")
        return known

    monkeypatch.setattr(stream_parts, "read_rate", measure)
    (part,) = (report := run(streamed)).parts
    assert report.disk.source == "seen in this run"
    assert math.isclose(part.floor_seconds, part.seconds)


def test_where_nothing_is_read_nothing_is_measured(store, monkeypatch) -> None:
    monkeypatch.setattr(stream_parts, "read_rate", lambda store: pytest.fail("measured"))
    with amoeba.stream.attach(store, ram="auto") as streamed:
        with torch.no_grad():  # all experts are asked for, and stay
            streamed.model(input_ids=torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(0)))
        assert streamed.report().read_bytes == LAYERS * EXPERTS * streamed.memory.store.expert_bytes(0)
        report = run(streamed)
    assert report.disk is None and report.parts[0].floor_seconds == 0 and report.parts[0].hit_rate == 1
    assert "no transfers" in report.lines()[1]


def test_experts_that_are_not_streamed_have_no_report() -> None:
    parts = StreamParts(None)
    parts.begin("prefill")
    assert parts.report() is None


def test_lines_name_each_part_its_floor_and_the_bandwidths(streamed, monkeypatch) -> None:
    monkeypatch.setattr(stream_parts, "read_rate", lambda store: Rate(2.0**40, 2**30))
    about, part, rates = run(streamed).lines()
    assert about.startswith("experts: ") and part.startswith("prompts: 5 tokens in ") and part.endswith("(disk)")
    assert rates == "disk 1 TiB/s (measured now)"
