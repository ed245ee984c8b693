"""Bytes: what lives from forward to backward, and the most that a step has allocated at any time.

    with watch_saved() as saved:
        y_TH = run()
    saved.bytes_without(parameters)
    peak = peak_bytes(step, torch.device("cpu"))    # above what was allocated before

What a kernel takes from the system behind torch's allocator is seen by neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SavedTensors:
    """The tensors that autograd has saved; they are held, so that no address is given out twice."""

    tensors: list[Tensor] = field(default_factory=list)

    def bytes_without(self, others: Iterable[Tensor]) -> int:
        """Bytes of the storages, each counted once and as a whole, that do not belong to `others`."""
        excluded = _storages(others)
        return sum(size for address, size in _storages(self.tensors).items() if address not in excluded)


@contextmanager
def watch_saved() -> Iterator[SavedTensors]:
    """Sees what autograd saves for the backward of all that runs inside."""
    saved = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        saved.tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that was allocated on the device during step(), above what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _peak_from_events(step)


def _peak_from_events(step: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler writes a line to stderr at start and stop
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        live += change
        peak = max(peak, live)
    return peak
