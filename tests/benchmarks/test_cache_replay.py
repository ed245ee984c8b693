"""`python -m benchmarks cache` as a user meets it."""

from typing import Any

import pytest

from amoeba.stream.cache.trace import LayerShape, TraceWriter
from benchmarks.__main__ import app
from benchmarks.stream.cache import replay, slots_of_share
from benchmarks.stream.synthetic import Locality, synthetic_trace
from called import Called, call

SMALL = "layers=2,tokens=60"


def simulate(*words: object, **options: Any) -> Called:
    return call("cache", *words, app=app, **options)


@pytest.fixture
def trace(tmp_path):
    found = synthetic_trace(Locality(), [LayerShape(64, 8), LayerShape(32, 4)], tokens=60)
    with TraceWriter(tmp_path / "run.trace", found.layers) as writer:
        for each in found.passes:
            for layer in range(len(found.layers)):
                writer.add(layer, each.of_layer(layer))
    return tmp_path / "run.trace", found


def test_budgets_are_replayed_and_printed():
    result = simulate("--synthetic", SMALL, "--json")
    found = result.document["results"]
    assert [row["budget"] for row in found] == ["10%", "25%", "50%"]
    assert "45 % of its selections repeat at the next token, 80 % within 8" in result.stdout
    for column in ("budget", "hits %", "from memory MB/token", "floor ms/token"):
        assert column in result.stdout
    assert "disk" not in result.stdout.splitlines()[4]
    for row in found:
        assert f"{100 * row['hit_rate']:.1f}" in result.stdout
        assert row["floor_seconds_per_token"] == pytest.approx(row["host_bytes_per_token"] / 55e9)


def test_a_recorded_trace_gives_what_the_library_gives(trace):
    path, found = trace
    (row,) = simulate(path, "--budget", "25%", "--json").document["results"]
    expected = replay(found, slots_of_share(found.layers, 0.25))
    assert row["hit_rate"] == expected.top_hit_rate and row["misses_of_layer"] == expected.misses_of_layer
    assert row["top_slots"] == [16, 8]


def test_bytes_are_given_by_vram_and_ram_over_a_disk():
    words = ("--synthetic", SMALL, "--json")
    both = simulate(*words, "--vram", "576MiB", "--ram", "576MiB", "--disk", 2).document["results"][0]
    assert both["top_slots"] == both["host_slots"] == [32, 32]
    assert both["floor_seconds_per_token"] == pytest.approx(both["disk_bytes_per_token"] / 2e9)
    in_memory = simulate(*words, "--vram", "576MiB").document["results"][0]
    assert in_memory["host_slots"] is None and in_memory["disk_bytes_per_token"] == 0
    assert in_memory["hit_rate"] == both["hit_rate"]
    no_gpu = simulate(*words, "--ram", "576MiB", "--disk", "200").document["results"][0]
    assert no_gpu["host_bytes_per_token"] == 0 and no_gpu["hit_rate"] == both["hit_rate"]
    assert no_gpu["floor_seconds_per_token"] == pytest.approx(no_gpu["disk_bytes_per_token"] / 200e9)


def test_a_trace_that_nobody_closed_is_replayed_with_a_warning(tmp_path):
    writer = TraceWriter(tmp_path / "open", [LayerShape(8, 2)])
    for _ in range(20):
        writer.add(0, [1, 2])
    result = simulate(tmp_path / "open", "--json")
    assert result.document["results"] and "is incomplete" in result.stderr
    assert "20 tokens in 20 passes" in result.stdout
    writer.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "trace: expected a file or --synthetic; got neither"),
        (("here", "--synthetic", SMALL), "trace: expected a file or --synthetic; got both"),
        (("--synthetic", "colour=3"), "--synthetic: expected qwen3-30b or name=value"),
        (("--synthetic", SMALL, "--budget", "25"), "--budget: expected shares such as 10%,25%; got '25'"),
        (("--synthetic", SMALL, "--budget", "0%"), "budget: expected more than 0 %, at most 100 %; got 0 %"),
        (("--synthetic", SMALL, "--budget", "nan%"), "budget: expected more than 0 %"),
        (("--synthetic", SMALL, "--budget", "5%", "--vram", "8GiB"), "--budget: expected shares, or bytes with"),
        (("--synthetic", SMALL, "--vram", "8 apples"), "--vram: expected a size in bytes; got '8 apples'"),
        (("--synthetic", SMALL, "--vram", "1MiB"), "--vram: expected at least 18 MiB for 2 layers; got 1 MiB"),
        (("--synthetic", SMALL, "--ram", "1MiB"), "--ram: expected at least 18 MiB for 2 layers; got 1 MiB"),
        (("--synthetic", SMALL, "--expert-size", "0"), "--expert-size: expected at least one byte; got 0"),
        (("--synthetic", SMALL, "--link", "0"), "--link and --disk: expected more than 0 GB/s; got 0 and 5"),
        (("--synthetic", SMALL, "--disk", "nan"), "--link and --disk: expected more than 0 GB/s"),
        (("--synthetic", SMALL, "--warm-up", "60"), "warm-up: expected 0 to 59 tokens"),
        (("missing.trace",), "missing.trace: expected a file or folder that can be read or written; got No such file"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(words, said):
    result = simulate(*words, code=2)
    assert said in result.stderr, result.output
    assert not result.stdout, "before anything is replayed"


def test_bytes_of_a_trace_that_does_not_know_them_are_asked_for(trace, tmp_path):
    result = simulate(trace[0], "--vram", "1GiB", code=2)
    assert "Give --expert-size, or use --budget 25%" in result.stderr
    assert simulate(trace[0], "--vram", "1GiB", "--expert-size", "9MiB", "--json").document["results"]
    TraceWriter(tmp_path / "empty", [LayerShape(8, 2)]).close()
    assert "expected a trace with at least one pass" in simulate(tmp_path / "empty", code=2).stderr
