"""`combine` and `slot_gradient` against plain torch in fp64."""

import math

import pytest
import torch
from row_checks import DTYPES, TOLERANCE, error, random
from torch import Tensor

from amoeba.core.layout import build_layout
from amoeba.kernels.combine import combine, slot_gradient
from selection import each_value_once

EXPERTS = 6


def random_experts(tokens: int, top_k: int) -> Tensor:
    """Some of them nobody's."""
    return torch.randint(-1, EXPERTS + 1, (tokens, top_k), generator=torch.Generator().manual_seed(tokens + top_k))


def slot_rows(expert_TK: Tensor, device: torch.device) -> Tensor:
    return build_layout(expert_TK.to(device), EXPERTS).slot_row_N.view(expert_TK.shape).to(torch.int32)


def scatter_rows(x_TH: Tensor, slot_row_TK: Tensor, out: Tensor) -> Tensor:
    """Each token's row at its slots; the other rows of `out` stay as they are."""
    token, slot = (slot_row_TK < slot_row_TK.numel()).nonzero(as_tuple=True)
    out[slot_row_TK[token, slot].long()] = x_TH[token]
    return out


def summed(rows: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    owned_TK = slot_row_TK < slot_row_TK.numel()
    picked_TKH = rows.double()[slot_row_TK.long().clamp(max=max(slot_row_TK.numel() - 1, 0))]
    if weight_TK is not None:
        picked_TKH = picked_TKH * weight_TK.double()[..., None]
    return torch.where(owned_TK[..., None], picked_TKH, 0.0).sum(1)


@each_value_once()
@pytest.mark.parametrize("hidden", [1, 64, 199, 760, 2056, 2100])
@pytest.mark.parametrize("wide_indices", [False, True])
def test_every_width_strided_rows_and_both_kinds_of_index(device, hidden, wide_indices):
    slot_row_TK = slot_rows(random_experts(4, 2), device)
    slot_row_TK = slot_row_TK.long() if wide_indices else slot_row_TK
    x = random(device, torch.float32, 4, 2 * hidden)[:, :hidden]
    buffer = torch.full((9, hidden + 8), math.nan, device=device)
    scatter_rows(x, slot_row_TK, buffer[:, :hidden])
    owned = int((slot_row_TK < 8).sum())
    assert buffer[:owned, :hidden].isfinite().all()
    assert buffer[owned:].isnan().all() and buffer[:, hidden:].isnan().all()
    out = torch.full((4, hidden), math.nan, device=device)
    count_T1 = (slot_row_TK < 8).sum(1, keepdim=True)
    assert error(combine(buffer[:, :hidden], slot_row_TK, None, out), x.double() * count_T1) < 1e-6


@each_value_once()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_combine_adds_weighted_rows_and_never_reads_those_of_nobody(device, dtype, weight_dtype):
    expert_TK = random_experts(23, 3)
    slot_row_TK, rows = slot_rows(expert_TK, device), expert_TK.numel()
    owned_TK = slot_row_TK < rows
    sorted_rows = random(device, dtype, rows, 63)
    sorted_rows[int(owned_TK.sum()) :] = math.nan
    weight_TK = None
    if weight_dtype is not None:
        weight_TK = random(device, weight_dtype, 23, 3).masked_fill(~owned_TK, math.inf)
    out = combine(sorted_rows, slot_row_TK, weight_TK, torch.full((23, 63), math.nan, dtype=dtype, device=device))
    assert error(out, summed(sorted_rows, slot_row_TK, weight_TK)) < TOLERANCE[dtype]


@each_value_once()
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 13, 33])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_combine_for_every_number_of_experts_per_token(device, tokens, top_k):
    slot_row_TK = slot_rows(random_experts(tokens, top_k), device)
    sorted_rows, weight_TK = (
        random(device, torch.float32, tokens * top_k, 40),
        random(device, torch.float32, tokens, top_k),
    )
    out = combine(sorted_rows, slot_row_TK, weight_TK, torch.full((tokens, 40), math.nan, device=device))
    assert error(out, summed(sorted_rows, slot_row_TK, weight_TK)) < 1e-6


def test_combine_adds_in_the_order_of_the_slots(device):
    """1e8 + 1 - 1e8 is 0 in fp32 in this order, and 1 in any order that adds the large ones first."""
    rows = torch.tensor([[1e8], [1.0], [-1e8]], device=device)
    slot_row_TK = torch.arange(3, dtype=torch.int32, device=device)[None]
    assert combine(rows, slot_row_TK, None, torch.full((1, 1), math.nan, device=device)) == 0
    swapped = torch.tensor([[0, 2, 1]], dtype=torch.int32, device=device)
    assert combine(rows, swapped, None, torch.full((1, 1), math.nan, device=device)) == 1


@pytest.mark.parametrize("fill", [-1, 0], ids=["nobody", "one expert"])
def test_all_slots_alike(device, fill):
    slot_row_TK = slot_rows(torch.full((7, 2), fill), device)
    x = random(device, torch.float32, 7, 16)
    rows = scatter_rows(x, slot_row_TK, torch.full((14, 16), math.nan, device=device))
    out = combine(rows, slot_row_TK, None, torch.full((7, 16), math.nan, device=device))
    assert torch.equal(out, torch.zeros_like(x) if fill < 0 else 2 * x)


@each_value_once()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 199, 760])
@pytest.mark.parametrize("with_extra", [False, True])
def test_slot_gradient_is_that_of_the_row_and_zero_for_nobody(device, dtype, tokens, with_extra):
    slot_row_TK = slot_rows(random_experts(tokens, 3), device)
    owned_TK = slot_row_TK < slot_row_TK.numel()
    ds = random(device, torch.float32, tokens * 3)
    ds[int(owned_TK.sum()) :] = math.nan
    extra = random(device, torch.float32, tokens, 3).masked_fill(~owned_TK, math.nan) if with_extra else None
    out = slot_gradient(ds, slot_row_TK, extra, torch.full((tokens, 3), math.nan, dtype=dtype, device=device))
    expected = summed(ds[:, None], slot_row_TK.reshape(-1, 1), None).view(tokens, 3)
    if extra is not None:
        expected = expected + extra.double().masked_fill(~owned_TK, 0)
    assert error(out, expected) < TOLERANCE[dtype]
    assert (out[~owned_TK] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_onto_a_residual_has_the_bits_of_a_sum(device, dtype):
    slot_row_TK = slot_rows(random_experts(9, 3), device)
    rows, onto = random(device, dtype, 27, 200), random(device, dtype, 9, 256)[:, :200]
    weight_TK = random(device, torch.float32, 9, 3)
    plain = combine(rows, slot_row_TK, weight_TK, torch.empty(9, 200, dtype=dtype, device=device))
    got = combine(rows, slot_row_TK, weight_TK, torch.full((9, 200), math.nan, dtype=dtype, device=device), onto)
    if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter truncates
        assert error(got, (onto + plain).double()) < TOLERANCE[dtype]
    else:
        assert torch.equal(got, onto + plain)
    with pytest.raises(ValueError, match="onto_TH"):
        combine(rows, slot_row_TK, weight_TK, plain, onto[:5])
