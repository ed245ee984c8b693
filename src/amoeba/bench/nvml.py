"""What an NVIDIA GPU draws while it works: clocks, watts and joules, from the driver's own library and nothing else.

    meter = open_meter(torch.device("cuda"))     # MeterError, in one sentence, where there is none
    meter.sm_mhz(), meter.watts(), meter.joules()

NVML comes with every driver as libnvidia-ml.so.1, so that it is called through ctypes and no package is needed.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

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
