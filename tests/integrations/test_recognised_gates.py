"""The activation of an experts module is recognised by its values, or called where it cannot be."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_modules import (
    clamped,
    gate_in_bf16,
    hidden_clamp,
    interleaved_gate,
    make_experts,
    recognised,
    scaled_by_a_parameter,
    swiglu,
    up_first,
)
from torch import Tensor, nn
from transformers.activations import ACT2FN

from amoeba import Activation
from amoeba.integrations import experts_module
from selection import each_value_once
from tiny_models import TOLERANCE, build_experts, experts_inputs, experts_parity, relative, run_experts

pytestmark = pytest.mark.filterwarnings("ignore")


ACTIVATIONS: dict[str, Activation | None] = {
    "silu": Activation("silu"),
    "swish": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_python": Activation("gelu"),
    "gelu_new": Activation("gelu_tanh"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "quick_gelu": Activation("silu", alpha=1.702),
    "relu": Activation("relu"),
    "relu2": Activation("relu2"),
    "tanh": None,
    "mish": None,
    "relu6": None,
    "gelu_10": None,
    "leaky_relu": None,
    "linear": None,
}


@each_value_once()
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_gate", [True, False])
def test_act_fn_is_recognised_by_its_values(name: str, has_gate: bool) -> None:
    module = make_experts(has_gate=has_gate)
    module.act_fn = ACT2FN[name]
    expected = ACTIVATIONS[name]
    if expected is not None and not has_gate:
        expected = Activation(expected.kind, gated=False, alpha=expected.alpha)
    assert recognised(module) == expected
    found = experts_parity(module, experts_inputs(tokens=19, top_k=2))
    assert found.holds, found


class Scaled(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * self.scale


class Hardened(nn.Module):
    """Smooth while it is trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) if self.training else nn.functional.relu(x)


class WithBuffer(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


def _straight_through(self: Any, h: Tensor) -> Tensor:
    value = swiglu(self, h)
    return h.chunk(2, dim=-1)[0] + (value - h.chunk(2, dim=-1)[0]).detach()


def _in_fp32(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(h.dtype)


def _with_a_tensor_of_its_own(self: Any, h: Tensor) -> Tensor:
    return swiglu(self, h) * torch.tensor(1.0)


def _dropping_in_training(self: Any, h: Tensor) -> Tensor:
    return F.dropout(swiglu(self, h), 0.5, training=self.training)


@each_value_once()
@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (swiglu, Activation("silu")),
        (_in_fp32, Activation("silu")),
        (_with_a_tensor_of_its_own, Activation("silu")),
        (interleaved_gate, Activation("silu", interleaved=True)),
        (hidden_clamp, None),
        (_straight_through, None),
        (gate_in_bf16, None),
        (up_first, None),
        (_dropping_in_training, None),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_gate_is_recognised_by_values_and_slopes(gate: Any, expected: Activation | None, training: bool) -> None:
    assert recognised(make_experts(gate).train(training)) == expected


@pytest.mark.parametrize("limit", [0.5, 7.0, 16.0, 300, 1e6])
def test_limit_of_any_size_is_found(limit: float) -> None:
    """A limit beyond the numbers that are tried would pass for no limit at all."""
    module = make_experts(clamped)
    module.limit = limit
    assert recognised(module) == Activation("silu", limit=limit)


def _no_slope_at_the_limit(self: Any, h: Tensor) -> Tensor:
    """What torch 2.15 does for `clamped`, on every version: where a value equals the limit, its gradient is 0."""
    gate, up = h.chunk(2, dim=-1)
    limit = torch.full_like(gate, self.limit)
    gate = torch.where(gate < limit, gate, limit)
    return F.silu(gate) * torch.where(up.abs() < limit, up, limit.copysign(up.detach()))


@pytest.mark.parametrize("gate", [clamped, _no_slope_at_the_limit])
@pytest.mark.parametrize("limit", [0.05, 9, 10.0, 1e4])  # all of them would be points at which a gate is tried out
def test_the_slope_at_the_limit_itself_does_not_count(gate: Any, limit: float) -> None:
    module = make_experts(gate)
    module.limit = limit
    assert recognised(module) == Activation("silu", limit=limit)


@pytest.mark.parametrize("extra", ["parameter", "frozen", "buffer", "tensor"])
def test_gate_that_reads_a_tensor_is_called(extra: str) -> None:
    module = make_experts(scaled_by_a_parameter)
    one = torch.ones(())
    if extra == "buffer":
        module.register_buffer("extra", one)
    elif extra == "tensor":
        module.extra = one
    else:
        module.extra = nn.Parameter(one, requires_grad=extra == "parameter")
    assert recognised(module) is None
    outcome = run_experts(module, "amoeba", experts_inputs(tokens=19, top_k=2))
    if extra == "parameter":
        eager = run_experts(module, "eager", experts_inputs(tokens=19, top_k=2))
        assert relative(outcome.gradients["extra"], eager.gradients["extra"]) < TOLERANCE


@pytest.mark.parametrize(
    "act_fn",
    [
        Scaled(nn.Parameter(torch.ones(()))),
        WithBuffer(),
        nn.Sequential(nn.SiLU(), nn.Dropout(0.5)),
        nn.RReLU(),
        Hardened(),
    ],
)
def test_act_fn_with_state_or_chance_is_called(act_fn: nn.Module) -> None:
    for training in (True, False):
        module = make_experts()
        module.act_fn = copy.deepcopy(act_fn)
        assert recognised(module.train(training)) is None
        assert all(inner.training == training for inner in module.modules())


def test_trying_out_leaves_the_random_state_alone() -> None:
    module = make_experts(_dropping_in_training).eval()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    recognised(module)
    assert torch.equal(torch.rand(3), expected)


def test_a_change_of_limit_or_act_fn_is_noticed() -> None:
    module = make_experts(clamped)
    inputs = experts_inputs(tokens=19, top_k=2)
    for limit in (7.0, 0.1, 7.0):
        module.limit = limit
        assert experts_parity(module, inputs).holds
        assert recognised(module) == Activation("silu", limit=limit)
    module = make_experts()
    for name in ("silu", "relu2", "tanh"):
        module.act_fn = ACT2FN[name]
        assert experts_parity(module, inputs).holds
        assert recognised(module) == ACTIVATIONS[name]


def test_a_change_of_gate_is_noticed_after_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_experts(swiglu)
    assert recognised(module) is not None
    monkeypatch.setattr(type(module), "_apply_gate", up_first)
    experts_module.forget(module)
    assert recognised(module) is None


def test_copies_and_pickles_keep_working() -> None:
    module = build_experts("qwen3_moe", "Qwen3MoeExperts")
    inputs = experts_inputs(tokens=5, top_k=2)
    expected = run_experts(module, "amoeba", inputs).output
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run_experts(twin, "amoeba", inputs).output, expected)
        twin.act_fn = ACT2FN["relu"]
        assert recognised(twin) == Activation("relu")
    assert recognised(module) == Activation("silu")
    assert list(module.state_dict()) == ["gate_up_proj", "down_proj"]
