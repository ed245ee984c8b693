"""A dense layer for few tokens against fp64, in the interpreter or on a GPU."""

import pytest
import torch
from row_checks import error, random

from amoeba.kernels.decode import linear as module
from amoeba.kernels.decode.linear import linear
from selection import each_value_once

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2}  # the interpreter truncates to bf16 where a GPU rounds


@each_value_once("width")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize(("width", "depth"), [(128, 2048), (77, 199), (513, 64), (1, 8192)])
def test_products_and_biases(device, width, depth, tokens, bias, dtype, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 8)  # a few columns in each
    x, weight = random(device, dtype, tokens, depth), random(device, dtype, width, depth)
    added = random(device, dtype, width) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    assert error(linear(x, weight, added).cpu(), expected.cpu()) < TOLERANCE[dtype]


def test_many_tokens_other_dtypes_and_weights_with_gaps_go_to_torch(device):
    weight = random(device, torch.float16, 16, 64)
    for x, w in (
        (random(device, torch.float16, 5, 64), weight),
        (random(device, torch.float32, 1, 64), weight.float()),
        (random(device, torch.float16, 1, 32), weight[:, :32]),
    ):
        assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))
    assert linear(random(device, torch.float16, 0, 64), weight).shape == (0, 16)
