"""Steps back to back: what is counted, whose clocks and joules, and what is said where nothing can be measured."""

import ctypes
import json
from dataclasses import replace

import pytest
import torch

from amoeba.bench import suite
from amoeba.bench import sustained as sustained_module
from amoeba.bench import timing as timing_module
from amoeba.bench.suite import Plan, run_suite
from amoeba.bench.sustained import MeterError, Sustained, open_meter, sustain_in_turns
from amoeba.bench.timing import Ceilings, Product
from amoeba.bench.workload import Shape
from amoeba.commands import bench_layers as bench_command
from amoeba.commands.bench_run import make_document
from noted_output import NotedOutput

CPU = torch.device("cpu")
TINY = Shape("tiny", tokens=37, hidden=32, intermediate=16, experts=6, top_k=2)


def test_without_the_drivers_library_the_reason_is_said(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(MeterError, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        open_meter(torch.device("cuda"))


class Clock:
    """Seconds that pass only where a step or a meter says so."""

    def __init__(self) -> None:
        self.now = 100.07  # between two moves of the counter

    def perf_counter(self) -> float:
        return self.now


class FakeMeter:
    power_limit_watts = 700.0

    def __init__(self, clock: Clock, watts: float, counts: bool = True) -> None:
        self.clock, self.true_watts, self.counts = clock, watts, counts

    def sm_mhz(self) -> float:
        return 1500.0

    def watts(self) -> float:
        return 400.0  # as read by a meter that lags behind

    def joules(self) -> float | None:
        """Moves ten times a second."""
        return self.true_watts * int(self.clock.now * 10) / 10 if self.counts else None


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sustained_module, "time", clock)
    return clock


def steps_of(clock: Clock, order: list[str], **milliseconds: float):
    def step_of(name: str, ms: float):
        def step(mark) -> None:
            if order[-1:] != [name]:
                order.append(name)
            mark()
            clock.now += 0.25 * ms / 1e3
            mark()
            clock.now += 0.75 * ms / 1e3
            mark()

        return step

    return {name: step_of(name, ms) for name, ms in milliseconds.items()}


def test_steps_take_turns_without_rests_and_are_counted_after_the_warm_up(clock):
    order: list[str] = []
    began = clock.now
    found = sustain_in_turns(steps_of(clock, order, a=10, b=20), CPU, 4.0, FakeMeter(clock, 680.0))
    assert order == ["a", "b", "a"], "there and back again"
    warm = sustained_module.FIRST_WARM_SECONDS + 3 * sustained_module.WARM_SECONDS
    assert clock.now - began == pytest.approx(warm + 2 * 4.0, abs=0.1)
    for name, ms in {"a": 10.0, "b": 20.0}.items():
        assert found[name].ms == pytest.approx(ms)
        assert found[name].forward_ms == pytest.approx(ms / 4)
        assert found[name].backward_ms == pytest.approx(ms * 3 / 4)
        assert found[name].steps == pytest.approx(4e3 / ms, abs=2)
        assert found[name].seconds == pytest.approx(4.0, abs=0.05)
        assert found[name].power_limit_watts == 700.0


def test_joules_come_from_the_counter_between_its_moves(clock):
    (found,) = sustain_in_turns(steps_of(clock, [], a=10), CPU, 2.0, FakeMeter(clock, 680.0)).values()
    assert found.watts == pytest.approx(680.0, rel=0.02), "a tenth of a second at either end would be ten per cent"
    assert found.joules_per_step == pytest.approx(found.watts * found.ms / 1e3)


def test_watts_are_the_mean_of_all_turns(clock):
    meter, order = FakeMeter(clock, 680.0, counts=False), []
    meter.watts = lambda: 300.0 if order == ["a"] else 500.0  # in its first turn, and in its second
    found = sustain_in_turns(steps_of(clock, order, a=10, b=10), CPU, 2.0, meter)["a"]
    assert found.watts == pytest.approx(400.0, rel=0.01)


def test_without_a_counter_joules_come_from_the_watts_that_were_read(clock):
    (found,) = sustain_in_turns(steps_of(clock, [], a=10), CPU, 2.0, FakeMeter(clock, 680.0, counts=False)).values()
    assert found.watts == pytest.approx(400.0)


def test_a_step_longer_than_the_time_is_measured_all_the_same(clock):
    (found,) = sustain_in_turns(steps_of(clock, [], a=9000), CPU, 2.0, FakeMeter(clock, 680.0)).values()
    assert found.steps == sustained_module.TURNS * sustained_module.LEAST_STEPS
    assert found.ms == pytest.approx(9000)


def test_the_command_prints_and_writes_both_with_rests_and_back_to_back(monkeypatch):
    asked = []

    def sustain(steps, device, seconds, meter):
        asked.append((list(steps), seconds, meter))
        for step in steps.values():
            step(lambda: None)
        return {name: Sustained(seconds, 40, 100.0, 30.0, 70.0, 1530.0, 680.0, 68.0, 700.0) for name in steps}

    monkeypatch.setattr(suite, "sustain_in_turns", sustain)
    monkeypatch.setattr(suite, "open_meter", lambda device: f"meter of {device}")
    output = NotedOutput()
    limits = Ceilings("cpu", {"float32": Product(2048, 1e9)}, copied_bytes=4096, copy_bytes_per_second=1e8)
    decode = replace(TINY, name="step", tokens=1, forward_only=True)
    plan = Plan([TINY, decode], CPU, [torch.float32], ["training"], 1, peers=["grouped_mm"], sustained=4.0)
    document, _ = bench_command.run(plan, None, output, ceilings=lambda device, dtypes: limits)
    layer, step = document["results"]
    timed = [m for m in layer["measurements"] if m["status"] == "timed"]
    assert asked == [([m["implementation"] for m in timed], 4.0, "meter of cpu")], "a decoding step is left out"
    assert all(m["sustained"]["joules_per_step"] == 68.0 and m["median_ms"] < 100 for m in timed)
    assert all(m["sustained"] is None for m in step["measurements"])
    assert document["command"].endswith("--sustained 4")
    assert document["format"] == 2
    assert layer["rest_ms"] == 0.0, "on a CPU there are none"
    json.dumps(document, allow_nan=False)

    _, columns, rows = output.titled("back to back")
    assert columns == [
        "",
        "ms",
        "forward",
        "backward",
        "TFLOP/s",
        "of matmul",
        "SM MHz",
        "W",
        "J/step",
        "vs grouped_mm",
    ]
    assert rows[0][-4:] == ["1530", "680", "68", "1.00x"]
    assert [line for line in output.lines if "no pauses, about 4.0 s each" in line and "limit 700 W" in line]


def test_the_rests_of_a_gpu_are_stated():
    (report,) = run_suite(Plan([TINY], CPU, [torch.float32], ["forward"], repeats=1, peers=[]))
    output = NotedOutput()
    bench_command._print(replace(report, rest_ms=timing_module.REST_MS), None, output)
    assert [line for line in output.lines if "rests of 4 ms before each pass" in line]
    bench_command._print(report, None, output := NotedOutput())
    assert not [line for line in output.lines if "rests" in line]
    assert make_document("amoeba bench", results=[report])["results"][0]["rest_ms"] == 0.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9])
def test_bad_seconds_are_refused(seconds):
    with pytest.raises(ValueError, match="--sustained: expected seconds, at most 600"):
        bench_command.check_sustained(seconds, CPU)


def test_without_a_gpu_it_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="--sustained: expected a GPU whose clocks and watts can be read; got none"):
        bench_command.check_sustained(4.0, CPU)
    bench_command.check_sustained(None, CPU)


@pytest.mark.gpu
def test_on_a_gpu_a_step_back_to_back_draws_power():
    device = torch.device("cuda")
    meter = sustained_module.open_meter(device)
    left = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def step(mark) -> None:
        mark()
        torch.mm(left, left)
        mark()

    (found,) = sustain_in_turns({"product": step}, device, 1.0, meter).values()
    assert 0 < found.joules_per_step < 10
    assert 50 < found.watts < 1.1 * found.power_limit_watts
    assert 200 < found.sm_mhz < 5000
    assert found.backward_ms is None
