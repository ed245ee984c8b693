"""How an fp32 number becomes bf16: with the missing bits kept in a remainder, or rounded stochastically.

In two halves: the bf16 number nearest to it, and what is missing, as a signed 16-bit integer.

    parameter, remainder = split(master)          # bf16 and int16
    join(parameter, remainder)                    # the same master, bit for bit

The bits of the master are (bits of the parameter << 16) + remainder. The parameter is the master plus half a unit of
bf16, cut off: the master's upper half where its lower half is below 0x8000, one more where it is not. So the remainder
is the lower half itself, read as a signed number: always in [-32768, 32767], and every master is exactly one pair. As
floating-point numbers lie in the order of their bits, separately for both signs, this is rounding to nearest, with ties
away from zero. (With ties to even, as bf16 is usually rounded, a parameter with an even last bit would stand for 65,537
masters, one more than 16 bits can tell apart.) Infinities and subnormal numbers are numbers like any other here; a NaN
is made torch's own first, since one with all bits set would be rounded up to a zero.

By chance, which repeats: it is a hash of where and when.

    bits = random_bits(step_key(seed, step), position, first, count, device)     # int32, one for each element
    rounded = round_stochastically(numbers, bits & 0xFFFF)                       # bf16

A number between two bf16 numbers becomes the upper one as often as it lies above the lower one, so that what is too
small for a single step is not lost in a thousand. `position` is that of the parameter in the optimizer, `first` the
index of the first element in the parameter. The same numbers come from kernels/adamw.py.
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
