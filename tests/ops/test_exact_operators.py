"""Operators whose results for a row depend on that row alone.

M rows · K summed · N columns · B rows of a batch · Q query heads · G key and value heads · T tokens ·
L keys · D of a head
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amoeba.ops import exact
from amoeba.ops.exact import ExactOperators
from selection import each_value_once

DTYPES = torch.float32, torch.bfloat16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@each_value_once()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(1, 5), (63, 199), (600, 16), (96, 64)])
def test_a_row_of_a_product_is_the_same_among_any_others(
    depth: int, columns: int, dtype: Any, transposed: bool
) -> None:
    rows, weight = random(199, depth).to(dtype), random(columns, depth, seed=1).to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    cuts = ((0, 1), (1, 5), (6, 16), (22, 177))  # before they are rounded, which hides most differences
    whole, *parts = (exact.product(rows[None, i : i + n], weight.t()[None])[0] for i, n in ((0, 199), *cuts))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.allclose(whole.double(), rows.double() @ weight.double().t(), rtol=1e-4, atol=1e-4)
    with ExactOperators():
        assert torch.equal(F.linear(rows[1:6], weight), whole[1:6].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_does_not_depend_on_threads(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = random(70, 300).to(dtype), random(130, 300, seed=1).to(dtype)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(exact.product(rows[None], weight.t()[None]))
    assert torch.equal(*found)


def test_zeros_add_nothing_to_a_product() -> None:
    a, b = random(2, 3, 40), random(2, 40, 7, seed=1)
    padded_a, padded_b = F.pad(a, (300, 5)), F.pad(b, (0, 0, 300, 5), value=3.0)
    assert torch.equal(exact.product(padded_a, padded_b), exact.product(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [F.silu, torch.sigmoid, torch.exp, torch.tanh, F.gelu, F.softplus, torch.rsqrt, lambda x: x.pow(2.5)],
    ids=["silu", "sigmoid", "exp", "tanh", "gelu", "softplus", "rsqrt", "pow"],
)
def test_an_element_is_the_same_wherever_it_lies(function: Any, dtype: torch.dtype) -> None:
    x = random(40_003).abs().to(dtype)
    with ExactOperators():
        whole = function(x)
        for first, count in ((0, 1), (1, 3), (5, 17), (1000, 33_000)):
            assert torch.equal(function(x[first : first + count]), whole[first : first + count])
    assert torch.allclose(whole.float(), function(x.float()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("size", [0, 1, 2, 63, 199, 760])
def test_sums_and_means(size: int) -> None:
    x = random(5, size)
    with ExactOperators():
        found, mean, over_rows = x.sum(-1), x.mean(-1, keepdim=True), x.sum(0)
        alone = x[3].sum()
    assert torch.equal(found[3], alone)
    assert torch.allclose(found, x.sum(-1), atol=1e-4)
    assert torch.allclose(over_rows, x.sum(0), atol=1e-5)
    if size:
        assert torch.allclose(mean, x.mean(-1, keepdim=True), atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(0),
        lambda x: x.logsumexp(-1),
        lambda x: F.normalize(x, dim=-1),
        lambda x: F.layer_norm(x, x.shape[-1:], x[0], x[1]),
        lambda x: F.rms_norm(x, x.shape[-1:], x[0]),
        lambda x: torch.addmm(x[0, :7], x, x.t()[:, :7], beta=2, alpha=3),
        lambda x: torch.add(x, x.flip(0), alpha=0.3),
        lambda x: F.silu(x.clone(), inplace=True),
        lambda x: (x * 2).add_(x, alpha=0.3),
        lambda x: x.clone().sub_(x.sum(-1, keepdim=True)),
        lambda x: torch.einsum("ab,cb->ac", x, x),
    ],
)
def test_values_and_gradients_are_those_of_torch(function: Any) -> None:
    x = random(9, 199).requires_grad_()
    wide = x.detach().double().requires_grad_()
    wanted = function(wide)
    with ExactOperators():
        found = function(x)
    assert torch.allclose(found.double(), wanted, atol=1e-4)
    weight = random(*found.shape, seed=2)
    (got,) = torch.autograd.grad(found, x, weight)
    (truth,) = torch.autograd.grad(wanted, wide, weight.double())
    assert torch.allclose(got.double(), truth, atol=1e-4, rtol=1e-4)


def test_in_place_as_torch() -> None:
    x, y = random(9, 199), random(9, 199)
    with ExactOperators():
        x.square_().sigmoid_()[:, 3:7].pow_(2)
    y.square_().sigmoid_()[:, 3:7].pow_(2)
    assert torch.allclose(x, y)


def test_random_numbers_and_unknown_operators_are_refused() -> None:
    x = random(3, 5)
    with ExactOperators():
        with pytest.raises(ValueError, match="no random numbers"):
            F.dropout(x, 0.5)
        with pytest.raises(ValueError, match="aten::cumsum"):
            x.cumsum(0)
        with pytest.raises(ValueError, match="float64"):
            x.double() @ x.double().t()
        assert x.long().cumsum(0).shape == x.shape


def test_outside_nothing_is_replaced_unless_another_mode_looks_on() -> None:
    x = random(3, 5)

    def fail() -> None:
        with exact.OUTSIDE:
            F.dropout(x, 0.5)
            with exact.OUTSIDE:
                raise ZeroDivisionError

    with ExactOperators():
        with pytest.raises(ZeroDivisionError):
            fail()
        with pytest.raises(ValueError, match="no random numbers"):
            F.dropout(x, 0.5)
    with Seen() as outer, ExactOperators():
        with exact.OUTSIDE, pytest.raises(ValueError, match="no random numbers"):
            F.dropout(x, 0.5)
        x.neg()
    assert outer.names[-1] == "aten::neg"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


# --- attention

B, Q, G, T, D = 2, 4, 2, 33, 8


def heads(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (random(batch, n, tokens, D, seed=seed).requires_grad_() for seed, n in enumerate((Q, G, G)))
    return q, k, v


def causal(tokens: int, window: int = 1000) -> Tensor:
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    return ((key <= query) & (query - key < window))[None, None]


def plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sink: Tensor | None, softcap: float) -> Tensor:
    k, v = (each.repeat_interleave(Q // G, 1) for each in (k, v))
    s = q @ k.mT * 0.3
    s = (softcap * torch.tanh(s / softcap) if softcap else s).masked_fill(~seen, -torch.inf)
    if sink is not None:
        s = torch.cat((s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)
    return s.softmax(-1)[..., : k.shape[2]] @ v


@each_value_once()
@pytest.mark.parametrize("chunk", [1 << 24, 900])
@pytest.mark.parametrize(("with_sink", "softcap", "window"), [(False, 0.0, 1000), (True, 0.0, 7), (False, 2.0, 1000)])
def test_attention_and_its_gradients(
    with_sink: bool, softcap: float, window: int, chunk: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(exact, "CHUNK", chunk)
    given = [*heads(B, T), *([random(Q, seed=5).requires_grad_()] if with_sink else [])]
    seen, sink = causal(T, window), given[3] if with_sink else None
    found = exact.attention(*given[:3], seen, scale=0.3, sink_Q=sink, softcap=softcap)
    wide = [each.detach().double().requires_grad_() for each in given]
    truth = plain(*wide[:3], seen, wide[3] if with_sink else None, softcap)
    assert torch.allclose(found.double(), truth, atol=1e-5)
    weight = random(*found.shape, seed=3)
    for got, wanted in zip(
        torch.autograd.grad(found, given, weight), torch.autograd.grad(truth, wide, weight.double()), strict=True
    ):
        assert torch.allclose(got.double(), wanted, atol=1e-4)


@pytest.mark.parametrize("window", [1000, 7])
def test_a_query_is_the_same_alone_and_behind_padding(window: int) -> None:
    q, k, v = (each.detach() for each in heads(B, T))
    whole = exact.attention(q, k, v, causal(T, window), scale=0.3)
    one = exact.attention(q[:1, :, 20:21], k[:1], v[:1], causal(T, window)[:, :, 20:21], scale=0.3)
    assert torch.equal(one, whole[:1, :, 20:21])
    behind = [F.pad(each, (0, 0, 70, 300), value=5.0) for each in (k, v)]
    seen = F.pad(causal(T, window), (70, 300), value=False)
    assert torch.equal(exact.attention(q, *behind, seen, scale=0.3), whole)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v = (each.detach() for each in heads(1, 3))
    assert torch.equal(
        exact.attention(q, k, v, torch.zeros(1, 1, 3, 3, dtype=torch.bool), scale=1.0), torch.zeros_like(q)
    )
