"""Sums of the residual stream in compiled layers: kept once, added by the experts' kernel, with the same bits."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from amoeba import ExpertWeights, Routing, experts
from amoeba.backends import triton_rows
from amoeba.integrations.compiled_layers import graph_passes
from amoeba.integrations.inductor_passes import KeptSums, SumsIntoExperts
from amoeba.kernels.combine import combine
from selection import each_value_once, quick
from small_layer import H, Layer, kernel_device, normal

ROWS, LENGTH = 2, 5


class Compiled:
    """A function compiled with our passes as torch.compile has them; its kernels run one by one."""

    def __init__(self, function: Any, passes: bool) -> None:
        self.kept: list[str] = []
        self.calls: list[str] = []
        self.passes = passes
        backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile, partition_fn=self._partition)
        torch._dynamo.reset()
        self.function = torch.compile(function, backend=backend, fullgraph=True)

    def _partition(self, joint: Any, inputs: Any, **options: Any) -> Any:
        if self.passes:
            KeptSums()(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        (output,) = forward.graph.find_nodes(op="output")
        self.kept = [str(node.target) for node in output.args[0][1:]]
        return forward, backward

    def _compile(self, graph: Any, inputs: Any) -> Any:
        if self.passes:
            SumsIntoExperts()(graph.graph)
            graph.graph.lint()
            graph.recompile()
        self.calls += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return make_boxed_func(graph)


def layer(order: str = "residual first") -> tuple[Any, list[Tensor]]:
    """x + a product, normed; and what the experts make of it added to that. Its function and leaves."""
    of_experts = Layer(bias=False, tokens=ROWS * LENGTH)
    x, projection = normal(ROWS, LENGTH, H, seed=1), normal(H, H, seed=2) / 4
    leaves = [x, projection, *(of_experts.tensors[name] for name in ("weight", "gate_up", "down"))]
    leaves = [leaf.detach().to(kernel_device()).requires_grad_() for leaf in leaves]
    expert_TK = of_experts.expert_TK.to(kernel_device())

    def run(x: Tensor, projection: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        total = x + torch.nn.functional.linear(x, projection)
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        routing = Routing(expert_TK, weight, trusted=True)
        y = experts(normed.view(-1, H), routing, ExpertWeights(gate_up, down), backend="triton").view(x.shape)
        if order == "residual last":
            return y + total
        if order == "read twice":
            return (total + y) * y
        if order == "scaled":
            return torch.add(total, y, alpha=2)
        if order == "made later":
            return y + down.sum(1)[:1, :1] * torch.ones_like(y)
        return total + y

    return run, leaves


def results(function: Any, leaves: list[Tensor]) -> list[Tensor]:
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@quick(lambda order: order == "residual last")
@pytest.mark.parametrize("order", ["residual first", "residual last"])
def test_the_experts_kernel_adds_the_residual_and_bits_stay(order):
    run, leaves = layer(order)
    plain, changed = Compiled(run, passes=False), Compiled(run, passes=True)
    expected, got = results(plain.function, leaves), results(changed.function, leaves)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert "amoeba.triton_onto.default" in changed.calls and "amoeba.triton.default" not in changed.calls
    assert "amoeba.triton.default" in plain.calls and "amoeba.triton_onto.default" not in plain.calls
    sums = [calls.count("aten.add.Tensor") for calls in (plain.calls, changed.calls)]
    assert sums[1] <= sums[0] - 2, "one that the experts make, one that backward does not make again"
    assert "aten.add.Tensor" in changed.kept and "aten.mm.default" not in changed.kept
    assert "aten.mm.default" in plain.kept


@pytest.mark.thorough  # it compiles C++ for a CPU
def test_the_compiler_takes_the_passes_as_options(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    onto: list[bool] = []

    def noted(*arguments: Any) -> Any:
        onto.append(arguments[4] is not None)
        return combine(*arguments)

    monkeypatch.setattr(triton_rows, "combine", noted)
    run, leaves = layer()
    expected = results(run, leaves)
    torch._dynamo.reset()
    compiled = torch.compile(run, options=graph_passes(), fullgraph=True)
    onto.clear()
    got = results(compiled, leaves)
    assert onto == [True, False], "of y, and of dx"
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@quick(lambda order: order == "read twice")
@pytest.mark.parametrize("order", ["read twice", "scaled", "made later"])
def test_other_sums_stay_as_they_are(order):
    run, leaves = layer(order)
    changed = Compiled(run, passes=True)
    got, expected = results(changed.function, leaves), results(run, leaves)
    assert "amoeba.triton.default" in changed.calls and "amoeba.triton_onto.default" not in changed.calls
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@each_value_once()
@pytest.mark.parametrize("save_h", [True, False])  # without h few tokens are decoded
@pytest.mark.parametrize("tokens", [0, 13])
def test_the_operator_gives_the_bits_of_a_sum(tokens, save_h):
    of_experts = Layer(tokens=tokens).to(kernel_device())
    tensors = {name: tensor.detach() for name, tensor in of_experts.tensors.items()}
    weights = of_experts.weights(tensors)
    given = (tensors["x"], of_experts.expert_TK, tensors["weight"], *weights.tensors(), *[None] * 6)
    given = (*given, *weights.constants(), 1.0, save_h)
    onto = normal(tokens, H, seed=9).to(kernel_device())
    plain, added = torch.ops.amoeba.triton(*given), torch.ops.amoeba.triton_onto(*given, onto)
    assert torch.equal(added[0], onto + plain[0])
    assert all(torch.equal(one, other) for one, other in zip(added[1:], plain[1:], strict=True))
    torch.library.opcheck(torch.ops.amoeba.triton_onto.default, (*given, onto), test_utils=["test_schema"])
