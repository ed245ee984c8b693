"""Sizes of the tiles of a product over sorted rows: what was measured on this GPU, else our tables.

    chosen = configuration_on(device, "product", Product(rows=N, experts=E, reduction=H, columns=J, dtype=x_TH.dtype))
    candidates("up", Product(...), capability=(8, 6))           # for a search

Our tables go by GPU, dtype, rows per expert and length. The answer to one question stays the same as long as the
process lives, and costs a look-up; nothing waits for the device. What a search has found earlier has to be one of the
candidates: none needs more shared memory than a block of that GPU may have, nor more registers than a thread has for
its share of the accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch

from amoeba.core.errors import bad_value
from amoeba.system import tuned

Role = Literal["product", "up", "down_backward", "weight_gradient"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Product(NamedTuple):
    """`rows` sorted rows over `experts`: how many of them an expert has, only the device knows. reduction and columns
    are those of one expert's product; for the weight gradient, whose reduction runs over the rows, they are the two
    sizes of an expert's matrix."""

    rows: int
    experts: int
    reduction: int
    columns: int
    dtype: torch.dtype

    @property
    def rows_per_expert(self) -> int:
        return -(-self.rows // self.experts)

    @property
    def is_modest(self) -> bool:
        """Whether operands come in through registers: in fp32, and where rows are no whole number of 16-byte words."""
        itemsize = self.dtype.itemsize
        return self.dtype == torch.float32 or any(size * itemsize % 16 for size in (self.reduction, self.columns))


@dataclass(frozen=True)
class Configuration:
    """Sizes of one tile and how it is computed.

    block_m, block_n: rows and columns of the accumulator; in a gated up projection, half of the columns are gates.
    block_k:          length of one step of the reduction.
    group_m:          the number of row tiles that sweep the columns together and share the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


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


def configuration(role: Role, product: Product, capability: tuple[int, int] | None) -> Configuration:
    """Our tile sizes. capability None stands for Triton's interpreter."""
    if product.dtype not in DTYPES:
        raise bad_value("dtype", "bfloat16, float16 or float32", product.dtype, "convert the layer to one of these")
    table = (_MODEST if product.is_modest else _HALF[_architecture(capability)])[role]
    rows, reduction = product.rows_per_expert, product.reduction
    chosen = next(entry for most_rows, longest, entry in table if rows <= most_rows and reduction <= longest)
    return clipped(chosen, role, reduction, product.columns)


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


def _architecture(capability: tuple[int, int] | None) -> str:
    if capability is None or capability in ((9, 0), (10, 0), (10, 3)):
        return "sm90"
    return "sm80" if capability in ((8, 0), (8, 7), (11, 0)) else "sm86"


def _block(size: int) -> int:
    return max(_SMALLEST_BLOCK, 1 << max(0, size - 1).bit_length())


# What a block may have, by NVIDIA's table of compute capabilities; of one that is not here, the least.
_SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KB = 99
# LoRA factors are added in steps of up to this depth, whatever the steps of the product itself are.
_STEP_OF_FACTORS = 64
_MOST_ACCUMULATED = 128  # fp32 numbers of a thread, of its 255 registers
FEW_ROWS = 32  # per expert
# Rows per expert that are searched as one: up to each of these, and all above. Where our tables change is among them.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
_ABOVE = 256

# Whether experts have few rows -> block_m, block_n, block_k, group_m, warps, stages
_SEARCHED = {
    False: (
        (128, 128, 32, 8, 4, 4),
        (128, 128, 64, 8, 8, 3),
        (128, 256, 64, 8, 8, 3),
        (64, 128, 64, 8, 4, 3),
        (128, 128, 32, 8, 8, 4),
        (128, 128, 64, 8, 4, 3),
        (64, 256, 64, 8, 4, 3),
        (128, 256, 32, 8, 8, 3),
        (128, 64, 64, 8, 4, 3),
        (64, 128, 32, 8, 4, 4),
        (64, 64, 64, 8, 4, 4),
        (128, 128, 32, 8, 4, 3),
    ),
    True: (
        (16, 128, 64, 1, 4, 4),
        (16, 64, 64, 1, 4, 4),
        (16, 128, 128, 1, 4, 3),
        (16, 64, 128, 1, 4, 4),
        (32, 128, 64, 1, 4, 4),
        (32, 64, 64, 1, 4, 4),
        (32, 128, 64, 1, 4, 3),
        (32, 128, 128, 1, 4, 3),
        (64, 64, 64, 1, 4, 4),
        (64, 128, 64, 1, 4, 3),
    ),
}
_SEARCHED_MODEST = {
    False: (
        (64, 64, 16, 8, 4, 3),
        (64, 128, 16, 8, 8, 3),
        (128, 128, 16, 8, 8, 2),
        (64, 64, 32, 8, 8, 3),
        (128, 64, 16, 8, 8, 3),
        (64, 64, 32, 8, 4, 2),
        (32, 64, 16, 8, 4, 3),
        (128, 128, 16, 8, 8, 3),
    ),
    True: (
        (16, 64, 32, 1, 4, 2),
        (16, 64, 16, 1, 4, 3),
        (16, 128, 16, 1, 4, 3),
        (32, 64, 32, 1, 4, 3),
        (32, 64, 16, 1, 4, 3),
        (32, 128, 16, 1, 8, 3),
    ),
}


def shared_bytes(capability: tuple[int, int] | None) -> int:
    """What a block may have on a GPU of this kind. None stands for the interpreter, which has no limit of its own."""
    return 1024 * (227 if capability is None else _SHARED_KB.get(capability, _LEAST_SHARED_KB))


def bucket(product: Product) -> int:
    """What stands for this many rows in the key of a search."""
    return next((most for most in _BUCKETS if product.rows_per_expert <= most), _ABOVE)


def candidates(role: Role, product: Product, capability: tuple[int, int] | None) -> tuple[Configuration, ...]:
    """Without repetitions, our own choice first."""
    few = role != "weight_gradient" and bucket(product) <= FEW_ROWS
    listed = _SEARCHED_MODEST if product.is_modest else _SEARCHED
    found = (clipped(Configuration(*sizes), role, product.reduction, product.columns) for sizes in listed[few])
    fitting = (each for each in found if _fits(each, product.dtype, capability))
    return tuple(dict.fromkeys((configuration(role, product, capability), *fitting)))


def _fits(chosen: Configuration, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    # Where asynchronous copies feed registers, the last stage's are in those; Hopper multiplies from shared memory.
    buffers = chosen.num_stages if capability is None or capability[0] in (9, 10) else chosen.num_stages - 1
    depth = max(chosen.block_k, _STEP_OF_FACTORS)
    needed = buffers * (chosen.block_m + chosen.block_n) * depth * dtype.itemsize
    accumulated = chosen.block_m * chosen.block_n // (32 * chosen.num_warps)
    return needed <= shared_bytes(capability) and 1 <= accumulated <= _MOST_ACCUMULATED


# of the pass that is under way; None: as many as its weights have
_experts: ContextVar[int | None] = ContextVar("experts", default=None)


@contextmanager
def as_with(experts: int) -> Iterator[None]:
    """Configurations are chosen as if the weights had this many experts: some of them, in slots, are computed with the
    tiles, and so with the last bits, of all."""
    token = _experts.set(experts)
    try:
        yield
    finally:
        _experts.reset(token)


def as_many(experts: int) -> int:
    """By which a configuration is chosen for weights of this many experts."""
    return _experts.get() or experts


_any_rows: ContextVar[bool] = ContextVar("any_rows", default=False)
# Rows per expert, as if there were no others; and columns of a product with one matrix, where they may be tokens.
_ROWS_OF_ANY, _COLUMNS_OF_ANY, _WIDEST_OF_ANY = 64, 1024, 128
# On Hopper the bits of a product of whole words are those of its steps of 16 along the reduction, whatever the tile and
# the instruction. Tiles by rows; the first is taken of which there are _LEAST_PROGRAMS, else the last. The best of six
# each on an H200 (dev/log).
_LEAST_PROGRAMS = 128
_FEW_ROWS = Configuration(16, 32, 128, 1, 4, 6), Configuration(16, 16, 128, 1, 4, 6)
_SOME_ROWS = Configuration(64, 32, 128, 1, 4, 6), Configuration(64, 16, 128, 1, 4, 6)
_SOME_OF_EXPERTS = Configuration(64, 128, 64, 8, 4, 4), Configuration(64, 64, 64, 1, 4, 6)
_MANY_ROWS = Configuration(128, 256, 64, 8, 8, 4), Configuration(128, 128, 64, 8, 8, 4), *_SOME_OF_EXPERTS


@contextmanager
def any_rows() -> Iterator[None]:
    """Configurations are those of `for_any_rows`: a row has the bits that it has among any others."""
    token = _any_rows.set(True)
    try:
        yield
    finally:
        _any_rows.reset(token)


def for_any_rows(device: torch.device, role: Role, product: Product) -> Configuration:
    """Whose products have the same bits for all numbers of rows, and which does not depend on what was measured."""
    capability = capability_of(device)
    if capability == (9, 0) and role in ("product", "up") and not product.is_modest:
        return clipped(_on_hopper(product), role, product.reduction, product.columns)
    columns = product.columns if product.experts > 1 else _COLUMNS_OF_ANY
    as_any = product._replace(rows=_ROWS_OF_ANY * product.experts, columns=columns)
    chosen = configuration(role, as_any, capability)
    return replace(chosen, block_n=min(chosen.block_n, _WIDEST_OF_ANY))


def _on_hopper(product: Product) -> Configuration:
    rows, experts = product.rows, product.experts
    if experts == 1:
        tiles = _FEW_ROWS if rows <= 16 else _SOME_ROWS if rows <= 64 else _MANY_ROWS
    else:
        tiles = _FEW_ROWS if rows <= 128 else _SOME_OF_EXPERTS if product.rows_per_expert <= 64 else _MANY_ROWS
    for each in tiles:
        if min(rows, rows // each.block_m + experts) * -(-product.columns // each.block_n) >= _LEAST_PROGRAMS:
            return each
    return tiles[-1]


def configuration_on(device: torch.device, role: Role, product: Product) -> Configuration:
    """For the GPU, or the interpreter, that `device` stands for."""
    if _any_rows.get():
        return for_any_rows(device, role, product)
    return _configuration_on(device, role, product._replace(experts=as_many(product.experts)))


@lru_cache(maxsize=1 << 16)
def _configuration_on(device: torch.device, role: Role, product: Product) -> Configuration:
    capability = capability_of(device)
    measured = tuned.choose(device, tile_key(role, product), lambda: candidates(role, product, capability))
    return configuration(role, product, capability) if measured is None else measured


def tile_key(role: Role, product: Product) -> str:
    """What one measurement stands for: the number of experts makes no difference to a tile."""
    sizes = {"reduction": product.reduction, "columns": product.columns}
    return tuned.key(role, product.dtype, rows=bucket(product), **sizes)


@cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """None for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
