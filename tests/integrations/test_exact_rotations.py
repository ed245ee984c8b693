"""Rotary embeddings in exact mode by our kernel, in Triton's interpreter or on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe import modeling_qwen3_moe

from amoeba.integrations.exact_rotations import fused_rotations
from amoeba.ops.exact import ExactOperators
from selection import each_value_once
from tiny_models import relative

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def given(dtype: torch.dtype, rotations: int, size: int) -> list[Tensor]:
    """Queries and keys as a layer has them, transposed, and rotations."""
    shapes = (2, 7, 10, size), (2, 7, 3, size), (rotations, 7, size), (rotations, 7, size)
    drawn = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]
    q, k, cos, sin = (each.to(DEVICE, dtype) for each in drawn)
    return [q.transpose(1, 2), k.transpose(1, 2), cos, sin]


def family() -> nn.Module:
    """A module of its file."""
    return modeling_qwen3_moe.Qwen3MoeRMSNorm(8)


def rotated(*tensors: Tensor) -> Any:
    return modeling_qwen3_moe.apply_rotary_pos_emb(*tensors)


@each_value_once()
@pytest.mark.parametrize("rotations", [1, 2])
@pytest.mark.parametrize("size", [16, 24])
def test_bits_of_transformers_and_gradients_of_fp64(rotations: int, size: int) -> None:
    tensors = given(torch.float16, rotations, size)
    wanted = rotated(*tensors)
    leaves = [each.detach().requires_grad_() for each in tensors[:2]]
    with fused_rotations(family()), ExactOperators():
        found = rotated(*leaves, *tensors[2:])
        one = rotated(*(each[1:, :, 3:4] for each in leaves), *(each[-1:, 3:4] for each in tensors[2:]))
    assert all(map(torch.equal, found, wanted))
    assert all(torch.equal(a, b[1:, :, 3:4]) for a, b in zip(one, wanted, strict=True))
    wide = [each.detach().double() for each in tensors]
    truth = [each.requires_grad_() for each in wide[:2]]
    dy = [torch.randn_like(each) for each in found]
    gradients = torch.autograd.grad(found, leaves, dy)
    expected = torch.autograd.grad(rotated(*truth, *wide[2:]), truth, [each.double() for each in dy])
    assert all(relative(a, b) < 1e-3 for a, b in zip(gradients, expected, strict=True))


def test_fp32() -> None:
    tensors = given(torch.float32, 2, 16)
    with fused_rotations(family()), ExactOperators():
        found = rotated(*tensors)
    assert all(relative(a, b) < 1e-6 for a, b in zip(found, rotated(*(each.double() for each in tensors)), strict=True))


def test_the_familys_function_is_back_after_its_last_exact_model() -> None:
    own = modeling_qwen3_moe.apply_rotary_pos_emb
    first = fused_rotations(family())
    first.__enter__()
    with fused_rotations(family()):
        first.__exit__(None, None, None)
        assert modeling_qwen3_moe.apply_rotary_pos_emb is not own
        assert all(map(torch.equal, rotated(*given(torch.float32, 1, 16)), own(*given(torch.float32, 1, 16))))
    assert modeling_qwen3_moe.apply_rotary_pos_emb is own


def test_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos[:, None], k * sin[:, None]

    monkeypatch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", interleaved)
    with fused_rotations(family()):
        assert modeling_qwen3_moe.apply_rotary_pos_emb is interleaved
