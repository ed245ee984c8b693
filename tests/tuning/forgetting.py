"""What a process remembers of earlier choices, forgotten."""

from amoeba.kernels import decode, tile_sizes
from amoeba.kernels.attention.tile import tile_of
from amoeba.system import tuned


def forget() -> None:
    """As if the process had just begun."""
    for each in (tuned.entries, tuned._warn_once, tile_sizes._configuration_on, tile_of):
        each.cache_clear()
    decode._plans.clear()
