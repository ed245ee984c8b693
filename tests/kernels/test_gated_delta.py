"""One token of gated delta networks against transformers' layers, their states too."""

import pytest
import torch
from row_checks import error, random
from transformers import AutoConfig, Cache, cache_utils

from amoeba.decoding.delta_layers import expected, linears_of, recognise, states_of
from amoeba.kernels.decode import gated_delta as module
from amoeba.kernels.decode.gated_delta import gated_delta
from selection import each_value_once

# transformers rounds at the same places, but for sums in another order; the interpreter truncates to bf16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
HIDDEN, STEPS = 64, 3


def network(family: str, dtype: torch.dtype, device, heads=(2, 4), widths=(16, 32)):
    """A layer of transformers with numbers that are not those that it starts with, and its cache after a prompt."""
    models = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    (key_heads, value_heads), (key_width, value_width) = heads, widths
    config = AutoConfig.for_model("qwen3_next").from_dict(
        {
            "hidden_size": HIDDEN,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": key_width,
            "linear_value_head_dim": value_width,
            "layer_types": ["linear_attention"],
            "num_hidden_layers": 1,
        }
    )
    config.linear_attn_gate_type = "silu"
    kind = next(getattr(models, name) for name in vars(models) if name.endswith("GatedDeltaNet"))
    torch.manual_seed(0)
    layer = kind(config, 0).to(device, dtype).eval()
    with torch.no_grad():
        for weight in (layer.norm.weight, layer.dt_bias):
            weight.copy_(random(device, dtype, len(weight)))
        cache = Cache(layers=[cache_utils.LinearAttentionLayer()])
        layer(random(device, dtype, 3, 7, HIDDEN), cache_params=cache)
    return layer, cache


@torch.no_grad()
@each_value_once()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("family", "heads", "widths"),
    [
        ("qwen3_next", (2, 4), (16, 32)),
        ("qwen3_next", (2, 2), (32, 8)),
        ("qwen3_5_moe", (1, 4), (16, 16)),
        ("qwen3_5_moe", (2, 6), (8, 16)),
    ],
)
def test_steps_give_transformers_outputs_and_states(device, dtype, family, heads, widths):
    layer, cache = network(family, dtype, device, heads, widths)
    form = recognise(layer)
    assert not isinstance(form, str), form
    own = states_of(cache.layers[0])
    states = [each.clone() for each in own]
    for step in range(STEPS):
        x = random(device, dtype, 3, 1, HIDDEN + step)[:, :, :HIDDEN].contiguous()
        projected = torch.cat([linear(x[:, 0]) for linear in linears_of(layer, form)], 1)
        y = gated_delta(
            projected, form.places, layer.conv1d.weight[:, 0], None, layer.A_log, layer.dt_bias, layer.norm.weight,
            *states, eps=form.eps,
        )  # fmt: skip
        found = layer.out_proj(y.flatten(1))[:, None]
        wanted = layer(x, cache_params=cache)
        assert error(found.cpu(), wanted.cpu()) < TOLERANCE[dtype]
        assert torch.equal(states[0], own[0])
        assert error(states[1].cpu(), own[1].cpu()) < TOLERANCE[dtype]


@torch.no_grad()
def test_biases_and_states_of_other_lengths_and_dtypes(device):
    """Which no layer of transformers has; against the formula."""
    layer, _ = network("qwen3_next", torch.float32, device)
    form = recognise(layer)
    channels = len(layer.conv1d.weight)
    x, bias = random(device, torch.float32, 2, 2 * 2 * 16 + 2 * 4 * 32 + 2 * 4), random(device, torch.float32, channels)
    for kept, dtype in ((3, torch.bfloat16), (6, torch.float32)):
        conv, state = random(device, torch.float32, 2, channels, kept), random(device, dtype, 2, 4, 16, 32)
        given = (x, form.places, layer.conv1d.weight[:, 0], bias, layer.A_log, layer.dt_bias, layer.norm.weight)
        y, conv_after, state_after = expected(*given, conv, state, key_heads=2, eps=1e-5)
        assert error(gated_delta(*given, conv, state, eps=1e-5).cpu(), y.cpu()) < 1e-5
        assert torch.equal(conv, conv_after)
        assert error(state.cpu(), state_after.to(dtype).cpu()) < (1e-5 if dtype == torch.float32 else 6e-3)


def test_no_rows(device):
    layer, cache = network("qwen3_next", torch.float32, device)
    states = [each[:0] for each in states_of(cache.layers[0])]
    x, form = torch.empty(0, 2 * 2 * 16 + 2 * 4 * 32 + 2 * 4, device=device), recognise(layer)
    given = (x, form.places, layer.conv1d.weight[:, 0], None, layer.A_log, layer.dt_bias, layer.norm.weight)
    assert gated_delta(*given, *states, eps=1e-6).shape == (0, 4, 32)


def test_a_layer_that_computes_something_else_is_left(device):
    layer, _ = network("qwen3_next", torch.float32, device)
    own = type(layer)

    class Doubled(own):
        def forward(self, *arguments, **options):
            return 2 * super().forward(*arguments, **options)

    layer.__class__ = Doubled
    assert recognise(layer) == "it computes something else"
    layer.__class__ = own
    layer.norm.register_forward_hook(lambda *given: None)
    assert recognise(layer) == "its projections are not plain linear layers"
    assert recognise(torch.nn.Linear(2, 2)) == "it is no gated delta network"
    layer, _ = network("qwen3_next", torch.float32, device, widths=(24, 32))
    assert "powers of two" in recognise(layer)


def test_what_does_not_fit_together_is_refused(device):
    layer, cache = network("qwen3_next", torch.float32, device)
    form, (conv, state) = recognise(layer), states_of(cache.layers[0])
    given = (layer.conv1d.weight[:, 0], None, layer.A_log, layer.dt_bias, layer.norm.weight)
    x = random(device, torch.float32, 3, 2 * 2 * 16 + 2 * 4 * 32 + 2 * 4)
    with pytest.raises(ValueError, match="contiguous rows"):
        gated_delta(x, form.places, *given, conv, state.transpose(2, 3), eps=1e-6)
    assert module.why_not(16, 32, 2, 3) == "takes a multiple of the 2 heads of keys, not 3 of values"
