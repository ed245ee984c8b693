"""How fast link and disk are is found out by a short copy and a short read, each within its bounds."""

import math
import threading
import time

import torch
from simulated_device import SimulatedDevice

from amoeba import ExpertWeights
from amoeba.stream import report
from amoeba.stream.placement import MemoryStore
from amoeba.stream.report import copy_rate, read_rate

E, H, I = 5, 4, 3


class SlowToOpen(MemoryStore):
    """As one whose reading threads are compiled by the first read."""

    opening, is_open = threading.Lock(), False

    def _read(self, layer, expert, memory) -> None:
        with self.opening:
            if not self.is_open:
                time.sleep(0.1)
            self.is_open = True
        super()._read(layer, expert, memory)


def store(kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
    return kind(ExpertWeights(torch.randn(E, 2 * I, H), torch.randn(E, H, I)))


def test_the_link_is_measured_by_copies_and_by_waiting_for_them_alone() -> None:
    device = SimulatedDevice(inline=True)
    assert 0 < copy_rate(device).bytes_per_second < math.inf
    assert set(device.waits) == {"copies"}
    assert device.copied == 8 * len(device.waits) > 0  # in rows, of which the last copy alone is waited for


def test_the_disk_is_measured_by_reading_each_expert_once_at_most(monkeypatch) -> None:
    opened = store()
    found = read_rate(opened)
    assert found.bytes == E * opened.expert_bytes(0) and 0 < found.bytes_per_second < math.inf
    monkeypatch.setattr(report, "READS", 1)
    monkeypatch.setattr(report, "_MOST_READ", 2 * opened.expert_bytes(0))
    assert read_rate(opened).bytes == 2 * opened.expert_bytes(0)


def test_what_the_first_read_has_to_prepare_is_not_the_disks_time(monkeypatch) -> None:
    monkeypatch.setattr(report, "_MOST_SECONDS", 0.05)
    opened = store(SlowToOpen)
    assert read_rate(opened).bytes == E * opened.expert_bytes(0)
