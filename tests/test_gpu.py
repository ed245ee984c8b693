"""The GPU path waits for nobody: no host synchronisation, capturable in a CUDA graph, bitwise repeatable."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amoeba import Activation, ExpertWeights, MoE, MoEConfig, RouterConfig, Routing, experts
from amoeba.proof.reference.experts import experts_backward
from selection import quick

pytestmark = pytest.mark.gpu

T, H, I, E, K = 199, 64, 96, 8, 2
NAMES = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias")


# Each way that a pass can go on a GPU; with I = 128, a multiple of 64, `triton` takes its kernels for Hopper there.
WAYS = pytest.mark.parametrize(
    ("backend", "inner"), [("grouped", I), ("triton", I), ("triton", 128)], ids=["grouped", "triton", "triton-64"]
)


def problem(
    seed: int, activation: Activation, dtype: torch.dtype = torch.bfloat16, inner: int = I
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to("cuda", dtype).requires_grad_()

    expert = torch.rand(T, E, generator=generator).topk(K, dim=-1).indices
    expert[::7, 0] = E  # slots that belong to nobody
    return {
        "x": normal(T, H),
        "expert": expert.cuda(),
        "weight": torch.rand(T, K, generator=generator).cuda().requires_grad_(),
        "gate_up": normal(E, activation.width(inner), H, scale=H**-0.5),
        "down": normal(E, H, inner, scale=inner**-0.5),
        "gate_up_bias": normal(E, activation.width(inner)),
        "down_bias": normal(E, H),
        "dy": normal(T, H).detach(),
    }


def step(p: dict[str, Tensor], activation: Activation, backend: str) -> list[Tensor]:
    weights = ExpertWeights(p["gate_up"], p["down"], p["gate_up_bias"], p["down_bias"], activation)
    y = experts(p["x"], Routing(p["expert"], p["weight"]), weights, backend=backend)
    return [y, *torch.autograd.grad(y, [p[name] for name in NAMES], p["dy"])]


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation("relu2", gated=False), Activation("silu", True, 1.702, 7.0, 1.0, True)],
    ids=["gated", "plain", "clamped"],
)
@WAYS
def test_a_captured_step_replays_on_new_data(activation, backend, inner):
    static = problem(0, activation, inner=inner)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static, activation, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, activation, backend)
    fresh = problem(1, activation, inner=inner)
    with torch.no_grad():
        for name, tensor in static.items():
            tensor.copy_(fresh[name])
    graph.replay()
    for name, got, expected in zip(("y", *NAMES), captured, step(fresh, activation, backend), strict=True):
        assert torch.equal(got, expected), name


@WAYS
def test_nothing_between_x_and_the_gradients_synchronises_with_the_host(backend: str, inner: int) -> None:
    activation = Activation()
    p = problem(0, activation, inner=inner)
    step(p, activation, backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(p, activation, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@WAYS
def test_two_runs_are_bitwise_equal(backend: str, inner: int) -> None:
    activation = Activation()
    p = problem(0, activation, inner=inner)
    runs = [step(p, activation, backend) for _ in range(2)]
    for name, first, second in zip(("y", *NAMES), *runs, strict=True):
        assert torch.equal(first, second), name


def _shifted(tensor: Tensor) -> Tensor:
    """Contiguous, at no multiple of 16 bytes."""
    memory = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].copy_(tensor.flatten()).view(tensor.shape)


def _inside_wider_rows(tensor: Tensor) -> Tensor:
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return wide[..., :-8].copy_(tensor)


def _one_row_for_all(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


@quick(lambda inner, place: inner == 128 or place is _shifted)
@pytest.mark.parametrize("place", [_shifted, _inside_wider_rows, _one_row_for_all])
@pytest.mark.parametrize("name", ["x", "dy", "gate_up", "down", "gate_up_bias"])
@pytest.mark.parametrize("inner", [I, 128])
def test_triton_takes_tensors_wherever_they_lie(inner: int, name: str, place: Callable[[Tensor], Tensor]) -> None:
    activation = Activation()
    p = problem(0, activation, inner=inner)
    with torch.no_grad():
        placed = place(p[name].detach())
    expected = step(p | {name: placed.contiguous().clone().requires_grad_()}, activation, "triton")
    found = step(p | {name: placed.requires_grad_()}, activation, "triton")
    for key, one, other in zip(("y", *NAMES), found, expected, strict=True):
        error = (one - other).float().norm() / other.float().norm()
        assert error < 1e-2, f"{key}: {error:.1e}"  # weights elsewhere go through other kernels


@pytest.mark.parametrize("inner", [I, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_auto_serves_what_grouped_refuses(dtype: torch.dtype, inner: int) -> None:
    activation = Activation()
    p = problem(0, activation, dtype, inner)
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


@pytest.mark.parametrize("inner", [I, 128])
def test_checkpointing_runs_the_forward_again_and_gives_the_same_gradients(inner: int) -> None:
    activation = Activation()
    p = problem(0, activation, inner=inner)
    expected = step(p, activation, "triton")

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        weights = ExpertWeights(p["gate_up"], p["down"], p["gate_up_bias"], p["down_bias"], activation)
        return experts(x, Routing(p["expert"], weight), weights, backend="triton")

    y = checkpoint(forward, p["x"], p["weight"], use_reentrant=False)
    for name, got, other in zip(
        ("y", *NAMES), [y, *torch.autograd.grad(y, [p[n] for n in NAMES], p["dy"])], expected, strict=True
    ):
        assert torch.equal(got, other), name


def test_under_autocast_fp32_weights_are_multiplied_in_bf16() -> None:
    activation = Activation()
    wide = problem(0, activation, torch.float32, inner=128)
    half = problem(0, activation, torch.bfloat16, inner=128)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = step(wide, activation, "auto")
    assert got[0].dtype == torch.bfloat16
    for name, one, other in zip(("y", *NAMES), got, step(half, activation, "triton"), strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_grouped_refuses_weights_at_an_odd_address_and_auto_serves_them() -> None:
    """torch's own error came out: its grouped product on a GPU wants memory that begins at a multiple of 16 bytes."""
    p = problem(0, Activation())
    stored = torch.empty(p["down"].numel() + 1, dtype=torch.bfloat16, device="cuda")
    p["down"] = stored[1:].view_as(p["down"]).copy_(p["down"].detach()).requires_grad_()
    with pytest.raises(ValueError, match=r"down begins at element 1 of its storage"):
        step(p, Activation(), "grouped")
    assert all(result.isfinite().all() for result in step(p, Activation(), "auto"))
