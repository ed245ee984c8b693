"""Attention layers from one projection: recognised by what they compute, with the same results and gradients."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amoeba.data.token_rows import document_arguments
from amoeba.integrations.fused_attention import NAME, Form, fused_attention, recognise
from amoeba.ops import rotary_attention
from tiny_models import build

LENGTH = 10


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve a CPU, in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is for machines without a GPU; see tests/kernels/test_rotary_attention.py")
    monkeypatch.setattr(rotary_attention, "why_not", rotary_attention.why_not_shape)


@pytest.fixture
def anywhere(served: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes their calls."""
    calls: list[Any] = []
    own = rotary_attention._operator

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return own(*arguments)

    monkeypatch.setattr(rotary_attention, "_operator", noted)
    return calls


def small(family: str = "qwen3_moe", **changes: Any) -> Any:
    return build(family, **{"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2} | changes).train()


def batch(rows: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (rows, LENGTH), generator=generator)
    positions = torch.tensor([[*range(6), *range(LENGTH - 6)]] * rows)
    given = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return given | document_arguments(given, most=2, longest=LENGTH)


def results(model: Any, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**batch() | changes, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            got[1][name], gradient, rtol=1e-3, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=["plain", "biases"])
def test_the_same_logits_and_gradients_and_the_model_is_as_before_afterwards(changes, anywhere):
    model = small(**changes)
    model.set_attn_implementation(NAME)
    classes, names = [type(module) for module in model.modules()], list(model.state_dict())
    expected = results(model)
    with fused_attention(model) as found:
        assert found.layers == found.of == 2
        assert list(model.state_dict()) == names
        got = results(model)
    assert len(anywhere) == 2
    check_same(got, expected)
    assert [type(module) for module in model.modules()] == classes


def test_frozen_norms_and_rotations_that_rows_share(anywhere):
    model = small()
    model.set_attn_implementation(NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name or "embed" in name)
    given = {"input_ids": batch()["input_ids"], "labels": batch()["labels"]}
    given = given | document_arguments(given, most=1, longest=LENGTH) | {"position_ids": None}
    expected = results(model, **given)
    with fused_attention(model):
        check_same(results(model, **given), expected)
    assert anywhere[0][3].shape[0] == LENGTH


@pytest.mark.parametrize("what", ["another attention", "a cache", "no documents", "one frozen", "autocast", "a mask"])
def test_calls_that_want_something_else_run_the_layers_own_code(what, anywhere, monkeypatch):
    model = small()
    model.set_attn_implementation("sdpa" if what in ("another attention", "a mask", "no documents") else NAME)
    if what == "one frozen":
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
        model.model.layers[1].self_attn.v_proj.weight.requires_grad_(False)
    given = batch()
    if what == "a mask":
        given["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64)
    if what == "no documents":
        given = {name: given[name] for name in ("input_ids", "labels")}

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            return model(**given, use_cache=what == "a cache").logits

    expected = run()
    with fused_attention(model) as found:
        assert found.layers == 2
        assert torch.equal(run(), expected)
    assert not anywhere


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "glm4_moe", "gpt_oss"])
def test_layers_of_another_form_stay_as_they_are_and_the_log_says_why(family, caplog):
    model = build(family)
    classes = [type(module) for module in model.modules()]
    with caplog.at_level(logging.INFO, "amoeba"), fused_attention(model) as found:
        assert found.layers == 0 and found.of > 0 and found.reasons
        assert [type(module) for module in model.modules()] == classes
    assert all(reason in caplog.text for reason in found.reasons)


def shifted(norm: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * (1 + norm.weight)


def changed(kind: str) -> tuple[Any, str]:
    """A layer that looks like Qwen3's and is not."""
    layer: Any = small().model.layers[0].self_attn
    own = type(layer)

    class Other(own):  # type: ignore[valid-type, misc]
        def forward(self, hidden_states: Tensor, position_embeddings: Any, *others: Any, **options: Any) -> Any:
            cos, sin = position_embeddings
            if kind == "turns the other way":
                return super().forward(hidden_states, (cos, -sin), *others, **options)
            if kind == "does not turn":
                return super().forward(hidden_states, (cos * 0 + 1, sin * 0), *others, **options)
            y, weights = super().forward(hidden_states, position_embeddings, *others, **options)
            return (y * 2 if kind == "scales its result" else y), weights

    layer.__class__ = Other
    if kind == "norms by one more than the weight":
        layer.q_norm.__class__ = type("Shifted", (type(layer.q_norm),), {"forward": shifted})
    if kind == "dropout":
        layer.attention_dropout = 0.1
        return layer, "it wants more of attention: dropout"
    if kind == "another linear layer":
        layer.k_proj = type("Wrapped", (nn.Linear,), {})(32, 128, bias=False)
        return layer, "its projections are not plain linear layers"
    if kind == "hooks":
        layer.v_proj.register_forward_hook(lambda module, arguments, output: output * 2)
        return layer, "its projections are not plain linear layers"
    if kind == "is not causal":
        layer.is_causal = False
        return layer, "it wants more of attention: is_causal=False"
    return layer, "it computes something else"


@pytest.mark.parametrize(
    ("size", "reason"), [(8, "our kernel supports heads of size 64 and 128; these have 8"), (64, None)]
)
def test_heads_that_the_kernels_do_not_serve(served, size, reason):
    form = recognise(small(head_dim=size).model.layers[0].self_attn)
    assert isinstance(form, Form) if reason is None else form == reason


def test_on_a_cpu_no_layer_is_changed():
    layer = small().model.layers[0].self_attn
    assert "computes on CUDA devices" in recognise(layer)
    layer.k_norm.variance_epsilon = 1e-3
    assert recognise(layer) == "its norms do not have one epsilon that they tell"
    layer.k_norm.variance_epsilon = layer.q_norm.variance_epsilon
    layer.q_proj.weight.data.fill_(torch.nan)
    assert recognise(layer) == "it computes something else"


KINDS = [
    "turns the other way",
    "does not turn",
    "scales its result",
    "norms by one more than the weight",
    "dropout",
    "another linear layer",
    "hooks",
    "is not causal",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_looks_alike_and_is_not_is_not_taken_for_one(kind):
    layer, reason = changed(kind)
    assert recognise(layer) == reason


def test_layers_are_recognised_in_bf16_with_their_window(anywhere):
    model = small(sliding_window=7, use_sliding_window=True).bfloat16()
    form = recognise(model.model.layers[0].self_attn)
    assert form == Form(model.config.rms_norm_eps, 64**-0.5, 7)
    with fused_attention(model) as found, fused_attention(model) as again:
        assert found.layers == 2 and again.layers == 0 and again.reasons == ("it is fused already",)


@pytest.mark.thorough
def test_layers_are_compiled_without_a_break_into_one_code(served):
    model = small()
    model.set_experts_implementation("amoeba")
    model.set_attn_implementation(NAME)
    expected = results(model)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(sum("rotary_attention" in str(node.target) for node in graph.graph.nodes))
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    with fused_attention(model):
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
        got = results(model)
        for layer in model.model.layers:
            layer._compiled_call_impl = None
    check_same(got, expected)
    assert graphs == [1]
