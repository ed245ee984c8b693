"""NF4 as bitsandbytes stores it, and as it is kept here.

    read_nf4("X.weight", names, read)    # uint8 (..., rows, bytes of a row), as `amoeba.precision.blocks` has nf4

A file has the numbers of a tensor in one run, two codes to a byte, the first in the high bits, and a scale for each
`block` of them (64). Scales are fp32, or with double quantisation bytes for numbers of a table, times an fp32 number
for each 256 of them, plus one offset of the tensor. Here a block of 64 is a part of a row and has its scale in fp32,
which is exact.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.precision.blocks import BLOCK_KINDS, NF4

# What follows the name of a weight.
ABSMAX, TABLE = ".absmax", ".quant_map"
NESTED_ABSMAX, NESTED_TABLE = ".nested_absmax", ".nested_quant_map"
STATE = ".quant_state.bitsandbytes__nf4"
SUFFIXES = (NESTED_ABSMAX, NESTED_TABLE, STATE, ABSMAX, TABLE)
NUMBERS = BLOCK_KINDS["nf4"].numbers
_REMEDY = "take the unquantised model, or quantise that with amoeba quantise"


class Nf4State(NamedTuple):
    """shape: of the numbers; block: that share a scale; nested: scales that share a number, 0 without double
    quantisation; offset: of scales that are quantised."""

    shape: tuple[int, ...]
    block: int
    nested: int
    offset: float


def read_state(name: str, stored: Tensor) -> Nf4State:
    try:
        found = json.loads(bytes(stored.view(torch.uint8).tolist()))
        state = Nf4State(
            tuple(int(size) for size in found["shape"]),
            int(found["blocksize"]),
            int(found.get("nested_blocksize", 0)),
            float(found.get("nested_offset", 0.0)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected, got = f"shape and blocksize in {name}{STATE}", repr(str(error))[:60]
        raise bad_value("MODEL", expected, got, "download it again") from error
    rows, columns = (*state.shape, 1)[:2] if len(state.shape) < 2 else state.shape[-2:]
    whole = state.block >= NUMBERS and state.block % NUMBERS == 0 and rows * columns % state.block == 0
    if len(state.shape) not in (2, 3) or columns % NUMBERS or not whole:
        expected = f"{name} in NF4 with rows of whole blocks of {NUMBERS}"
        got = f"shape {state.shape} in blocks of {state.block}"
        raise bad_value("MODEL", expected, got, _REMEDY)
    return state


def scales_of(state: Nf4State, absmax: Tensor, nested: tuple[Tensor, Tensor] | None, first: int = 0) -> Tensor:
    """fp32, one of each block. nested: table and numbers of double quantisation. first: of all scales of a tensor, the
    one that `absmax` begins with."""
    if nested is None:
        return absmax.view(torch.float32)
    table, of_scales = nested
    last = first + absmax.numel()
    place = torch.arange(first, last, dtype=torch.int64, device=absmax.device) // state.nested
    return table[absmax.view(torch.uint8).to(torch.int64)] * of_scales[place] + state.offset


def codes_of(stored: Tensor) -> Tensor:
    """uint8 (blocks, 32): low nibbles of the first half of 64 numbers, high ones of the other half."""
    pairs = stored.reshape(-1).view(torch.uint8).view(-1, 2, NUMBERS // 4)
    first, last = torch.stack((pairs >> 4, pairs & 15), -1).flatten(-2).unbind(1)
    return first | last << 4


def spread(state: Nf4State, scales: Tensor) -> Tensor:
    """uint8 (blocks, 4): of blocks of 64, whatever the file's are."""
    return scales.repeat_interleave(state.block // NUMBERS)[:, None].contiguous().view(torch.uint8)


def read_nf4(name: str, names: Container[str], read: Callable[[str], Tensor]) -> Tensor:
    """uint8 (..., rows, bytes of a row)."""
    state = state_of(name, names, read)
    stored, absmax, nested = read(name), read(name + ABSMAX), nested_of(name, state, names, read)
    scales, count = scales_of(state, absmax, nested), math.prod(state.shape)
    if 2 * stored.nbytes != count or scales.numel() * state.block != count:
        expected = f"{count} numbers of {name} and {count // state.block} scales"
        raise bad_value("MODEL", expected, f"{2 * stored.nbytes} and {scales.numel()}", "download it again")
    blocks = torch.cat((spread(state, scales), codes_of(stored)), 1)
    return blocks.view(*state.shape[:-1], -1)


def state_of(name: str, names: Container[str], read: Callable[[str], Tensor]) -> Nf4State:
    """ValueError where something is missing, or where the numbers are not those of NF4."""
    _check_there(name, (TABLE, STATE), names)
    table = read(name + TABLE)
    if table.tolist() != torch.tensor(NF4, dtype=torch.float32, device="cpu").tolist():
        raise bad_value("MODEL", f"the numbers of NF4 in {name}{TABLE}", str(table.tolist())[:60], _REMEDY)
    return read_state(name, read(name + STATE))


def nested_of(
    name: str, state: Nf4State, names: Container[str], read: Callable[[str], Tensor]
) -> tuple[Tensor, Tensor] | None:
    if not state.nested:
        return None
    _check_there(name, (NESTED_TABLE, NESTED_ABSMAX), names)
    return read(name + NESTED_TABLE).float(), read(name + NESTED_ABSMAX).float()


def _check_there(name: str, suffixes: tuple[str, ...], names: Container[str]) -> None:
    missing = next((name + suffix for suffix in suffixes if name + suffix not in names), None)
    if missing is not None:
        raise bad_value("MODEL", f"a tensor {missing}", "none in the checkpoint", "download it again")
