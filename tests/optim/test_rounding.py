"""Rounding to bf16 by chance: right on average, and the same chance again for the same seed, step and element."""

import math

import pytest
import torch
from torch import Tensor

from amoeba.optim.rounding import random_bits, round_stochastically, step_key

CPU = torch.device("cpu")


def rounded(numbers: Tensor, step: int = 1, position: int = 0) -> Tensor:
    bits = random_bits(step_key(0, step), position, 0, len(numbers), CPU)
    return round_stochastically(numbers, bits & 0xFFFF)


@pytest.mark.parametrize("number", [1.0, 1.001, 1.00390625, -0.7771, 3e-39, 1e30])
def test_the_mean_of_what_is_rounded_is_the_number(number: float) -> None:
    numbers = torch.full((1 << 16,), number)
    found = rounded(numbers)
    apart = 2.0 ** (math.floor(math.log2(max(abs(number), 2.0**-126))) - 7)  # two neighbours in bf16
    assert found.unique().numel() <= 2
    assert abs(found.double().mean().item() - numbers[0].double().item()) < 0.01 * apart  # 5 standard deviations


def test_what_bf16_can_hold_stays_as_it_is() -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[~numbers.isnan()]
    for step in range(1, 5):
        assert torch.equal(rounded(numbers.float(), step), numbers)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1])
def test_a_nan_stays_one(bits: int) -> None:
    numbers = torch.tensor([bits], dtype=torch.int32).view(torch.float32).expand(100).contiguous()
    assert rounded(numbers).isnan().all()


def test_random_bits_differ_by_step_parameter_and_seed() -> None:
    whole = random_bits(step_key(3, 7), 5, 0, 1000, CPU)
    assert torch.equal(whole[400:], random_bits(step_key(3, 7), 5, 400, 600, CPU))
    for other in (random_bits(step_key(*key), at, 0, 1000, CPU) for *key, at in ((3, 8, 5), (4, 7, 5), (3, 7, 6))):
        assert (whole == other).sum() <= 1
    beyond = random_bits(step_key(3, 7), 5, (1 << 33) - 2, 4, CPU)
    assert beyond.unique().numel() == 4, "elements beyond 2³¹ have numbers, too"


def test_bits_are_even_and_independent_of_their_neighbours() -> None:
    bits = random_bits(step_key(0, 1), 0, 0, 1 << 16, CPU)
    for half in (bits & 0xFFFF, bits >> 16 & 0xFFFF):
        numbers = half.double() / 65536 - 0.5
        assert abs(numbers.mean()) < 0.006  # 5 standard deviations of 65,536 even numbers
        assert abs((numbers[1:] * numbers[:-1]).mean()) < 0.0017
