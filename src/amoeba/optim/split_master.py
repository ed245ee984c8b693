"""An fp32 number in two halves: the bf16 number nearest to it, and what is missing, as a signed 16-bit integer.

    parameter, remainder = split(master)          # bf16 and int16
    join(parameter, remainder)                    # the same master, bit for bit

The bits of the master are (bits of the parameter << 16) + remainder. The parameter is the master plus half a unit of
bf16, cut off: the master's upper half where its lower half is below 0x8000, one more where it is not. So the remainder
is the lower half itself, read as a signed number: always in [-32768, 32767], and every master is exactly one pair. As
floating-point numbers lie in the order of their bits, separately for both signs, this is rounding to nearest, with ties
away from zero. (With ties to even, as bf16 is usually rounded, a parameter with an even last bit would stand for 65,537
masters, one more than 16 bits can tell apart.) Infinities and subnormal numbers are numbers like any other here; a NaN
is made torch's own first, since one with all bits set would be rounded up to a zero.
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
