"""A few tokens through block-scaled experts, against fp64 on what their codes stand for.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

from __future__ import annotations

import pytest
import torch

from amoeba import Activation, Routing, experts
from amoeba.backends import block_scaled_rows, block_scaled_triton
from amoeba.kernels.decode import block_scaled
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.precision.experts import dequantise_experts, quantise_experts
from amoeba.problem import Problem
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU
from amoeba.proof.reference import experts as reference
from selection import quick
from small_layer import E, Layer

FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4)
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
# several steps with a rest of blocks; no whole block; several steps of down
SIZES = [(288, 24), (31, 23), (32, 272)]  # H, I


@quick(lambda format, activation, sizes: activation is SILU and sizes == SIZES[FORMATS.index(format) % len(SIZES)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", [SILU, PLAIN_RELU2, CLAMPED_SWIGLU], ids=str)
@by_format
def test_y_is_that_of_what_the_codes_stand_for(
    format: Format,
    activation: Activation,
    sizes: tuple[int, int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_scaled, "BYTES", 128)  # shorter steps, since the interpreter is slow
    hidden, inner = sizes
    expert_TK = torch.tensor([[0, 3], [E, 3], [-1, E]])
    layer = Layer(activation, tokens=3, hidden=hidden, inner=inner, expert_TK=expert_TK)
    named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
    named["weight"][1, 0] = torch.nan  # a sentinel's
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"], expert_TK.to(device), named["weight"], weights)
    found = block_scaled.decode(problem)
    exact = dequantise_experts(weights, torch.float64)
    weight = named["weight"].nan_to_num().double()
    truth = reference.experts_forward(named["x"].double(), expert_TK.to(device), weight, exact)
    assert (found.double() - truth).norm() <= 1e-5 * truth.norm()
    assert found[2].count_nonzero() == 0


def test_few_tokens_without_gradients_and_factors_are_decoded_and_no_others(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_rows = block_scaled_rows.BlockScaledRows.dispatch
    passes = []
    monkeypatch.setattr(
        block_scaled_rows.BlockScaledRows,
        "dispatch",
        classmethod(lambda cls, *given: (passes.append(given), sorted_rows(*given))[1]),
    )

    def sorts(tokens: int, rank: int = 0, gradient: bool = False) -> bool:
        passes.clear()
        layer = Layer(tokens=tokens, rank=rank)
        named = {name: tensor.detach().to(device) for name, tensor in layer.tensors.items()}
        named["x"].requires_grad_(gradient)
        weights = quantise_experts(layer.weights(named), MXFP8)
        routing = Routing(layer.expert_TK.to(device), named["weight"])
        experts(named["x"], routing, weights, lora=layer.lora(named), backend="triton")
        return bool(passes)

    most = block_scaled_triton.DECODE_TOKENS
    assert not sorts(1) and not sorts(most)
    assert sorts(most + 1) and sorts(1, rank=2) and sorts(1, gradient=True)
