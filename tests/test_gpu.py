"""The GPU path waits for nobody: no host synchronisation, capturable in a CUDA graph, bitwise repeatable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amoeba import Activation, ExpertWeights, MoE, MoEConfig, RouterConfig, Routing, experts
from amoeba.reference.experts import experts_backward

pytestmark = pytest.mark.gpu

T, H, I, E, K = 199, 64, 96, 8, 2
NAMES = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias")


def problem(seed: int, activation: Activation, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to("cuda", dtype).requires_grad_()

    expert = torch.rand(T, E, generator=generator).topk(K, dim=-1).indices
    expert[::7, 0] = E  # slots that belong to nobody
    return {
        "x": normal(T, H),
        "expert": expert.cuda(),
        "weight": torch.rand(T, K, generator=generator).cuda().requires_grad_(),
        "gate_up": normal(E, activation.width(I), H, scale=H**-0.5),
        "down": normal(E, H, I, scale=I**-0.5),
        "gate_up_bias": normal(E, activation.width(I)),
        "down_bias": normal(E, H),
        "dy": normal(T, H).detach(),
    }


def step(p: dict[str, Tensor], activation: Activation, backend: str = "grouped") -> list[Tensor]:
    weights = ExpertWeights(p["gate_up"], p["down"], p["gate_up_bias"], p["down_bias"], activation)
    y = experts(p["x"], Routing(p["expert"], p["weight"]), weights, backend=backend)
    return [y, *torch.autograd.grad(y, [p[name] for name in NAMES], p["dy"])]


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation("relu2", gated=False), Activation("silu", True, 1.702, 7.0, 1.0, True)],
    ids=["gated", "plain", "clamped"],
)
def test_forward_and_backward_are_captured_in_a_cuda_graph_and_replay_on_new_data(activation: Activation) -> None:
    static = problem(0, activation)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static, activation)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, activation)
    fresh = problem(1, activation)
    with torch.no_grad():
        for name, tensor in static.items():
            tensor.copy_(fresh[name])
    graph.replay()
    for name, got, expected in zip(("y", *NAMES), captured, step(fresh, activation), strict=True):
        assert torch.equal(got, expected), name


def test_nothing_between_x_and_the_gradients_synchronises_with_the_host() -> None:
    activation = Activation()
    p = problem(0, activation)
    step(p, activation)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(p, activation, backend="auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_runs_are_bitwise_equal() -> None:
    activation = Activation()
    p = problem(0, activation)
    for name, first, second in zip(("y", *NAMES), step(p, activation), step(p, activation), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_auto_serves_what_grouped_refuses(dtype: torch.dtype) -> None:
    activation = Activation()
    p = problem(0, activation, dtype)
    got = dict(zip(("y", *NAMES), step(p, activation, backend="auto"), strict=True))
    wide = {name: tensor.detach().cpu() for name, tensor in p.items()}
    wide = {name: tensor if name == "expert" else tensor.double() for name, tensor in wide.items()}
    weights = ExpertWeights(wide["gate_up"], wide["down"], wide["gate_up_bias"], wide["down_bias"], activation)
    truth = experts_backward(wide["dy"], wide["x"], wide["expert"], wide["weight"], weights)
    for name in NAMES:
        error = (got[name].cpu().double() - truth[name]).norm() / truth[name].norm()
        assert error < (1e-3 if dtype == torch.float16 else 1e-4), f"{name}: {error:.1e}"  # tf32 is off by default


def test_the_whole_layer_trains_under_compile_without_graph_breaks() -> None:
    layer = MoE(MoEConfig(H, I, RouterConfig(E, K)), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 33, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = layer(x)
    expected.float().square().mean().backward()
    gradient = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    compiled = torch.compile(layer, fullgraph=True)
    got = compiled(x)
    got.float().square().mean().backward()
    assert (got - expected).float().norm() / expected.float().norm() < 1e-2
    for name, p in layer.named_parameters():
        assert (p.grad - gradient[name]).float().norm() / gradient[name].float().norm() < 2e-2, name
