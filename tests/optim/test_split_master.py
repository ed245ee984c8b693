"""A master and its two halves: every bit comes back, and the half that is a parameter is the nearest bf16 number."""

import pytest
import torch
from torch import Tensor

from amoeba.optim.rounding import join, split

# upper halves whose neighbours are special: zeros, subnormal numbers, ones, the largest ones, infinities
UPPER = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x8000, 0x8001, 0x807F, 0xBF80, 0xFF7F)


def masters(upper: int) -> Tensor:
    """All 65,536 with this upper half."""
    bits = torch.arange(1 << 16, dtype=torch.int64) + (upper << 16)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def random_masters() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=generator).to(torch.int32)
    return bits.view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("numbers", [*(masters(upper) for upper in UPPER), random_masters()])
def test_every_master_comes_back_from_a_parameter_and_a_16_bit_remainder(numbers: Tensor) -> None:
    numbers = numbers[~numbers.isnan()]
    parameter, remainder = split(numbers)
    assert parameter.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert same_bits(join(parameter, remainder), numbers)


@pytest.mark.parametrize("numbers", [*(masters(upper) for upper in UPPER), random_masters()])
def test_the_parameter_is_the_nearest_bf16_number_ties_away_from_zero(numbers: Tensor) -> None:
    numbers = numbers[~numbers.isnan()]
    parameter = split(numbers)[0]
    tie = numbers.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(parameter[~tie], numbers[~tie].bfloat16())
    up = (numbers[tie].view(torch.int32) + 0x8000).view(torch.float32)
    assert torch.equal(parameter[tie].float(), up)
    assert torch.equal(parameter.signbit(), numbers.signbit()), "nothing is rounded across zero"


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_a_nan_of_any_bits_is_seen_in_the_parameter(bits: int) -> None:
    """All bits set is what a GPU computes; rounded as a number it would be -0."""
    parameter, remainder = split(torch.tensor([bits], dtype=torch.int32).view(torch.float32))
    assert parameter.isnan().all() and join(parameter, remainder).isnan().all()


def test_a_bf16_parameter_begins_as_its_own_master() -> None:
    parameter = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    master = join(parameter, torch.zeros_like(parameter, dtype=torch.int16))
    assert torch.equal(master.view(torch.int32), parameter.float().view(torch.int32))
