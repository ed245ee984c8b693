"""Steps by our kernels for norms, sums and rotations: the tokens of plain ones, and a model that is as before."""

import functools
from contextlib import ExitStack

import pytest
import torch
from torch import nn

import greedy_texts
from amoeba.decoding import Decoder, fused_layers
from amoeba.decoding.step import Step
from amoeba.integrations import norms
from amoeba.kernels import norm_rotate, rms_norm
from amoeba.kernels.decode import gated_attention, gated_delta, shared_expert
from amoeba.ops import rotary_attention
from greedy_texts import endless, prompts
from selection import quick


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """All steps are fused, in Triton's interpreter; which kernels they call."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU; tests/decoding/test_decoder.py captures steps")
    monkeypatch.setattr(rotary_attention, "why_not", rotary_attention.why_not_shape)
    monkeypatch.setattr(fused_layers, "_why_not", lambda weight: weight is None or len(weight) > rms_norm.MOST)
    enter = Step._enter
    monkeypatch.setattr(Step, "_enter", lambda self, stack, compiled, fused=True: enter(self, stack, compiled, True))
    found: list[str] = []
    for module, name in (
        (norm_rotate, "norm_rotate_cached"),
        (rms_norm, "rms_norm"),
        (rms_norm, "add_rms_norm"),
        (gated_attention, "norm_rotate_gated"),
        (gated_delta, "gated_delta"),
        (shared_expert, "add_shared_expert"),
    ):
        own = getattr(module, name)

        def noted(*arguments, own=own, name=name, **options):
            found.append(name)
            return own(*arguments, **options)

        monkeypatch.setattr(module, name, noted)
    return found


plain, decoded = (functools.partial(each, tokens=6) for each in (greedy_texts.plain, greedy_texts.decoded))


_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def small(family: str = "qwen3_moe", **changes):
    heads = {"head_dim": 64} if family == "qwen3_moe" else {}  # which our kernels serve
    return endless(family, **heads | changes)


@quick(lambda changes: changes)
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=["plain", "biases"])
def test_fused_steps_give_plain_tokens_and_leave_the_model_as_before(calls, monkeypatch, changes):
    """A batch with padding, whose prompts are documents."""
    monkeypatch.setattr(Decoder, "_captures_prompt", lambda self, tokens: True)
    model, rows = small(**changes), prompts(17, 3, 9)
    expected, classes = plain(model, rows), [type(module) for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    fused_layers.join_projections(model)
    assert decoded(model, rows) == expected
    # of two layers: their attention, the sum with its norm, and the norm before it; and the last norm
    assert [calls.count(name) for name in ("norm_rotate_cached", "add_rms_norm", "rms_norm")] == [12, 12, 18]
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert plain(model, rows) == expected


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_what_is_not_recognised_is_left_and_the_rest_is_fused(calls, family):
    model, rows = small(family), prompts(7, 4)
    assert not fused_layers.reads_documents(model)
    assert decoded(model, rows) == plain(model, rows)
    assert "norm_rotate_cached" not in calls and calls


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_gated_delta_networks_step_in_one_launch_and_give_plain_tokens(calls, family):
    """Of two layers the first is one, the other has gated attention; five steps for a text of six tokens."""
    model, rows = small(family, **_DELTA), prompts(17)
    expected, weights = plain(model, rows), {name: value.clone() for name, value in model.state_dict().items()}
    fused_layers.join_projections(model)
    assert decoded(model, rows) == expected
    names = ("gated_delta", "norm_rotate_gated", "add_rms_norm", "rms_norm")
    assert [calls.count(name) for name in names] == [5, 5, 10, 15]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert plain(model, rows) == expected


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_a_shared_expert_that_a_token_scales_is_added_in_two_launches(calls, family):
    model = small(family).half()
    block = model.model.layers[1].mlp
    experts = block.experts
    experts.forward = lambda *given, own=experts.forward: own(*given)  # as placed ones have
    x, placed = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0)).half(), experts.forward
    expected = block(x)
    fused_layers.join_projections(model)
    with fused_layers.fused_layers(model):
        assert not calls
        found = block(x)
        assert calls == ["add_shared_expert"]
        many = block(x.repeat(1, 5, 1))
    assert calls == ["add_shared_expert"] and experts.forward is placed
    assert (found - expected).norm() < 2e-3 * expected.norm() and (many[:, :1] - expected).norm() < 2e-3 * many.norm()

    own = type(block)

    class Doubled(own):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    block.__class__ = Doubled
    assert fused_layers._block_of(model.model.layers[1]) is None


def test_without_joined_projections_the_layers_own_attention_runs(calls):
    model, rows = small(), prompts(5)
    assert decoded(model, rows) == plain(model, rows)
    assert "norm_rotate_cached" not in calls and "add_rms_norm" in calls


def test_projections_are_joined_once_and_parameters_stay_what_they_are(calls):
    model = small()
    attention = model.model.layers[0].self_attn
    parameters, values = (
        dict(model.named_parameters()),
        [attention.q_proj.weight.clone(), attention.v_proj.weight.clone()],
    )
    fused_layers.join_projections(model)
    place = attention.v_proj.weight.data_ptr()
    fused_layers.join_projections(model)
    assert attention.v_proj.weight.data_ptr() == place
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert torch.equal(attention.q_proj.weight, values[0]) and torch.equal(attention.v_proj.weight, values[1])
    whole, _ = fused_layers._whole(fused_layers._projections(attention))
    assert torch.equal(whole[-len(values[1]) :], values[1])


def test_biases_of_some_projections_alone_are_left_to_the_layer(calls):
    model, rows = small(), prompts(5)
    attention = model.model.layers[0].self_attn
    attention.q_proj.bias = nn.Parameter(torch.randn(attention.q_proj.out_features))
    fused_layers.join_projections(model)
    assert fused_layers._whole(fused_layers._projections(attention)) is None
    assert decoded(model, rows) == plain(model, rows)


class _Shifted(nn.Module):
    """By more than Gemma's."""

    def __init__(self, own):
        super().__init__()
        self.weight, self.variance_epsilon = own.weight, own.variance_epsilon

    def forward(self, x):
        x = x.float()
        return (2 + self.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def test_a_norm_or_a_layer_that_computes_something_else_is_left(calls):
    model, rows = small(), prompts(5)
    model.model.norm = _Shifted(model.model.norm)
    layer = model.model.layers[0]
    own = type(layer)

    class Doubled(own):
        def forward(self, *arguments, **options):
            return 2 * super().forward(*arguments, **options)

    layer.__class__ = Doubled
    assert fused_layers._adds_and_norms(layer) is None
    assert fused_layers._adds_and_norms(model.model.layers[1]) == "self_attn"
    assert norms.recognise(model.model.norm) is None
    assert decoded(model, rows) == plain(model, rows)
    with ExitStack() as stack:
        stack.enter_context(fused_layers.fused_layers(model))
        assert not isinstance(layer, fused_layers._StepLayer) and isinstance(
            layer.input_layernorm, fused_layers._StepNorm
        )
