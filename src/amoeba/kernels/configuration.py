"""Sizes of the tiles of a product over sorted rows: our tables, by GPU, dtype, rows per expert and length.

    chosen = configuration("product", rows=N, experts=E, reduction=H, columns=J, dtype=x_TH.dtype, capability=(9, 0))

`amoeba.kernels.choice` has what the kernels ask: what was measured on the user's own GPU comes before these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from amoeba.core.errors import bad_value
from amoeba.kernels.launch import next_power_of_2

Role = Literal["product", "up", "down_backward", "weight_gradient"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Configuration:
    """Sizes of one tile and how it is computed.

    block_m, block_n: rows and columns of the accumulator; in a gated up projection, half of the columns are gates.
    block_k:          length of one step of the reduction.
    group_m:          so many tiles of rows sweep the columns together, so that they meet in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# (rows per expert, length of the reduction) up to which a configuration serves -> configuration; the first that fits is
# taken. Chosen by what the compiled kernels need: shared memory, and registers without spills. Speed not measured yet.
# A short reduction leaves a program little to hide its beginning and its end behind: smaller tiles there, so that two
# programs share a multiprocessor.
_ANY = 1 << 62
_Table = tuple[tuple[int, int, Configuration], ...]


def _by_role(product: _Table, down_backward: _Table, weight_gradient: _Table) -> dict[Role, _Table]:
    return {
        "product": product,
        "up": product,
        "down_backward": down_backward,
        "weight_gradient": weight_gradient,
    }


_HALF: dict[str, dict[Role, _Table]] = {
    "sm90": _by_role(  # 227 KB of shared memory; 64 rows is the least that its matrix instruction takes
        product=(
            (16, _ANY, Configuration(16, 128, 128, 1, 4, 4)),
            (32, _ANY, Configuration(32, 128, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 256, 64, 8, 4, 4)),
            (_ANY, 512, Configuration(128, 128, 64, 8, 4, 3)),
            (_ANY, _ANY, Configuration(128, 256, 64, 8, 8, 4)),
        ),
        down_backward=(
            (16, _ANY, Configuration(16, 128, 64, 1, 4, 4)),
            (32, _ANY, Configuration(32, 128, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 128, 64, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 256, 64, 8, 8, 4)),
        ),
        weight_gradient=(
            (32, _ANY, Configuration(128, 128, 32, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 256, 64, 8, 8, 4)),
        ),
    ),
    "sm80": _by_role(  # 163 KB of shared memory
        product=(
            (16, _ANY, Configuration(16, 128, 128, 1, 4, 4)),
            (32, _ANY, Configuration(32, 128, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 128, 64, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 128, 32, 8, 4, 4)),
        ),
        down_backward=(
            (16, _ANY, Configuration(16, 128, 64, 1, 4, 4)),
            (32, _ANY, Configuration(32, 128, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 128, 64, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 128, 32, 8, 8, 4)),
        ),
        weight_gradient=((_ANY, _ANY, Configuration(128, 128, 32, 8, 4, 4)),),
    ),
    "sm86": _by_role(  # 99 KB of shared memory: the graphics cards
        product=(
            (16, _ANY, Configuration(16, 64, 64, 1, 4, 4)),
            (32, _ANY, Configuration(32, 64, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 128, 32, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 128, 32, 8, 4, 4)),
        ),
        down_backward=(
            (16, _ANY, Configuration(16, 64, 64, 1, 4, 4)),
            (32, _ANY, Configuration(32, 64, 64, 1, 4, 4)),
            (192, _ANY, Configuration(64, 128, 32, 8, 4, 4)),
            (_ANY, _ANY, Configuration(128, 128, 32, 8, 8, 4)),
        ),
        weight_gradient=((_ANY, _ANY, Configuration(128, 128, 32, 8, 4, 3)),),
    ),
}
# One modest table for every GPU. fp32 in full precision runs outside the matrix units, from registers; and rows that
# are no whole number of 16-byte words come in through registers too.
_MODEST_ROWS: _Table = (
    (16, _ANY, Configuration(16, 64, 32, 1, 4, 3)),
    (_ANY, _ANY, Configuration(64, 64, 32, 8, 4, 3)),
)
_MODEST = _by_role(
    product=_MODEST_ROWS,
    down_backward=_MODEST_ROWS,
    weight_gradient=((_ANY, _ANY, Configuration(64, 64, 32, 8, 4, 3)),),
)
_SMALLEST_BLOCK = 16  # of tl.dot


def configuration(
    role: Role,
    *,
    rows: int,
    experts: int,
    reduction: int,
    columns: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> Configuration:
    """Tile sizes for `rows` sorted rows over `experts`: how many rows an expert has, only the device knows.

    reduction and columns are those of one expert's product; for the weight gradient, whose reduction runs over the
    rows, they are the two sizes of an expert's matrix. capability None stands for Triton's interpreter.
    """
    if dtype not in DTYPES:
        raise bad_value("dtype", "bfloat16, float16 or float32", dtype, "convert the layer to one of these")
    modest = dtype == torch.float32 or not is_aligned(reduction, columns, dtype)
    table = (_MODEST if modest else _HALF[_architecture(capability)])[role]
    per_expert = -(-rows // experts)
    chosen = next(entry for most_rows, longest, entry in table if per_expert <= most_rows and reduction <= longest)
    return clipped(chosen, role, reduction, columns)


def clipped(chosen: Configuration, role: Role, reduction: int, columns: int) -> Configuration:
    """The same with no block larger than what it covers."""
    block_n = min(chosen.block_n, _block(columns))
    if role == "weight_gradient":
        return replace(chosen, block_m=min(chosen.block_m, _block(reduction)), block_n=block_n)
    return replace(chosen, block_n=block_n, block_k=min(chosen.block_k, _block(reduction)))


def with_addend(chosen: Configuration) -> Configuration:
    """The same for a product that adds LoRA's part in a second, shallower one.

    Where one warpgroup multiplies two tiles of 64 rows, ptxas 12.8 (of Triton 3.6) computes the address of that part's
    operands from a register that does not hold it: wrong numbers, reads beyond shared memory. Two warpgroups have one
    tile each.
    """
    return replace(chosen, num_warps=max(chosen.num_warps, chosen.block_m // 16))


def is_aligned(reduction: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether rows are a whole number of 16-byte words: others come in through registers."""
    return reduction * dtype.itemsize % 16 == 0 and columns * dtype.itemsize % 16 == 0


def _architecture(capability: tuple[int, int] | None) -> str:
    if capability is None or capability in ((9, 0), (10, 0), (10, 3)):
        return "sm90"
    return "sm80" if capability in ((8, 0), (8, 7), (11, 0)) else "sm86"


def _block(size: int) -> int:
    return max(_SMALLEST_BLOCK, next_power_of_2(size))
