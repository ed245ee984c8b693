"""Where the ranks of a group are: on which machines, and on which GPUs.

    why_not_between(ranks, device)      # why kernels of one rank cannot write to the memory of another
    shares_its_gpu(ranks, device)       # whether other ranks compute on the same GPU

The ranks tell each other once, through the group's store; each waits for the others' word.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from amoeba.parallel.ranks import Ranks

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def why_not_between(ranks: Ranks, device: torch.device) -> str | None:
    return _why_not(_places(ranks, device), device)


@functools.lru_cache(maxsize=64)
def shares_its_gpu(ranks: Ranks, device: torch.device) -> bool:
    """With MPS their kernels run at the same time. False for a rank with a GPU, or an instance of one, to itself."""
    if device.type != "cuda" or ranks.count == 1:
        return False
    places = _places(ranks, device)
    return places.count(places[ranks.rank]) > 1


def _places(ranks: Ranks, device: torch.device) -> list[str]:
    """Of each rank its machine, by number and by name, and its device."""
    unit = "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else platform.node()
    return ranks.post(f"place on {device.type}", f"{machine} {platform.node()} {unit}")


def _why_not(places: Sequence[str], device: torch.device) -> str | None:
    machine, node, _ = places[0].split(" ")
    for rank, place in enumerate(places):
        other, other_node, unit = place.split(" ")
        if other != machine:
            return f"needs all ranks on one machine; rank 0 is on {node}, rank {rank} on {other_node}"
        if unit and not _reaches(device, unit):
            return f"needs GPUs that can access each other's memory; {device} and that of rank {rank} cannot"
    return None


def _reaches(device: torch.device, unit: str) -> bool:
    """Whether the GPU can reach that one's memory, as far as this process sees it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == unit:
            own = torch.cuda.current_device() if device.index is None else device.index
            return index == own or torch.cuda.can_device_access_peer(own, index)
    return True
