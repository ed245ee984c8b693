"""LoRA's kernels for sorted rows: `join_factors`, and `activate_backward_low_rank` against the reference in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from row_checks import error
from torch import Tensor

from amoeba.config import Activation
from amoeba.kernels.activate_low_rank import activate_backward_low_rank
from amoeba.kernels.join_factors import join_factors
from amoeba.layout import build_layout
from amoeba.proof.reference import experts as truth
from amoeba.weights import LoraFactors

E, H, I = 3, 37, 71  # I: a whole tile of 32 columns, and a part of one
GATED, INTERLEAVED, PLAIN = Activation("silu"), Activation("gelu", interleaved=True), Activation("relu2", gated=False)
ACTIVATIONS = pytest.mark.parametrize("activation", [GATED, INTERLEAVED, PLAIN], ids=["gated", "interleaved", "plain"])
# tl.dot on bf16 is wrong in Triton's interpreter
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def random(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def factors(device: torch.device, gate: int, up: int, down: int) -> LoraFactors:
    """Of these ranks; 0: none."""
    named: dict[str, Tensor] = {}
    for seed, (name, rank) in enumerate((("gate", gate), ("up", up), ("down", down))):
        fan_in, fan_out = (I, H) if name == "down" else (H, I)
        if rank:
            named[f"{name}_lora_a"] = random(device, E, rank, fan_in, seed=seed)
            named[f"{name}_lora_b"] = random(device, E, rank, fan_out, seed=seed).mT  # not contiguous
    return LoraFactors(**named, scaling=1.5)


@ACTIVATIONS
@pytest.mark.parametrize("ranks", [(5, 5, 5), (3, 70, 64), (0, 4, 0), (0, 0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_joined_factors_are_the_factors_and_zeros(device, activation, ranks, dtype):
    gate, up, down = ranks
    lora = factors(device, gate if activation.gated else 0, up, down)
    joined_up, joined_down = join_factors(lora, activation, dtype)
    assert (joined_up is None, joined_down is None) == (up == 0, down == 0)
    if joined_down is not None:
        assert joined_down.a_EPI.shape[1] == joined_down.b_EOP.shape[2] == 64
        assert torch.equal(joined_down.a_EPI[:, :down], lora.down_lora_a.to(dtype))
        assert torch.equal(joined_down.b_EOP[:, :, :down], lora.down_lora_b.to(dtype))
        assert not joined_down.a_EPI[:, down:].any() and not joined_down.b_EOP[:, :, down:].any()
    if joined_up is not None:
        x = random(device, 2, H).to(dtype).double()
        for e in range(E):
            parts = {
                name: x @ a[e].to(dtype).double().T @ b[e].to(dtype).double().T
                for name, a, b in (
                    ("gate", lora.gate_lora_a, lora.gate_lora_b),
                    ("up", lora.up_lora_a, lora.up_lora_b),
                )
                if a is not None
            }
            expected = parts["up"]
            if activation.gated:
                expected = truth.join_gate_up(parts.get("gate", torch.zeros_like(expected)), expected, activation)
            a, b = (matrix[e].double() for matrix in joined_up)
            assert error(x @ a.T @ b.T, expected) < 1e-12
            own = sum(t.shape[1] for t in (lora.gate_lora_a, lora.up_lora_a) if t is not None)
            assert a.shape[0] % 64 == 0 and not a[own:].any() and not b[:, own:].any()


@ACTIVATIONS
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rank", [5, 40])
def test_thin_products_come_with_the_backward_of_the_activation(device, activation, in_place, rank):
    """70 rows on one expert are two tiles; rows of nobody are not read (NaN) and not written (7)."""
    expert_TK = torch.tensor([[0, 2]] * 70 + [[-1, 2], [3, 0]], device=device)
    layout = build_layout(expert_TK, E)
    rows, owned = expert_TK.numel(), int(layout.offs_E[-1])
    lora = factors(device, rank if activation.gated else 0, rank, rank)
    up, down = join_factors(lora, activation, torch.float32)
    da, h = random(device, rows, I), random(device, rows, activation.width(I), seed=1)
    weight_TK = random(device, *expert_TK.shape, seed=2)
    da[owned:], h[owned:] = math.nan, math.nan
    da64, h64 = da[:owned].double(), h[:owned].double()
    up_rank = rank * (2 if activation.gated else 1)
    dlow, low_down = torch.full((rows, 64 * -(-up_rank // 64)), 7.0).to(device), torch.full((rows, 64), 7.0).to(device)
    dh, scaled_a = (h, da) if in_place else (torch.full_like(h, 7.0), torch.full_like(da, 7.0))
    ds = activate_backward_low_rank(
        da, h, weight_TK, layout.order_N.to(torch.int32), activation, dh, scaled_a, layout.offs_E,
        scaling=1.5, b_EJP=up.b_EOP, dlow_NP=dlow, up_rank=up_rank, a_EPI=down.a_EPI, low_down_NR=low_down,
    )  # fmt: skip
    scale = weight_TK.flatten()[layout.order_N][:owned, None].double()
    a = truth.activate(h64, activation)
    true_dh = truth.activate_backward(scale * da64, h64, activation)
    expert = torch.searchsorted(layout.offs_E, torch.arange(owned, device=device, dtype=torch.int32), right=True)
    true_dlow = 1.5 * torch.einsum("nj,njr->nr", true_dh, up.b_EOP.double()[expert])
    true_low = 1.5 * torch.einsum("ni,nri->nr", scale * a, down.a_EPI.double()[expert])
    assert error(ds[:owned], (da64 * a).sum(-1)) < 2e-6
    assert error(dh[:owned], true_dh) < 2e-6
    assert error(scaled_a[:owned], scale * a) < 2e-6
    assert error(dlow[:owned], true_dlow) < 2e-6 and not dlow[:owned, up_rank:].any()
    assert error(low_down[:owned], true_low) < 2e-6
    assert (dlow[owned:] == 7).all() and (low_down[owned:] == 7).all()
