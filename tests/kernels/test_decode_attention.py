"""The attention of one new token per row, against torch in fp64.

B rows · Q query heads · G key heads · L slots of the cache · D width of a key · V width of a value
"""

import pytest
import torch

from amoeba.proof.conformance import TOLERANCE, poisoned_memory
from selection import each_value_once

kernel = pytest.importorskip("amoeba.kernels.decode.attention", reason="the kernels need Triton")

# B, Q, G, L, D, V: one head for all, as many as queries, groups that are no power of two, keys wider than values
SHAPES = [(1, 4, 1, 64, 16, 16), (2, 6, 2, 200, 24, 24), (3, 2, 2, 130, 40, 16), (1, 3, 3, 1, 8, 8)]


def inputs(shape, device, dtype=torch.float32):
    rows, heads, groups, length, depth, width = shape
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(size, generator=generator).to(device, dtype)
        for size in ((rows, heads, depth), (rows, groups, length, depth), (rows, groups, length, width))
    )
    live = torch.rand(rows, length, generator=generator) < 0.6
    live[:, length // 3] = True
    return query, key, value, live.to(device)


def expected(query, key, value, live, scaling, sink=None):
    heads, groups = query.shape[1], key.shape[1]
    key, value = (each.double().repeat_interleave(heads // groups, 1) for each in (key, value))
    logits = (query.double()[:, :, None] * key).sum(-1) * scaling
    logits = logits.masked_fill(~live[:, None], float("-inf"))
    if sink is not None:
        logits = torch.cat([logits, sink.double()[None, :, None].expand(*logits.shape[:2], 1)], -1)
    share = logits.softmax(-1)[..., : key.shape[2]]
    return (share[..., None] * value).sum(2)


def run(query, key, value, live, scaling, sink=None):
    with poisoned_memory():
        return kernel.attention(query, key, value, live.view(torch.uint8), scaling, sink)


def assert_close(found, truth):
    assert found.isfinite().all()
    error = float((found.double() - truth).norm() / truth.norm())
    assert error < TOLERANCE[found.dtype], f"relative error {error:.1e}"


@each_value_once()
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention_over_the_live_slots(shape, with_sink, device):
    query, key, value, live = inputs(shape, device)
    sink = torch.linspace(-1, 3, shape[1], device=device) if with_sink else None
    assert_close(run(query, key, value, live, 0.3, sink), expected(query, key, value, live, 0.3, sink))


def test_what_is_not_live_is_not_looked_at(device):
    """Whole blocks of slots, and slots inside a block: what lies there is nobody's."""
    query, key, value, live = inputs((2, 4, 2, 300, 16, 16), device)
    live[:, 64:200] = False
    truth = expected(query, key, value, live, 0.25)
    key, value = (each.masked_fill(~live[:, None, :, None], float("nan")) for each in (key, value))
    assert_close(run(query, key, value, live, 0.25), truth)


def test_large_logits_do_not_overflow(device):
    query, key, value, live = inputs(SHAPES[1], device)
    assert_close(run(query * 30, key * 30, value, live, 1.0), expected(query * 30, key * 30, value, live, 1.0))


def test_strides_of_the_cache_are_free(device):
    """A cache that is a part of a longer one, and a query that is a view."""
    query, key, value, live = inputs((2, 4, 2, 300, 16, 16), device)
    part = slice(37, 170)
    live[:, 40] = True
    found = run(
        query.transpose(0, 1).contiguous().transpose(0, 1), key[:, :, part], value[:, :, part], live[:, part], 1
    )
    assert_close(found, expected(query, key[:, :, part], value[:, :, part], live[:, part], 1))


def test_it_is_the_same_from_run_to_run(device):
    made = inputs(SHAPES[1], device)
    assert torch.equal(run(*made, 0.3), run(*made, 0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    query, key, value, live = inputs((3, 32, 4, 700, 128, 128), device, dtype)
    assert_close(run(query, key, value, live, 0.09), expected(query, key, value, live, 0.09))
