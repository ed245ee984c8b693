"""`activate` and `activate_backward` against the reference in fp64, and the activations themselves."""

import math

import pytest
import torch
from row_checks import TOLERANCE, error
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.layout import build_layout
from amoeba.kernels.activate import SCALED_COLUMNS, activate, activate_backward, new_scales
from amoeba.proof.reference import experts as truth
from selection import each_value_once

GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)
ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
    "plain silu": Activation("silu", gated=False),
    "plain gelu": Activation("gelu", gated=False),
    "plain gelu_tanh": Activation("gelu_tanh", gated=False),
    "plain relu2": Activation("relu2", gated=False),
    "plain relu, clamped": Activation("relu", gated=False, limit=1.5),
    "clamped": Activation("silu", limit=1.0),
    "interleaved": Activation("gelu", interleaved=True),
    "gpt-oss": GPT_OSS,
}
EXPERTS, TOP_K = 5, 3


class Rows:
    """Sorted rows of a routing in which some slots belong to nobody; their rows hold NaN."""

    def __init__(
        self, device, activation, *, tokens=21, intermediate=63, dtype=torch.float32, expert_TK=None, spread=3.0
    ):
        generator = torch.Generator().manual_seed(tokens * 1000 + intermediate)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        if expert_TK is None:
            expert_TK = torch.randint(-1, EXPERTS + 1, (tokens, TOP_K), generator=generator)
        layout = build_layout(expert_TK.to(device), EXPERTS)
        self.rows, self.owned = expert_TK.numel(), int(layout.offs_E[-1])
        self.offs_E, self.order_N = layout.offs_E, layout.order_N.to(torch.int32)
        width = activation.width(intermediate)
        self.h = (spread * random(self.rows, width)).to(device, dtype)
        self.da = random(self.rows, intermediate).to(device, dtype)
        self.weight_TK = random(*expert_TK.shape).to(device)
        self.bias_EJ = random(EXPERTS, width).to(device, dtype)
        for tensor in (self.h, self.da):
            tensor[self.owned :] = math.nan
        row = torch.arange(self.owned, device=device)
        self.expert = torch.searchsorted(self.offs_E, row.to(torch.int32), right=True)
        self.scale = self.weight_TK.flatten()[layout.order_N][: self.owned, None].double()

    def output(self, like: Tensor) -> Tensor:
        """NaN where a kernel must write, 7 in the rows of nobody."""
        out = torch.full_like(like, math.nan)
        out[self.owned :] = 7
        return out

    def untouched(self, *outputs: Tensor) -> bool:
        return all(bool((out[self.owned :] == 7).all()) for out in outputs)


def poisoned(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape or like.shape, math.nan, dtype=like.dtype, device=like.device)


@each_value_once()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ACTIVATIONS]
    + [(name, dtype) for name in ("silu", "plain gelu", "gpt-oss") for dtype in (torch.float16, torch.bfloat16)],
)
def test_forward_and_backward_equal_the_reference(device, name, dtype):
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, dtype=dtype)
    h, da, owned = rows.h[: rows.owned].double(), rows.da[: rows.owned].double(), rows.owned
    a = truth.activate(h, activation)

    out = activate(rows.h, activation, rows.output(rows.da), rows.offs_E)
    assert error(out[:owned], a) < TOLERANCE[dtype]
    assert rows.untouched(out)

    dh, scaled_a = rows.output(rows.h), rows.output(rows.da)
    ds = activate_backward(rows.da, rows.h, rows.weight_TK, rows.order_N, activation, dh, scaled_a, rows.offs_E)
    assert ds.dtype == torch.float32
    assert error(ds[:owned], (da * a).sum(-1)) < 1e-6
    assert (ds[owned:] == 0).all()
    assert error(dh[:owned], truth.activate_backward(rows.scale * da, h, activation)) < TOLERANCE[dtype]
    assert error(scaled_a[:owned], rows.scale * a) < TOLERANCE[dtype]
    assert rows.untouched(dh, scaled_a)


@each_value_once()
@pytest.mark.parametrize("name", ["silu", "plain gelu", "gpt-oss"])
@pytest.mark.parametrize("intermediate", [1, 199, 760, 1100])
def test_every_width(device, name, intermediate):
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, tokens=3, intermediate=intermediate)
    h, da, owned = rows.h[: rows.owned].double(), rows.da[: rows.owned].double(), rows.owned
    a = truth.activate(h, activation)
    out, dh = poisoned(rows.da), poisoned(rows.h)
    assert error(activate(rows.h, activation, out, rows.offs_E)[:owned], a) < 1e-6
    ds = activate_backward(rows.da, rows.h, rows.weight_TK, rows.order_N, activation, dh, None, rows.offs_E)
    assert error(ds[:owned], (da * a).sum(-1)) < 1e-5
    assert error(dh[:owned], truth.activate_backward(rows.scale * da, h, activation)) < 1e-6


@each_value_once()
@pytest.mark.parametrize("tokens", [0, 1, 140])
@pytest.mark.parametrize("expert", [-1, 0, EXPERTS - 1], ids=["nobody", "first", "last"])
def test_all_rows_on_one_expert_or_on_none(device, tokens, expert):
    activation = ACTIVATIONS["silu"]
    rows = Rows(device, activation, intermediate=16, expert_TK=torch.full((tokens, 1), expert))
    assert rows.owned == (0 if expert < 0 else tokens)
    h, da, owned = rows.h[: rows.owned].double(), rows.da[: rows.owned].double(), rows.owned
    h_kept = rows.h.clone()
    out = activate(h_kept, activation, rows.output(rows.da), rows.offs_E, bias_EJ=rows.bias_EJ)
    assert error(out[:owned], truth.activate(h + rows.bias_EJ[rows.expert].double(), activation)) < 1e-6
    dh = rows.output(rows.h)
    ds = activate_backward(rows.da, rows.h, rows.weight_TK, rows.order_N, activation, dh, None, rows.offs_E)
    assert error(ds[:owned], (da * truth.activate(h, activation)).sum(-1)) < 1e-6
    assert (ds[owned:] == 0).all() and rows.untouched(out, dh)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["silu", "plain gelu", "gpt-oss"])
def test_the_bias_of_its_expert_is_added_and_kept(device, name, dtype):
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, dtype=dtype)
    expected = rows.h[: rows.owned].double() + rows.bias_EJ[rows.expert].double()
    rows.h[rows.owned :] = 7
    out = activate(rows.h, activation, poisoned(rows.da), rows.offs_E, bias_EJ=rows.bias_EJ)
    assert error(rows.h[: rows.owned], expected) < TOLERANCE[dtype]
    assert rows.untouched(rows.h)
    again = activate(rows.h, activation, poisoned(rows.da), rows.offs_E)
    assert torch.equal(out[: rows.owned], again[: rows.owned]), "what is activated is the h that is kept"


@each_value_once("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["silu", "plain gelu", "gpt-oss"])
@pytest.mark.parametrize("intermediate", [63, 72])
def test_in_place_gives_the_same_bits(device, name, intermediate, dtype):
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, intermediate=intermediate, dtype=dtype)
    arguments = (rows.weight_TK, rows.order_N, activation)
    dh, scaled_a = rows.h.clone(), rows.da.clone()
    ds = activate_backward(rows.da, rows.h, *arguments, dh, scaled_a, rows.offs_E)
    ds_in_place = activate_backward(rows.da, rows.h, *arguments, rows.h, rows.da, rows.offs_E)
    for name_of, out_of_place, in_place in (
        ("ds", ds, ds_in_place),
        ("dh", dh, rows.h),
        ("scaled a", scaled_a, rows.da),
    ):
        assert torch.equal(out_of_place.nan_to_num(7), in_place.nan_to_num(7)), name_of


def in_fp16(da: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As a product leaves it (`kernels.hopper.epilogue.row_scale`): in memory of another dtype of 16 bits."""
    codes, scales = torch.empty_like(da, dtype=torch.float16), new_scales(da)
    for block, part in enumerate(da.float().split(SCALED_COLUMNS, 1)):
        exponent = part.nan_to_num(0).abs().amax(1).frexp().exponent  # the largest is below 2 ** this
        codes[:, block * SCALED_COLUMNS :][:, : part.shape[1]] = torch.ldexp(part, (15 - exponent)[:, None])
        scales[:, block] = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 15)
    return codes.view(dtype), scales


@each_value_once()
@pytest.mark.parametrize("name", ["silu", "plain gelu", "gpt-oss"])
@pytest.mark.parametrize("intermediate", [64, 192, 760])
def test_in_fp16_with_scales_the_rounding_of_da_is_next_to_nothing(device, name, intermediate):
    """Rows a million times as large as others; in place and not."""
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, intermediate=intermediate, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    da = torch.randn(rows.da.shape, generator=generator).to(device) * torch.logspace(-9, 3, rows.rows)[:, None].to(
        device
    )
    h, owned, arguments = rows.h.clone(), rows.owned, (rows.weight_TK, rows.order_N, activation)
    expected = (da.double() * truth.activate(h.double(), activation)).sum(-1)[:owned]

    def errors(da: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
        dh, scaled_a = rows.output(rows.h), rows.output(rows.da)
        ds = activate_backward(da, h, *arguments, dh, scaled_a, rows.offs_E, da_scales_NB=scales)
        return ds, dh, scaled_a, float(((ds[:owned] - expected) / expected).abs().median())

    codes, scales = in_fp16(da, torch.bfloat16)
    *_, rounded = errors(da.bfloat16(), None)
    ds, dh, scaled_a, found = errors(codes, scales)
    print(f"median error of ds: {rounded:.1e} with dA' in bf16, {found:.1e} in fp16")
    assert found < rounded / 4
    of_dh = truth.activate_backward(rows.scale * da[:owned].double(), h[:owned].double(), activation)
    assert error(dh[:owned], of_dh) < TOLERANCE[torch.bfloat16] and rows.untouched(dh, scaled_a)
    assert torch.equal(activate_backward(codes, h, *arguments, h, codes, rows.offs_E, da_scales_NB=scales), ds)
    assert torch.equal(h[:owned], dh[:owned]) and torch.equal(codes[:owned], scaled_a[:owned])


def test_the_errors_of_dx_and_of_the_routing_weights_without_the_rounding_of_da(device):
    """A layer with one expert, all but the row pass in torch: h, dh and rows of dx are rounded to bf16 either way."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, intermediate, activation = 24, 256, 256, Activation()

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().to(device)

    rows = Rows(device, activation, tokens=tokens, intermediate=intermediate, expert_TK=torch.zeros(tokens, 1).long())
    dy, x, down = random(tokens, hidden) * 16, random(tokens, hidden) * 16, random(hidden, intermediate)
    gate_up = random(2 * intermediate, hidden)
    exact_h, exact_da = x.double() @ gate_up.double().T, dy.double() @ down.double()
    scale = rows.weight_TK[rows.order_N.long()].double()
    expected_ds = (exact_da * truth.activate(exact_h, activation)).sum(-1)
    expected_dx = truth.activate_backward(scale * exact_da, exact_h, activation) @ gate_up.double()
    h, da = exact_h.bfloat16(), exact_da.float()
    found = {}
    for name, given in {"bf16": (da.bfloat16(), None), "fp16": in_fp16(da, torch.bfloat16)}.items():
        # what the kernel writes is fp32 here: the interpreter truncates to bf16 where a GPU rounds
        dh = torch.empty_like(h, dtype=torch.float32)
        ds = activate_backward(
            given[0], h, rows.weight_TK, rows.order_N, activation, dh, None, rows.offs_E, da_scales_NB=given[1]
        )
        dx = (dh.bfloat16().double() @ gate_up.double()).bfloat16()
        found[name] = error(dx, expected_dx), error(ds, expected_ds)
    print("errors of dx and of the routing weights' gradient:", found)
    assert found["fp16"][0] < 0.92 * found["bf16"][0] and found["fp16"][1] < 0.9 * found["bf16"][1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["silu", "plain gelu", "gpt-oss"])
@pytest.mark.parametrize("intermediate", [768, 2880, 4096])
def test_in_place_gives_the_same_bits_at_full_size(device, name, intermediate):
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, tokens=8192, intermediate=intermediate, dtype=torch.bfloat16)
    arguments = (rows.weight_TK, rows.order_N, activation)
    dh, scaled_a = rows.h.clone(), rows.da.clone()
    ds = activate_backward(rows.da, rows.h, *arguments, dh, scaled_a, rows.offs_E)
    for _ in range(5):
        h, da = rows.h.clone(), rows.da.clone()
        assert torch.equal(ds, activate_backward(da, h, *arguments, h, da, rows.offs_E))
        assert torch.equal(dh.nan_to_num(7), h.nan_to_num(7)) and torch.equal(scaled_a.nan_to_num(7), da.nan_to_num(7))


def test_rows_with_a_stride_wide_indices_and_narrow_weights(device):
    activation = ACTIVATIONS["silu"]
    rows = Rows(device, activation)
    h = torch.cat((rows.h, poisoned(rows.h)), dim=1)[:, : rows.h.shape[1]]
    da = torch.cat((rows.da, poisoned(rows.da)), dim=1)[:, : rows.da.shape[1]]
    weight_TK, order_N = rows.weight_TK.bfloat16(), rows.order_N.long()
    owned, buffer = rows.owned, poisoned(rows.h, rows.rows + 1, 130)
    dh = buffer[:-1, :126]
    scale = weight_TK.flatten()[order_N][:owned, None].double()
    ds = activate_backward(da, h, weight_TK, order_N, activation, dh, None, rows.offs_E)
    assert (
        error(dh[:owned], truth.activate_backward(scale * da[:owned].double(), h[:owned].double(), activation)) < 1e-6
    )
    assert error(ds[:owned], (da[:owned].double() * truth.activate(h[:owned].double(), activation)).sum(-1)) < 1e-6
    assert buffer[-1].isnan().all() and buffer[:, 126:].isnan().all()


def test_without_offsets_every_row_is_computed(device):
    rows = Rows(device, GPT_OSS)
    h = rows.h.nan_to_num(0.5)
    assert error(activate(h, GPT_OSS, poisoned(rows.da)), truth.activate(h.double(), GPT_OSS)) < 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_diverged_row_shows(device, name):
    """NaN in, NaN out, in every kind and through the clamps; and large values give no NaN of their own."""
    activation = ACTIVATIONS[name]
    rows = Rows(device, activation, tokens=8, intermediate=16, spread=1e4)
    assert activate(rows.h, activation, poisoned(rows.da), rows.offs_E)[: rows.owned].isfinite().all()
    dh = poisoned(rows.h)
    ds = activate_backward(rows.da, rows.h, rows.weight_TK, rows.order_N, activation, dh, None, rows.offs_E)
    assert dh[: rows.owned].isfinite().all() and ds.isfinite().all()
    rows.h[0] = math.nan
    out = activate(rows.h, activation, poisoned(rows.da).zero_(), rows.offs_E)
    assert out[0].isnan().all() and out[1 : rows.owned].isfinite().all()
