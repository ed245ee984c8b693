"""A shared expert and its sum with the routed ones against torch's operators, in the interpreter or on a GPU."""

import pytest
import torch
from row_checks import error, random

from amoeba.kernels.decode import linear as linears
from amoeba.kernels.decode.shared_expert import add_shared_expert, serves
from selection import each_value_once

# The interpreter truncates to bf16 where a GPU rounds, and six times here.
TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 3e-2}


def by_torch(x, gate, up, scale, down, routed):
    x, gate, up, scale, down, routed = (each.double() for each in (x, gate, up, scale, down, routed))
    shared = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    return routed + torch.sigmoid(x @ scale.T) * shared


@each_value_once()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("width", "depth"), [(64, 32), (77, 40), (513, 1)])
def test_the_sum_is_that_of_torch(device, width, depth, tokens, dtype, monkeypatch):
    monkeypatch.setattr(linears, "PROGRAMS", 8)  # a few columns in each
    x, routed = random(device, dtype, tokens, width), random(device, dtype, tokens, width, 1)[..., 0].contiguous()
    gate, up, scale = (random(device, dtype, rows, width) / width**0.5 for rows in (depth, depth + 1, 1))
    down = random(device, dtype, width, depth) / depth**0.5
    expected = by_torch(x, gate, up[1:], scale, down, routed)
    y = add_shared_expert(x, torch.cat([gate, up[1:], scale]), down, routed)
    assert error(y.cpu(), expected.cpu()) < TOLERANCE[dtype]


def test_what_it_does_not_serve_is_refused(device):
    x, joined, down = (random(device, torch.float16, *shape) for shape in ((2, 32), (17, 32), (32, 8)))
    assert serves(x, joined, down) and not serves(x.float(), joined.float(), down.float())
    assert not serves(x[:0], joined, down) and not serves(x.repeat(9, 1), joined, down)
    with pytest.raises(ValueError, match="a few tokens"):
        add_shared_expert(x, joined[1:], down, x)
