"""Steps back to back, as in training: no rests, no flushed caches, long enough that a GPU reaches its power limit.

    found = sustain_in_turns({"a": step_a, "b": step_b}, device, seconds=4, meter=open_meter(device))
    found["a"].ms, found["a"].sm_mhz, found["a"].joules_per_step

A GPU that rests between steps runs at clocks that it cannot hold: figures with rests (`timing`) and these do not
compare. Each candidate has two turns, the second in reverse order. The host stays some steps ahead of the GPU, and
reads the meter meanwhile, in the same thread.

    meter = open_meter(torch.device("cuda"))     # MeterError, in one sentence, where there is none
    meter.sm_mhz(), meter.watts(), meter.joules()

NVML comes with every driver as libnvidia-ml.so.1, so that it is called through ctypes and no package is needed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from amoeba.bench.timing import Step

TURNS = 2
# Before the first turn of all, when the GPU is cool, and before the later ones, which find it at its limit already.
FIRST_WARM_SECONDS, WARM_SECONDS = 3.0, 1.0
LEAST_STEPS = 2

_LOOK_EVERY_SECONDS = 0.01  # the counter of energy moves a few times less often
_AHEAD_SECONDS = 0.05  # of the GPU's work that is launched before it is waited for
_MOST_AHEAD = 64

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS, _NOT_SUPPORTED = 0, 3
_CLOCK_OF_MULTIPROCESSORS = 1


class MeterError(RuntimeError):
    """Why nothing can be read, to follow a colon."""


class Meter(Protocol):
    power_limit_watts: float

    def sm_mhz(self) -> float: ...

    def watts(self) -> float: ...

    def joules(self) -> float | None:
        """A counter that only grows, every few tens of milliseconds; None on a GPU that has none."""


class NvmlMeter:
    """One GPU. The library stays open until the process ends: there is nothing to give back."""

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        _call(library, "nvmlInit_v2")
        self._gpu = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._gpu))
        self.power_limit_watts = self._number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint()) / 1e3
        try:
            self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
            self._counts_energy = True
        except NotSupported:
            self._counts_energy = False

    def sm_mhz(self) -> float:
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(), _CLOCK_OF_MULTIPROCESSORS)

    def watts(self) -> float:
        return self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint()) / 1e3

    def joules(self) -> float | None:
        if not self._counts_energy:
            return None
        return self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3

    def _number(self, function: str, into: ctypes.c_uint | ctypes.c_ulonglong, *arguments: int) -> float:
        _call(self._library, function, self._gpu, *arguments, ctypes.byref(into))
        return float(into.value)


class NotSupported(MeterError):
    pass


def open_meter(device: torch.device) -> Meter:
    if device.type != "cuda":
        raise MeterError(f"the device is {device.type}, and NVML measures NVIDIA's GPUs")
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise MeterError(f"the driver's library {LIBRARY} cannot be loaded ({error})") from error
    # by its UUID: CUDA_VISIBLE_DEVICES renumbers torch's GPUs and not NVML's
    return NvmlMeter(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _call(library: Any, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status != _SUCCESS:
        library.nvmlErrorString.restype = ctypes.c_char_p
        said = library.nvmlErrorString(status) or b"no reason"
        kind = NotSupported if status == _NOT_SUPPORTED else MeterError
        raise kind(f"{function} says {said.decode(errors='replace')!r}")


@dataclass(frozen=True)
class Sustained:
    """ms: of a step, the whole time over their number; forward_ms and backward_ms: medians of its parts."""

    seconds: float
    steps: int
    ms: float
    forward_ms: float
    backward_ms: float | None
    sm_mhz: float
    watts: float
    joules_per_step: float
    power_limit_watts: float


@dataclass
class _Readings:
    meter: Meter
    mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    # (time, joules) where the counter was seen to move: only there is it known what it stands for
    moves: list[tuple[float, float]] = field(default_factory=list)
    _last_look: float = -math.inf
    _last_joules: float | None = None

    def look(self) -> None:
        now = time.perf_counter()
        if now - self._last_look < _LOOK_EVERY_SECONDS:
            return
        self._last_look = now
        joules = self.meter.joules()
        if self._last_joules is not None and joules is not None and joules != self._last_joules:
            self.moves.append((time.perf_counter(), joules))
        self._last_joules = joules
        self.mhz.append(self.meter.sm_mhz())
        self.watts.append(self.meter.watts())

    def mean_watts(self) -> float:
        """By the counter of energy; where it has hardly moved, or is none, by the watts that were read."""
        if len(self.moves) < 2:
            return statistics.fmean(self.watts)
        (began, before), (ended, after) = self.moves[0], self.moves[-1]
        return (after - before) / (ended - began)


class _Turn(NamedTuple):
    parts_ms: list[tuple[float, ...]]
    total_ms: float
    mhz: list[float]
    watts: float


def sustain_in_turns(
    steps: dict[str, Step], device: torch.device, seconds: float, meter: Meter
) -> dict[str, Sustained]:
    """Each step runs for `seconds` in all, after warming up. Steps are expected to have run before."""
    turns: dict[str, list[_Turn]] = {name: [] for name in steps}
    warm = FIRST_WARM_SECONDS
    for turn in range(TURNS):
        for name in reversed(steps) if turn % 2 else steps:
            turns[name].append(_turn(steps[name], device, warm, seconds / TURNS, meter))
            warm = WARM_SECONDS
    return {name: _joined(found, meter) for name, found in turns.items()}


def _joined(turns: list[_Turn], meter: Meter) -> Sustained:
    parts = list(zip(*(parts for turn in turns for parts in turn.parts_ms), strict=True))
    total_ms, count = sum(turn.total_ms for turn in turns), len(parts[0])
    joules = sum(turn.watts * turn.total_ms / 1e3 for turn in turns)
    return Sustained(
        seconds=total_ms / 1e3,
        steps=count,
        ms=total_ms / count,
        forward_ms=statistics.median(parts[0]),
        backward_ms=statistics.median(parts[1]) if len(parts) > 1 else None,
        sm_mhz=statistics.fmean(itertools.chain.from_iterable(turn.mhz for turn in turns)),
        watts=joules / total_ms * 1e3,
        joules_per_step=joules / count,
        power_limit_watts=meter.power_limit_watts,
    )


def _turn(step: Step, device: torch.device, warm_seconds: float, seconds: float, meter: Meter) -> _Turn:
    """Warming up goes over into what is measured without a pause."""
    new_mark = marker(device)
    readings = _Readings(meter)
    launched: deque[list[Any]] = deque()
    measured: list[list[Any]] = []
    began, finished = time.perf_counter(), 0
    while True:
        passed = time.perf_counter() - began
        if passed >= warm_seconds + seconds and len(measured) >= LEAST_STEPS:
            break
        marks: list[Any] = []
        step(lambda marks=marks: marks.append(new_mark()))  # type: ignore[misc]
        launched.append(marks)
        if passed >= warm_seconds:
            measured.append(marks)
            readings.look()
        while len(launched) > _ahead(passed, finished):
            launched.popleft()[-1].synchronize()
            finished += 1
    measured[-1][-1].synchronize()
    parts = [tuple(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) for marks in measured]
    return _Turn(parts, measured[0][0].elapsed_time(measured[-1][-1]), readings.mhz, readings.mean_watts())


def _ahead(passed: float, finished: int) -> int:
    """Steps that may be under way: the host reads the meter while the GPU works on them."""
    return 1 if not finished else min(_MOST_AHEAD, 1 + math.ceil(_AHEAD_SECONDS * finished / passed))


def marker(device: torch.device) -> Callable[[], Any]:
    """Makes marks with `synchronize` and `elapsed_time`: events on the stream of a GPU, else moments on the host."""
    if device.type != "cuda":
        return _HostMark

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return record


class _HostMark:
    """A moment on the host, with the methods of an event on a stream."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostMark) -> float:
        return (later._at - self._at) * 1e3
