"""How an fp32 number becomes bf16: with the missing bits kept in a remainder, or rounded stochastically.

    parameter, remainder = split(master)          # bf16 and int16
    join(parameter, remainder)                    # the same master, bit for bit

The bits of the master are (bits of the parameter << 16) + remainder. The parameter is the master plus half a unit of
bf16, cut off, and the remainder the master's lower half, read as a signed number: every master is exactly one pair.
This rounds to nearest, with ties away from zero. (With ties to even a parameter with an even last bit would stand for
65,537 masters, one more than 16 bits can tell apart.) A NaN is made torch's own first: one with all bits set would be
rounded up to a zero.

    bits = random_bits(step_key(seed, step), position, first, count, device)     # int32, one for each element
    rounded = round_stochastically(numbers, bits & 0xFFFF)                       # bf16

The chance is a hash, so it repeats: `position` is that of the parameter in the optimizer, `first` the index of the
first element in the parameter. The same numbers come from kernels/adamw.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN = 0x7FC00000  # in fp32; its upper half is a NaN of bf16
HALF = 0x8000  # of the last bit of bf16, in the bits of fp32


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    bits = fp32_bits(master)
    return ((bits + HALF) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    bits = parameter.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


def fp32_bits(numbers: Tensor) -> Tensor:
    """As int32, a copy; every NaN is the same one."""
    return numbers.view(torch.int32).masked_fill(numbers.isnan(), QUIET_NAN)


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
