"""Ways of `amoeba.kernels.hopper.product` to the same bits.

    AMOEBA_PRODUCT_WAYS=rounds amoeba bench --shape qwen3_30b --ours triton --sustained 4      # others, for one process

Where power limits a GPU, a product's time is its joules, and these spare instructions. On an H200, back to back,
`rounds,brisk` takes 5 % less time and 5 to 8 % fewer joules for the up projection of qwen3_30b, olmoe and sonic_b, and
nothing to 7 % less time for the down projection (docs/log.md, 2026-11-16). The bits are the same in each (`brisk`: what
is below 2^-126 is zero, see `amoeba.kernels.activation`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from amoeba.errors import bad_value

VARIABLE = "AMOEBA_PRODUCT_WAYS"
TAKEN = "rounds,brisk"


class Ways(NamedTuple):
    """
    rounds:   where a tile is whole turns of the ring of stages (a depth of 256, 512, ...), each stage has code of its
              own: which stage it is and where its rows lie need not be computed.
    quarters: sums leave through two buffers in turns, and the activation is computed while the first ones leave.
    brisk:    a sigmoid of five instructions.
    """

    rounds: bool = False
    quarters: bool = False
    brisk: bool = False


def ways_named(names: str, what: str = VARIABLE) -> Ways:
    """names: parted by commas; none for the plain way."""
    wanted = [name for name in names.split(",") if name]
    if any(name not in Ways._fields for name in wanted):
        raise bad_value(what, f"some of {', '.join(Ways._fields)}", repr(names), f"leave it out for {TAKEN}")
    return Ways(**dict.fromkeys(wanted, True))


def chosen_constants(whole_turns: bool) -> dict[str, bool]:
    """Of the kernel's plan. whole_turns: of the ring, a tile's depth."""
    return _constants(os.environ.get(VARIABLE, TAKEN), whole_turns)


@cache
def _constants(names: str, whole_turns: bool) -> dict[str, bool]:
    ways = ways_named(names)
    taken = ways._replace(rounds=ways.rounds and whole_turns)
    return {name.upper(): value for name, value in taken._asdict().items()}
