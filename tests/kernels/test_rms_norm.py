"""Norms of rows against transformers' formula in fp64."""

import pytest
import torch
from row_checks import DTYPES, error, random

from amoeba.kernels.rms_norm import add_rms_norm, rms_norm
from selection import each_value_once

EPS = 1e-6
# The interpreter truncates to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def normed(x, weight):
    x, weight = x.double().cpu(), weight.double().cpu()
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@each_value_once()
@pytest.mark.parametrize("rounds_late", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2048), (7, 199), (3, 5, 64), (0, 32)])
def test_rows_and_sums_of_rows_are_normed(device, shape, dtype, rounds_late):
    x, added = random(device, dtype, *shape), random(device, dtype, *shape, 1)[..., 0].contiguous()
    weight = random(device, dtype, shape[-1])
    y = rms_norm(x, weight, EPS, rounds_late=rounds_late)
    total, of_sum = add_rms_norm(x, added, weight, EPS, rounds_late=rounds_late)
    if not x.numel():
        assert y.shape == total.shape == of_sum.shape == x.shape
        return
    assert error(y.cpu(), normed(x, weight)) < TOLERANCE[dtype]
    assert error(total.cpu(), x.double().cpu() + added.double().cpu()) < TOLERANCE[dtype]
    assert error(of_sum.cpu(), normed(total, weight)) < TOLERANCE[dtype]


def test_numbers_are_rounded_where_transformers_rounds_them(device):
    """In fp16, which the interpreter rounds as a GPU does."""
    x, weight = random(device, torch.float16, 33, 512), random(device, torch.float16, 512)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    early, late = weight * normed.half(), (weight * normed).half()
    assert not torch.equal(early, late)
    for rounds_late, expected in ((False, early), (True, late)):
        got = rms_norm(x, weight, EPS, rounds_late=rounds_late)
        assert (got != expected).float().mean() < 0.01  # sums in another order


def test_what_does_not_fit_together_is_refused(device):
    with pytest.raises(ValueError, match="contiguous rows of one dtype"):
        rms_norm(random(device, torch.float32, 4, 8), random(device, torch.float32, 9), EPS)
