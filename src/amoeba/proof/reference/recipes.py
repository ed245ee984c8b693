"""The reference for experts that train in 8 or 4 bits: the recipes of `amoeba.precision.recipes` in fp64, one by one.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I

    y_TH = experts_forward(x_TH, expert_TK, weight_TK, weights, dtype)
    grads = experts_backward(dy_TH, x_TH, expert_TK, weight_TK, weights, dtype)

Operands are quantised where the recipe says so, as the formats are defined; between these places all is fp64, but for
h, dA' and dh, and s · a where it is quantised, which are rounded to dtype, that of x. Only so can others agree with it:
a number next to the middle between two codes falls to one of them or to the other, a sixteenth away, and with one
rounding more in bf16 one in fifty does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from amoeba.precision.formats import (
    FP8_128_ROWS,
    FP8_TRAINING_COLUMNS,
    FP8_TRAINING_ROWS,
    Format,
    fp8_training_columns,
)
from amoeba.precision.quantised import quantise
from amoeba.precision.recipes import W8A8, Fp8Experts
from amoeba.proof.reference.experts import activate, activate_backward


def quantised_rows(rows: Tensor, format: Format = FP8_TRAINING_ROWS) -> Tensor:
    return quantise(rows, format).dequantise(torch.float64)


def quantised_weight(weight_EOI: Tensor, weights: Fp8Experts) -> Tensor:
    return quantise(weight_EOI, weights.weight_format).dequantise(torch.float64)


def quantised_blocks(rows: Tensor) -> Tensor:
    """rows: those of one expert."""
    return quantise(rows, FP8_TRAINING_COLUMNS).dequantise(torch.float64)


def quantised_columns(rows_TW: Tensor) -> Tensor:
    return quantise(rows_TW, fp8_training_columns(rows_TW.shape[0])).dequantise(torch.float64)


def experts_forward(
    x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, weights: Fp8Experts, dtype: torch.dtype
) -> Tensor:
    """With w8a8 for a recipe: the weights are the numbers that codes stand for already, and scales of rows are no
    powers of two."""
    y_TH, row_format = torch.zeros_like(x_TH), weights.row_format
    gate_up, quantised_down = weights.gate_up_EJH, weights.down_EHI
    if weights.recipe == W8A8:
        row_format = FP8_128_ROWS
    else:
        gate_up, quantised_down = quantised_weight(gate_up, weights), quantised_weight(quantised_down, weights)
    quantised_x = quantised_rows(x_TH, row_format)
    for e in range(weights.num_experts):
        token, slot = torch.where(expert_TK == e)
        h = _hidden(quantised_x[token], e, gate_up, weights, dtype)
        y = quantised_rows(activate(h, weights.activation), row_format) @ quantised_down[e].T
        if weights.down_bias_EH is not None:
            y = y + weights.down_bias_EH[e]
        y_TH.index_add_(0, token, y * weight_TK[token, slot, None])
    return y_TH


def experts_backward(
    dy_TH: Tensor, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, weights: Fp8Experts, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gradients by name: x, weight, gate_up, down and the biases that there are."""
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    grads = {"x": torch.zeros_like(x_TH), "weight": torch.zeros_like(weight_TK)}
    grads |= {n: torch.zeros_like(t) for n, t in zip(names, weights.tensors(), strict=True) if t is not None}
    quantised_x = quantised_rows(x_TH, weights.row_format)
    gate_up = quantised_weight(weights.gate_up_EJH, weights)
    back, back_gate_up, back_down = operands_of_backward(weights)
    by_token, by_expert = operands_of_weights(weights)
    x_of_weights, dy_of_weights = by_token(x_TH), by_token(dy_TH)
    for e in range(weights.num_experts):
        token, slot = torch.where(expert_TK == e)
        dout, s = dy_TH[token], weight_TK[token, slot, None]
        h = _hidden(quantised_x[token], e, gate_up, weights, dtype)
        h = kept(h, weights)
        a = activate(h, weights.activation)
        da = (back(dout) @ back_down[e]).to(dtype).double()
        ds = (da * a).sum(-1)
        scaled_a = (s * a).to(dtype).double() if weights.recipe == "fp8-all" else s * a
        grads["down"][e] = dy_of_weights[token].T @ by_expert(scaled_a)
        if weights.down_bias_EH is not None:
            grads["down_bias"][e] = (s * dout).sum(0)
            ds = ds + dout @ weights.down_bias_EH[e]
        grads["weight"][token, slot] = ds
        dh = activate_backward(s * da, h, weights.activation).to(dtype).double()
        grads["gate_up"][e] = by_expert(dh).T @ x_of_weights[token]
        if weights.gate_up_bias_EJ is not None:
            grads["gate_up_bias"][e] = dh.sum(0)
        grads["x"].index_add_(0, token, back(dh) @ back_gate_up[e])
    return grads


def operands_of_backward(weights: Fp8Experts) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """What becomes of the rows that go back through a weight, and gate_up and down as they meet them."""
    if weights.recipe == "fp8-ste":
        return lambda rows: rows, weights.gate_up_EJH, weights.down_EHI
    gate_up, down = (quantised_weight(weight, weights) for weight in (weights.gate_up_EJH, weights.down_EHI))
    return lambda rows: quantised_rows(rows, weights.row_format), gate_up, down


def operands_of_weights(weights: Fp8Experts) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What becomes of rows of all tokens (x, dO) and of one expert's (dh, s · a) that give gradients of weights."""
    if weights.recipe == "fp8-all":
        return quantised_columns, quantised_blocks
    return lambda rows: rows, lambda rows: rows


def kept(h: Tensor, weights: Fp8Experts) -> Tensor:
    """As backward has it. Codes times powers of two are exact in bf16."""
    return quantised_rows(h) if weights.recipe == "fp8-saved" else h


def _hidden(x: Tensor, e: int, gate_up: Tensor, weights: Fp8Experts, dtype: torch.dtype) -> Tensor:
    """x and gate_up: quantised."""
    h = x @ gate_up[e].T
    if weights.gate_up_bias_EJ is not None:
        h = h + weights.gate_up_bias_EJ[e]
    return h.to(dtype).double()
