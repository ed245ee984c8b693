"""Cross-entropy and its gradient in place, against torch in fp64."""

import pytest
import torch

pytest.importorskip("triton")

from amoeba.kernels import cross_entropy as kernels
from selection import each_value_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@each_value_once("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 63, 64, 199])
@pytest.mark.parametrize("in_registers", [True, False])
def test_losses_and_gradients(dtype, columns, in_registers, monkeypatch):
    if not in_registers:
        monkeypatch.setattr(kernels, "IN_REGISTERS", 0)
        monkeypatch.setattr(kernels, "COLUMNS", 64)  # several blocks
    torch.manual_seed(0)
    wide = torch.randn(7, columns + 3, device=DEVICE).mul(4).to(dtype)
    logits = wide[:, :columns]  # rows that are further apart than they are long
    labels = torch.randint(0, columns, (7,), device=DEVICE)
    labels[2], labels[3] = -100, columns  # outside: they count for nothing
    exact = logits.double().clone().requires_grad_()
    counts = (labels >= 0) & (labels < columns)
    expected = torch.nn.functional.cross_entropy(exact, labels.where(counts, -100), reduction="none")
    expected.sum().backward()
    losses = torch.full((7,), float("nan"), device=DEVICE)
    before = wide.clone()
    kernels.cross_entropy_(logits, labels, losses, gradient=False)
    assert torch.equal(wide, before)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    kernels.cross_entropy_(logits, labels, losses, gradient=True)
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(logits.double(), exact.grad, rtol=rounding, atol=rounding)
    assert torch.equal(wide[:, columns:], before[:, columns:])


@pytest.mark.parametrize("in_registers", [True, False])
def test_infinite_logits_end_as_in_torch(in_registers, monkeypatch):
    if not in_registers:
        monkeypatch.setattr(kernels, "IN_REGISTERS", 0)
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[0, :4] = float("-inf")
    logits[1] = float("nan")
    logits[2, 0] = float("-inf")
    labels, losses = torch.tensor([4, 0, 0], device=DEVICE), torch.empty(3, device=DEVICE)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    kernels.cross_entropy_(logits, labels, losses, gradient=True)
    torch.testing.assert_close(losses, expected, equal_nan=True)


def test_no_rows():
    kernels.cross_entropy_(
        torch.empty(0, 5, device=DEVICE),
        torch.empty(0, dtype=torch.int64, device=DEVICE),
        torch.empty(0, device=DEVICE),
        gradient=True,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32768, 32000, 151936])
def test_vocabularies_of_models(columns):
    torch.manual_seed(0)
    logits = torch.randn(3000, columns, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (3000,), device="cuda")
    losses, expected = torch.empty(3000, device="cuda"), torch.nn.functional.cross_entropy
    exact = logits.float()
    kept = logits.clone()
    kernels.cross_entropy_(logits, labels, losses, gradient=True)
    torch.testing.assert_close(losses, expected(exact, labels, reduction="none"), rtol=1e-5, atol=1e-5)
    gradient = exact.softmax(1)
    gradient[torch.arange(3000), labels] -= 1
    torch.testing.assert_close(logits.float(), gradient, rtol=8e-3, atol=1e-6)
    for _ in range(5):  # a label's logit that was read too late would change the loss
        again, found = kept.clone(), torch.empty_like(losses)
        kernels.cross_entropy_(again, labels, found, gradient=True)
        assert torch.equal(found, losses) and torch.equal(again, logits)
