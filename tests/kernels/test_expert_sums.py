"""`sum_per_expert` and `bias_dot` against plain torch in fp64."""

import itertools
import math

import pytest
import torch
from row_checks import TOLERANCE, error, random
from torch import Tensor

from amoeba.core.layout import Layout, build_layout
from amoeba.kernels import expert_sums
from amoeba.kernels.expert_sums import bias_dot, sum_per_expert
from selection import each_value_once

EXPERTS = 6


def random_experts(tokens: int, top_k: int) -> Tensor:
    """Some of them nobody's, and one expert without rows."""
    expert_TK = torch.randint(-1, EXPERTS + 1, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    return expert_TK.masked_fill(expert_TK == 2, 3)


def summed(rows_NW: Tensor, layout: Layout) -> Tensor:
    ends = [0, *layout.offs_E.tolist()]
    return torch.stack([rows_NW[a:b].double().sum(0) for a, b in itertools.pairwise(ends)])


@pytest.fixture(params=[1, 5, 128], ids=lambda rows: f"chunks of {rows}")
def chunks(request, monkeypatch):
    """Many chunks of an expert, a few with a part of one, a single one."""
    monkeypatch.setattr(expert_sums, "CHUNK", request.param)


@each_value_once("dtype")
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(tokens, torch.float32) for tokens in (0, 1, 63)] + [(20, torch.float16), (20, torch.bfloat16)],
)
@pytest.mark.usefixtures("chunks")
def test_rows_of_each_expert_are_summed(device, dtype, tokens):
    expert_TK = random_experts(tokens, 2).to(device)
    layout = build_layout(expert_TK, EXPERTS)
    rows = random(device, dtype, 2 * tokens, 63)
    rows[int(layout.offs_E[-1]) :] = math.nan
    out = sum_per_expert(rows, layout.offs_E, torch.full((EXPERTS, 63), math.nan, dtype=dtype, device=device))
    assert error(out, summed(rows, layout)) < TOLERANCE[dtype]
    assert (out[2] == 0).all()


@pytest.mark.usefixtures("chunks")
def test_an_experts_sum_has_the_same_bits_whichever_other_experts_there_are(device):
    """As over ranks, where each has its own experts only."""
    layout = build_layout(random_experts(70, 2).to(device), EXPERTS)
    rows = random(device, torch.float32, 140, 40)
    together = sum_per_expert(rows, layout.offs_E, torch.empty(EXPERTS, 40, device=device))
    for expert, (begin, end) in enumerate(itertools.pairwise([0, *layout.offs_E.tolist()])):
        alone = torch.tensor([end - begin], dtype=torch.int32, device=device)
        found = sum_per_expert(rows[begin:end], alone, torch.empty(1, 40, device=device))
        assert torch.equal(found[0], together[expert])


@each_value_once()
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_token", [False, True])
def test_scaled_rows_and_rows_of_tokens(device, weight_dtype, by_token):
    tokens, top_k = 40, 3
    layout = build_layout(random_experts(tokens, top_k).to(device), EXPERTS)
    weight_TK = random(device, weight_dtype, tokens, top_k)
    rows = random(device, torch.float32, tokens if by_token else tokens * top_k, 40)
    sorted_rows = rows[layout.token_N] if by_token else rows
    expected = summed(sorted_rows.double() * weight_TK.flatten()[layout.order_N, None].double(), layout)
    for order_N in (layout.order_N, layout.order_N.to(torch.int32)):
        out = torch.full((EXPERTS, 40), math.nan, device=device)
        sum_per_expert(rows, layout.offs_E, out, order_N=order_N, weight_TK=weight_TK, by_token=by_token)
        assert error(out, expected) < 2e-6


@each_value_once()
@pytest.mark.parametrize("expert", [-1, 0, EXPERTS - 1], ids=["nobody", "first", "last"])
@pytest.mark.usefixtures("chunks")
def test_all_rows_on_one_expert_or_on_none(device, expert):
    layout = build_layout(torch.full((63, 1), expert, device=device), EXPERTS)
    rows = random(device, torch.float32, 63, 16)
    out = sum_per_expert(rows, layout.offs_E, torch.full((EXPERTS, 16), math.nan, device=device))
    assert error(out, summed(rows, layout)) < 2e-6


@pytest.mark.parametrize("width", [1, 199, 520, 760])
def test_every_width(device, width):
    layout = build_layout(random_experts(20, 1).to(device), EXPERTS)
    rows = random(device, torch.float32, 20, width + 8)[:, :width]
    out = sum_per_expert(rows, layout.offs_E, torch.full((EXPERTS, width), math.nan, device=device))
    assert error(out, summed(rows, layout)) < 2e-6


@pytest.mark.usefixtures("chunks")
def test_more_experts_than_rows(device):
    expert_TK = torch.tensor([[90], [3], [3], [99], [0]], device=device)
    layout = build_layout(expert_TK, 100)
    rows = random(device, torch.float32, 5, 16)
    out = sum_per_expert(rows, layout.offs_E, torch.full((100, 16), math.nan, device=device))
    assert error(out, summed(rows, layout)) < 2e-6


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "dtype"),
    [
        (0, 2, 63, torch.float32),
        (1, 1, 1, torch.float32),
        (23, 3, 63, torch.float16),
        (23, 3, 64, torch.bfloat16),
        (5, 20, 760, torch.float32),
        (3, 4, 2100, torch.float32),
    ],
)
def test_bias_dot_is_the_product_with_the_bias_of_the_slots_expert(device, tokens, top_k, hidden, dtype):
    expert_TK = random_experts(tokens, top_k).to(device)
    dy, bias = random(device, dtype, tokens, hidden), random(device, dtype, EXPERTS, hidden)
    owned_TK = (expert_TK >= 0) & (expert_TK < EXPERTS)
    picked = bias.double()[expert_TK.clamp(0, EXPERTS - 1)]
    expected = torch.where(owned_TK, (dy.double()[:, None] * picked).sum(-1), 0.0)
    out = bias_dot(dy, bias, expert_TK)
    assert out.dtype == torch.float32
    assert error(out, expected) < 2e-6
    assert (out[~owned_TK] == 0).all()


def test_bias_dot_of_an_infinite_gradient_is_zero_for_nobody(device):
    dy, bias = torch.full((1, 8), math.inf, device=device), torch.ones(EXPERTS, 8, device=device)
    out = bias_dot(dy, bias, torch.tensor([[-1, 0, EXPERTS]], device=device))
    assert out.tolist() == [[0.0, math.inf, 0.0]]
