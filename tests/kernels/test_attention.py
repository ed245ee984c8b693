"""Attention of packed documents against a dense one in fp64: outputs and every gradient.

T tokens · Q query heads · G key and value heads · D of a head · N documents
"""

import math
from dataclasses import dataclass

import pytest
import torch
from row_checks import error, random
from torch import Tensor

from amoeba.kernels import attention
from amoeba.kernels.attention.kernels import bounds

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
DTYPE = torch.float16  # the interpreter multiplies no bf16


def ends_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def visible(lengths: tuple[int, ...], tokens: int, window: int) -> Tensor:
    """(T, T): whether a query sees a key."""
    numbered = [*enumerate(lengths), (-1, tokens - sum(lengths))]
    document = torch.cat([torch.full((length,), number) for number, length in numbered])
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = (document[:, None] == document[None]) & (key <= query) & (document >= 0)
    return seen & (query - key <= window) if window >= 0 else seen


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (states.repeat_interleave(group, 1) for states in (k, v))
    scores = torch.einsum("tqd,sqd->qts", q, k) * scale
    probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)  # a query may see nothing
    return torch.einsum("qts,sqd->tqd", probabilities, v)


@dataclass
class Case:
    lengths: tuple[int, ...]
    heads: int = 1
    key_heads: int = 1
    window: int = -1
    size: int = 64
    rest: int = 0  # tokens of no document


CASES = {
    "one document of several tiles": Case((321,)),
    "lengths around a tile": Case((63, 1, 199, 64, 1, 1, 128)),
    "as long as tiles": Case((128, 256)),
    "groups of query heads": Case((90, 140), 6, 2),
    "window": Case((30, 230), window=70),
    "window of its own token": Case((70, 80), window=0),
    "tokens of no document": Case((100,), rest=150),
    "repeated ends": Case((0, 65, 0, 0, 70, 0, 0)),
    "one token": Case((1,)),
    "size 128": Case((150,), 2, 1, size=128),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_dense_attention(device, name):
    case = CASES[name]
    tokens, scale = sum(case.lengths) + case.rest, case.size**-0.5
    q, dy = (random(device, DTYPE, tokens, case.heads, case.size, *extra) for extra in ((), (1,)))
    k, v = (random(device, DTYPE, tokens, case.key_heads, case.size, *extra) for extra in ((1, 1), (1, 1, 1)))
    dy, k, v = (states.reshape(tokens, -1, case.size) for states in (dy, k, v))
    ends = ends_of(case.lengths).to(device)
    y, logsumexp = attention.forward(q, k, v, ends, scale, case.window)
    got = {"y": y}
    gradients = attention.backward(dy, q, k, v, y, logsumexp, ends, scale, case.window)
    got |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    leaves = [states.double().cpu().requires_grad_() for states in (q, k, v)]
    expected_y = dense(*leaves, visible(case.lengths, tokens, case.window), scale)
    expected = dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad(expected_y, leaves, dy.double().cpu()), strict=True), y=expected_y
    )
    found = {each: error(got[each].cpu(), expected[each]) for each in got}
    print(found)
    # A single token's own score has no gradient: what there is of it is rounding.
    zero = {each for each in expected if expected[each].abs().max() < 1e-9}
    assert all(got[each].abs().max() < 1e-2 for each in zero)
    assert all(found[each] < TOLERANCE[DTYPE] for each in found if each not in zero), found


@pytest.mark.parametrize("window", [-1, 0, 3])
@pytest.mark.parametrize("rest", [0, 5])
def test_bounds_say_who_sees_whom(device, window, rest):
    lengths = (1, 0, 7, 300, 2, 0, 0)
    tokens = sum(lengths) + rest
    first_T, end_T = bounds(ends_of(lengths).to(device), tokens, window).cpu()
    token = torch.arange(tokens)
    seen = visible(lengths, tokens, window)
    assert torch.equal((first_T[:, None] <= token[None]) & (token[None] <= token[:, None]), seen)
    assert torch.equal((token[None] <= token[:, None]) & (token[:, None] < end_T[None]), seen)
    assert (first_T.diff() >= 0).all() and (end_T.diff() >= 0).all()
