"""Attention of packed documents on a CPU, and in a model there: as by a mask, and no mask is made.

T tokens · Q query heads · G key and value heads · D of a head
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils

from amoeba.data.token_rows import document_arguments
from amoeba.integrations.fused_attention import NAME
from amoeba.ops.attention import document_attention
from selection import each_value_once
from tiny_models import build

LENGTHS = {
    "one": (37,),
    "rows of one length": (16, 16, 16),
    "rows of one length between others": (5, 16, 16, 1, 1, 9),
    "all different": (1, 2, 63, 31),
}


def ends_of(lengths: tuple[int, ...], repeated: int = 3) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.cat([ends, ends[-1:].expand(repeated)])  # as batches with fewer documents have them


def by_a_mask(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    seen_TT = (document_T[:, None] == document_T[None]).tril()
    heads = (states.transpose(0, 1) for states in (q, k, v))
    return scaled_dot_product_attention(*heads, attn_mask=seen_TT, scale=scale, enable_gqa=True).transpose(0, 1)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("name", LENGTHS)
def test_outputs_and_gradients_on_a_cpu_are_those_under_a_mask(name, heads, key_heads, dtype):
    lengths, generator = LENGTHS[name], torch.Generator().manual_seed(0)

    def random(heads: int, size: int) -> Tensor:
        return torch.randn(sum(lengths), heads, size, generator=generator).to(dtype)

    leaves = [random(heads, 8), random(key_heads, 8), random(key_heads, 12)]  # values may be of another size
    dy = random(heads, 12)
    found = [leaf.clone().requires_grad_() for leaf in leaves]
    y = document_attention(*found, ends_of(lengths), longest=max(lengths), scale=0.3)
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    truth = by_a_mask(*wide, lengths, 0.3)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for got, expected in zip(
        (y, *torch.autograd.grad(y, found, dy)), (truth, *torch.autograd.grad(truth, wide, dy.double())), strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def batch(positions: list[list[int]]) -> dict[str, Tensor]:
    position_BS = torch.tensor(positions)
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(0, 50, position_BS.shape, generator=generator)
    return {"input_ids": ids_BS, "labels": ids_BS, "position_ids": position_BS}


@pytest.mark.parametrize("window", [None, 12, 5])
def test_a_model_on_a_cpu_makes_no_mask_and_learns_the_same(window, monkeypatch):
    model: Any = build("mixtral", sliding_window=window)
    given = batch([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], list(range(10))])
    told = document_arguments(given, most=4, longest=10)
    model(**given, use_cache=False).loss.backward()  # with a cache transformers takes documents for one
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation(NAME)
    if window == 5:
        with pytest.raises(ValueError, match=r"ours has no sliding window on a CPU. Use sdpa"):
            model(**given, **told)
        return
    made = []
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *given, **options: made.append(options))
    model(**given, **told).loss.backward()
    assert not made
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_graph_is_told_that_the_result_is_contiguous_however_queries_lie():
    """As the kernels write it: a compiled graph takes it for what it is told."""
    q, k, v = (torch.empty(heads, 12, 32, device="meta").transpose(0, 1) for heads in (4, 2, 2))
    assert document_attention(
        q, k, v, torch.empty(3, dtype=torch.int32, device="meta"), longest=8, scale=1.0
    ).is_contiguous()
