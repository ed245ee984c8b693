"""Ways of `amoeba.kernels.hopper.product` that are there by name, until a measurement says which to take.

    AMOEBA_PRODUCT_WAYS=halves,rounds amoeba bench --shape qwen3_30b --ours triton --sustained 4      # for one process

Where power limits a GPU, a product's time is its joules. These spare instructions, idle cycles, and products of rows
that an expert does not have. The bits are the same in each (`brisk`: see `amoeba.kernels.activation.brisk_sigmoid`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from amoeba.errors import bad_value

VARIABLE = "AMOEBA_PRODUCT_WAYS"


class Ways(NamedTuple):
    """
    halves:   where an expert's last tile has 64 rows or fewer, the warpgroup of the other 64 multiplies nothing.
    rounds:   where a tile is whole turns of the ring of stages (a depth of 256, 512, ...), each stage has code of its
              own: which stage it is and where its rows lie need not be computed.
    lag:      with `rounds`, the second warpgroup stays a stage behind the first, so that one of them may multiply while
              the other stores its sums.
    quarters: sums leave through two buffers in turns, and the activation is computed while the first ones leave.
    brisk:    a sigmoid of five instructions.
    """

    halves: bool = False
    rounds: bool = False
    lag: bool = False
    quarters: bool = False
    brisk: bool = False


def ways_named(names: str, what: str = VARIABLE) -> Ways:
    """names: parted by commas; none for the usual way."""
    wanted = [name for name in names.split(",") if name]
    if any(name not in Ways._fields for name in wanted):
        raise bad_value(what, f"some of {', '.join(Ways._fields)}", repr(names), "leave it out for the usual way")
    return Ways(**dict.fromkeys(wanted, True))


def chosen_constants(whole_turns: bool) -> dict[str, bool]:
    """Of the kernel's plan, by the environment. whole_turns: of the ring, a tile's depth."""
    return _constants(os.environ.get(VARIABLE, ""), whole_turns)


@cache
def _constants(names: str, whole_turns: bool) -> dict[str, bool]:
    ways = ways_named(names)
    rounds = ways.rounds and whole_turns
    taken = ways._replace(rounds=rounds, lag=ways.lag and rounds)
    return {name.upper(): value for name, value in taken._asdict().items()}
