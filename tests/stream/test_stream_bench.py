"""`python -m benchmarks stream` over a link. Threads stand for the GPU here (simulated_device.py), so its times mean
nothing; that there are some is what is tested."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated_device import LiveDevice, RepeatedFunction

from benchmarks.stream import decode, place
from benchmarks.stream import run as suite
from benchmarks.stream.problem import SIZES, StreamProblem

CPU = torch.device("cpu")
# Triton's interpreter takes a tenth of a second for a layer
TINIEST = StreamProblem(
    replace(SIZES["tiny"], layers=1, disk_layers=1, lora_layers=1, lora_tokens=2), CPU, ("decode", "disk")
)

pytestmark = pytest.mark.thorough


class SimulatedPlace(place.LinkedPlace):
    """Steps wait for themselves: nothing here orders a copy of ids behind them."""

    def __init__(self) -> None:
        self._devices: list[LiveDevice] = []

    def device(self) -> LiveDevice:
        self._devices.append(LiveDevice(inline=True))
        return self._devices[-1]

    def repeated(self, run: Callable[[], None], memory=None) -> Callable[[], None]:
        if memory is None:
            return run
        step = RepeatedFunction(memory.device, memory.replays, run)

        def repeat() -> None:
            step.replay()
            memory.device.record(memory.device.compute).wait()

        return repeat

    def wait(self) -> None:
        for device in self._devices:
            if not device.closed:
                device.record(device.compute).wait()

    def link_rate(self) -> float:
        return 1e9

    def export_us(self, memory, expert_TK) -> float:
        return 3.0

    def close(self) -> None:
        assert all(device.closed for device in self._devices)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch) -> None:
    few = {"WARM": 3, "WARM_FROM_DISK": 3, "COMPARED": 1, "AHEAD": 1, "HITS": 1}
    for name, value in few.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(suite, "WARM", 3)


def test_every_setting_over_a_link_is_right_and_timed(tmp_path: Path) -> None:
    report = suite.run_stream(TINIEST, 2, tmp_path, make_place=SimulatedPlace)
    assert not report.wrong
    assert [each.setting for each in report.decodes] == [each.name for each in suite.settings(16, True)]
    for each in report.decodes:
        assert (each.same_bits and each.error == 0) or each.miss != "move"
        assert each.error < 1e-5 and each.us > 0 and each.hits_us > 0 and each.over_least > 0
        assert (each.simulated_hit_rate is None) == (each.miss != "move" or each.slots == 16)
        if each.miss == "auto":  # time decides what is moved
            continue
        assert (each.bytes_up_per_token == 0) == (each.hit_rate == 1 or each.miss == "cpu")
        assert each.hit_rate == 1 or each.slots < 16
        assert (each.computed_us is None) == (each.miss == "move")
        assert (each.share_of_link is None) == (each.bytes_up_per_token == 0)
        assert (each.export_us is None) == (each.slots == 16)
    assert report.disk_bytes_per_second > 0 and report.resident_us > 0


def test_a_fine_tuning_step_over_a_link_is_right_and_timed(tmp_path: Path) -> None:
    report = suite.run_stream(replace(TINIEST, parts=("lora",)), 1, tmp_path, make_place=SimulatedPlace)
    lora = report.lora
    assert lora.same_bits and lora.ms > 0 and lora.resident_ms > 0 and lora.share_of_link > 0
    assert lora.bytes_per_step > 0 and lora.bytes_per_step % report.expert_bytes == 0
