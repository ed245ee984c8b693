"""Stochastic rounding to bf16 that repeats: the chance is a hash of where and when.

    bits = random_bits(step_key(seed, step), position, first, count, device)     # int32, one for each element
    rounded = round_stochastically(numbers, bits & 0xFFFF)                       # bf16

A number between two bf16 numbers becomes the upper one as often as it lies above the lower one, so that what is too
small for a single step is not lost in a thousand. `position` is that of the parameter in the optimizer, `first` the
index of the first element in the parameter. The same numbers come from kernels/adamw.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.optim.split_master import fp32_bits

# A mixing function of 32 bits with little bias: github.com/skeeto/hash-prospector, "lowbias32".
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
_MASK = 0xFFFFFFFF


def step_key(seed: int, step: int) -> int:
    return signed(_mix(_mix(seed & _MASK) ^ (step & _MASK)))


def random_bits(key: int, position: int, first: int, count: int, device: torch.device) -> Tensor:
    index = torch.arange(first, first + count, dtype=torch.int64, device=device).to(torch.int32)
    x = index.bitwise_xor_(signed(_mix((key ^ position) & _MASK)))
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # torch shifts signed numbers only: what comes in from the left is removed
    x *= _FIRST
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= signed(_SECOND)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def round_stochastically(numbers: Tensor, chance: Tensor) -> Tensor:
    """chance: int32 in [0, 65535], of the same shape."""
    return fp32_bits(numbers).add_(chance).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * _FIRST & _MASK
    x ^= x >> 15
    x = x * _SECOND & _MASK
    return x ^ x >> 16


def signed(x: int) -> int:
    """The same 32 bits as a signed number."""
    return x - (1 << 32) if x >> 31 else x
