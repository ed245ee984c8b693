"""Norms of a model by the C++ core: the numbers of its own modules, and its own code where a gradient is taken."""

import pytest
import torch
from torch import Tensor, nn

from amoeba.cpu.core import load_core, why_no_core
from amoeba.integrations import norms
from selection import each_value_once

pytestmark = pytest.mark.skipif(why_no_core() is not None, reason=str(why_no_core()))


class RMSNorm(nn.Module):
    def __init__(self, width: int, adds_one: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.adds_one = nn.Parameter(torch.randn(width)), 1e-5, adds_one

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.adds_one:
            return ((1 + self.weight.float()) * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


@each_value_once()
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("width", [1, 63, 128, 199, 2048])
def test_norms_are_those_of_fp64(width, adds_one, monkeypatch):
    model = nn.Sequential(RMSNorm(width, adds_one), nn.Linear(width, 2))
    norms.by_core(model)
    norm, calls = model[0], []
    core, compute = load_core(), load_core().rms_norm
    monkeypatch.setattr(core, "rms_norm", lambda *given, **more: (calls.append(1), compute(*given, **more))[1])
    for shape in ((0, width), (1, width), (3, 17, width), (700, width)):
        x = torch.randn(shape) * 3
        wide = x.double()
        weight = norm.weight.double() + adds_one
        truth = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        with torch.no_grad():
            assert torch.allclose(norm(x).double(), truth, rtol=2e-6, atol=1e-6)
    assert len(calls) == 3  # nothing of no rows
    turned = torch.randn(width, 5).T
    with torch.no_grad():
        assert torch.allclose(norm(turned), norm(turned.clone()))

    calls.clear()
    x = torch.randn(4, width, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is not None and not calls
    with torch.no_grad():
        norm(x.double() if width == 1 else x.bfloat16())
    assert not calls
    x = x.detach()
    x[0] = torch.nan
    with torch.no_grad():
        assert norm(x)[0].isnan().all() and norm(x)[1:].isfinite().all()
