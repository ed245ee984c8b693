"""LoRA factors through `experts`: what the conformance suite, which compares numbers, does not ask.

E experts · H hidden · I intermediate · R LoRA rank
"""

import functools

import pytest
import torch

from amoeba import Activation, Routing, experts
from amoeba.backends import cpu, registry
from amoeba.core.problem import Needs
from amoeba.core.weights import LORA_NAMES, ExpertWeights, LoraFactors
from amoeba.cpu.core import why_no_core
from amoeba.proof.conformance import poisoned_memory
from amoeba.proof.reference import experts as reference
from selection import each_value_once, quick
from small_layer import E, H, I, Layer, normal

BASE = ("gate_up", "down", "gate_up_bias", "down_bias")
INTERLEAVED = Activation("silu", interleaved=True)
PLAIN = Activation("relu2", gated=False)


@functools.cache
def all_gradients(backend):
    return Layer(rank=4).gradients(backend)


class TestFrozenWeights:
    def needs(self, monkeypatch, backend, layer):
        """What the backward of one pass is asked for, and what it gives."""
        (chosen,) = (b for b in registry.backends_of(ExpertWeights, torch.device("cpu")) if b.name == backend)
        asked, plain = [], chosen.operator.backward

        def backward(problem, kept, dy_TH, needs):
            gradients = plain(problem, kept, dy_TH, needs)
            asked.append((needs, gradients))
            return gradients

        monkeypatch.setattr(chosen.operator, "backward", backward)
        layer.run(backend).backward(layer.dy_TH)
        return asked[0]

    def test_only_the_factors_x_and_the_routing_get_gradients(self, monkeypatch, backend):
        layer = Layer(rank=4)
        for name in BASE:
            layer.tensors[name].requires_grad_(False)
        needs, gradients = self.needs(monkeypatch, backend, layer)
        assert needs == Needs(True, True, False, False, False, False, *[True] * 6)
        assert [gradient is not None for gradient in gradients] == list(needs)
        assert {name for name, tensor in layer.tensors.items() if tensor.grad is None} == set(BASE)

    # which gradients are computed is low_rank's affair, one for all backends: of the kernels one of each kind is enough
    @each_value_once("backend")
    @quick(lambda backend, only: backend != "triton" or only in ("up_lora_b", "down_lora_a"))
    @pytest.mark.parametrize("only", LORA_NAMES)
    def test_one_factor_alone(self, monkeypatch, backend, only):
        expected, layer = all_gradients(backend), Layer(rank=4)
        for name, tensor in layer.tensors.items():
            tensor.requires_grad_(name == only)
        needs, gradients = self.needs(monkeypatch, backend, layer)
        assert [name for name, need in zip(Needs._fields, needs, strict=True) if need] == [only]
        assert sum(gradient is not None for gradient in gradients) == 1
        torch.testing.assert_close(layer.tensors[only].grad, expected[only])


@quick(lambda backend, rank: backend != "triton" or rank == 5)
@pytest.mark.parametrize("rank", [1, 5, 8])
def test_gate_and_up_may_share_their_a(backend, rank):
    layer = Layer(rank=rank)
    shared = layer.tensors["gate_lora_a"]
    apart = layer.gradients(backend, up_lora_a=shared.detach().clone().requires_grad_())
    layer.run(backend, up_lora_a=shared).backward(layer.dy_TH)
    torch.testing.assert_close(shared.grad, apart["gate_lora_a"] + apart["up_lora_a"])
    torch.testing.assert_close(layer.tensors["up_lora_b"].grad, apart["up_lora_b"])


def test_two_tensors_of_the_same_memory_have_their_own_gradients(backend):
    layer = Layer(rank=3)
    first = layer.tensors["gate_lora_a"]
    apart, alias = (
        layer.gradients(backend, up_lora_a=other.requires_grad_()) for other in (first.detach().clone(), first.detach())
    )
    for name in ("gate_lora_a", "up_lora_a"):
        torch.testing.assert_close(alias[name], apart[name])


def test_ranks_may_differ(backend):
    layer = Layer(rank=5)
    other = {"down_lora_a": normal(E, 3, I, seed=1), "down_lora_b": normal(E, H, 3, seed=2)}
    layer.tensors |= {name: tensor.requires_grad_() for name, tensor in other.items()}
    found, expected = layer.gradients(backend), layer.gradients("eager")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(why_no_core() is not None, reason=str(why_no_core()))
def test_an_a_that_reads_the_same_memory_in_another_order_is_another():
    layer = Layer(rank=H)
    gate = layer.tensors["gate_lora_a"].detach()
    turned, copied = (layer.run("eager", gate_lora_a=gate, up_lora_a=up) for up in (gate.mT, gate.mT.contiguous()))
    torch.testing.assert_close(turned, copied)


class TestFewTokensOnTheCpu:
    """Without gradients the core decodes them, factors or not: nothing is sorted, no factors are packed."""

    # an expert twice at one token, one that several tokens meet, nobody's slots beside expert 0
    IDS = torch.tensor([[1, 1, 3], [E, 0, 1], [0, -1, 2], [2**32 + 1, E + 3, -7], [2, 3, 1], [0, 0, E]])

    @pytest.fixture(autouse=True)
    def nothing_but_decoding(self, monkeypatch):
        def refuse(*_):
            raise AssertionError("not decoded")

        monkeypatch.setattr(cpu.sorted_rows, "forward", refuse)
        monkeypatch.setattr(cpu.cpu_fused, "forward", refuse)

    @each_value_once("dtype")
    @pytest.mark.parametrize("tokens", [1, 4, 6])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("without", [(), ("gate",), ("down",), ("gate", "up")], ids=lambda names: "-".join(names))
    @pytest.mark.parametrize("activation", [Activation(), INTERLEAVED, PLAIN], ids=["gated", "interleaved", "plain"])
    def test_they_agree_with_fp64(self, activation, without, dtype, tokens):
        layer = Layer(activation, rank=5)
        layer.expert_TK = self.IDS[:tokens]
        named = {
            name: tensor.detach().to(dtype)
            for name, tensor in layer.tensors.items()
            if not (name in LORA_NAMES and name.startswith(without))
        }
        named |= {"x": named["x"][:tokens], "weight": normal(tokens, 3, seed=9).abs()}
        # as adapters from PEFT come: B with the rank outermost
        named |= {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in named.items() if n.endswith("lora_b")}
        given = named["x"], Routing(layer.expert_TK, named["weight"]), layer.weights(named)
        with torch.no_grad(), poisoned_memory():
            found = experts(*given, lora=layer.lora(named), backend="cpu")
        wide = {name: tensor.double() for name, tensor in named.items()}
        problem = wide["x"], layer.expert_TK, wide["weight"], layer.weights(wide), layer.lora(wide)
        truth = reference.experts_forward(*problem)
        assert found.dtype == dtype
        error = float((found - truth).norm() / truth.norm())
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)  # one rounding, that of y
        if tokens > 3:
            assert not found[3].count_nonzero()

    @pytest.mark.parametrize("turned", [False, True], ids=["", "rank outermost in b"])
    @pytest.mark.parametrize("tokens", [1, 6])
    def test_fp32_factors_are_rounded_where_they_are_met(self, tokens, turned, monkeypatch):
        layer = Layer(rank=5)
        for name in LORA_NAMES if turned else ():
            if name.endswith("b"):
                layer.tensors[name] = layer.tensors[name].detach().mT.contiguous().mT
        layer.expert_TK = self.IDS[:tokens]
        half = {name: t.detach().bfloat16() for name, t in layer.tensors.items()}
        half |= {"x": half["x"][:tokens], "weight": normal(tokens, 3, seed=9).abs().bfloat16()}
        with torch.no_grad():
            expected = layer.run("cpu", **half)
            monkeypatch.setattr(LoraFactors, "to", lambda *_: pytest.fail("all of them were rounded"))
            found = layer.run("cpu", **{name: t for name, t in half.items() if name not in LORA_NAMES})
        assert torch.equal(found, expected)


class TestDtypes:
    @pytest.mark.parametrize("name", ["auto", "eager"])
    def test_fp32_factors_next_to_bf16_weights(self, name):
        layer = Layer(rank=8)
        half = {n: t.detach().bfloat16().requires_grad_() for n, t in layer.tensors.items() if n not in LORA_NAMES}
        y_TH = layer.run(name, **half)
        assert y_TH.dtype == torch.bfloat16
        all_half = {n: t.detach().bfloat16().requires_grad_() for n, t in layer.tensors.items()}
        y_half = layer.run(name, **all_half)
        assert torch.equal(y_TH, y_half)
        factors = [layer.tensors[n] for n in LORA_NAMES]
        found = torch.autograd.grad(y_TH, factors, layer.dy_TH.bfloat16())
        expected = torch.autograd.grad(y_half, [all_half[n] for n in LORA_NAMES], layer.dy_TH.bfloat16())
        for gradient, truth in zip(found, expected, strict=True):
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, truth.float())


def test_no_factors_at_all_are_no_lora(backend):
    layer = Layer()
    routing = Routing(layer.expert_TK, layer.tensors["weight"])
    given = layer.tensors["x"], routing, layer.weights(layer.tensors)
    assert torch.equal(experts(*given, lora=LoraFactors(), backend=backend), experts(*given, backend=backend))
