"""What a process remembers of earlier choices, forgotten."""

from __future__ import annotations

from amoeba import tuned
from amoeba.kernels import choice, decode
from amoeba.kernels.attention.tile import tile_of


def forget() -> None:
    """As if the process had just begun."""
    for each in (tuned.entries, tuned._warn_once, choice._configuration_on, tile_of):
        each.cache_clear()
    decode._plans.clear()
