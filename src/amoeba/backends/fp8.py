"""`eager` for experts that train in 8 or 4 bits: the recipes of `amoeba.precision.recipes` in plain torch.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

Any device: these are the numbers that kernels have to agree with. What codes and their scales stand for is multiplied
in fp32, in which each single product is exact. On a GPU it reads row counts and sums of the weights' bits on
the host in every pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amoeba.backends import eager, fp8_saved, sorted_rows
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.backends.torch_rows import TorchRows, empty_gradient, empty_rows
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.precision.formats import (
    FP8_128_ROWS,
    FP8_TRAINING_COLUMNS,
    Format,
    fp8_training_columns,
)
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.precision.quantised_experts import ReadInBlocks
from amoeba.precision.recipes import AUTO, Fp8Experts
from amoeba.precision.weight_cache import quantised_weight


class StraightThroughRows(TorchRows):
    """fp8-ste: forward in fp8, and back with rows and weights as they are."""

    @property
    def row_format(self) -> Format:
        return self.problem.weights.row_format

    def codes(self, weight_EOI: Any) -> QuantisedMatrix:
        return quantised_weight(weight_EOI, self.problem.weights.weight_format).matrix

    def hidden(self) -> Tensor:
        weights = self.problem.weights
        h_NJ = self.new_rows(weights.gate_up_EJH.shape[1])
        x = self.problem.quantised_x
        x_TH = _rounded(self.problem.x_TH, self.row_format) if x is None else x.dequantise()
        x_NH = x_TH.index_select(0, self.token_N)
        self._multiply(x_NH, self.codes(weights.gate_up_EJH), h_NJ, bias_EO=weights.gate_up_bias_EJ)
        return h_NJ

    def up(self, want_h: bool) -> tuple[Tensor | None, Tensor]:
        h_NJ, weights = self.hidden(), self.problem.weights
        a_NI = empty_rows(self.rows, weights.intermediate, h_NJ, torch.float32)
        self.activate(h_NJ, torch.ones_like(self.scale_N), weights.activation, a_NI)
        return h_NJ if want_h else None, a_NI

    def down(self, a_NI: Tensor) -> Tensor:
        weights = self.problem.weights
        y_NH = empty_rows(self.rows + 1, weights.hidden, self.problem.x_TH)
        matrix_EHI, bias_EH = self.codes(weights.down_EHI), weights.down_bias_EH
        self._multiply(_rounded(a_NI, self.row_format), matrix_EHI, y_NH, bias_EO=bias_EH, scale_N=self.scale_N)
        return y_NH

    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        assert isinstance(dy, Tensor)
        weights = self.problem.weights
        da_NI = empty_rows(self.rows, weights.intermediate, self.problem.x_TH)
        self.through_down(dy, da_NI)
        dh_NJ = self.new_rows(h_NJ.shape[1])
        scaled_a_NI = self.new_rows(weights.intermediate) if needs.scaled_a else None
        ds_N = self.activate_backward(da_NI, h_NJ, self.scale_N, weights.activation, dh_NJ, scaled_a_NI)
        return ActivationGradients(dh_NJ, scaled_a_NI, ds_N, None)

    def through_down(self, dy_NH: Tensor, da_NI: Tensor) -> None:
        """Writes dA', rounded once."""
        for e, dy, da in self.groups.each(dy_NH, da_NI):
            da.copy_(dy.float() @ self.problem.weights.down_EHI[e].float())

    def _multiply(
        self,
        rows_NI: Tensor,
        matrix_EOI: QuantisedMatrix,
        out_NO: Tensor,
        *,
        bias_EO: Tensor | None = None,
        scale_N: Tensor | None = None,
    ) -> None:
        """out[n] = (rows[n] · matrix of n's expert, transposed, + bias) · scale, rounded once."""
        scales = self.scale_N if scale_N is None else scale_N
        for e, rows, out, scale in self.groups.each(rows_NI, out_NO, scales):
            product = rows @ matrix_EOI[e].dequantise().t()
            if bias_EO is not None:
                product += bias_EO[e]
            out.copy_(product if scale_N is None else product.mul_(scale[:, None]))


class W8a8Rows(StraightThroughRows):
    """Forward alone, of frozen experts that are in e4m3 already."""

    row_format = FP8_128_ROWS

    def codes(self, weight_EOI: ReadInBlocks) -> QuantisedMatrix:
        return weight_EOI.matrix


class Fp8Rows(StraightThroughRows):
    """fp8, mxfp8 and nvfp4: the gradients of rows in it as well."""

    def transposed(self, weight_EOI: Any) -> QuantisedMatrix:
        return quantised_weight(weight_EOI, self.problem.weights.weight_format).transposed()

    def through_down(self, dy_NH: Tensor, da_NI: Tensor) -> None:
        self._multiply(_rounded(dy_NH, self.row_format), self.transposed(self.problem.weights.down_EHI), da_NI)

    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        weights = self.problem.weights
        dx_NH = empty_rows(self.rows + 1, weights.hidden, self.problem.x_TH)
        self._multiply(_rounded(dh_NJ, self.row_format), self.transposed(weights.gate_up_EJH), dx_NH)
        return dx_NH


class SavedInFp8Rows(Fp8Rows):
    """fp8-saved: h in e4m3 between the passes, and where it is computed again."""

    def save(self, h_NJ: Tensor) -> Saved:
        layout = self.layout
        maps = layout.order_N, layout.slot_row_N, layout.offs_E
        return fp8_saved.save(self.problem, fp8_saved.quantised_in_torch(h_NJ), maps)

    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        width = self.problem.weights.gate_up_EJH.shape[1]
        saved = h_NJ if h_NJ.dtype == torch.uint8 else fp8_saved.quantised_in_torch(h_NJ)
        kept_NJ = fp8_saved.saved_rows(saved, self.rows, width).dequantise(self.problem.x_TH.dtype)
        return super().activation_backward(dy, kept_NJ, needs, overwrite_h=True)


class AllInFp8Rows(Fp8Rows):
    """fp8-all: the gradients of weights in fp8 as well."""

    def gather(self, rows_TH: Tensor) -> Tensor:
        self._dy_TH = rows_TH  # its columns are scaled over all tokens, once each
        return super().gather(rows_TH)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        assert isinstance(grad, Tensor)
        gradient = empty_gradient(weight_EOI).zero_()
        of_gate_up = isinstance(rows, ByToken)
        by_token_TW, sorted_NW = (rows.rows_TW, grad) if isinstance(rows, ByToken) else (self._dy_TH, rows)
        coded_TW = _rounded(by_token_TW, fp8_training_columns(by_token_TW.shape[0]))
        for e, part, token in self.groups.each(sorted_NW, self.token_N):
            product = _rounded(part, FP8_TRAINING_COLUMNS).t() @ coded_TW.index_select(0, token)
            gradient[e] = product if of_gate_up else product.t()
        return gradient


def _rounded(rows: Tensor, format: Format) -> Tensor:
    """The numbers that the codes of these rows stand for, in fp32."""
    return quantise(rows, format).dequantise()


_ROWS: dict[str, type[StraightThroughRows]] = {
    "fp8": Fp8Rows,
    "fp8-ste": StraightThroughRows,
    fp8_saved.RECIPE: SavedInFp8Rows,
    "fp8-all": AllInFp8Rows,
    "mxfp8": Fp8Rows,
    "nvfp4": Fp8Rows,
}


class Fp8Backend(PassesBackend):
    name, summary, kinds = "eager", "emulated in plain torch, without the speed of it", (Fp8Experts,)
    operator_name = "fp8_eager"
    traced = SavedRows(h=fp8_saved.fake_h)
    waits_on_gpu = True

    def preference(self, device: torch.device) -> int:
        return eager.BACKEND.preference(device)

    def why_not(self, request: Request) -> str | None:
        if request.weights.dtype not in (torch.float32, torch.bfloat16):
            dtype = request.weights.dtype
            return f"trains fp32 and bf16 weights in fp8 (also under autocast to bf16); these weights are {dtype}"
        if request.lora is not None:
            return "trains the experts themselves; with LoRA factors, keep them frozen as fp8-weights"
        return None

    def row_format(self, request: Request) -> Format | None:
        weights = request.weights
        assert isinstance(weights, Fp8Experts)
        has_gradient = torch.is_grad_enabled() and weights.gate_up_EJH.requires_grad  # which is a sum over x as it is
        travels = weights.row_format.scale == "fp32"  # see `pack_rows`
        return weights.row_format if travels and not has_gradient and weights.recipe != AUTO else None

    def rows(self, weights: Fp8Experts) -> type[sorted_rows.SortedRows]:
        """By which `amoeba.proof.conformance` proves one product after the other."""
        return _ROWS[weights.recipe]

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(problem, save, self.rows(problem.weights))

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        return sorted_rows.backward(problem, saved, dy_TH, needs, self.rows(problem.weights))


BACKEND = Fp8Backend()
