"""Queries, gates, keys and values of a step against the formula of transformers, in the interpreter or on a GPU."""

import pytest
import torch
from row_checks import error, random

from amoeba.kernels.decode.gated_attention import norm_rotate_gated
from selection import each_value_once

EPS = 1e-6
# The interpreter truncates to bf16 where a GPU rounds, four times here.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}


def rotated(x, weight, cos, sin):
    """(B, heads, D) in fp64."""
    x, weight, cos, sin = x.double(), weight.double(), cos.double()[:, None], sin.double()[:, None]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


@each_value_once()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "size", "part", "tables", "slots"),
    [(4, 2, 32, 8, 1, [3]), (3, 3, 16, 16, 3, [5, 0, 2]), (8, 1, 64, 12, 3, [1])],
)
def test_heads_gates_and_cache(device, heads, groups, size, part, tables, slots, dtype):
    rows, length = 3, 6
    qkv = random(device, dtype, rows, 2 * (heads + groups) * size)
    weights = [random(device, dtype, size) / 3, random(device, dtype, 2 * size)[:size] / 3]
    cos, sin = (random(device, dtype, tables, part, number)[..., 0].contiguous() for number in (1, 2))
    key, value = (random(device, dtype, rows, groups, length, size) for _ in range(2))
    expected_key, expected_value = key.double().cpu(), value.double().cpu()
    slot = torch.tensor(slots, dtype=torch.int64, device=device)
    q, gate = norm_rotate_gated(qkv, *weights, cos, sin, key, value, slot, query_heads=heads, eps=EPS)

    with_gates, k, v = qkv.cpu().split([2 * heads * size, groups * size, groups * size], 1)
    queries, gates = with_gates.view(rows, heads, 2, size).unbind(2)
    of_cpu = [each.cpu() for each in (*weights, cos, sin)]
    k = rotated(k.view(rows, groups, size), of_cpu[1], *of_cpu[2:])
    for row in range(rows):
        expected_key[row, :, slots[row % len(slots)]] = k[row]
        expected_value[row, :, slots[row % len(slots)]] = v.view(rows, groups, size)[row].double()
    assert error(q.cpu(), rotated(queries, of_cpu[0], *of_cpu[2:])) < TOLERANCE[dtype]
    assert error(gate.cpu(), torch.sigmoid(gates.double())) < TOLERANCE[dtype]
    assert error(key.cpu(), expected_key) < TOLERANCE[dtype]
    assert torch.equal(value.cpu().double(), expected_value)


def test_behind_the_last_slot_nothing_is_kept(device):
    key, value = (torch.zeros(1, 2, 4, 8, device=device) for _ in range(2))
    qkv, weight = random(device, torch.float32, 1, 64), random(device, torch.float32, 8)
    cos, slot = random(device, torch.float32, 1, 4), torch.tensor([4], device=device)
    norm_rotate_gated(qkv, weight, weight, cos, cos, key, value, slot, query_heads=2, eps=EPS)
    assert not key.any() and not value.any()


def test_what_does_not_fit_together_is_refused(device):
    key = torch.zeros(1, 2, 4, 8, device=device)
    qkv, weight, slot = (
        random(device, torch.float32, 1, 64),
        random(device, torch.float32, 8),
        torch.tensor([0], device=device),
    )
    for rotated_part, heads in ((3, 2), (16, 2), (4, 3)):
        cos = random(device, torch.float32, 1, rotated_part)
        with pytest.raises(ValueError, match="rows of all heads with gates"):
            norm_rotate_gated(qkv, weight, weight, cos, cos, key, key, slot, query_heads=heads, eps=EPS)
