"""The reference for experts and their activations: one expert after another, with the backward written out by hand.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    y_TH = experts_forward(x_TH, expert_TK, weight_TK, weights, lora)          # differentiable by autograd
    grads = experts_backward(dy_TH, x_TH, expert_TK, weight_TK, weights, lora)  # the same by hand, a dict by name

Nothing here is shared with the backends: they are compared against this. It is itself checked by gradcheck and by
comparing the two functions above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from amoeba.core.config import Activation, unknown_kind
from amoeba.core.weights import ExpertWeights, LoraFactors


def act(z: Tensor, activation: Activation) -> Tensor:
    """The scalar function, applied to the gate (or to h of an ungated expert), after the clamp."""
    kind = activation.kind
    if kind == "silu":
        return z / (1 + torch.exp(-activation.alpha * z))
    if kind == "gelu":
        return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if kind == "relu":
        return z.clamp(min=0)
    if kind == "relu2":
        return z.clamp(min=0) ** 2
    raise unknown_kind(kind, "the reference")


def act_slope(z: Tensor, activation: Activation) -> Tensor:
    """d act / dz."""
    kind = activation.kind
    if kind == "silu":
        sigmoid = 1 / (1 + torch.exp(-activation.alpha * z))
        return sigmoid * (1 + activation.alpha * z * (1 - sigmoid))
    if kind == "gelu":
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    if kind == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
        tanh = torch.tanh(inner)
        return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh * tanh) * inner_slope
    if kind == "relu":
        return (z > 0).to(z.dtype)
    if kind == "relu2":
        return 2 * z.clamp(min=0)
    raise unknown_kind(kind, "the reference")


def split_gate_up(h: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    if activation.interleaved:
        return h[..., 0::2], h[..., 1::2]
    half = h.shape[-1] // 2
    return h[..., :half], h[..., half:]


def join_gate_up(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    if activation.interleaved:
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up), dim=-1)


def activate(h: Tensor, activation: Activation) -> Tensor:
    if not activation.gated:
        return act(_at_most(activation.limit, h), activation)
    gate, up = split_gate_up(h, activation)
    limit = activation.limit
    return act(_at_most(limit, gate), activation) * (-_at_most(limit, -_at_most(limit, up)) + activation.up_shift)


def _at_most(limit: float, z: Tensor) -> Tensor:
    """z.clamp(max=limit), with the same gradient in every version of torch: where z equals the limit, that of clamp is
    1 up to torch 2.13, and 0 in 2.15."""
    return torch.where(z > limit, limit, z)


def activate_backward(da: Tensor, h: Tensor, activation: Activation) -> Tensor:
    """dh from da; a clamped value passes no gradient. A value that equals the limit does."""
    limit = activation.limit
    if not activation.gated:
        return _unless(h > limit, da * act_slope(h.clamp(max=limit), activation))
    gate, up = split_gate_up(h, activation)
    gate_in, up_in = gate.clamp(max=limit), up.clamp(-limit, limit)
    dgate = _unless(gate > limit, da * (up_in + activation.up_shift) * act_slope(gate_in, activation))
    dup = _unless(up.abs() > limit, da * act(gate_in, activation))
    return join_gate_up(dgate, dup, activation)


def _unless(clamped: Tensor, gradient: Tensor) -> Tensor:
    """0 where clamped, also for a gradient of NaN; NaN itself is not clamped."""
    return torch.where(clamped, torch.zeros_like(gradient), gradient)


def experts_forward(
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    weights: ExpertWeights,
    lora: LoraFactors | None = None,
) -> Tensor:
    y_TH = torch.zeros_like(x_TH)
    for e, token, slot in _rows_of_each_expert(expert_TK, weights.num_experts):
        h = _up(x_TH[token], e, weights, lora)
        y = _down(activate(h, weights.activation), e, weights, lora)
        y_TH = y_TH.index_add(0, token, y * weight_TK[token, slot, None].to(y.dtype))
    return y_TH


def experts_backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    weights: ExpertWeights,
    lora: LoraFactors | None = None,
) -> dict[str, Tensor]:
    """Gradients by name: x, weight, gate_up, down, the biases and LoRA factors that there are."""
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    grads = {"x": torch.zeros_like(x_TH), "weight": torch.zeros_like(weight_TK)}
    grads |= {n: torch.zeros_like(t) for n, t in zip(names, weights.tensors(), strict=True) if t is not None}
    grads |= {n: torch.zeros_like(t) for n, t in (lora.tensors() if lora else {}).items()}
    for e, token, slot in _rows_of_each_expert(expert_TK, weights.num_experts):
        x, dout = x_TH[token], dy_TH[token]
        s = weight_TK[token, slot, None].to(x.dtype)
        h = _up(x, e, weights, lora)
        a = activate(h, weights.activation)

        # through down: dA' holds no s yet, so ds is its product with a (plus what bias and LoRA add to y)
        da = dout @ weights.down_EHI[e]
        grads["down"][e] = (s * dout).T @ a
        ds = (dout @ weights.down_EHI[e] * a).sum(-1)
        if weights.down_bias_EH is not None:
            grads["down_bias"][e] = (s * dout).sum(0)
            ds = ds + dout @ weights.down_bias_EH[e]
        if lora is not None and lora.down_lora_a is not None and lora.down_lora_b is not None:
            low_a, low_b = lora.down_lora_a[e], lora.down_lora_b[e]
            down_low = lora.scaling * (dout @ low_b)
            grads["down_lora_b"][e] = lora.scaling * (s * dout).T @ (a @ low_a.T)
            grads["down_lora_a"][e] = (s * down_low).T @ a
            da = da + down_low @ low_a
            ds = ds + (down_low * (a @ low_a.T)).sum(-1)
        grads["weight"][token, slot] = ds.to(weight_TK.dtype)

        # through the activation: its derivative comes before the matrix product, s exactly once
        dh = activate_backward(s * da, h, weights.activation)
        grads["gate_up"][e] = dh.T @ x
        dx = dh @ weights.gate_up_EJH[e]
        if weights.gate_up_bias_EJ is not None:
            grads["gate_up_bias"][e] = dh.sum(0)
        if lora is not None:
            for name, part, low_a, low_b in _up_factors(dh, e, weights.activation, lora):
                dlow = lora.scaling * (part @ low_b)
                grads[f"{name}_lora_b"][e] = lora.scaling * part.T @ (x @ low_a.T)
                grads[f"{name}_lora_a"][e] = dlow.T @ x
                dx = dx + dlow @ low_a
        grads["x"].index_add_(0, token, dx)
    return grads


def shared_expert_forward(x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """The expert that every token visits with weight 1 (silu, gated)."""
    gate = x_TH @ gate_IH.T
    return (gate / (1 + torch.exp(-gate)) * (x_TH @ up_IH.T)) @ down_HI.T


def shared_expert_backward(
    dy_TH: Tensor, x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor
) -> dict[str, Tensor]:
    silu = Activation("silu")
    gate, up = x_TH @ gate_IH.T, x_TH @ up_IH.T
    da = dy_TH @ down_HI
    dgate, dup = da * up * act_slope(gate, silu), da * act(gate, silu)
    return {
        "x": dgate @ gate_IH + dup @ up_IH,
        "shared_gate": dgate.T @ x_TH,
        "shared_up": dup.T @ x_TH,
        "shared_down": dy_TH.T @ (act(gate, silu) * up),
    }


def _rows_of_each_expert(expert_TK: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for e in range(num_experts):
        token, slot = torch.where(expert_TK == e)
        if token.numel():
            yield e, token, slot


def _up(x: Tensor, e: int, weights: ExpertWeights, lora: LoraFactors | None) -> Tensor:
    h = x @ weights.gate_up_EJH[e].T
    if weights.gate_up_bias_EJ is not None:
        h = h + weights.gate_up_bias_EJ[e]
    if lora is None:
        return h
    parts = {name: lora.scaling * (x @ a.T) @ b.T for name, _, a, b in _up_factors(h, e, weights.activation, lora)}
    if not weights.activation.gated:
        return h + parts.get("up", 0)
    gate, up = split_gate_up(h, weights.activation)
    return join_gate_up(gate + parts.get("gate", 0), up + parts.get("up", 0), weights.activation)


def _down(a: Tensor, e: int, weights: ExpertWeights, lora: LoraFactors | None) -> Tensor:
    y = a @ weights.down_EHI[e].T
    if weights.down_bias_EH is not None:
        y = y + weights.down_bias_EH[e]
    if lora is not None and lora.down_lora_a is not None and lora.down_lora_b is not None:
        y = y + lora.scaling * (a @ lora.down_lora_a[e].T) @ lora.down_lora_b[e].T
    return y


def _up_factors(
    h: Tensor, e: int, activation: Activation, lora: LoraFactors
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, the columns of h that the factors of this name act on, a, b) of expert e."""
    gate, up = split_gate_up(h, activation) if activation.gated else (None, h)
    for name, part, low_a, low_b in (
        ("gate", gate, lora.gate_lora_a, lora.gate_lora_b),
        ("up", up, lora.up_lora_a, lora.up_lora_b),
    ):
        if part is not None and low_a is not None and low_b is not None:
            yield name, part, low_a[e], low_b[e]
