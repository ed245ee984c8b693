"""How streamed experts are run on this machine: what holds them, how a token is repeated, when it is done.

    with place_of(torch.device("cuda")) as place:
        memory = place.memory(store, slots=32, host_slots=128)
        step = place.repeated(run, memory)      # on a GPU one CUDA graph
        step(); place.wait()

On a CPU there is no link and no tier between: slots are in memory, and what misses is read from the disk.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from amoeba.core.torch_internals import capture, occupy_gpu
from amoeba.stream.cpu.memory import ExpertMemory
from amoeba.stream.gpu.device import CudaDevice, Device
from amoeba.stream.report import copy_rate
from amoeba.stream.store.store import Store

# Requests whose way to the host is timed, and cycles of idling ahead of each: their launch is not part of it.
_EXPORTS, _IDLE = 40, 200_000

StreamedMemory = Any  # an ExpertMemory or a DeviceMemory


class Place(ABC):
    has_link = False  # a tier of pinned memory, and a link to slots on a device
    backend = "auto"  # of resident experts

    @abstractmethod
    def memory(self, store: Store, slots: int, host_slots: int, miss: str = "move") -> StreamedMemory: ...

    @abstractmethod
    def repeated(self, run: Callable[[], None], memory: StreamedMemory | None = None) -> Callable[[], None]:
        """Runs once more at each call; with streamed experts, whose memory is given, or without."""

    @abstractmethod
    def wait(self) -> None:
        """For all that was called."""

    @abstractmethod
    def check(self, memory: StreamedMemory) -> None:
        """Raises where the latest steps went on without their experts."""

    def link_rate(self) -> float | None:
        return None

    def export_us(self, memory: StreamedMemory, expert_TK: Tensor) -> float | None:
        """Microseconds from the end of the kernel ahead of a request to its ids read."""
        return None

    @abstractmethod
    def close(self) -> None:
        """What was kept from one memory to the next goes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CpuPlace(Place):
    def memory(self, store: Store, slots: int, host_slots: int, miss: str = "move") -> ExpertMemory:
        from amoeba.stream import placement  # noqa: F401  registers the backend

        return ExpertMemory(store, [slots] * len(store.layers))

    def repeated(self, run: Callable[[], None], memory: StreamedMemory | None = None) -> Callable[[], None]:
        return run

    def wait(self) -> None:
        """Nothing runs on after a call."""

    def check(self, memory: StreamedMemory) -> None:
        """Where an expert is missing, the step itself raises."""

    def close(self) -> None:
        """Nothing is kept."""


class LinkedPlace(Place):
    """What is the same on a GPU and on what stands for one in tests."""

    has_link, backend = True, "triton"

    @abstractmethod
    def device(self) -> Device:
        """For one memory, which closes it."""

    def memory(self, store: Store, slots: int, host_slots: int, miss: str = "move") -> StreamedMemory:
        from amoeba.stream.gpu.memory import DeviceMemory
        from amoeba.stream.placement import MOST_IDS

        layers = len(store.layers)
        sizes = [slots] * layers, [host_slots] * layers, MOST_IDS
        return DeviceMemory(store, self.device(), *sizes, miss=miss)

    def check(self, memory: StreamedMemory) -> None:
        memory.replays.check()


class GpuPlace(LinkedPlace):
    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, CudaDevice(device)
        self._free: dict[int, list[Tensor]] = {}

    def device(self) -> Device:
        return _Reusing(self._device, self._pins, self._free)

    def repeated(self, run: Callable[[], None], memory: StreamedMemory | None = None) -> Callable[[], None]:
        stream, graph = torch.cuda.Stream(self._device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        replays = None if memory is None else memory.replays
        with torch.cuda.stream(stream), nullcontext() if replays is None else replays.rehearsing():
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self.wait()
        with (
            nullcontext() if replays is None else replays.capturing() as passes,
            capture(graph, stream=stream),
        ):
            run()
        return graph.replay if replays is None else lambda: replays.replay(passes, graph.replay)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def link_rate(self) -> float:
        device = CudaDevice(self._device)
        try:
            return copy_rate(device).bytes_per_second
        finally:
            device.close()

    def export_us(self, memory: StreamedMemory, expert_TK: Tensor) -> float:
        replays, nobody, taken = memory.replays, torch.full_like(expert_TK, -1), []
        for _ in range(_EXPORTS):
            self.wait()
            serial = replays.mailbox.expect(1)
            occupy_gpu(_IDLE)
            ahead = torch.cuda.Event()
            ahead.record()
            replays.request(0, nobody)
            while not ahead.query():
                pass
            began = time.perf_counter()
            while not replays.mailbox.is_there_after(serial, 1):
                if time.perf_counter() - began > replays.mailbox.limit:
                    raise RuntimeError("a request did not reach the host")
            replays.mailbox.read(serial)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken) * 1e6

    def close(self) -> None:
        self._free.clear()
        self._pins.close()


class _Reusing(CudaDevice):
    """Takes pinned memory that an earlier one gave back: pinning 30 GB takes longer than measuring."""

    def __init__(self, device: torch.device, pins: CudaDevice, free: dict[int, list[Tensor]]) -> None:
        super().__init__(device)
        self._pins, self._free, self._taken = pins, free, list[Tensor]()

    def host_memory(self, size: int) -> Tensor:
        free = self._free.get(size)
        self._taken.append(free.pop() if free else self._pins.host_memory(size))
        return self._taken[-1]

    def close(self) -> None:
        super().close()
        while self._taken:
            memory = self._taken.pop()
            self._free.setdefault(memory.numel(), []).append(memory)


def place_of(device: torch.device) -> Place:
    return GpuPlace(device) if device.type == "cuda" else CpuPlace()
