"""LoRA's kernels for sorted rows: `join_factors`, and `lora_backward` against sums in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from row_checks import error
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.weights import LoraFactors
from amoeba.kernels.lora.epilogue import padded_rank
from amoeba.kernels.lora.join_factors import join_factors
from amoeba.kernels.lora.lora_backward import configuration, lora_backward
from amoeba.proof.reference import experts as truth
from selection import each_value_once

E, H, I = 3, 37, 71
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


@pytest.mark.parametrize("activation", [GATED, INTERLEAVED], ids=["gated", "interleaved"])
def test_an_a_that_gate_and_up_share_is_there_once(device, activation):
    apart = factors(device, 5, 5, 0)
    lora = replace(apart, up_lora_a=apart.gate_lora_a)
    (a_EPH, b_EJP), _ = join_factors(lora, activation, torch.float32)
    assert a_EPH.shape == (E, 16, H) and b_EJP.shape == (E, 2 * I, 16)
    assert torch.equal(a_EPH[:, :5], lora.gate_lora_a) and not a_EPH[:, 5:].any()
    gate, up = (b_EJP[:, 0::2], b_EJP[:, 1::2]) if activation.interleaved else b_EJP.chunk(2, 1)
    assert torch.equal(gate[:, :, :5], lora.gate_lora_b) and torch.equal(up[:, :, :5], lora.up_lora_b)
    assert not b_EJP[:, :, 5:].any()


@each_value_once("dtype")
@ACTIVATIONS
@pytest.mark.parametrize("ranks", [(5, 5, 5), (3, 70, 64), (0, 4, 0), (0, 0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_joined_factors_are_the_factors_and_zeros(device, activation, ranks, dtype):
    gate, up, down = ranks
    lora = factors(device, gate if activation.gated else 0, up, down)
    joined_up, joined_down = join_factors(lora, activation, dtype)
    assert (joined_up is None, joined_down is None) == (up == 0, down == 0)
    if joined_down is not None:
        assert joined_down.a_EPI.shape[1] == joined_down.b_EOP.shape[2] == padded_rank(down)
        assert torch.equal(joined_down.a_EPI[:, :down], lora.down_lora_a.to(dtype))
        assert torch.equal(joined_down.b_EOP[:, :, :down], lora.down_lora_b.to(dtype))
        assert not joined_down.a_EPI[:, down:].any() and not joined_down.b_EOP[:, :, down:].any()
    if joined_up is not None:
        x = random(device, 2, H).to(dtype).double()
        for e in range(E):
            parts = {
                name: x @ a[e].to(dtype).double().T @ b[e].to(dtype).double().T
                for name, a, b in (("gate", lora.gate_lora_a, lora.gate_lora_b), ("up", lora.up_lora_a, lora.up_lora_b))
                if a is not None
            }
            expected = parts["up"]
            if activation.gated:
                expected = truth.join_gate_up(parts.get("gate", torch.zeros_like(expected)), expected, activation)
            a, b = (matrix[e].double() for matrix in joined_up)
            assert error(x @ a.T @ b.T, expected) < 1e-12
            own = sum(t.shape[1] for t in (lora.gate_lora_a, lora.up_lora_a) if t is not None)
            assert a.shape[0] == padded_rank(own) and not a[own:].any() and not b[:, own:].any()


def test_ranks_are_padded_to_one_short_step_or_to_whole_ones():
    assert [padded_rank(rank) for rank in (0, 1, 16, 17, 24, 32, 33, 64, 65, 128, 129)] == [
        0, 16, 16, 32, 32, 32, 64, 64, 128, 128, 192,
    ]  # fmt: skip


@each_value_once("gathered")
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("width", "rank"), [(71, 5), (64, 16), (19, 70)])
@pytest.mark.parametrize("rows", [(70, 0, 9), (1, 2, 0), (0, 0, 0), (300, 400, 10)], ids=str)
def test_a_pair_of_thin_products_from_one_read(device, rows, width, rank, gathered):
    """70 rows on one expert are two tiles, 300 with few others larger ones; rows of nobody are not read (NaN)."""
    owned, count, padded = sum(rows), sum(rows) + 3, padded_rank(rank)
    generator = torch.Generator().manual_seed(count)
    order = torch.randperm(count, generator=generator).to(device, torch.int32)
    offs = torch.tensor(rows, device=device).cumsum(0).to(torch.int32)
    dtype = HALF if owned > 300 or rank > 32 else torch.float32
    factor = random(device, E, width, padded).to(dtype)
    factor[:, :, rank:] = 0
    low, weight = random(device, count, padded, seed=1).to(dtype), random(device, count, 1, seed=2)
    low[owned:] = math.nan
    given = random(device, count, width, seed=3).to(dtype)
    if not gathered:
        given[owned:] = math.nan
    found, sums = lora_backward(
        given,
        factor,
        low,
        offs,
        rank=rank,
        scaling=1.5,
        order_N=order if gathered else None,
        weight_TK=weight if gathered else None,
        top_k=1,
    )
    sorted_rows = (given[order.long()] if gathered else given)[:owned].double()
    scale = weight.flatten()[order.long()][:owned, None].double() if gathered else 1.0
    expert = torch.searchsorted(offs, torch.arange(owned, device=device, dtype=torch.int32), right=True)
    thin = 1.5 * torch.einsum("nw,nwr->nr", sorted_rows, factor.double()[expert])
    each = torch.einsum("nw,nr->nwr", sorted_rows, low[:owned, :rank].double() * scale)
    true_sums = torch.zeros(E, width, rank, dtype=torch.float64, device=device).index_add_(0, expert, each)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    assert found.shape == (count, padded) and not found[:owned, rank:].any()
    assert error(found[:owned], thin) <= tolerance
    whole = sums.write(torch.full((E, width, rank), math.nan, device=device))
    assert error(whole, true_sums) <= tolerance
    assert torch.equal(whole, sums.write(torch.empty_like(whole)))
    # every second column, the later ranks, stored the other way round
    some = sums.write(torch.full((E, rank - 2, width // 2), math.nan, device=device).mT, first=1, step=2, rank=2)
    assert torch.equal(some, whole[:, 1 : 2 * (width // 2) : 2, 2:])


@pytest.mark.parametrize(("rank", "is_large"), [(16, True), (64, True), (65, False), (128, False)])
def test_ranks_above_64_have_modest_tiles_on_a_large_gpu_too(rank, is_large):
    of_large, of_small = (configuration(1 << 20, 64, rank, torch.bfloat16, each) for each in ((9, 0), (8, 6)))
    assert (of_large != of_small) == is_large
