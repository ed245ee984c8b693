"""Codes of weights that train are those of the numbers that the weights have, however these were written.

In plain torch and by the kernels: on a Hopper GPU these run, elsewhere their products are stood in for, in fp32.
"""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amoeba import MoE, MoEConfig, RouterConfig
from amoeba.precision import weight_cache
from amoeba.precision.formats import FP8_TRAINING
from amoeba.precision.quantised import quantise
from amoeba.precision.weight_cache import quantised_weight
from fp8_stand_ins import stand_in
from selection import quick

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
DEVICE = "cuda" if IS_HOPPER else "cpu"
HIDDEN, INNER = 64, 64
pytestmark = [pytest.mark.gpu] if IS_HOPPER else []
by_both = pytest.mark.parametrize("computed", ["eager", "triton"], indirect=True)


@pytest.fixture
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of layers in plain torch, and that of the kernels."""
    if request.param == "triton" and not IS_HOPPER:
        stand_in(monkeypatch)
    return request.param


def small_layer(computed: str = "auto", seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    config = MoEConfig(HIDDEN, INNER, RouterConfig(4, 2))
    dtype = torch.float32 if computed == "triton" and not IS_HOPPER else torch.bfloat16
    return MoE(config, backend=computed, precision="fp8", dtype=dtype, device=DEVICE)


def other_layer(like: MoE) -> MoE:
    return small_layer(like.experts.backend, seed=5)


def batch(like: MoE) -> Tensor:
    drawn = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    return drawn.to(DEVICE, like.experts.down_proj.dtype)


def step_with(**options) -> Callable[[MoE], None]:
    def step(layer: MoE) -> None:
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        optimizer.step()

    return step


def exchange(*dimensions: int) -> Callable[[MoE], None]:
    """The same numbers in other places."""

    def write(layer: MoE) -> None:
        down = layer.experts.down_proj.data
        down.copy_(down.flip(*dimensions))

    return write


def cast_and_back(layer: MoE) -> None:
    dtype = layer.experts.down_proj.dtype
    layer.to(torch.float64).to(dtype)


def bit_by_bit(layer: MoE) -> None:
    bits = layer.experts.down_proj.detach().view(torch.int16)
    if bits.is_cuda:
        bits.bitwise_xor_(1)
    else:
        bits.numpy()[...] ^= 1


WRITES: dict[str, Callable[[MoE], object]] = {
    "fused AdamW": step_with(fused=True),
    "foreach AdamW": step_with(foreach=True),
    "AdamW one by one": step_with(foreach=False),
    ".data.copy_": lambda layer: layer.experts.gate_up_proj.data.copy_(other_layer(layer).experts.gate_up_proj.data),
    ".data of another": lambda layer: setattr(
        layer.experts.down_proj, "data", other_layer(layer).experts.down_proj.data
    ),
    "experts exchanged": exchange(0),
    "rows exchanged": exchange(1),
    "columns exchanged": exchange(2),
    "bit by bit": bit_by_bit,
    "load_state_dict": lambda layer: layer.load_state_dict(other_layer(layer).state_dict()),
    "load_state_dict(assign=True)": lambda layer: layer.load_state_dict(other_layer(layer).state_dict(), assign=True),
    "cast and back": cast_and_back,
}
# One that writes behind the back of a version counter, and one that everyone uses: of them both backends ask one cache.
NAMED = ("fused AdamW", ".data.copy_")


def numbers(layer: MoE) -> list[Tensor]:
    layer.zero_grad(set_to_none=True)
    y = layer(batch(layer))
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in layer.parameters())]


@quick(lambda way, computed: IS_HOPPER or computed == "eager" or way in NAMED)
@by_both
@pytest.mark.parametrize("way", WRITES)
def test_after_a_write_the_numbers_are_fresh(way: str, computed: str) -> None:
    layer = small_layer(computed)
    before = numbers(layer)  # fills the cache, both orientations
    for _ in range(2):
        WRITES[way](layer)
        found, expected = numbers(layer), numbers(copy.deepcopy(layer))  # a copy has no codes yet
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if "exchanged" not in way and way not in ("bit by bit", "cast and back"):  # twice is as it was
        assert not torch.equal(found[0], before[0])


@by_both
def test_checkpointed_passes_and_those_after_a_step_are_fresh(computed: str) -> None:
    """The pass is computed again in backward, with the codes of the same weights."""
    layer, plain = small_layer(computed), small_layer(computed)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (layer, plain)]
    for _ in range(3):
        for each, call in ((layer, lambda x: checkpoint(layer, x, use_reentrant=False)), (plain, plain)):
            each.zero_grad()
            call(batch(layer)).float().square().sum().backward()
        for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()


@by_both
def test_a_backward_after_the_weights_were_written_is_an_error(computed: str) -> None:
    layer = small_layer(computed)
    loss = layer(batch(layer)).float().sum()
    with torch.no_grad():
        layer.experts.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_codes_are_made_once_and_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    again = weight_cache.quantise_again
    monkeypatch.setattr(weight_cache, "quantise_again", lambda *given: (made.append(given), again(*given)))
    weight = nn.Parameter(torch.randn(3, 200, 140))
    stored = nn.Parameter(torch.randn(3, 140, 200))  # of a module that keeps (E, in, out): a new view for each call
    for make in (lambda: weight, lambda: stored.transpose(1, 2)):
        first = quantised_weight(make(), FP8_TRAINING)
        turned = first.transposed()
        places = [each.data_ptr() for each in (first.matrix.data, first.matrix.scales, turned.data, turned.scales)]
        assert quantised_weight(make(), FP8_TRAINING) is first and not made
        with torch.no_grad():
            make().mul_(3)
        assert quantised_weight(make(), FP8_TRAINING) is first and len(made) == 1
        made.clear()
        expected = quantise(make(), FP8_TRAINING)
        for found, right in ((first.matrix, expected.dequantise()), (first.transposed(), expected.dequantise().mT)):
            assert torch.equal(found.dequantise(), right)
        now = (first.matrix.data, first.matrix.scales, first.transposed().data, first.transposed().scales)
        assert places == [each.data_ptr() for each in now]


def test_codes_go_with_their_weight() -> None:
    gc.collect()
    before = len(weight_cache._kept)
    weight = nn.Parameter(torch.randn(2, 8, 8))
    quantised_weight(weight, FP8_TRAINING)
    assert len(weight_cache._kept) == before + 1
    del weight
    gc.collect()
    assert len(weight_cache._kept) == before


@by_both
def test_a_layer_that_was_evaluated_under_inference_mode_trains_on(computed: str) -> None:
    layer = small_layer(computed)
    with torch.inference_mode():
        first = layer(batch(layer))
    assert torch.equal(first, numbers(layer)[0])
    step_with(fused=True)(layer)
    found, expected = numbers(layer), numbers(copy.deepcopy(layer))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    step_with(fused=True)(layer)
    with torch.inference_mode():
        assert torch.equal(layer(batch(layer)), copy.deepcopy(layer)(batch(layer)))


def test_weights_made_under_inference_mode_have_codes_too() -> None:
    with torch.inference_mode():
        weight = torch.randn(2, 8, 8)
        first = quantised_weight(weight, FP8_TRAINING).matrix.dequantise()
        weight.mul_(5)
        second = quantised_weight(weight, FP8_TRAINING).matrix.dequantise()
        assert torch.equal(second, quantise(weight, FP8_TRAINING).dequantise())
        assert not torch.equal(first, second)


def test_two_parts_of_one_tensor_have_codes_of_their_own() -> None:
    both = torch.randn(4, 2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    first, second = quantised_weight(both[:2], FP8_TRAINING), quantised_weight(both[2:], FP8_TRAINING)
    for part, codes in ((both[:2], first), (both[2:], second)):
        assert torch.equal(codes.matrix.data, quantise(part, FP8_TRAINING).data)
