"""Between a GPU and the CPU, through pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.cpu.pointers import CPU


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, when the device has come so far; those that are there already as they are."""
    staged, events = zip(*(_stage(tensor) for tensor in tensors), strict=True)
    for event in events:
        if event is not None:
            event.synchronize()
    return list(staged)


def _stage(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A pinned copy of a GPU's tensor and the event after which it may be read; a CPU's tensor is itself."""
    if tensor.device.type != "cuda":
        return tensor, None
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU, pin_memory=True)
    copied.copy_(tensor.detach(), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return copied, event


def deliver(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In that dtype on that device; a GPU gets it in its own time, while the host goes on."""
    if device.type != "cuda":
        return tensor.to(dtype)
    pinned = torch.empty(tensor.shape, dtype=dtype, device=CPU, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)
