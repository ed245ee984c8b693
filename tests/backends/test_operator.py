"""Experts inside torch: compiled, under autocast, checkpointed, differentiated twice, and what they keep.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from amoeba import Activation, Routing, experts
from amoeba.backends import grouped
from amoeba.backends.custom_activation import experts_composed
from amoeba.core.layout import build_layout
from amoeba.core.weights import LORA_NAMES
from amoeba.proof.reference.experts import activate
from selection import each_value_once, quick
from small_layer import SCALING, K, Layer

GPT_OSS = Activation("silu", alpha=1.702, limit=0.7, up_shift=1.0, interleaved=True)


def assert_same(found, expected, exactly=False):
    assert found.keys() == expected.keys()
    for name in expected:
        if exactly:
            assert torch.equal(found[name], expected[name]), name
        else:
            torch.testing.assert_close(found[name], expected[name], msg=lambda m, n=name: f"{n}: {m}")


class TestSaved:
    """Saved for backward are x, the routing, the weights, h and the row maps alone; and what LoRA makes of a row."""

    def saved(self, layer, backend, recompute):
        """What is saved beyond the inputs."""
        found = {}

        def note(tensor):
            found[tensor.data_ptr(), tuple(tensor.shape)] = tensor
            return tensor

        inputs = [*layer.tensors.values(), layer.expert_TK]
        named = layer.tensors
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            routing = Routing(layer.expert_TK, named["weight"])
            given = named["x"], routing, layer.weights(named)
            y_TH = experts(*given, lora=layer.lora(named), backend=backend, recompute=recompute)
        pointers = {tensor.data_ptr() for tensor in inputs}
        extra = [tensor for tensor in found.values() if tensor.data_ptr() not in pointers and tensor.numel()]
        y_TH.backward(layer.dy_TH)
        return extra

    @quick(lambda backend, activation, rank: backend != "triton" or (activation == GPT_OSS) == (rank > 0))
    @pytest.mark.parametrize("activation", [Activation(), GPT_OSS, Activation("relu2", gated=False)])
    @pytest.mark.parametrize("rank", [0, 5], ids=["", "lora"])
    def test_h_and_the_row_maps(self, backend, activation, rank):
        layer = Layer(activation, tokens=50, rank=rank)
        rows, experts_, width = 50 * K, *layer.tensors["gate_up"].shape[:2]
        extra = self.saved(layer, backend, recompute=False)
        maps = 2 * (4 if backend == "triton" else 8) * rows + 4 * experts_
        # LoRA's thin rows of x and of a, whose ranks are padded
        thin = [(rows, 16)] * 2 if rank and backend == "triton" else []
        assert sum(tensor.nbytes for tensor in extra) == 4 * rows * (width + 16 * len(thin)) + maps
        shapes = [(rows, width), (rows,), (rows,), (experts_,), *thin]
        assert sorted(tuple(tensor.shape) for tensor in extra) == sorted(shapes)

    def test_recompute_drops_h(self, backend):
        layer = Layer(tokens=50)
        rows, experts_ = 50 * K, layer.tensors["gate_up"].shape[0]
        extra = self.saved(layer, backend, recompute=True)
        assert sum(tensor.nbytes for tensor in extra) <= 2 * 8 * rows + 4 * experts_, "more than the row maps"
        expected = Layer(tokens=50)
        expected.run(backend).backward(expected.dy_TH)
        for name, tensor in layer.tensors.items():
            assert torch.equal(tensor.grad, expected.tensors[name].grad), name

    @each_value_once("backend")
    @quick(lambda backend, tokens: backend != "triton" or tokens in (1, 8))
    @pytest.mark.parametrize("tokens", [1, 2, 8, 20])
    def test_recompute_works_for_few_rows_too(self, backend, tokens):
        """Where a pass without gradient would go a shorter way."""
        kept, recomputed = Layer(tokens=tokens), Layer(tokens=tokens)
        kept.run(backend).backward(kept.dy_TH)
        self.saved(recomputed, backend, recompute=True)
        for name, tensor in kept.tensors.items():
            torch.testing.assert_close(recomputed.tensors[name].grad, tensor.grad, msg=lambda m, n=name: f"{n}: {m}")

    @each_value_once("backend")
    @pytest.mark.parametrize("rank", [0, 5], ids=["", "lora"])
    def test_a_pass_is_gone_with_its_result(self, backend, rank):
        """Not when Python next looks for circles of references: until then its memory would be taken, and gradients
        would be added where its own were, which spoils the capture of the next pass."""
        layer = Layer(rank=rank)
        x = layer.tensors["x"]

        def notes():  # of where the gradient of x is added, as long as somebody keeps the graph
            return torch.autograd.graph.get_gradient_edge(x).node.metadata

        gc.collect()
        gc.disable()
        try:
            y_TH = layer.run(backend, x=x * 2)
            notes()["pass"] = "first"
            assert notes()
            y_TH.backward(layer.dy_TH)
            del y_TH
            assert not notes()
        finally:
            gc.enable()


# Every backend has its operators of one factory; cpu, grouped and eager have their rows of one flow (sorted_rows.py).
ONE_OF_EACH_OPERATOR = (("triton", True),)  # of the core, for any number of tokens: below


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()

    def compiled(self, activation, backend, **options):
        def layer_of(x, expert, weight, weights, lora=None):
            return experts(x * 2, Routing(expert, weight), weights, lora=lora, backend=backend) + 1

        counted = CompileCounterWithBackend("aot_eager")
        return layer_of, torch.compile(layer_of, fullgraph=True, backend=counted, **options), counted

    def gradients(self, function, layer):
        named = layer.tensors
        lora = {"lora": layer.lora(named)} if layer.lora(named) else {}
        y_TH = function(named["x"], layer.expert_TK, named["weight"], layer.weights(named), **lora)
        found = torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH)
        return {"output": y_TH.detach()} | dict(zip(named, found, strict=True))

    @quick(lambda backend, bias: (backend, bias) in ONE_OF_EACH_OPERATOR)
    @pytest.mark.parametrize(("activation", "bias"), [(Activation(), False), (GPT_OSS, True)], ids=["silu", "gpt-oss"])
    def test_one_graph_with_the_same_gradients(self, backend, activation, bias):
        layer = Layer(activation, bias)
        plain, compiled, counted = self.compiled(activation, backend)
        expected = self.gradients(plain, layer)
        assert_same(self.gradients(compiled, layer), expected, exactly=True)
        assert counted.frame_count == 1
        with torch.no_grad():
            named = layer.tensors
            y_TH = compiled(named["x"], layer.expert_TK, named["weight"], layer.weights(named))
        torch.testing.assert_close(y_TH, expected["output"])

    @pytest.mark.thorough  # in a model: tests/cpu/test_packed_experts.py, tests/decoding/test_decoder.py
    def test_one_graph_with_lora(self, backend):
        layer = Layer(GPT_OSS, rank=5)
        plain, compiled, counted = self.compiled(GPT_OSS, backend)
        assert_same(self.gradients(compiled, layer), self.gradients(plain, layer), exactly=True)
        assert counted.frame_count == 1

    @quick(lambda backend, others: backend == "cpu" and not others)
    @pytest.mark.parametrize("others", [(), (0, 1)], ids=["", "none_and_one"])
    def test_one_graph_for_any_number_of_tokens(self, backend, others):
        plain, compiled, counted = self.compiled(Activation(), backend, dynamic=True)
        graphs = set()
        for tokens in (13, 7):
            layer = Layer(tokens=tokens)
            assert_same(self.gradients(compiled, layer), self.gradients(plain, layer), exactly=True)
            graphs.add(counted.frame_count)
        assert len(graphs) == 1, "another number of tokens made torch compile again"
        for tokens in others if backend == "cpu" else ():  # torch compiles these anew, as it always does
            layer = Layer(tokens=tokens)
            assert_same(self.gradients(compiled, layer), self.gradients(plain, layer), exactly=True)

    @quick(lambda backend: backend == "cpu")
    def test_frozen_weights(self, backend):
        layer = Layer()
        for name in ("gate_up", "down_bias"):
            layer.tensors[name].requires_grad_(False)
        _, compiled, _ = self.compiled(Activation(), backend)
        named = layer.tensors
        y_TH = compiled(named["x"], layer.expert_TK, named["weight"], layer.weights(named))
        y_TH.backward(layer.dy_TH)
        assert {name for name, tensor in named.items() if tensor.grad is None} == {"gate_up", "down_bias"}

    @pytest.mark.thorough  # in a model: test_compiled_unknown_gate_without_an_eager_call
    def test_composed(self):
        def layer_of(x, expert, weight, weights):
            routing = Routing(expert, weight)
            return experts_composed(x, routing, *weights.tensors(), gate=lambda h: activate(h, GPT_OSS))

        compiled = torch.compile(layer_of, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (13, 7):
            layer = Layer(GPT_OSS, tokens=tokens)
            assert_same(self.gradients(compiled, layer), self.gradients(layer_of, layer))


class TestAutocast:
    @pytest.mark.parametrize(("name", "rank"), [("auto", 0), ("eager", 0), ("grouped", 0), ("auto", 8)])
    def test_bf16_out_and_fp32_gradients(self, name, rank, monkeypatch):
        # grouped leaves bf16 to eager on CPUs that only emulate it; asked for, it is right all the same
        monkeypatch.setattr(grouped, "has_bf16_instructions", lambda: True)
        layer = Layer(rank=rank)
        expected = layer.gradients("eager")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_TH = layer.run(name)
        assert y_TH.dtype == torch.bfloat16
        gradients = torch.autograd.grad(y_TH, list(layer.tensors.values()), layer.dy_TH.bfloat16())
        for key, gradient in zip(layer.tensors, gradients, strict=True):
            assert gradient.dtype == torch.float32, key
            error = (gradient - expected[key]).norm() / expected[key].norm()
            assert 0 < error < 0.02, f"{key}: {error:.1e}"

    @pytest.mark.parametrize("name", ["cpu", "eager"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_it_casts_what_goes_in_and_nothing_inside(self, name, rank):
        """The same bits as inputs in bf16 give without it, also where backward runs under it."""
        layer = Layer(rank=rank)
        dy_TH = layer.dy_TH.bfloat16()
        cast = {key: tensor if key == "weight" else tensor.bfloat16() for key, tensor in layer.tensors.items()}
        y_TH = layer.run(name, **cast)
        expected = torch.autograd.grad(y_TH, list(layer.tensors.values()), dy_TH)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_TH = layer.run(name)
            found = torch.autograd.grad(under_TH, list(layer.tensors.values()), dy_TH)
        assert torch.equal(y_TH, under_TH)
        for key, one, other in zip(layer.tensors, expected, found, strict=True):
            assert torch.equal(one, other), key

    def test_half_precision_x_is_taken_with_fp32_weights(self):
        layer = Layer()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_TH = layer.run("auto", x=layer.tensors["x"].detach().bfloat16())
        assert y_TH.dtype == torch.bfloat16

    def test_switched_off_it_changes_nothing(self, backend):
        layer = Layer()
        with torch.autocast("cpu", enabled=False):
            assert layer.run(backend).dtype == torch.float32


@quick(lambda backend, use_reentrant: backend != "triton" or not use_reentrant)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_equal_gradients(backend, use_reentrant):
    layer, expected = Layer(), Layer().gradients(backend)
    named = layer.tensors

    def forward(x, weight, gate_up):
        weights = layer.weights(named | {"gate_up": gate_up})
        return experts(x, Routing(layer.expert_TK, weight), weights, backend=backend)

    y_TH = checkpoint(forward, named["x"], named["weight"], named["gate_up"], use_reentrant=use_reentrant)
    y_TH.backward(layer.dy_TH)
    torch.testing.assert_close(y_TH, expected["output"])
    for name, tensor in named.items():
        assert torch.equal(tensor.grad, expected[name]), name


class TestOpcheck:
    """torch's own test of an operator: schema, fake, autograd registration, tracing."""

    def arguments(self, layer):
        return (
            layer.tensors["x"],
            layer.expert_TK,
            layer.tensors["weight"],
            *layer.weights(layer.tensors).tensors(),
            *(layer.tensors.get(name) for name in LORA_NAMES),
            layer.activation.kind,
            layer.activation.gated,
            layer.activation.alpha,
            layer.activation.limit,
            layer.activation.up_shift,
            layer.activation.interleaved,
            SCALING,
        )

    @quick(lambda backend, save_h, tokens, rank: save_h == (backend == "triton" or tokens + rank > 2))
    @quick(lambda backend, rank: backend == "triton")
    @pytest.mark.parametrize("save_h", [True, False])
    @pytest.mark.parametrize(("tokens", "rank"), [(2, 0), (40, 0), (2, 5)])
    def test_forward(self, backend, save_h, tokens, rank):
        if backend == "triton" and (tokens > 2 or rank):
            pytest.skip(
                "triton goes one way for 2 and for 40 tokens, and in the interpreter it takes 6 s, 30 with LoRA"
            )
        operator = getattr(torch.ops.amoeba, backend).default
        torch.library.opcheck(operator, (*self.arguments(Layer(GPT_OSS, tokens=tokens, rank=rank)), save_h))

    @quick(lambda backend, rank: backend == "cpu" and rank > 0)
    @pytest.mark.parametrize(("bias", "rank"), [(True, 0), (False, 0), (True, 5)])
    def test_backward(self, backend, bias, rank):
        if backend == "triton" and (rank or not bias):
            pytest.skip("biases and LoRA change nothing about the operator, and in the interpreter it takes 6 s and 30")
        layer = Layer(bias=bias, tokens=5 if backend == "triton" else 20, rank=rank)
        for tensor in layer.tensors.values():
            tensor.requires_grad_(False)
        arguments = self.arguments(layer)
        _, *saved = getattr(torch.ops.amoeba, backend)(*arguments, True)
        operator = getattr(torch.ops.amoeba, f"{backend}_backward").default
        for needs in (
            [True] * 4 + [bias] * 2 + [rank > 0] * 6,
            [False, True, False, True, False, False] + [rank > 0] * 6,
        ):
            torch.library.opcheck(operator, (*arguments, True, *saved, layer.dy_TH, needs))

    def test_several_gradients_at_once_are_refused_by_the_operator_itself_too(self):
        layer = Layer(tokens=5)
        y_TH = torch.ops.amoeba.eager(*self.arguments(layer), True)[0]
        with pytest.raises(NotImplementedError, match="amoeba::eager: several gradients at once are not implemented"):
            torch.autograd.grad(y_TH, layer.tensors["x"], torch.stack([layer.dy_TH] * 2), is_grads_batched=True)

    def test_operators_of_composed(self):
        layer = Layer(tokens=20)
        layout = build_layout(layer.expert_TK, 4)
        slot_row_TK = layout.slot_row_N.view_as(layer.expert_TK)
        named, operators = layer.tensors, torch.ops.amoeba
        torch.library.opcheck(operators.expand_rows.default, (named["x"], layout.token_N, slot_row_TK))
        rows_NH = named["x"].detach()[layout.token_N].requires_grad_()
        torch.library.opcheck(operators.combine_rows.default, (rows_NH, layout.token_N, slot_row_TK))
        for bias in (named["gate_up_bias"], None):
            torch.library.opcheck(operators.row_linear.default, (rows_NH, named["gate_up"], bias, layout.offs_E))
