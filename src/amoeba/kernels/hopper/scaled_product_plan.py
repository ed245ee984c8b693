"""What is known of Hopper's products in e4m3 when they are compiled: tiles, what is written, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from amoeba.kernels.hopper.order import IN_GROUPS

E4M3 = torch.float8_e4m3fn
# A stage holds so much of the depth, and so many columns share a scale.
BLOCK = 128
# A tile.
BLOCK_M, BLOCK_N = 128, 256
# Row tiles that sweep the columns together, so that their rows and the weights stay in the second-level cache.
GROUP_M = 8
ROWS, HALF = (BLOCK_M, BLOCK), (BLOCK_M // 2, BLOCK)
QUARTER = (BLOCK_M // 2, BLOCK // 2)
# Stages of the ring where scales come along with rows, and so much of the depth is one turn of it.
ALONG_STAGES = 4
TURN = ALONG_STAGES * BLOCK


class Ways(NamedTuple):
    """How the same bits are computed; `scaled_product.WAYS` has names for some.

    ahead:     a tile's place, its rows' tokens and its first scales are asked for while the tile before it is stored.
    behind:    gathered rows are made visible to the matrix unit by the threads that gather them, so many stages later.
    skips:     a warpgroup that has no rows of a tile multiplies nothing.
    alternate: h in bf16 leaves through two buffers in turns that take the room of one.
    under:     halves of a tile leave under the products that come next, see `scaled_product_under`. `ahead` and `skips`
               are nothing to it.
    in_turns:  warpgroups begin their products one after the other, see `scaled_product_turns`. With `under`.
    along:     scales of gathered rows come with their codes where a tile is whole turns of the ring of stages, see
               `scaled_product_along`. It takes turns; `ahead`, `behind`, `skips` and `under` are nothing to it.
    brisk:     silu by instructions that flush subnormal numbers: 0 for gates below -87 (where it is 1e-36 at most).
    """

    ahead: bool = False
    behind: int = 0
    skips: bool = False
    alternate: bool = False
    brisk: bool = False
    under: bool = False
    in_turns: bool = False
    along: bool = False


PLAIN = Ways()


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    ACTIVATE: bool  # write act(product) in e4m3 instead of the product
    GATHER: bool  # rows are those of tokens, found by order // top_k, instead of sorted ones
    BIAS: bool
    KEEP: bool  # write the product in bf16 as well as what its activation gives
    CODED: bool = False  # what KEEP writes is in e4m3
    CUT: bool = False  # the last block of a width is half full
    KIND: str = "relu"
    GATED: bool = False
    ALPHA: float = 1.0
    CLAMP: bool = False
    LIMIT: float = 0.0
    UP_SHIFT: float = 0.0
    WAYS: Ways = PLAIN
    ORDER: int = IN_GROUPS  # of tiles, see `amoeba.kernels.hopper.order`

    @property
    def AHEAD(self) -> bool:
        return self.WAYS.ahead

    @property
    def BEHIND(self) -> int:
        """Of the stages that the producer has begun, the last ones that it has not made visible; 0: consumers do."""
        return self.WAYS.behind if self.GATHER and not self.ALONG else 0

    @property
    def ALONG(self) -> bool:
        """Not for an activation without gates."""
        return self.WAYS.along and self.GATHER and (self.PAIRED or not self.ACTIVATE)

    @property
    def UNDER(self) -> bool:
        """Where it has been faster, or nearly: not with h to write. Where two halves are activated one by one,
        their sums do not all find registers."""
        return self.WAYS.under and (self.PAIRED or not self.ACTIVATE) and not self.KEEP

    @property
    def IN_TURNS(self) -> bool:
        return self.ALONG or (self.UNDER and self.WAYS.in_turns)

    @property
    def EARLY(self) -> bool:
        """Of plans that are ALONG: the next tile's first product is begun before the end of this one has left. While h
        leaves in bf16 there are no registers for it."""
        return not self.KEEP or self.CODED

    @property
    def SKIPS(self) -> bool:
        return self.WAYS.skips

    @property
    def ALTERNATE(self) -> bool:
        return self.WAYS.alternate and self.KEEP and not self.CODED

    @property
    def BRISK(self) -> bool:
        return self.WAYS.brisk and self.KIND == "silu"

    @property
    def FORM(self) -> str:
        """The activation, as `amoeba.kernels.activation` names it."""
        return "brisk_silu" if self.BRISK else self.KIND

    @property
    def PAIRED(self) -> bool:
        """A tile holds columns of the gate and the same columns of up."""
        return self.ACTIVATE and self.GATED

    @property
    def SHIFTED(self) -> bool:
        """A tile's columns of up may lie in two blocks."""
        return self.PAIRED and self.CUT

    @property
    def COLUMNS(self) -> int:
        """Columns of the result that a tile holds."""
        return BLOCK if self.PAIRED else BLOCK_N

    @property
    def COPIED(self) -> tuple[int, int]:
        """As much of a matrix as is copied at a time: gate and up come one after the other."""
        return self.COLUMNS, BLOCK

    @property
    def BUFFERS(self) -> int:
        """Of the epilogue, for each warpgroup: with two, one is filled while the copy engine reads the other. It is
        worth a stage where nothing but bf16 is written: 3 % of down and dx, while up loses 8 % (H200, 2026-11-16)."""
        return 1 if self.ACTIVATE and not self.ALTERNATE else 2

    @property
    def STAGES(self) -> int:
        """They take up to 224 KB of the 227, together with the buffers."""
        return ALONG_STAGES if self.ACTIVATE or self.ALONG else 3

    @property
    def REGISTERS(self) -> list[int]:
        """Of the second warpgroup's threads and of those that fill stages, so that neither puts a step's sums aside."""
        return [224, 56] if self.ACTIVATE or self.AHEAD or self.UNDER else [216, 72]

    @property
    def STAGED(self) -> tuple[int, int]:
        """As much of the result as leaves at a time."""
        return QUARTER if self.ALONG and not self.ACTIVATE else HALF
