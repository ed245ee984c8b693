"""Queries and keys normed and rotated against transformers' formulas in fp64: outputs and every gradient by name.

T tokens · Q query heads · G key and value heads · D of a head · C columns of a joined projection
"""

import pytest
import torch
from row_checks import DTYPES, error, random
from torch import Tensor

from amoeba.kernels.norm_rotate import BACKWARD, FORWARD, norm_rotate, norm_rotate_backward_, norm_rotate_cached
from selection import each_value_once, quick

EPS = 1e-6
# In half precision normed, weighted and rotated numbers are rounded one after the other, as transformers does it. The
# interpreter truncates to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}
CASES = {
    "groups of heads": (37, 8, 4, 64, 37),
    "one key head": (50, 3, 1, 64, 50),
    "odd numbers of heads": (9, 6, 3, 32, 9),
    "rows of one batch share rotations": (66, 4, 2, 64, 33),
    "size 128": (19, 4, 2, 128, 19),
    "one token": (1, 2, 2, 64, 1),
    "many programs": (139, 2, 1, 32, 139),
}


def rotated(qkv: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """(T, Q + G, D), by autograd."""
    tokens, size = qkv.shape[0], weights[0].shape[0]
    key_heads = (qkv.shape[1] // size - heads) // 2
    x = qkv[:, : (heads + key_heads) * size].reshape(tokens, -1, size)
    weight = torch.stack([weights[0]] * heads + [weights[1]] * key_heads)
    m = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    turned = torch.cat([-m[..., size // 2 :], m[..., : size // 2]], -1)
    cos, sin = (table.repeat(tokens // len(table), 1)[:, None] for table in (cos, sin))
    return m * cos + turned * sin


def problem(device: torch.device, dtype: torch.dtype, name: str) -> tuple[list[Tensor], Tensor, int]:
    tokens, heads, key_heads, size, rotations = CASES[name]
    columns = (heads + 2 * key_heads) * size
    qkv, dqkv = random(device, dtype, tokens, columns), random(device, dtype, tokens, columns, 1)[..., 0]
    weights = [1 + 0.3 * random(device, dtype, size), 1 + 0.3 * random(device, dtype, size, 1)[:, 0]]
    tables = [random(device, dtype, rotations, size), random(device, dtype, rotations, size, 1)[..., 0]]
    return [each.contiguous() for each in (qkv, *weights, *tables)], dqkv.contiguous(), heads


@quick(lambda name, dtype: dtype == torch.float16 or name == "groups of heads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_formula(device, name, dtype):
    given, dqkv, heads = problem(device, dtype, name)
    qkv, *weights, cos, sin = given
    size = len(weights[0])
    width = (qkv.shape[1] // size + heads) // 2 * size  # of queries and keys
    got = {"qk": norm_rotate(*given, query_heads=heads, eps=EPS)}
    leaves = [each.double().cpu().requires_grad_() for each in (qkv, *weights)]
    expected = rotated(leaves[0], (leaves[1], leaves[2]), cos.double().cpu(), sin.double().cpu(), heads, EPS)
    truth = [expected, *torch.autograd.grad(expected, leaves, dqkv[:, :width].double().cpu().view(expected.shape))]
    values = dqkv[:, width:].clone()
    of_weights = norm_rotate_backward_(dqkv, *given, query_heads=heads, eps=EPS)
    assert torch.equal(dqkv[:, width:], values)
    got |= {"dqk": dqkv[:, :width], "dq_weight": of_weights[0], "dk_weight": of_weights[1]}
    truth = [truth[0].detach(), truth[1][:, :width], *truth[2:]]
    errors = {key: error(found.cpu(), one) for (key, found), one in zip(got.items(), truth, strict=True)}
    print(errors)
    assert all(found.dtype == dtype for found in got.values())
    assert max(errors.values()) < TOLERANCE[dtype], errors


def test_strides_of_rows_and_frozen_weights(device):
    given, dqkv, heads = problem(device, torch.float32, "groups of heads")
    wide, d_wide = (torch.cat([each, each], 1)[:, : each.shape[1]] for each in (given[0], dqkv))
    assert not wide.is_contiguous()
    assert torch.equal(
        norm_rotate(wide, *given[1:], query_heads=heads, eps=EPS), norm_rotate(*given, query_heads=heads, eps=EPS)
    )
    norm_rotate_backward_(dqkv, *given, query_heads=heads, eps=EPS)
    none = norm_rotate_backward_(d_wide, wide, *given[1:], query_heads=heads, eps=EPS, of_weights=False)
    assert none is None and torch.equal(d_wide, dqkv)


@pytest.mark.parametrize("elements", [512, 4096])
def test_tiles_decide_about_the_order_of_sums_alone(device, elements):
    given, dqkv, heads = problem(device, torch.float32, "many programs")
    again = dqkv.clone()
    out = norm_rotate(*given, query_heads=heads, eps=EPS)
    tile = FORWARD._replace(elements=elements)
    torch.testing.assert_close(norm_rotate(*given, query_heads=heads, eps=EPS, tile=tile), out)
    sums = norm_rotate_backward_(dqkv, *given, query_heads=heads, eps=EPS)
    tile = BACKWARD._replace(elements=elements, repeats=3)
    others = norm_rotate_backward_(again, *given, query_heads=heads, eps=EPS, tile=tile)
    torch.testing.assert_close(again, dqkv)
    torch.testing.assert_close(others, sums)


def test_no_tokens(device):
    given, _, heads = problem(device, torch.float32, "groups of heads")
    none = given[0][:0]
    assert norm_rotate(none, *given[1:], query_heads=heads, eps=EPS).shape[0] == 0
    sums = norm_rotate_backward_(none.clone(), none, *given[1:], query_heads=heads, eps=EPS)
    assert all(torch.equal(each, torch.zeros_like(each)) for each in sums)


@pytest.mark.parametrize("wrong", ["dtype", "columns", "size", "rotations", "gradient"])
def test_arguments_that_do_not_fit_are_refused(device, wrong):
    given, dqkv, heads = problem(device, torch.float32, "groups of heads")
    if wrong == "dtype":
        given[3] = given[3].half()
    elif wrong == "columns":
        given[0] = given[0][:, :-64]
    elif wrong == "size":
        given[1], given[2] = given[1][:48], given[2][:48]
    elif wrong == "rotations":
        given[4] = given[4][:-1]
    else:
        dqkv = dqkv[:-1]
    with pytest.raises(ValueError, match="expected"):
        norm_rotate_backward_(dqkv, *given, query_heads=heads, eps=EPS)


@each_value_once()
@pytest.mark.parametrize("each", [False, True], ids=["one_slot", "a_slot_of_each_row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["groups of heads", "one key head", "rows of one batch share rotations", "size 128"])
def test_keys_and_values_go_into_the_cache_at_the_slot_and_nothing_else_does(device, name, dtype, each):
    """Tokens that have no slot left are not kept."""
    given, _, heads = problem(device, dtype, name)
    tokens, _, key_heads, size, rotations = CASES[name]
    rows = tokens // rotations
    length, first = rotations + 5, 7
    firsts = [first + (row % 3 if each else 0) for row in range(rows)]
    keys, values = (torch.full((rows, key_heads, length, size), 9.0, dtype=dtype, device=device) for _ in range(2))
    slot = torch.tensor(firsts if each else [first], device=device)
    q, k = norm_rotate_cached(*given, keys, values, slot, query_heads=heads, eps=EPS)
    expected = norm_rotate(*given, query_heads=heads, eps=EPS)  # with squares in another order
    assert error(torch.cat([q, k], 1), expected.double()) < TOLERANCE[dtype] / 4
    v = given[0][:, -key_heads * size :]
    for cache, came in ((keys, k), (values, v.view(tokens, key_heads, size))):
        for row, first in enumerate(firsts):
            kept = min(rotations, length - first)
            expected = came.view(rows, rotations, key_heads, size).transpose(1, 2)[row, :, :kept]
            assert torch.equal(cache[row, :, first : first + kept], expected)
            assert (cache[row, :, :first] == 9).all() and (cache[row, :, first + kept :] == 9).all()
