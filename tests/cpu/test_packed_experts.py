"""Packed experts behind the seam: nodes agree, gradients are right, and torch's machinery works around them.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import copy
import functools
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from packed_layer import INTERLEAVED, PLAIN, E, H, I, K, PackedLayer, assert_close, error
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from amoeba import Activation, ExpertWeights, Routing, experts
from amoeba.backends import packed as passes
from amoeba.backends.registry import backends_of
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.packed_experts import PackedExperts, pack_experts
from amoeba.cpu.weights import load_packed
from amoeba.proof.reference.experts import activate
from selection import each_value_once, quick

try:
    load_packed()
except CoreUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

GATED = Activation()


class TestAnInt8ForwardWithABf16Backward:
    @each_value_once()
    @pytest.mark.parametrize("nodes", [1, 3])
    @pytest.mark.parametrize("activation", [GATED, INTERLEAVED, PLAIN], ids=["gated", "interleaved", "plain"])
    def test_it_has_the_output_of_int8_and_the_gradients_of_bf16(self, nodes, activation):
        """Those of h that is computed again: with an h in int8, gradients are 1.0e-2 to 1.8e-2 away from fp64."""
        layer = PackedLayer(activation)
        found = layer.found(layer.pack("int8", nodes, backward="bf16"))
        assert_close(found, layer.truth(), output=3e-2, gradients=1e-2)
        assert torch.equal(found["output"], layer.run(layer.pack("int8", nodes)))
        in_bf16 = layer.found(layer.pack("bf16", nodes), recompute=True)
        assert [name for name in in_bf16 if not torch.equal(found[name], in_bf16[name])] == ["output"]

    def test_of_one_node_the_weights_are_kept_and_not_copied(self):
        """Backward must not read what packing has freed (bug 20 of the seed)."""
        layer = PackedLayer()
        truth, packed = layer.truth(), layer.pack("int8", backward="bf16")
        places = [tensor.data_ptr() for tensor in layer.weights.tensors()[:2]]
        of_backward = packed.shares[0].of_backward
        assert [each.weight_EOI.data_ptr() for each in (of_backward.gate_up, of_backward.down)] == places
        layer.weights = None
        gc.collect()
        for _ in range(2):
            assert_close(layer.found(packed), truth, output=3e-2, gradients=1e-2)

    def test_no_h_is_saved_and_recompute_changes_nothing(self):
        layer = PackedLayer()
        packed = layer.pack("int8", backward="bf16")
        expected = layer.found(packed)
        for name, gradient in layer.found(packed, recompute=True).items():
            assert torch.equal(gradient, expected[name]), name
        _, left = passes.forward(packed, layer.lora, layer.x_TH, layer.expert_TK, layer.weight_TK, "h")
        assert all(cache.h_NJ is None for cache in left.caches)


class TestThePacking:
    def test_the_source_may_go(self):
        """Weights that backward reads must not be a temporary of packing (bug 20 of the seed)."""
        layer = PackedLayer()
        truth, packed = layer.truth(), layer.pack(nodes=2)
        sources = [weakref.ref(tensor) for tensor in layer.weights.tensors()]
        for source in sources:
            source().fill_(float("nan"))
        layer.weights = None
        gc.collect()
        assert all(source() is None for source in sources)
        for _ in range(2):
            assert_close(layer.found(packed), truth)

    def test_a_copy_is_itself_and_a_pickle_is_refused(self):
        packed = PackedLayer().pack()
        assert copy.deepcopy(packed) is packed
        with pytest.raises(TypeError, match=r"are not pickled. Save the weights"):
            pickle.dumps(packed)

    def test_it_is_freed_with_its_last_owner(self):
        packed = PackedLayer().pack(nodes=2)
        handle, gone = packed.handle, weakref.ref(packed)
        del packed
        gc.collect()
        assert gone() is None
        with pytest.raises(KeyError):
            PackedExperts.of((handle,), ())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"kind": "fp8"}, "kind: expected bf16 or int8; got 'fp8'"),
            ({"backward": "int8"}, "backward: expected bf16, or"),
            ({"nodes": I + 1}, f"nodes: expected 1 to {I}"),
            ({"nodes": 0}, "nodes: expected a number of at least 1"),
        ],
    )
    def test_bad_requests_are_explained(self, change, message):
        with pytest.raises(ValueError, match=message):
            pack_experts(PackedLayer().weights, **change)

    def test_weights_that_cannot_be_packed_are_named(self):
        weights = PackedLayer().weights
        with pytest.raises(ValueError, match="weights: expected resident weights on the CPU in bfloat16 or float32"):
            pack_experts(weights.to(torch.float64))
        with pytest.raises(ValueError, match="got packed weights"):
            pack_experts(pack_experts(weights))


def as_int8(rows):
    """The numbers that codes stand for, with a scale for each row, in fp64. Half of the largest, in the middle of two
    codes, becomes the upper one, by a sum in fp32."""
    step = rows.abs().amax(-1, keepdim=True) / 127
    codes = (rows / step).float().add(128.5).floor().double() - 128
    return torch.where(step > 0, codes * step, 0.0)


def output_of_int8(x_TH, expert_TK, weight_TK, weights):
    """The recipe in fp64, and how far from it rounding to bf16 may lead: x, W1, W2 and a, in bf16, in int8 each."""
    gate_up, down = as_int8(weights.gate_up_EJH.double()), as_int8(weights.down_EHI.double())
    y_TH, room_TH = torch.zeros_like(x_TH), torch.zeros_like(x_TH)
    for t, k in itertools.product(range(expert_TK.shape[0]), range(expert_TK.shape[1])):
        e, s = int(expert_TK[t, k]), weight_TK[t, k]
        a_I = activate(gate_up[e] @ as_int8(x_TH[t]), weights.activation).bfloat16().double()
        y_TH[t] += s * (down[e] @ as_int8(a_I))
        # y is rounded, and so is a, which may take each of its codes to the next one
        step = a_I.abs().amax() / 127 if a_I.numel() > 1 else 0.0
        room_TH[t] += s * (down[e].abs() @ (a_I.abs() / 64 + step))
    return y_TH, room_TH


@each_value_once()
@pytest.mark.parametrize(
    "activation", [Activation(), Activation("relu2", gated=False), Activation("gelu", gated=False)], ids=str
)
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_sums_of_a_few_numbers_have_the_error_of_int8_and_no_other(inner, activation):
    """A sum next to 0 may be off by its own size and more in int8: what rounds is measured by the row's largest."""
    for seed, hidden in itertools.product(range(8), (1, 2, 3, 64)):
        generator = torch.Generator().manual_seed(seed)
        drawn = functools.partial(torch.randn, generator=generator)
        gate_up_EJH = (drawn(2, activation.width(inner), hidden) / hidden**0.5).bfloat16()
        weights = ExpertWeights(gate_up_EJH, (drawn(2, hidden, inner) / inner**0.5).bfloat16(), activation=activation)
        x_TH, weight_TK = drawn(2, hidden).bfloat16(), torch.rand(2, 1 + seed % 2, generator=generator)
        expert_TK = torch.rand(2, 2, generator=generator).argsort(1)[:, : 1 + seed % 2]
        packed = pack_experts(weights, kind="int8", nodes=1, threads=1)
        found = experts(x_TH, Routing(expert_TK, weight_TK), packed).double()
        expected, room = output_of_int8(x_TH.double(), expert_TK, weight_TK.double(), weights)
        assert ((found - expected).abs() <= room + 1e-30).all(), (seed, hidden)


class TestTheSeam:
    def test_fp32_x_is_refused_with_the_cast_to_make(self):
        layer = PackedLayer()
        with pytest.raises(
            ValueError, match=r"x_TH: expected torch.bfloat16.*got torch.float32. Cast x to torch.bfloat16"
        ):
            experts(layer.x_TH.float(), layer.routing, layer.pack())

    def test_other_backends_refuse_with_a_reason(self):
        layer = PackedLayer()
        packed = layer.pack()
        assert [backend.name for backend in backends_of(PackedExperts, torch.device("cpu"))] == ["cpu"]
        expected = r"one that supports packed weights \(PackedExperts\); got eager, which does not"
        with pytest.raises(ValueError, match=expected):
            layer.run(packed, backend="eager")
        layer.run(packed, backend="auto")

    def test_factors_that_do_not_fit_are_refused_before_anything_is_computed(self):
        layer = PackedLayer()
        packed = layer.pack(nodes=2)
        wrong = LoraFactors(
            down_lora_a=torch.zeros(E, 4, I - 1).bfloat16(), down_lora_b=torch.zeros(E, H, 4).bfloat16()
        )
        with pytest.raises(ValueError, match=rf"down_lora_a and down_lora_b: expected shapes \({E}, R, {I}\)"):
            experts(layer.x_TH, layer.routing, packed, lora=wrong)

    @pytest.mark.parametrize("nodes", [1, 2])
    def test_fp32_factors_get_fp32_gradients_of_the_same_numbers(self, nodes):
        layer = PackedLayer()
        packed, expected = layer.pack(nodes=nodes), layer.found(layer.pack(nodes=nodes))
        wide = {name: tensor.detach().float().requires_grad_() for name, tensor in layer.lora.tensors().items()}
        layer.lora = LoraFactors(**wide, scaling=layer.lora.scaling)
        found = layer.found(packed)
        assert torch.equal(found["output"], expected["output"])
        for name in LORA_NAMES:
            assert found[name].dtype == torch.float32
            assert error(found[name], expected[name]) < 3e-3, name

    def test_gate_and_up_may_share_their_a(self):
        layer = PackedLayer()
        apart = layer.found(layer.pack(nodes=2))
        shared = layer.lora.gate_lora_a
        layer.lora = LoraFactors(**layer.lora.tensors() | {"up_lora_a": shared}, scaling=layer.lora.scaling)
        (gradient,) = torch.autograd.grad(layer.run(layer.pack(nodes=2)), shared, layer.dy_TH)
        copied = LoraFactors(
            **layer.lora.tensors() | {"up_lora_a": shared.detach().clone().requires_grad_()}, scaling=layer.lora.scaling
        )
        layer.lora = copied
        both = layer.found(layer.pack(nodes=2))
        assert error(gradient, both["gate_lora_a"].float() + both["up_lora_a"].float()) < 5e-3
        assert error(both["gate_lora_a"], apart["gate_lora_a"]) > 0.02, "the other A was not used"

    @pytest.mark.parametrize("only", ["x", "weight", *LORA_NAMES])
    def test_one_gradient_alone(self, only):
        layer = PackedLayer()
        expected = layer.found(layer.pack(nodes=2))[only]
        for name, tensor in layer.wanted().items():
            tensor.requires_grad_(name == only)
        y_TH = layer.run(layer.pack(nodes=2))
        (found,) = torch.autograd.grad(y_TH, layer.wanted()[only], layer.dy_TH)
        assert error(found, expected) < 1e-6


class TestInsideTorch:
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_inference_mode(self, nodes):
        layer = PackedLayer()
        packed, expected = layer.pack(nodes=nodes), layer.found(layer.pack(nodes=nodes))
        with torch.inference_mode():
            made_here = LoraFactors(**{n: t * 1 for n, t in layer.lora.tensors().items()}, scaling=layer.lora.scaling)
            for lora in (layer.lora, made_here):
                y_TH = experts(layer.x_TH * 1, layer.routing, packed, lora=lora)
                assert torch.equal(y_TH, expected["output"])

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_activation_checkpointing(self, use_reentrant):
        layer = PackedLayer()
        packed, expected = layer.pack(nodes=2), layer.found(layer.pack(nodes=2))

        def forward(x, weight):
            return experts(x, Routing(layer.expert_TK, weight), packed, lora=layer.lora)

        y_TH = checkpoint(forward, layer.x_TH, layer.weight_TK, use_reentrant=use_reentrant)
        y_TH.backward(layer.dy_TH)
        for name, tensor in layer.wanted().items():
            assert torch.equal(tensor.grad, expected[name]), name

    def test_what_is_kept_is_seen_by_saved_tensor_hooks_and_recompute_keeps_no_h(self):
        layer = PackedLayer(tokens=50)
        packed = layer.pack()

        def kept(recompute):
            shapes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
                layer.run(packed, recompute=recompute).backward(layer.dy_TH)
            return shapes

        h = (50 * K, 2 * I)
        assert h in kept(recompute=False)
        assert h not in kept(recompute=True)

    def test_a_graph_that_lives_on_keeps_nothing(self):
        layer = PackedLayer()
        y_TH = layer.run(layer.pack())
        y_TH.backward(layer.dy_TH)
        with pytest.raises(RuntimeError, match="second time"):
            y_TH.backward(layer.dy_TH)

    def test_a_factor_changed_between_the_passes_is_an_error(self):
        layer = PackedLayer()
        y_TH = layer.run(layer.pack())
        with torch.no_grad():
            layer.lora.up_lora_b.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y_TH.backward(layer.dy_TH)

    def test_autocast(self):
        layer = PackedLayer()
        packed, expected = layer.pack(), layer.found(layer.pack())
        x_TH = layer.x_TH.detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y_TH = experts(x_TH, layer.routing, packed, lora=layer.lora)
        assert torch.equal(y_TH, expected["output"])
        (dx,) = torch.autograd.grad(y_TH, x_TH, layer.dy_TH)
        assert dx.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError, match="Use autocast in bfloat16"):
            experts(x_TH, layer.routing, packed)

    @quick(lambda nodes: nodes == 2)
    @pytest.mark.parametrize("nodes", [1, 2])
    def test_compiled_it_is_one_graph_for_all_layers_with_the_same_gradients(self, nodes):
        torch.compiler.reset()
        counted = CompileCounterWithBackend("aot_eager")

        def forward(x, expert, weight, packed, lora):
            return experts(x * 2, Routing(expert, weight), packed, lora=lora) + 1

        compiled = torch.compile(forward, fullgraph=True, backend=counted)
        for seed in range(3):
            layer = PackedLayer(seed=seed)
            packed = layer.pack(nodes=nodes)
            given = layer.x_TH, layer.expert_TK, layer.weight_TK, packed, layer.lora
            wanted = list(layer.wanted().values())
            y_TH, expected = compiled(*given), forward(*given)
            assert torch.equal(y_TH, expected)
            for found, truth in zip(
                torch.autograd.grad(y_TH, wanted, layer.dy_TH),
                torch.autograd.grad(expected, wanted, layer.dy_TH),
                strict=True,
            ):
                assert torch.equal(found, truth)
        assert counted.frame_count == 1

    def test_opcheck(self):
        layer = PackedLayer()
        packed = layer.pack()
        tensors = layer.x_TH, layer.expert_TK, layer.weight_TK, packed.handle, *layer.lora.six()
        arguments = (*tensors, layer.lora.scaling)
        torch.library.opcheck(torch.ops.amoeba.packed.default, arguments)
        frozen = tuple(tensor.detach() for tensor in tensors)
        for needs in ([True] * 8, [True, False] * 4):
            given = (*frozen, layer.lora.scaling, layer.dy_TH, needs)
            torch.library.opcheck(torch.ops.amoeba.packed_backward.default, given)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 2])
def test_x_on_a_gpu_and_experts_on_the_cpu(nodes):
    layer = PackedLayer()
    packed, expected = layer.pack(nodes=nodes), layer.found(layer.pack(nodes=nodes))
    x_TH, weight_TK = (t.detach().cuda().requires_grad_() for t in (layer.x_TH, layer.weight_TK))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y_TH = experts(x_TH * 1, Routing(layer.expert_TK.cuda(), weight_TK), packed, lora=layer.lora)
        assert y_TH.is_cuda
        y_TH.backward(layer.dy_TH.cuda())
    stream.synchronize()
    assert torch.equal(y_TH.cpu(), expected["output"])
    assert torch.equal(x_TH.grad.cpu(), expected["x"])
    assert torch.equal(weight_TK.grad.cpu(), expected["weight"])
    for name, tensor in layer.lora.tensors().items():
        assert torch.equal(tensor.grad, expected[name]), name
