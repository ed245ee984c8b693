"""Kernels whose results for a row depend on that row alone: the same bits alone, among others and behind padding.

M rows · K summed · N columns · B rows of a batch · Q query heads · G key and value heads · T tokens · L keys · D of a
head
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.kernels import exact, exact_attention, exact_linear
from amoeba.ops import exact as ops
from selection import each_value_once, quick

ON_GPU = torch.cuda.is_available()
DTYPES = torch.float32, torch.bfloat16 if ON_GPU else torch.float16  # the interpreter's bf16 products are wrong
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@each_value_once()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(1, 5), (63, 199), (200, 24)])
def test_a_row_of_a_product(device: Any, depth: int, columns: int, dtype: torch.dtype, transposed: bool) -> None:
    rows = random(device, 1, 130, depth, dtype=dtype)
    weight = random(device, 1, depth, columns, seed=1, dtype=dtype)
    weight = weight.mT.contiguous().mT if transposed else weight
    whole = exact.product(rows, weight)
    for first, count in ((0, 1), (1, 3), (4, 63), (4, 64), (4, 65)):
        assert torch.equal(exact.product(rows[:, first : first + count], weight), whole[:, first : first + count])
    assert relative(whole, rows.double() @ weight.double()) < 1e-6


@pytest.mark.parametrize("widths", [(199,), (24, 40), (64, 7, 130)])
def test_linear_layers_of_the_same_rows(device: Any, widths: tuple[int, ...]) -> None:
    dtype = DTYPES[1]
    x = random(device, 130, 72, dtype=dtype)
    weights = [random(device, width, 72, seed=seed, dtype=dtype) for seed, width in enumerate(widths)]
    whole = exact_linear.linears(x, weights)
    for weight, found in zip(weights, whole, strict=True):
        assert relative(found, x.double() @ weight.double().mT) < 1e-3
    for first, count in ((0, 1), (1, 3), (4, 64), (4, 65), (0, 0)):
        some = exact_linear.linears(x[first : first + count], weights)
        assert all(torch.equal(a, b[first : first + count]) for a, b in zip(some, whole, strict=True))


def test_a_linear_layer_with_factors(device: Any) -> None:
    dtype = DTYPES[1]
    x, weight = random(device, 130, 72, dtype=dtype), random(device, 199, 72, seed=1, dtype=dtype)
    a, b = random(device, 5, 72, seed=2), random(device, 199, 5, seed=3)

    def run(part: slice) -> Tensor:
        low = exact.product(x[part][None], a.mT[None])[0]  # rows in half precision, factors in fp32
        return exact_linear.linear_with_factors(x[part], weight, low, b, 0.7)

    whole = run(slice(130))
    assert relative(whole, x.double() @ (weight.double() + 0.7 * b.double() @ a.double()).mT) < 1e-3
    for first, count in ((0, 1), (1, 3), (4, 64), (4, 65)):
        assert torch.equal(run(slice(first, first + count)), whole[first : first + count])


def test_products_of_batches(device: Any) -> None:
    a, b = random(device, 3, 7, 40), random(device, 3, 40, 9, seed=1)
    whole = exact.product(a, b)
    assert torch.equal(exact.product(a[1:2], b[1:2]), whole[1:2])
    assert torch.equal(exact.product(a, b[..., :1]), whole[..., :1])  # columns may be tokens
    assert relative(whole, a.double() @ b.double()) < 1e-6
    assert exact.product(a[:, :, :0], b[:, :0]).eq(0).all()
    assert exact.product(a[:, :0], b).shape == (3, 0, 9)


@pytest.mark.parametrize("size", [0, 1, 2, 63, 1024, 2500])
def test_sums(device: Any, size: int) -> None:
    x = random(device, 3, 5, size)
    found = exact.row_sum(x)
    assert torch.equal(exact.row_sum(x[1:2, 3:4]), found[1:2, 3:4])
    assert torch.allclose(found.double(), x.double().sum(-1), atol=1e-4)


# --- attention

B, Q, G, T, D = 2, 4, 2, 33, 8


def heads(device: Any, tokens: int, dtype: torch.dtype, size: int = D, width: int = D) -> tuple[Tensor, ...]:
    shapes = (Q, size), (G, size), (G, width)
    return tuple(random(device, B, n, tokens, each, seed=seed, dtype=dtype) for seed, (n, each) in enumerate(shapes))


def causal(device: Any, tokens: int, window: int = 10_000) -> Tensor:
    query, key = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)[None]
    return ((key <= query) & (query - key < window))[None, None].expand(B, 1, tokens, tokens)


def with_holes(seen: Tensor) -> Tensor:
    """Others in each row and for each query; a query keeps itself."""
    kept = torch.rand(seen.shape, generator=torch.Generator().manual_seed(3)).to(seen.device) > 0.3
    return seen & (kept | torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device))


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    return exact_attention.attention(q, k, v, sink, seen, exact_attention.seen_bounds(seen), 0.3, softcap)[0]


def truth(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None, softcap: float) -> Tensor:
    q, k, v = q.double(), *(each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    s = q @ k.mT * 0.3
    s = (softcap * torch.tanh(s / softcap) if softcap else s).masked_fill(~seen, -torch.inf)
    if sink is not None:
        s = torch.cat((s, sink.double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    nothing = ~seen.any(-1, keepdim=True)
    return s.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)[..., : k.shape[2]] @ v


@quick(lambda tokens, dtype: tokens < 100 and (dtype == torch.float32) == (tokens == 63))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "window", "with_sink", "softcap", "size", "width"),
    [(1, 99, False, 0.0, 8, 8), (65, 7, True, 0.0, 24, 8), (63, 99, False, 2.0, 8, 20), (130, 70, True, 0.0, 16, 16)],
)
def test_attention(
    device: Any,
    tokens: int,
    window: int,
    with_sink: bool,
    softcap: float,
    size: int,
    width: int,
    dtype: torch.dtype,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(exact_attention, "SPLIT", 64)
    given, seen = heads(device, tokens, dtype, size, width), causal(device, tokens, window)
    if tokens in (63, 65):
        seen = with_holes(seen)
    sink = random(device, Q, seed=5, dtype=dtype) if with_sink else None
    found = attend(*given, seen, sink, softcap)
    assert relative(found, truth(*given, seen, sink, softcap)) < TOLERANCE[dtype]
    half = [each[:, : each.shape[1] // 2] for each in given]
    sink, found = None if sink is None else sink[: Q // 2], found[:, : Q // 2]
    monkeypatch.setattr(exact_attention, "PARTS", 40 * B * Q // 2 * width)  # a few queries at a time
    assert torch.equal(attend(*half, seen, sink, softcap), found)
    monkeypatch.setattr(exact_attention, "PROGRAMS", 1)  # and all pieces of the keys by one program
    assert torch.equal(attend(*half, seen, sink, softcap), found)


# several pieces with a window that ends within one, and all that came before in one piece
@quick(lambda window, split, dtype: (window, split) in ((20, 64), (10_000, 512)) and dtype != torch.float32)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [64, 512])
@pytest.mark.parametrize("window", [10_000, 20])
def test_a_query_alone_and_behind_padding(device: Any, window: int, split: int, dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(exact_attention, "SPLIT", split)
    tokens = 70
    q, k, v = (each[:, : each.shape[1] // 2] for each in heads(device, tokens, dtype))
    seen = causal(device, tokens, window)
    whole = attend(q, k, v, seen)
    for token in (0, 63, 64, 69):
        at = slice(token, token + 1)
        kept = slice(token + 1)  # a cache that ends there
        one = attend(q[:1, :, at], k[:1, :, kept], v[:1, :, kept], seen[:1, :, at, kept])
        assert torch.equal(one, whole[:1, :, at])
    q, k, v, seen, whole = (each[:1] for each in (q, k, v, seen, whole))
    for before, behind in ((1, 0), (37, 100)):
        more = [F.pad(each, (0, 0, before, behind), value=5.0) for each in (k, v)]
        padded = F.pad(seen, (before, behind), value=False)
        assert torch.equal(attend(q, *more, padded), whole)
    pieces = slice(41), slice(41, None)
    assert torch.equal(torch.cat([attend(q[:, :, piece], k, v, seen[:, :, piece]) for piece in pieces], 2), whole)


def test_two_documents_in_a_row_are_as_each_alone(device: Any) -> None:
    q, k, v = (each[:1] for each in heads(device, T + 70, torch.float32))
    seen = torch.zeros(1, 1, T + 70, T + 70, dtype=torch.bool, device=device)
    for part in (slice(T), slice(T, T + 70)):
        seen[:, :, part, part] = causal(device, part.stop - (part.start or 0))[:1]
    whole = attend(q, k, v, seen)
    for part in (slice(T), slice(T, T + 70)):
        alone = attend(*(each[:, :, part] for each in (q, k, v)), seen[:, :, part, part])
        assert torch.equal(whole[:, :, part], alone)


def test_what_is_not_seen_may_be_anything(device: Any) -> None:
    q, k, v = heads(device, T, torch.float32)
    seen = causal(device, T)
    whole = attend(q, k, v, seen)
    more = [F.pad(each, (0, 0, 70, 3), value=float("nan")) for each in (k, v)]
    assert torch.equal(attend(q, *more, F.pad(seen, (70, 3), value=False)), whole)


def test_a_query_that_sees_nothing_gives_zeros(device: Any) -> None:
    q, k, v = heads(device, 3, torch.float32)
    nothing = torch.zeros(B, 1, 3, 3, dtype=torch.bool, device=device)
    assert torch.equal(attend(q, k, v, nothing), torch.zeros_like(q))
    assert torch.equal(attend(q, k, v, nothing, random(device, Q)), torch.zeros_like(q))


def documents(device: Any, tokens: int) -> Tensor:
    """Of the first row padding on the left; of the second two documents, and padding on the right, which sees them."""
    seen = causal(device, tokens).clone()
    seen[0, :, :37] = seen[0, :, :, :37] = False
    seen[1, :, 75:, :75] = False
    seen[1, :, :, tokens - 20 :] = False
    return seen


@quick(lambda mask, dtype: (mask, dtype) in (("holes", torch.float16), ("documents", torch.float32)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "window", "with_sink", "softcap", "size", "width", "mask"),
    [
        (200, 999, True, 2.0, 8, 20, "holes"),  # in whole blocks of keys and of queries, too
        (200, 999, False, 0.0, 16, 16, "causal"),
        (190, 999, True, 0.0, 24, 8, "documents"),
        (130, 40, True, 0.0, 24, 8, "holes"),
    ],
)
def test_gradients_of_attention(
    device: Any,
    tokens: int,
    window: int,
    with_sink: bool,
    softcap: float,
    size: int,
    width: int,
    mask: str,
    dtype: Any,
) -> None:
    given, seen = heads(device, tokens, dtype, size, width), causal(device, tokens, window)
    if mask != "causal":
        seen = with_holes(seen) if mask == "holes" else documents(device, tokens)
    sink = random(device, Q, seed=5, dtype=dtype) if with_sink else None
    dy = random(device, B, Q, tokens, width, seed=7, dtype=dtype)
    leaves = [each.double().requires_grad_() for each in (*given, *([] if sink is None else [sink]))]
    wanted = torch.autograd.grad(
        truth(*leaves[:3], seen, leaves[3] if with_sink else None, softcap), leaves, dy.double()
    )
    own = [each.detach().clone().requires_grad_() for each in (*given, *([] if sink is None else [sink]))]
    bounds = exact_attention.seen_bounds(seen)
    y = ops._Attention.apply(*own[:3], own[3] if with_sink else None, seen, bounds, 0.3, softcap)
    for got, true in zip(torch.autograd.grad(y, own, dy), wanted, strict=True):
        assert relative(got, true) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_compiled_for_other_gpus_is_still_there(dtype: torch.dtype) -> None:
    """Its own test takes minutes and runs nightly."""
    from test_other_gpus import launches

    found = launches(dtype, (9, 0))
    assert len(found) > 100 and any(name.startswith("exact attention") for name in found)
