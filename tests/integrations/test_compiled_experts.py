"""Experts modules under torch.compile: no graph break, and the numbers of "eager"."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_modules import (
    LAYOUTS,
    MODELS,
    assert_close,
    clamped,
    gate_in_bf16,
    hidden_clamp,
    make_experts,
    recognised,
    scaled_by_a_parameter,
    up_first,
)
from torch import nn

from amoeba import Activation
from selection import quick
from tiny_models import (
    HIDDEN,
    TOLERANCE,
    Outcome,
    build,
    build_experts,
    experts_classes,
    experts_inputs,
    needs,
    relative,
    run_experts,
    token_ids,
)

pytestmark = pytest.mark.filterwarnings("ignore")


class Recorder:
    """A backend that keeps count of the graphs and of our operators in them."""

    def __init__(self) -> None:
        self.operators: list[set[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Any:
        names = (str(node.target) for node in graph.graph.nodes)
        self.operators.append({name.removesuffix(".default") for name in names if name.startswith("amoeba.")})
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @property
    def own_functions_called(self) -> bool:
        assert all(self.operators), "a graph without any operator of ours"
        return any("amoeba.row_linear" in operators for operators in self.operators)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    torch.compiler.reset()
    yield Recorder()
    torch.compiler.reset()


def assert_compiled_equals_eager(module: Any, recorder: Recorder, *sizes: int) -> None:
    compiled = torch.compile(module, fullgraph=True, backend=recorder)
    for tokens in sizes:
        inputs = experts_inputs(tokens, top_k=2)
        expected = run_experts(module, "eager", inputs)
        assert_close(run_experts(module, "amoeba", inputs, call=compiled), expected, TOLERANCE)


@quick(lambda model_type, eager_call_first: model_type == "muse_spark" and not eager_call_first)
@pytest.mark.parametrize("eager_call_first", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v4", "nemotron_h", "muse_spark"])
def test_compiled_experts(model_type: str, eager_call_first: bool, recorder: Recorder) -> None:
    module = build_experts(needs(model_type), experts_classes()[model_type][0])
    if eager_call_first:
        run_experts(module, "amoeba", experts_inputs(tokens=5, top_k=2))
    # another number of tokens is another graph, of the same code for every model
    assert_compiled_equals_eager(module, recorder, 19, *((1,) if eager_call_first else ()))
    assert recorder.own_functions_called == (MODELS[model_type] is None)


@quick(lambda layout: layout == "bias")
@pytest.mark.parametrize("layout", ["plain", "transposed", "bias", "ungated", "norm"])
def test_compiled_layouts_without_an_eager_call(layout: str, recorder: Recorder) -> None:
    assert_compiled_equals_eager(make_experts(**LAYOUTS[layout]), recorder, 19)


@quick(lambda gate: gate is scaled_by_a_parameter)
@pytest.mark.parametrize("gate", [up_first, gate_in_bf16, hidden_clamp, scaled_by_a_parameter])
def test_compiled_unknown_gate_without_an_eager_call(gate: Any, recorder: Recorder) -> None:
    module = make_experts(gate)
    module.extra = nn.Parameter(torch.ones(()))
    assert_compiled_equals_eager(module, recorder, 19)
    assert recorder.own_functions_called


SILU_BY_NAME = type("SiLUActivation", (nn.Tanh,), {})()  # a familiar name is not enough


@quick(lambda act_fn, has_gate: has_gate and type(act_fn) is nn.Tanh)
@pytest.mark.parametrize("act_fn", [nn.GELU(approximate="tanh"), nn.Tanh(), nn.Softplus(beta=2), F.silu, SILU_BY_NAME])
@pytest.mark.parametrize("has_gate", [True, False])
def test_compiled_act_fn_that_its_class_does_not_tell(act_fn: Any, has_gate: bool, recorder: Recorder) -> None:
    module = make_experts(has_gate=has_gate)
    del module.act_fn
    module.act_fn = act_fn
    assert_compiled_equals_eager(module, recorder, 19)
    assert recorder.own_functions_called


def test_an_eager_call_after_compiling_tries_out_what_the_class_did_not_tell(recorder: Recorder) -> None:
    module = make_experts()
    module.act_fn = nn.GELU(approximate="tanh")
    torch.compile(module, fullgraph=True, backend=recorder)(*experts_inputs(tokens=5, top_k=2))
    assert recorder.own_functions_called
    assert recognised(module) == Activation("gelu_tanh")


@pytest.mark.thorough
def test_compiled_module_follows_a_change_of_limit(recorder: Recorder) -> None:
    module = make_experts(clamped)
    for limit in (7.0, 0.1):
        module.limit = limit
        assert_compiled_equals_eager(module, recorder, 19)
    module(*experts_inputs(tokens=19, top_k=2))
    module.limit = 0.3
    assert_compiled_equals_eager(module, recorder, 19)


def test_layers_compiled_one_by_one_share_their_code(recorder: Recorder) -> None:
    """More layers than torch.compile is willing to compile one function for."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        module = build_experts("gpt_oss", "GptOssExperts")
        module.config._experts_implementation = "amoeba"
        torch.compile(module, fullgraph=True, backend=recorder)(*experts_inputs(tokens=19, top_k=2))
    assert len(recorder.operators) == 1


def test_compiled_moe_block(recorder: Recorder) -> None:
    block = build("qwen3_moe").model.layers[0].mlp
    x = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(0))
    outcomes = {}
    for implementation in ("amoeba", "eager"):  # the compiled call comes first
        block.experts.config._experts_implementation = implementation
        call = torch.compile(block, fullgraph=True, backend=recorder) if implementation == "amoeba" else block
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        y = call(leaf)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        outcomes[implementation] = Outcome(
            y.detach(), {"x": leaf.grad} | {name: parameter.grad for name, parameter in block.named_parameters()}
        )
    assert_close(outcomes["amoeba"], outcomes["eager"], TOLERANCE)
    assert len(recorder.operators) == 1
    assert not recorder.own_functions_called


@pytest.mark.thorough  # its parts are compiled above, its layers in tests/jobs/test_fast_paths.py
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_compiled_model(model_type: str, recorder: Recorder) -> None:
    model = build(model_type, num_hidden_layers=1)
    model.set_experts_implementation("amoeba")
    with torch.no_grad():
        ours = torch.compile(model, fullgraph=True, backend=recorder)(token_ids(), use_cache=False).logits
        model.set_experts_implementation("eager")
        assert relative(ours, model(token_ids(), use_cache=False).logits) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_compiled_by_inductor_on_gpu(model_type: str, recorder: Recorder) -> None:
    module = build_experts(model_type, experts_classes()[model_type][0]).bfloat16().cuda()
    hidden_states, index, weights = (tensor.cuda() for tensor in experts_inputs(63, top_k=2))
    inputs = hidden_states.bfloat16(), index, weights.bfloat16()
    compiled = torch.compile(module, fullgraph=True)
    ours = run_experts(module, "amoeba", inputs, call=compiled)
    assert_close(ours, run_experts(module, "eager", inputs), 2e-2)
