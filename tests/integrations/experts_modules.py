"""Experts modules of any layout and gate, and how two results are compared."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from amoeba import Activation
from amoeba.integrations.experts_module import ATTRIBUTE
from tiny_models import EXPERTS, HIDDEN, Outcome, experts_inputs, randomise, relative

GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)
MODELS: dict[str, Activation | None] = {
    "qwen3_moe": Activation("silu"),
    "mixtral": Activation("silu"),
    "olmoe": Activation("silu"),
    "deepseek_v3": Activation("silu"),
    "gpt_oss": GPT_OSS,
    "nemotron_h": Activation("relu2", gated=False),
    "aria": Activation("silu"),
    "deepseek_v4": Activation("silu", limit=10.0),
    "muse_spark": None,
}


class Experts(nn.Module):
    """Experts of any layout, with the loop over experts that transformers' own have. Subclasses are decorated."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        flags = self.flags
        self.num_experts, hidden, intermediate = EXPERTS, HIDDEN, 24
        width = 2 * intermediate if flags["has_gate"] else intermediate
        up_shape, down_shape = (hidden, width), (intermediate, hidden)
        if not flags["is_transposed"]:
            up_shape, down_shape = up_shape[::-1], down_shape[::-1]
        self.up_name = "gate_up_proj" if flags["has_gate"] else "up_proj"
        self.register_parameter(self.up_name, nn.Parameter(torch.empty(EXPERTS, *up_shape)))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, *down_shape))
        if flags["has_bias"]:
            self.register_parameter(f"{self.up_name}_bias", nn.Parameter(torch.empty(EXPERTS, width)))
            self.down_proj_bias = nn.Parameter(torch.empty(EXPERTS, hidden))
        self.act_fn: Any = ACT2FN["silu"]
        if flags.get("has_post_expert_norm"):
            self.post_expert_norm = nn.LayerNorm(hidden)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            h = self._product(hidden_states[token], self.up_name, expert)
            out = self._product(self._apply_gate(h) if self.flags["has_gate"] else self.act_fn(h), "down_proj", expert)
            if self.flags.get("has_post_expert_norm"):
                out = self.post_expert_norm(out)
            y = y.index_add(0, token, (out * top_k_weights[token, slot, None]).to(y.dtype))
        return y

    def _product(self, rows: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.flags["has_bias"] else None
        return F.linear(rows, weight.T if self.flags["is_transposed"] else weight, bias)


def interleaved_gate(self: Any, gate_up: Tensor) -> Tensor:
    return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]


def make_experts(gate: Any = None, **changes: Any) -> Any:
    flags = {"is_transposed": False, "is_concatenated": True, "has_bias": False, "has_gate": True, **changes}
    unknown = flags.keys() - inspect.signature(use_experts_implementation).parameters.keys()
    if unknown:
        pytest.skip(f"transformers {transformers.__version__} does not know {unknown}")
    body: dict[str, Any] = {"flags": flags, "__init__": lambda self, config: Experts.__init__(self, config)}
    body["forward"] = lambda self, *args: Experts.forward(self, *args)
    if gate is not None or not flags["is_concatenated"]:
        body["_apply_gate"] = gate or interleaved_gate
    decorated = use_experts_implementation(type("TestExperts", (Experts,), body), **flags)
    config = PreTrainedConfig()
    config._experts_implementation = "amoeba"
    return randomise(decorated(config))


LAYOUTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed": {"is_transposed": True},
    "interleaved": {"is_concatenated": False},
    "bias": {"has_bias": True},
    "ungated": {"has_gate": False},
    "ungated transposed bias": {"has_gate": False, "is_transposed": True, "has_bias": True},
    "gpt-oss": {"is_transposed": True, "is_concatenated": False, "has_bias": True},
    "norm": {"has_post_expert_norm": True},
    "norm transposed interleaved bias": {
        "has_post_expert_norm": True,
        "is_transposed": True,
        "is_concatenated": False,
        "has_bias": True,
    },
}


# --- recognition of the activation ------------------------------------------------------------------------------------


def recognised(module: Any) -> Activation | None:
    module(*experts_inputs(tokens=3, top_k=2))
    return vars(module)[ATTRIBUTE].fused


def swiglu(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def hidden_clamp(self: Any, h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up.clamp(-200, 200)


def gate_in_bf16(self: Any, h: Tensor) -> Tensor:
    return swiglu(self, h.bfloat16()).to(h.dtype)


def up_first(self: Any, h: Tensor) -> Tensor:
    up, gate = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def scaled_by_a_parameter(self: Any, h: Tensor) -> Tensor:
    return swiglu(self, h) * self.extra


def assert_close(ours: Outcome, expected: Outcome, tolerance: float) -> None:
    assert relative(ours.output, expected.output) < tolerance
    for name, gradient in expected.gradients.items():
        found = ours.gradients[name]
        assert (found is None) == (gradient is None), name
        if found is not None and gradient is not None:
            assert relative(found, gradient) < tolerance, name
