"""Tiles of a product over sorted rows: how large they are, and which one a program computes.

N = T·K routed rows · E experts

Expert e owns the sorted rows offs_E[e-1] : offs_E[e]; only the device knows them. A grid of an upper bound of tiles is
launched, and a program that finds no rows exits. Expert e is given the slots from offs_E[e-1] // BLOCK_M + e on: that
is always enough for its rows (ceil((b - a)/m) <= b//m - a//m + 1), and so a program finds its expert by counting the
experts that begin at or before its slot. That costs one load of offs_E and one sum: no scan, no kernel ahead of it, no
tables. The price, at most E slots without rows, is the one that any upper bound pays. Where there are fewer rows than
that, as in decoding, every row gets a slot instead.

    chosen = configuration("product", rows=N, experts=E, reduction=H, columns=J, dtype=x_TH.dtype, capability=(9, 0))
    grid = (slots(N, E, chosen.block_m) * column_tiles,)
    expert, row, row_end, column_tile = find_tile(offs_E, ...)  # in the kernel
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl

from amoeba.errors import bad_value
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
    unaligned = reduction * dtype.itemsize % 16 != 0 or columns * dtype.itemsize % 16 != 0
    modest = unaligned or dtype == torch.float32
    table = (_MODEST if modest else _HALF[_architecture(capability)])[role]
    per_expert = -(-rows // experts)
    chosen = next(entry for most_rows, longest, entry in table if per_expert <= most_rows and reduction <= longest)
    block_n = min(chosen.block_n, _block(columns))
    if role == "weight_gradient":
        return replace(chosen, block_m=min(chosen.block_m, _block(reduction)), block_n=block_n)
    return replace(chosen, block_n=block_n, block_k=min(chosen.block_k, _block(reduction)))


def configuration_on(device: torch.device, role: Role, **problem) -> Configuration:
    """`configuration` for the GPU, or the interpreter, that `device` stands for."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return configuration(role, capability=capability, **problem)


def slots(rows: int, experts: int, block_m: int) -> int:
    """Upper bound of the tiles of rows, wherever the rows are routed; see `find_tile`."""
    return min(rows, rows // block_m + experts)


def expert_constants(rows: int, experts: int, chosen: Configuration) -> dict[str, object]:
    """The compile-time constants of `find_tile` that follow from the rows and the experts."""
    return {
        "EXPERTS": experts,
        "BLOCK_E": next_power_of_2(experts),
        "SLOT_PER_ROW": rows < rows // chosen.block_m + experts,
    }


def _architecture(capability: tuple[int, int] | None) -> str:
    if capability is None or capability in ((9, 0), (10, 0), (10, 3)):
        return "sm90"
    return "sm80" if capability in ((8, 0), (8, 7), (11, 0)) else "sm86"


def _block(size: int) -> int:
    return max(_SMALLEST_BLOCK, next_power_of_2(size))


@triton.jit
def grouped_order(program, row_tiles, COLUMN_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Position of a program in its plane of tiles: GROUP_M tiles of rows sweep the columns together."""
    group = program // (GROUP_M * COLUMN_TILES)
    within = program % (GROUP_M * COLUMN_TILES)
    first = group * GROUP_M
    size = tl.minimum(row_tiles - first, GROUP_M)
    return first + within % size, within // size


@triton.jit
def find_tile(
    offs_E,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOT_PER_ROW: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """This program's expert, its first sorted row, the end of the expert's rows, and its tile of columns.

    No rows are left for this program where the first row is not before the end.
    """
    slot, column_tile = grouped_order(tl.program_id(0), tl.num_programs(0) // COLUMN_TILES, COLUMN_TILES, GROUP_M)
    expert_E = tl.arange(0, BLOCK_E)
    start_E = tl.load(offs_E + expert_E - 1, mask=(expert_E > 0) & (expert_E < EXPERTS), other=0)
    first_slot_E = start_E if SLOT_PER_ROW else start_E // BLOCK_M + expert_E
    expert = tl.sum(((first_slot_E <= slot) & (expert_E < EXPERTS)).to(tl.int32), 0) - 1
    start = tl.load(offs_E + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offs_E + expert)
    first_slot = start if SLOT_PER_ROW else start // BLOCK_M + expert
    return expert, start + (slot - first_slot) * BLOCK_M, end, column_tile


@triton.jit
def rows_of_tile(order_N, row, row_end, GATHER: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sorted rows of a tile, and where to read them: behind the last one, the last one again.

    Rows do not mix in a product, so what is read twice needs no mask; only what is stored does.
    """
    row_M = row + tl.arange(0, BLOCK_M)
    source_M = tl.minimum(row_M, row_end - 1)
    if GATHER:
        source_M = tl.load(order_N + source_M).to(tl.int32) // TOP_K
    return row_M, source_M
