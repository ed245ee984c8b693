"""`python -m benchmarks stream` over a link. Threads stand for the GPU here (simulated_device.py), so its times mean
nothing; that there are some is what is tested."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated_device import LiveDevice, RepeatedFunction

from benchmarks.stream import place
from benchmarks.stream import run as suite
from benchmarks.stream.problem import SIZES, StreamProblem
from tests.benchmarks.test_stream_suite import check_decodes, check_lora, few_tokens  # noqa: F401

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


def test_every_setting_over_a_link_is_right_and_timed(tmp_path: Path) -> None:
    check_decodes(suite.run_stream(TINIEST, 2, tmp_path, make_place=SimulatedPlace), has_link=True)


def test_a_fine_tuning_step_over_a_link_is_right_and_timed(tmp_path: Path) -> None:
    check_lora(suite.run_stream(replace(TINIEST, parts=("lora",)), 1, tmp_path, make_place=SimulatedPlace))
