"""Turns the two budgets into slots: on the GPU, next to everything but the experts, and in pinned memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from amoeba.core.errors import bad_value
from amoeba.cpu.pointers import CPU
from amoeba.stream.cache.budget import least_budget, share_budget
from amoeba.stream.cache.trace import LayerShape
from amoeba.stream.cpu.memory import READS
from amoeba.stream.gpu.reads import PASSING
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.sizes import parse_size, show_size
from amoeba.stream.store.store import Store
from amoeba.system.machine import available_memory, total_memory

# Of the memory that is free, `auto` takes this part: the rest is for activations, keys and values, and other programs.
AUTO_SHARE = 0.7


class Budgets(NamedTuple):
    vram_bytes: int
    ram_bytes: int
    slots: list[int]
    host_slots: list[int]


def share(store: Store, rest: int, vram: str | int, ram: str | int, device: torch.device, reserved: int = 0) -> Budgets:
    """rest: bytes of everything but the experts, also on the GPU. reserved: bytes needed there that no budget
    includes."""
    on_gpu = [LayerShape(entry.experts, 1, LayerTiers.slot_bytes(entry)) for entry in store.layers]
    once = [1] * len(on_gpu)
    least, all_of_it = rest + least_budget(on_gpu, once), rest + _bytes(on_gpu)
    vram_bytes = _budget("vram", vram, all_of_it, [available_memory(device)], reserved)
    if vram_bytes < least:
        needed = f"{show_size(rest)} for everything but the experts, {show_size(least - rest)} for one expert per layer"
        expected = f"at least {show_size(least)} ({needed})"
        raise bad_value("vram", expected, show_size(vram_bytes), f"raise it to {show_size(least)} or more")
    slots = share_budget(vram_bytes - rest, on_gpu, least=once, name="vram")
    _check_free("vram", rest + least_budget(on_gpu, slots), available_memory(device), reserved)

    # nothing below a layer that is on the GPU as a whole
    on_host = [
        LayerShape(entry.experts if count < entry.experts else 0, 1, entry.expert_bytes)
        for entry, count in zip(store.layers, slots, strict=True)
    ]
    passing = store.scratch_bytes(READS) + PASSING * max(shape.expert_bytes for shape in on_host)
    # as many as there are experts at most: what is on the GPU need then not be written back
    ram_bytes = _budget("ram", ram, passing + _bytes(on_host), [available_memory(CPU), total_memory()])
    if ram_bytes < passing:
        expected = f"at least {show_size(passing)}, through which experts are read"
        raise bad_value("ram", expected, show_size(ram_bytes), "raise it, or leave it out")
    host_slots = share_budget(ram_bytes - passing, on_host, least=[0] * len(on_host), name="ram")
    _check_free("ram", passing + least_budget(on_host, host_slots), available_memory(CPU))
    return Budgets(vram_bytes, ram_bytes, slots, host_slots)


def _bytes(shapes: list[LayerShape]) -> int:
    return sum(shape.experts * shape.expert_bytes for shape in shapes)


def _check_free(name: str, needed: int, free: int | None, reserved: int = 0) -> None:
    """Before it is allocated: pinned memory cannot be swapped out."""
    if free is not None and needed + reserved > free:
        got = f"{show_size(needed)} to allocate"
        if reserved:
            got += f", with {show_size(reserved)} needed for training"
        raise bad_value(name, f"no more than the {show_size(free)} that are free", got, "lower it, or free memory")


def _budget(name: str, asked: str | int, all_of_it: int, free: list[int | None], reserved: int = 0) -> int:
    if asked != "auto":
        return parse_size(name, asked) if isinstance(asked, str) else asked
    return min([all_of_it, *(int(AUTO_SHARE * max(0, each - reserved)) for each in free if each is not None)])
