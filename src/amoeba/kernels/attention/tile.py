"""Tiles of the attention kernels, by kernel, GPU and size of a head.

tile = tile_of(device, "forward", 128, torch.bfloat16)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch

from amoeba.kernels.tile_sizes import capability_of, shared_bytes
from amoeba.system import tuned

Kernel = Literal["forward", "query_gradient", "key_gradient"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
HEAD_SIZES = 64, 128


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and how it is computed."""

    BLOCK_M: int
    BLOCK_N: int
    warps: int
    stages: int

    def constants(self, **others: int) -> dict[str, int]:
        blocks = {"BLOCK_M": self.BLOCK_M, "BLOCK_N": self.BLOCK_N}
        return others | blocks | {"num_warps": self.warps, "num_stages": self.stages}


# Hopper: the best of five or six each on an H200, rows of 1024 and 4096 tokens (dev/log).
_HOPPER: dict[tuple[Kernel, int], Tile] = {
    ("forward", 64): Tile(64, 64, 4, 3),
    ("forward", 128): Tile(64, 64, 4, 3),
    ("query_gradient", 64): Tile(64, 64, 4, 3),
    ("query_gradient", 128): Tile(64, 64, 4, 2),
    ("key_gradient", 64): Tile(64, 64, 4, 3),
    ("key_gradient", 128): Tile(64, 64, 4, 2),
}
# Elsewhere matrix instructions take operands from registers: with Hopper's tiles a thread spills hundreds of bytes on
# sm86 and sm120, with these none (Triton 3.6). Speed not measured yet.
_AMPERE: dict[tuple[Kernel, int], Tile] = {
    ("forward", 64): Tile(128, 32, 8, 2),
    ("forward", 128): Tile(64, 32, 8, 2),
    ("query_gradient", 64): Tile(128, 32, 8, 2),
    ("query_gradient", 128): Tile(64, 32, 8, 2),
    ("key_gradient", 64): Tile(32, 64, 4, 2),
    ("key_gradient", 128): Tile(64, 32, 8, 2),
}
_BLACKWELL_CARDS = _AMPERE | {
    ("forward", 128): Tile(128, 32, 8, 2),
    ("query_gradient", 128): Tile(32, 64, 8, 2),
    ("key_gradient", 128): Tile(64, 16, 8, 2),
}

_LISTED = (
    Tile(64, 64, 4, 3),
    Tile(64, 64, 4, 2),
    Tile(64, 32, 4, 2),
    Tile(64, 32, 8, 2),
    Tile(128, 32, 8, 2),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(64, 128, 4, 2),
    Tile(32, 64, 4, 2),
    Tile(32, 64, 8, 2),
    Tile(64, 16, 8, 2),
)


@cache
def tile_of(device: torch.device, kernel: Kernel, size: int, dtype: torch.dtype) -> Tile:
    """What was measured on this GPU, else ours."""
    capability = capability_of(device)
    key, allowed = attention_key(kernel, size, dtype), lambda: candidates(kernel, size, dtype, capability)
    return tuned.choose(device, key, allowed) or _default(kernel, size, capability)


def candidates(kernel: Kernel, size: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> tuple[Tile, ...]:
    """Without repetitions, our own choice first."""
    found = (tile for tile in _LISTED if _shared(tile, size, dtype) <= shared_bytes(capability))
    return tuple(dict.fromkeys((_default(kernel, size, capability), *found)))


def attention_key(kernel: Kernel, size: int, dtype: torch.dtype) -> str:
    return tuned.key(f"attention_{kernel}", dtype, head=size)


def _default(kernel: Kernel, size: int, capability: tuple[int, int] | None) -> Tile:
    if capability is None or capability[0] in (9, 10):
        return _HOPPER[kernel, size]
    return (_AMPERE if capability[0] == 8 else _BLACKWELL_CARDS)[kernel, size]


def _shared(tile: Tile, size: int, dtype: torch.dtype) -> int:
    """At most: two tensors stay, two come in stages."""
    return 2 * (tile.BLOCK_M + tile.stages * tile.BLOCK_N) * size * dtype.itemsize
