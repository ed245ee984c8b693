"""Experts with an activation that aMoEba does not know: the same products, with torch's autograd in between.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · O out ·
R LoRA rank

    y_TH = experts_composed(x_TH, routing, gate_up_EJH, down_EHI, gate=module._apply_gate)

Used where an activation or a norm after the expert is not one of `Activation`. Correct everywhere, deterministic, and
heavier than the fused backends: autograd keeps what the foreign function keeps. On a GPU nothing waits for the host
where torch's grouped product or our kernels serve the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends.grouped import bias_of_row, sum_per_expert, weight_gradient
from amoeba.backends.rowwise import sum_rows
from amoeba.backends.torch_rows import Groups, empty_rows
from amoeba.backends.triton import why_not_on
from amoeba.core import operators
from amoeba.core.layout import build_layout
from amoeba.core.operators import Operand
from amoeba.core.weights import LoraFactors
from amoeba.routing.router import Routing

RowFunction = Callable[[Tensor], Tensor]


def experts_composed(
    x_TH: Tensor,
    routing: Routing,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    gate_up_bias_EJ: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    *,
    gate: RowFunction,
    finish: RowFunction | None = None,
    lora: LoraFactors | None = None,
    interleaved: bool = False,
) -> Tensor:
    """y_t = Σ_k weight · finish(gate(x W1ᵀ + b1) W2ᵀ + b2), for any differentiable `gate` (J -> I) and `finish`.

    interleaved: which rows of gate_up the LoRA factors of gate and up belong to, see `Activation`.
    """
    layout = build_layout(routing.expert_TK, gate_up_EJH.shape[0])
    offs_E, slot_row_TK = layout.offs_E, layout.slot_row_N.view_as(routing.expert_TK)
    x_NH = _expand_rows(x_TH, layout.token_N, slot_row_TK)
    h_NJ = _row_linear(x_NH, gate_up_EJH, gate_up_bias_EJ, offs_E)
    if lora is not None:
        up = _low_rank(x_NH, lora.up_lora_a, lora.up_lora_b, lora.scaling, offs_E)
        if gate_up_EJH.shape[1] == 2 * down_EHI.shape[2]:
            gated = _low_rank(x_NH, lora.gate_lora_a, lora.gate_lora_b, lora.scaling, offs_E)
            h_NJ = h_NJ + _join(gated, up, interleaved)
        elif up is not None:
            h_NJ = h_NJ + up
    a_NI = gate(h_NJ)
    y_NH = _row_linear(a_NI, down_EHI, down_bias_EH, offs_E)
    if lora is not None and lora.down_lora_a is not None:
        y_NH = y_NH + _low_rank(a_NI, lora.down_lora_a, lora.down_lora_b, lora.scaling, offs_E)
    if finish is not None:
        # rows of sentinels are zeros, which `finish` may shift or divide by: they must not reach a gradient
        y_NH = finish(y_NH).masked_fill(_tail(y_NH.shape[0], offs_E), 0)
    weighted_NH = y_NH * routing.weight_TK.reshape(-1)[layout.order_N][:, None]
    return _combine_rows(weighted_NH, layout.token_N, slot_row_TK).to(x_TH.dtype)


def _low_rank(rows_NI: Tensor, a: Tensor | None, b: Tensor | None, scaling: float, offs_E: Tensor) -> Tensor | None:
    if a is None or b is None:
        return None
    low_NR = _row_linear(rows_NI, a, None, offs_E) * scaling
    return _row_linear(low_NR, b, None, offs_E)


def _join(gate: Tensor | None, up: Tensor | None, interleaved: bool) -> Tensor | float:
    """The columns of both as h has them; a missing one adds nothing."""
    present = gate if gate is not None else up
    if present is None:
        return 0.0
    gate, up = (torch.zeros_like(present) if part is None else part for part in (gate, up))
    return torch.stack((gate, up), dim=-1).flatten(1) if interleaved else torch.cat((gate, up), dim=1)


def _compute_row_linear(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, offs_E: Tensor) -> Tensor:
    """x Wᵀ + b with each row's own expert. Rows past offs_E[-1] come out as zeros."""
    if _grouped_on_gpu(x_NI, weight_EOI):
        out_NO = F.grouped_mm(x_NI.contiguous(), weight_EOI.transpose(1, 2), offs=offs_E)
        if bias_EO is not None:
            out_NO += bias_of_row(bias_EO, x_NI.shape[0], offs_E)
        return out_NO.masked_fill_(_tail(x_NI.shape[0], offs_E), 0)
    out_NO = empty_rows(x_NI.shape[0], weight_EOI.shape[1], x_NI)
    if _kernels_serve(x_NI):
        return _multiply(x_NI, weight_EOI.transpose(1, 2), offs_E, out_NO, bias_EO)
    groups = Groups(offs_E, x_NI.shape[0])
    groups.multiply_rows(x_NI, weight_EOI.transpose(1, 2), out=out_NO, bias_EO=bias_EO)
    groups.rest(out_NO).zero_()
    return out_NO


def _compute_row_linear_backward(
    arguments: tuple, saved: tuple, gradients: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x_NI, weight_EOI, _, offs_E = arguments
    dout_NO = gradients[0].contiguous()
    dx = dweight = None
    dbias = sum_per_expert(dout_NO, offs_E, None, weight_EOI.dtype) if needs[2] else None
    if _grouped_on_gpu(x_NI, weight_EOI):
        if needs[0]:
            dx = F.grouped_mm(dout_NO, weight_EOI, offs=offs_E).masked_fill_(_tail(x_NI.shape[0], offs_E), 0)
        if needs[1]:
            dweight = weight_gradient(dout_NO, x_NI.contiguous(), offs_E, weight_EOI)
        return dx, dweight, dbias
    if _kernels_serve(x_NI):
        from amoeba.kernels import weight_gradient as kernels

        if needs[0]:
            dx = _multiply(dout_NO, weight_EOI, offs_E, torch.empty_like(x_NI, memory_format=torch.contiguous_format))
        if needs[1]:
            dweight = kernels.weight_gradient(dout_NO, x_NI, offs_E, torch.empty_like(weight_EOI))
        return dx, dweight, dbias
    groups = Groups(offs_E, x_NI.shape[0])
    if needs[0]:
        dx = torch.empty_like(x_NI)
        groups.multiply_rows(dout_NO, weight_EOI, out=dx)
        groups.rest(dx).zero_()
    if needs[1]:
        dweight = groups.weight_gradient(dout_NO, x_NI, weight_EOI)
    return dx, dweight, dbias


def _multiply(
    rows_NI: Tensor, matrix_EIO: Tensor, offs_E: Tensor, out_NO: Tensor, bias_EO: Tensor | None = None
) -> Tensor:
    from amoeba.kernels.grouped_gemm import multiply_rows

    multiply_rows(rows_NI, matrix_EIO, offs_E, out_NO, bias_EO=bias_EO)
    return out_NO.masked_fill_(_tail(out_NO.shape[0], offs_E), 0)


def _kernels_serve(x_NI: Tensor) -> bool:
    return x_NI.is_cuda and why_not_on(x_NI.device, x_NI.dtype) is None


def _grouped_on_gpu(x_NI: Tensor, weight_EOI: Tensor) -> bool:
    """torch's grouped product takes rows of a multiple of 16 bytes, that is of 8 numbers in bf16; before Hopper it
    waits for the device."""
    if not (x_NI.is_cuda and x_NI.dtype == torch.bfloat16 and x_NI.shape[0] > 0):
        return False
    if torch.cuda.get_device_capability(x_NI.device) < (9, 0):
        return False
    strides = weight_EOI.stride()[1:]
    return 1 in strides and all(length % 8 == 0 for length in (max(strides), *weight_EOI.shape[1:]))


def _tail(rows: int, offs_E: Tensor) -> Tensor:
    return (torch.arange(rows, dtype=torch.int64, device=offs_E.device) >= offs_E[-1])[:, None]


def _combined(rows_NH: Tensor, slot_row_TK: Tensor) -> Tensor:
    spare = rows_NH.new_zeros(1, rows_NH.shape[1])
    return sum_rows(torch.cat((rows_NH, spare)), slot_row_TK)


def _single(operator: operators.Operator) -> Callable[..., Any]:
    return lambda *arguments: operator(*arguments)[0]


def _like_rows(rows: Tensor, width: Tensor) -> tuple[Tensor]:
    return (width.new_empty(rows.shape[0], width.shape[1]),)


_TOKEN, _SLOT_ROW = Operand("token", "Tensor"), Operand("slot_row", "Tensor")

_row_linear = _single(
    operators.define(
        "row_linear",
        (
            Operand("x", "Tensor", True),
            Operand("weight", "Tensor", True),
            Operand("bias", "Tensor?", True),
            Operand("offs", "Tensor"),
        ),
        ("y",),
        forward=lambda *arguments: (_compute_row_linear(*arguments),),
        backward=_compute_row_linear_backward,
        fake=lambda x, weight, bias, offs: (x.new_empty(x.shape[0], weight.shape[1]),),
    )
)
# These two are each other's adjoint, which is what keeps the backward of a gather free of atomics. A sentinel has no
# row in combine_rows; its row in expand_rows lies past offs_E[-1], where row_linear gives zeros.
_expand_rows = _single(
    operators.define(
        "expand_rows",
        (Operand("x", "Tensor", True), _TOKEN, _SLOT_ROW),
        ("rows",),
        forward=lambda x, token, slot_row: (x.index_select(0, token),),
        backward=lambda arguments, saved, gradients, needs: (_combined(gradients[0], arguments[2]),),
        fake=lambda x, token, slot_row: _like_rows(token, x),
    )
)
_combine_rows = _single(
    operators.define(
        "combine_rows",
        (Operand("rows", "Tensor", True), _TOKEN, _SLOT_ROW),
        ("y",),
        forward=lambda rows, token, slot_row: (_combined(rows, slot_row),),
        backward=lambda arguments, saved, gradients, needs: (gradients[0].index_select(0, arguments[1]),),
        fake=lambda rows, token, slot_row: _like_rows(slot_row, rows),
    )
)
