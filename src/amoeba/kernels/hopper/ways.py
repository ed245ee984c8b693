"""Ways of `amoeba.kernels.hopper.product` and `amoeba.kernels.hopper.gradient` to the same bits.

    AMOEBA_PRODUCT_WAYS=rounds amoeba bench --shape qwen3_30b --ours triton --sustained 4      # others, for one process
    AMOEBA_GRADIENT_WAYS=rounds,place amoeba bench ...                                         # of weight gradients

Where power limits a GPU, a product's time is its joules, and these spare instructions. On an H200, back to back,
`rounds,brisk` takes 5 % less time and 5 to 8 % fewer joules for the up projection of qwen3_30b, olmoe and sonic_b, and
nothing to 7 % less time for the down projection (docs/log.md, 2026-11-16). The bits are the same in each (`brisk`: what
is below 2^-126 is zero, see `amoeba.kernels.activation`). `place`, `carry`, `hold` and those of the gradients have not
been timed yet and are taken by name only.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from amoeba.errors import bad_value

VARIABLE = "AMOEBA_PRODUCT_WAYS"
TAKEN = "rounds,brisk"
# Of the weights' gradients.
GRADIENT_VARIABLE = "AMOEBA_GRADIENT_WAYS"
GRADIENT_TAKEN = ""


class Ways(NamedTuple):
    """
    rounds:   where a tile is whole turns of the ring of stages (a depth of 256, 512, ...), each stage has code of its
              own: which stage it is and where its rows lie need not be computed.
    quarters: sums leave through two buffers in turns, and the activation is computed while the first ones leave.
    brisk:    a sigmoid of five instructions.
    place:    with rounds: where a tile lies is found while its products run, not before the first one.
    carry:    with rounds and without quarters, where nothing is activated: half of a tile's sums leave while the next
              tile's products run; its place is found there as well.
    hold:     with carry, where rows are not gathered (that takes the registers): all of its sums do.
    """

    rounds: bool = False
    quarters: bool = False
    brisk: bool = False
    place: bool = False
    carry: bool = False
    hold: bool = False


class GradientWays(NamedTuple):
    """
    rounds:   where H is a multiple of 128: as above, see `amoeba.kernels.hopper.gradient_rounds`.
    quarters: as above.
    place:    with rounds: where the next tile lies is found while one of this tile's products runs.
    carry:    with rounds and without quarters: half of a tile's sums leave while the next tile is computed.
    """

    rounds: bool = False
    quarters: bool = False
    place: bool = False
    carry: bool = False

    @property
    def BUFFERS(self) -> int:
        """Of a warpgroup's sums on their way to memory."""
        return 2 if self.quarters else 1

    @property
    def REGISTERS(self) -> list[int]:
        """Of a thread that multiplies, and of one that gathers."""
        if self.carry:
            return [216, 72]
        return [200, 104] if self.rounds else [208, 88]

    @property
    def ROUNDS(self) -> bool:
        return self.rounds

    @property
    def PLACE(self) -> bool:
        return self.place

    @property
    def CARRY(self) -> bool:
        return self.carry


def ways_named(names: str, what: str = VARIABLE) -> Ways:
    """names: parted by commas; none for the plain way."""
    return Ways(**_named(names, Ways._fields, what, TAKEN))


def _named(names: str, possible: tuple[str, ...], what: str, usual: str) -> dict[str, bool]:
    wanted = [name for name in names.split(",") if name]
    if any(name not in possible for name in wanted):
        raise bad_value(what, f"some of {', '.join(possible)}", repr(names), f"leave it out for {usual or 'none'}")
    return dict.fromkeys(wanted, True)


def chosen_constants(whole_turns: bool) -> dict[str, bool]:
    """Of the kernel's plan. whole_turns: of the ring, a tile's depth."""
    return _constants(os.environ.get(VARIABLE, TAKEN), whole_turns)


@cache
def _constants(names: str, whole_turns: bool) -> dict[str, bool]:
    ways = ways_named(names)
    rounds = ways.rounds and whole_turns
    carry = ways.carry and rounds and not ways.quarters
    taken = ways._replace(rounds=rounds, place=ways.place and rounds, carry=carry, hold=ways.hold and carry)
    return {name.upper(): value for name, value in taken._asdict().items()}


def gradient_ways(whole_tiles: bool) -> GradientWays:
    """whole_tiles: H is a multiple of a tile's."""
    return _gradient_ways(os.environ.get(GRADIENT_VARIABLE, GRADIENT_TAKEN), whole_tiles)


@cache
def _gradient_ways(names: str, whole_tiles: bool) -> GradientWays:
    ways = GradientWays(**_named(names, GradientWays._fields, GRADIENT_VARIABLE, GRADIENT_TAKEN))
    rounds = ways.rounds and whole_tiles
    return ways._replace(rounds=rounds, place=ways.place and rounds, carry=ways.carry and rounds and not ways.quarters)
