"""The products of a recipe one by one, each fed the operands that the rows under proof have themselves.

N routed rows · E experts · H hidden · I intermediate · J = 2I or I

    errors = stage_errors(problem, Fp8Rows, dy_TH)        # {"stage h": 1.6e-3, ...}, relative in the L2 norm

fp8 is 6 % away from fp64, which hides mistakes. From fp64 on the same quantised operands a product is as far as the
rounding of its result: 1.7e-3 in bf16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from amoeba.backends.sorted_rows import SortedRows
from amoeba.core.layout import build_layout
from amoeba.core.problem import Needs, Problem
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.precision.recipes import Fp8Experts
from amoeba.proof.reference.experts import activate, activate_backward
from amoeba.proof.reference.recipes import (
    kept,
    operands_of_backward,
    operands_of_weights,
    quantised_rows,
    quantised_weight,
)

STAGES = ("stage h", "stage y", "stage dh", "stage ds", "stage dx", "stage dW1", "stage dW2")
STAGE_TOLERANCE = 3e-3

_NEEDS = Needs(x=True, weight=True, gate_up=True, down=True)


def stage_errors(problem: Problem, rows_type: type[SortedRows], dy_TH: Tensor) -> dict[str, float]:
    """h of x; y, each token's sum over its experts, of a; dh and ds of dy and h; dx of dh; dW1 of dh and x, dW2 of
    dy and s · a."""
    layout = build_layout(problem.expert_TK, problem.weights.num_experts)
    ends = [0, *layout.offs_E.tolist()]
    if not ends[-1]:
        return {}
    rows = rows_type.dispatch(problem, None)
    h_NJ, dy = rows.hidden(), rows.gather(dy_TH)
    _, a_NI = rows.up(want_h=False)
    y_NH = rows.down(a_NI)
    dh_NJ, scaled_a_NI, ds_N, _ = rows.activation_backward(dy, h_NJ, _NEEDS, overwrite_h=False)
    assert scaled_a_NI is not None
    d_gate_up = rows.weight_gradient(dh_NJ, rows.x, problem.weights.gate_up_EJH)
    d_down = rows.weight_gradient(dy, scaled_a_NI, problem.weights.down_EHI)
    dx_NH, _ = rows.up_backward(dh_NJ, _NEEDS)
    assert dx_NH is not None

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().double()

    def own(tensor: Tensor) -> Tensor:
        """Without rows of sentinels."""
        return wide(tensor[: ends[-1]])

    token_N = layout.token_N[: ends[-1]].cpu()
    tensors = [None if tensor is None else wide(tensor) for tensor in problem.weights.tensors()]
    weights = Fp8Experts.of(tensors, problem.weights.constants())
    s = wide(problem.weight_TK).reshape(-1)[layout.order_N[: ends[-1]].cpu(), None]
    back, back_gate_up, back_down = operands_of_backward(weights)

    def multiply(rows_NI: Tensor, matrix: Callable[[int], Tensor], bias_EO: Tensor | None = None) -> Tensor:
        parts = [
            rows_NI[start:end] @ matrix(e) + (0 if bias_EO is None else bias_EO[e])
            for e, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat(parts)

    gate_up, down = quantised_weight(weights.gate_up_EJH), quantised_weight(weights.down_EHI)
    x_NH, h, dout = wide(problem.x_TH)[token_N], kept(own(h_NJ), weights), wide(dy_TH)[token_N]
    da = wide(multiply(back(dout), lambda e: back_down[e]).to(problem.x_TH.dtype))
    truth = {
        "stage h": (h_NJ, multiply(quantised_rows(x_NH), lambda e: gate_up[e].T, weights.gate_up_bias_EJ)),
        "stage dh": (dh_NJ, activate_backward(s * da, h, weights.activation)),
        "stage ds": (ds_N, (da * activate(h, weights.activation)).sum(-1)),
        "stage dx": (dx_NH, multiply(back(own(dh_NJ)), lambda e: back_gate_up[e])),
    }
    errors = {name: _error(own(found), expected) for name, (found, expected) in truth.items()}
    by_token, by_expert = operands_of_weights(weights)

    def gradient(by_token_TW: Tensor, sorted_NW: Tensor) -> Tensor:
        """Of each expert, (width of the sorted rows, width of the tokens')."""
        rows_NW, sorted_rows = by_token(wide(by_token_TW))[token_N], own(sorted_NW)
        parts = [by_expert(sorted_rows[start:end]).T @ rows_NW[start:end] for start, end in itertools.pairwise(ends)]
        return torch.stack(parts)

    errors["stage dW1"] = _error(wide(d_gate_up), gradient(problem.x_TH, dh_NJ))
    errors["stage dW2"] = _error(wide(d_down), gradient(dy_TH, scaled_a_NI).mT)
    # Whether a row of y has its routing weight in it already is the rows' own affair; summed up it has.
    activated = a_NI.dequantise() if isinstance(a_NI, QuantisedMatrix) else a_NI
    y = s * multiply(quantised_rows(own(activated)), lambda e: down[e].T, weights.down_bias_EH)
    y_TH = torch.zeros(dy_TH.shape, dtype=torch.float64, device="cpu").index_add_(0, token_N, y)
    return errors | {"stage y": _error(wide(rows.combine(y_NH, weighted=True)), y_TH)}


def _error(found: Tensor, truth: Tensor) -> float:
    size = float(truth.norm())
    return float((found - truth).norm()) / size if size else float(found.norm())
