"""On a GPU nothing waits for the host, and where something has to, it is said."""

import logging
from types import SimpleNamespace

import pytest
import torch

from amoeba import ExpertWeights, Routing
from amoeba.backends import custom_activation as composed
from amoeba.backends import eager, registry, triton
from amoeba.backends.custom_activation import experts_composed
from amoeba.backends.torch_rows import Groups

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 21, 2, 4, 24, 16


def passes(dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of experts with a foreign activation; some slots are sentinels, one expert is empty."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        made = torch.randn(sizes, generator=generator, dtype=torch.float32, device="cpu") / 4
        return made.to(DEVICE, dtype).requires_grad_()

    x, weight = draw(TOKENS, HIDDEN), draw(TOKENS, TOP_K)
    gate_up, down = draw(EXPERTS, 2 * INNER, HIDDEN), draw(EXPERTS, HIDDEN, INNER)
    biases = draw(EXPERTS, 2 * INNER), draw(EXPERTS, HIDDEN)
    expert_TK = torch.randint(-1, EXPERTS - 1, (TOKENS, TOP_K), generator=generator, dtype=torch.int64, device="cpu")
    routing = Routing(expert_TK.to(DEVICE), weight)
    before = torch.cuda.get_sync_debug_mode() if DEVICE.type == "cuda" else None
    try:
        if before is not None:
            torch.cuda.set_sync_debug_mode("error")
        y = experts_composed(
            x, routing, gate_up, down, *biases, gate=lambda h: torch.tanh(h[:, :INNER]) * h[:, INNER:], finish=torch.sin
        )
        leaves = x, weight, gate_up, down, *biases
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]
    finally:
        if before is not None:
            torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_experts_with_a_foreign_activation_read_nothing_back(dtype, monkeypatch):
    """As on a GPU: the kernels compute them, in the interpreter where there is none."""
    expected = passes(dtype) if DEVICE.type == "cpu" else None
    monkeypatch.setattr(composed, "_kernels_serve", lambda x: triton.why_not_on(x.device, x.dtype) is None)
    monkeypatch.setattr(Groups, "__init__", lambda *_: pytest.fail("the row counts were read"))
    found = passes(dtype)
    if expected is not None:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3 if dtype == torch.float16 else 1e-5)


def test_a_backend_that_waits_for_a_gpu_is_announced_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(registry, "_announced", set())
    explanation = registry.Explanation(eager.BACKEND, {"triton": "needs Triton, which is not installed"})
    for place, level in ((torch.device("cuda"), logging.WARNING), (torch.device("cpu"), logging.INFO)):
        weights = SimpleNamespace(placement="resident", device=place, dtype=torch.float16)
        with caplog.at_level(logging.INFO, "amoeba"):
            registry._announce(explanation, SimpleNamespace(weights=weights))  # type: ignore[arg-type]
        assert caplog.records[-1].levelno == level
        assert ("each pass waits for the GPU" in caplog.records[-1].message) == (level == logging.WARNING)
        assert "needs Triton" in caplog.records[-1].message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_dtype_that_the_kernels_serve_falls_back_to_a_backend_that_waits(dtype, gpu_of, monkeypatch):
    """Below Hopper torch's grouped product waits, so there must be another."""
    gpu_of(8, 6)
    monkeypatch.setattr(triton, "_TRITON_FOUND", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.why_not_on(torch.device("cuda"), dtype) is None
    rows = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(8, 64))
    weight = ExpertWeights(torch.zeros(2, 64, 64), torch.zeros(2, 64, 32)).gate_up_EJH
    assert composed._kernels_serve(rows) and not composed._grouped_on_gpu(rows, weight)  # type: ignore[arg-type]
