"""The LoRA terms of a pass over sorted rows, written once for all backends: two thin products per row and projection.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    h  += c (x Aᵀ) Bᵀ on the columns of gate and of up        y   += c (a A_dᵀ) B_dᵀ
    dA' += c (dy B_d) A_d                                     dx  += c (dh B) A
    dB = dhᵀ [c (x Aᵀ)]      dA = [c (dh B)]ᵀ x               dB_d = dyᵀ [c (s·a A_dᵀ)]      dA_d = [c (dy B_d)]ᵀ (s·a)

with c the scaling, which is applied to the (N, R) in brackets and nowhere else. Since dA' holds the LoRA path, <dA', a>
is still the whole of ds. Nothing of this is saved for backward. A backend brings its products (`RowProducts`); as
with all sorted rows, those past the last expert's hold anything. (`triton` has a way of its own: `triton_low_rank`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from amoeba.backends.rowwise import split_gate_up
from amoeba.core.problem import Needs, Problem
from amoeba.cpu.pointers import place_of


class ByToken(NamedTuple):
    """Rows in the order of the tokens, to be gathered into that of the sorted rows."""

    rows_TW: Tensor


Rows = Tensor | ByToken


class RowProducts(Protocol):
    """Products of the sorted rows with thin matrices, one per expert."""

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        """rows[n] @ matrix of n's expert, (N, O)."""

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        """out[n] += rows[n] @ matrix of n's expert; out may have any strides."""

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight; zeros where no rows came."""


def add_to_h(problem: Problem, products: RowProducts, x: Rows, h_NJ: Tensor) -> None:
    low_NR = None
    for _, columns, a, b in _of_up(problem, h_NJ):
        if low_NR is None or not _shares_a(problem):
            low_NR = _low(problem, products, x, a.mT)
        products.add_product(low_NR, b.mT, columns)


def add_to_y(problem: Problem, products: RowProducts, a_NI: Tensor, y_NH: Tensor) -> None:
    pair = _of_down(problem)
    if pair is not None:
        products.add_product(_low(problem, products, a_NI, pair[0].mT), pair[1].mT, y_NH)


def add_to_da(problem: Problem, products: RowProducts, dy: Rows, da_NI: Tensor) -> Tensor | None:
    """Returns c (dy B_d), of which `down_gradients` makes the gradient of A_d."""
    pair = _of_down(problem)
    if pair is None:
        return None
    dlow_NR = _low(problem, products, dy, pair[1])
    products.add_product(dlow_NR, pair[0], da_NI)
    return dlow_NR


def down_gradients(
    problem: Problem, products: RowProducts, dy: Rows, dlow_NR: Tensor | None, scaled_a_NI: Tensor | None, needs: Needs
) -> dict[str, Tensor]:
    """By name, those that are needed; dlow_NR as `add_to_da` gave it."""
    found: dict[str, Tensor] = {}
    pair = _of_down(problem)
    if pair is not None and scaled_a_NI is not None:
        a_ERI, b_EHR = pair
        if needs.down_lora_a:
            assert dlow_NR is not None
            found["down_lora_a"] = products.weight_gradient(dlow_NR, scaled_a_NI, a_ERI)
        if needs.down_lora_b:
            low_NR = _low(problem, products, scaled_a_NI, a_ERI.mT)
            found["down_lora_b"] = products.weight_gradient(dy, low_NR, b_EHR)
    return found


def up_gradients(
    problem: Problem, products: RowProducts, x: Rows, dh_NJ: Tensor, dx_NH: Tensor | None, needs: Needs
) -> dict[str, Tensor]:
    """By name, those that are needed; adds the LoRA path to dx_NH where that is given."""
    found: dict[str, Tensor] = {}
    low_NR = None
    for name, dpart, a, b in _of_up(problem, dh_NJ):
        needs_a, needs_b = getattr(needs, f"{name}_lora_a"), getattr(needs, f"{name}_lora_b")
        if needs_b:
            if low_NR is None or not _shares_a(problem):
                low_NR = _low(problem, products, x, a.mT)
            found[f"{name}_lora_b"] = products.weight_gradient(dpart, low_NR, b)
        if needs_a or dx_NH is not None:
            dlow_NR = _low(problem, products, dpart, b)
            if needs_a:
                found[f"{name}_lora_a"] = products.weight_gradient(dlow_NR, x, a)
            if dx_NH is not None:
                products.add_product(dlow_NR, a, dx_NH)
    return found


def _low(problem: Problem, products: RowProducts, rows: Rows, matrix_EIR: Tensor) -> Tensor:
    assert problem.lora is not None
    low_NR = products.multiply(rows, matrix_EIR)
    return low_NR if problem.lora.scaling == 1.0 else low_NR.mul_(problem.lora.scaling)


def _of_up(problem: Problem, h_NJ: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, the columns of h or dh that are its own, A, B) of gate and up, where they have factors."""
    lora = problem.lora
    if lora is None:
        return
    gate, up = split_gate_up(h_NJ, problem.weights.activation) if problem.weights.activation.gated else (None, h_NJ)
    if gate is not None and lora.gate_lora_a is not None and lora.gate_lora_b is not None:
        yield "gate", gate, lora.gate_lora_a, lora.gate_lora_b
    if lora.up_lora_a is not None and lora.up_lora_b is not None:
        yield "up", up, lora.up_lora_a, lora.up_lora_b


def _shares_a(problem: Problem) -> bool:
    """In backward autograd may give out one tensor as two of the same memory."""
    assert problem.lora is not None
    gate, up = problem.lora.gate_lora_a, problem.lora.up_lora_a
    if gate is None or up is None:
        return False
    return place_of(gate) == place_of(up) and gate.shape == up.shape and gate.stride() == up.stride()


def _of_down(problem: Problem) -> tuple[Tensor, Tensor] | None:
    lora = problem.lora
    if lora is None or lora.down_lora_a is None or lora.down_lora_b is None:
        return None
    return lora.down_lora_a, lora.down_lora_b
