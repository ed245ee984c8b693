"""Sorted rows in fp8 by our own kernels: those of `triton` on Hopper, with products in e4m3; by plain Triton on other
GPUs, and in mxfp8 and nvfp4.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

x and dy are quantised token by token, before their rows are gathered; a in the epilogue of the product that gives h; dh
in the pass that takes the activation back. Where a block of its columns holds gates and ups (I is no multiple of 128),
a pass of its own quantises dh, and h as fp8-saved keeps it. The gradients of weights are those of `HopperRows`, but for
fp8-all: there both operands of each are transposed copies in e4m3, which last as long as their product.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from amoeba.backends import fp8_saved
from amoeba.backends.fp8_weights import WeightCodes, codes_of
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.backends.triton_rows import HopperRows, TritonRows, in_whole_pieces, sorted_maps, with_plain_rows
from amoeba.core.problem import Needs, Problem, Saved
from amoeba.cpu.pointers import place_of
from amoeba.kernels import quantise, quantised_gemm
from amoeba.kernels.activate import activate_backward, has_whole_blocks
from amoeba.kernels.hopper import fp8_gemm, fp8_wgrad
from amoeba.kernels.quantise import RowBlocks, empty_rows, row_blocks, transpose_rows, transpose_tokens
from amoeba.kernels.quantise_blocks import activate_and_quantise, quantise_rows
from amoeba.precision.formats import FP8_128_ROWS, FP8_TRAINING_ROWS, Format
from amoeba.precision.quantised import QuantisedMatrix, empty_quantised
from amoeba.precision.quantised_experts import ReadInBlocks


class StraightThroughKernelRows(HopperRows):
    """fp8-ste: forward in fp8, and back as `HopperRows` does it."""

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> StraightThroughKernelRows:
        problem = _with_aligned_weights(with_plain_rows(problem))
        kept = saved[1:] if saved else sorted_maps(problem)
        return cls(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *kept)

    products: Any = fp8_gemm

    def hidden(self) -> Tensor:
        return self._hidden(self.goes_back)

    def _hidden(self, both: bool) -> Tensor:
        weights, top_k = self.problem.weights, self.top_k
        h_NJ, gate_up = self.new_rows(weights.gate_up_EJH.shape[1]), self.written(weights.gate_up_EJH, both)
        bias_EJ = weights.gate_up_bias_EJ
        self.products.multiply(
            self.quantised_x, gate_up, self.table, h_NJ, order_N=self.order_N, top_k=top_k, bias_EO=bias_EJ
        )
        return h_NJ

    def up(self, want_h: bool) -> tuple[Any, QuantisedMatrix]:
        weights = self.problem.weights
        h_NJ = self._room_for_h() if want_h else None
        a_NI = self._room_for_a()
        both = want_h and self.goes_back
        gate_up = self.written(weights.gate_up_EJH, both)
        self.written(weights.down_EHI, both)
        fp8_gemm.up(
            self.quantised_x,
            self.order_N,
            self.top_k,
            gate_up,
            self.table,
            weights.activation,
            a_NI,
            h_NJ=h_NJ,
            bias_EJ=weights.gate_up_bias_EJ,
        )
        return h_NJ, a_NI

    @property
    def quantised_x(self) -> QuantisedMatrix:
        x = self.problem.quantised_x
        return quantise_rows(self.problem.x_TH, self.row_format) if x is None else x

    @property
    def rows(self) -> int:
        """Of the buffers: those that may have an expert here."""
        return self.order_N.shape[0]

    def _room_for_h(self) -> Any:
        return self.new_rows(self.problem.weights.gate_up_EJH.shape[1])

    def _room_for_a(self) -> QuantisedMatrix:
        weights = self.problem.weights
        return empty_quantised((self.rows, weights.intermediate), self.row_format, device=weights.device)

    @property
    def _has_whole_blocks(self) -> bool:
        return has_whole_blocks(self.problem.weights.activation, self.problem.weights.intermediate)

    def down(self, a_NI: QuantisedMatrix) -> Tensor:
        weights = self.problem.weights
        y_NH = self.new_rows(weights.hidden)
        self.products.multiply(a_NI, self.codes(weights.down_EHI), self.table, y_NH, bias_EO=weights.down_bias_EH)
        return y_NH

    def written(self, weight_EOI: Any, both: bool) -> QuantisedMatrix:
        """Codes of the weight as it is now. both: the transposed ones, too, for a backward pass to come."""
        kept = self.kept(weight_EOI)
        kept.write(weight_EOI, both=both)
        return kept.matrix

    def codes(self, weight_EOI: Any) -> QuantisedMatrix:
        """As they were written last."""
        return self.kept(weight_EOI).matrix

    def kept(self, weight_EOI: Tensor) -> WeightCodes:
        return codes_of(weight_EOI, self.problem.weights.weight_format)

    goes_back = False  # whether backward multiplies by codes

    @property
    def row_format(self) -> Format:
        """Of x and a, and of dO and dh where backward multiplies by codes."""
        return self.problem.weights.row_format


class W8a8KernelRows(StraightThroughKernelRows):
    """Forward alone, of frozen experts that are in e4m3 already."""

    row_format = FP8_128_ROWS

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> W8a8KernelRows:
        problem = with_plain_rows(problem)
        return cls(problem._replace(x_TH=in_whole_pieces(problem.x_TH)), *sorted_maps(problem))

    def written(self, weight_EOI: ReadInBlocks, both: bool) -> QuantisedMatrix:
        return weight_EOI.matrix

    def codes(self, weight_EOI: ReadInBlocks) -> QuantisedMatrix:
        return weight_EOI.matrix


class Fp8KernelRows(StraightThroughKernelRows):
    """fp8: the gradients of rows in fp8 as well."""

    goes_back = True
    _dh: QuantisedMatrix | None = None

    def _activation_backward(self, dy_TH: Tensor, h_NJ: Any, dh_NJ: Tensor, needs: Needs) -> ActivationGradients:
        problem, weights = self.problem, self.problem.weights
        da_NI = self.new_rows(weights.intermediate)
        down = self.kept(weights.down_EHI).transposed(weights.down_EHI)
        dy = quantise_rows(dy_TH, self.row_format)
        self.products.multiply(dy, down, self.table, da_NI, order_N=self.order_N, top_k=self.top_k)
        scaled_a_NI = da_NI if needs.scaled_a else None
        fused = needs.x and self._has_whole_blocks and self.row_format == FP8_TRAINING_ROWS
        self._dh = empty_rows(self.rows, dh_NJ.shape[1], dh_NJ.device) if fused else None
        ds_N = activate_backward(
            da_NI,
            h_NJ,
            problem.weight_TK,
            self.order_N,
            weights.activation,
            dh_NJ,
            scaled_a_NI,
            self.offs_E,
            quantised_dh=self._dh,
        )
        return ActivationGradients(dh_NJ, scaled_a_NI, ds_N, None)

    def up_backward(self, dh_NJ: Tensor, needs: Needs) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not needs.x:
            return None, {}
        weights, dh, self._dh = self.problem.weights, self._dh, None
        dh = quantise_rows(dh_NJ, self.row_format) if dh is None else dh
        dx_NH = self.new_rows(weights.hidden)
        gate_up = self.kept(weights.gate_up_EJH).transposed(weights.gate_up_EJH)
        self.products.multiply(dh, gate_up, self.table, dx_NH)
        return dx_NH, {}


class SavedInFp8KernelRows(Fp8KernelRows):
    """fp8-saved: h in e4m3 between the passes, written by the product that gives it, where that has its blocks."""

    def _room_for_h(self) -> QuantisedMatrix | Tensor:
        return self._room_to_save() if self._has_whole_blocks else super()._room_for_h()

    def _room_to_save(self) -> QuantisedMatrix:
        width = self.problem.weights.gate_up_EJH.shape[1]
        self._saved = fp8_saved.empty_saved(self.rows, width, self.problem.x_TH.device)
        return fp8_saved.saved_rows(self._saved, self.rows, width)

    def save(self, h_NJ: QuantisedMatrix | Tensor) -> Saved:
        if not isinstance(h_NJ, QuantisedMatrix):
            quantise.quantise_rows(h_NJ, self._room_to_save())
        return fp8_saved.save(self.problem, self._saved, (self.order_N, self.slot_row_N, self.offs_E))

    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        """h_NJ: bytes that were saved, or h as it was computed again."""
        assert isinstance(dy, ByToken)
        width = self.problem.weights.gate_up_EJH.shape[1]
        is_saved = h_NJ.dtype == torch.uint8
        kept = fp8_saved.saved_rows(h_NJ, self.rows, width) if is_saved else quantise_rows(h_NJ, self.row_format)
        return self._activation_backward(dy.rows_TW, kept, self.new_rows(width), needs)


class AllInFp8KernelRows(Fp8KernelRows):
    """fp8-all: the gradients of weights in fp8 as well."""

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        gradient = torch.empty_like(weight_EOI)
        if isinstance(grad, ByToken):
            by_token, sorted_NW, out_EWH = grad, rows, gradient.transpose(1, 2)
        else:
            by_token, sorted_NW, out_EWH = rows, grad, gradient  # type: ignore[assignment]
        assert isinstance(by_token, ByToken) and isinstance(sorted_NW, Tensor)
        left = transpose_rows(sorted_NW, self.row_blocks)
        right = transpose_tokens(by_token.rows_TW, self.order_N, self.top_k, self.row_blocks)
        fp8_wgrad.weight_gradient(left, right, self.row_blocks, self.heaviest_E, out_EWH)
        return gradient

    @cached_property
    def row_blocks(self) -> RowBlocks:
        return row_blocks(self.offs_E, self.table)


ROWS = {
    "fp8": Fp8KernelRows,
    "fp8-ste": StraightThroughKernelRows,
    fp8_saved.RECIPE: SavedInFp8KernelRows,
    "fp8-all": AllInFp8KernelRows,
}


class _PlainTriton(StraightThroughKernelRows):
    """The same without Gluon: for GPUs that have fp8 and are not Hopper. Never run on one, see
    `amoeba.kernels.quantised_gemm`."""

    products = quantised_gemm
    _multiply = TritonRows._multiply  # type: ignore[assignment]  # without scales of dA'
    _new_scales = TritonRows._new_scales
    weight_gradient = TritonRows.weight_gradient

    @property
    def table(self) -> Tensor:
        return self.offs_E

    def up(self, want_h: bool) -> tuple[Any, QuantisedMatrix]:
        weights, a_NI, both = self.problem.weights, self._room_for_a(), want_h and self.goes_back
        h_NJ = self._hidden(both)
        self.written(weights.down_EHI, both)
        activate_and_quantise(h_NJ, weights.activation, a_NI, self.offs_E)
        return h_NJ if want_h else None, a_NI


class PlainStraightThroughRows(_PlainTriton):
    """fp8-ste."""


class PlainFp8Rows(_PlainTriton, Fp8KernelRows):
    """fp8, mxfp8 and nvfp4."""


class PlainSavedInFp8Rows(_PlainTriton, SavedInFp8KernelRows):
    """fp8-saved."""


PLAIN_ROWS = {
    "fp8": PlainFp8Rows,
    "fp8-ste": PlainStraightThroughRows,
    fp8_saved.RECIPE: PlainSavedInFp8Rows,
    "mxfp8": PlainFp8Rows,
    "nvfp4": PlainFp8Rows,
}


def _with_aligned_weights(problem: Problem) -> Problem:
    """Copies of those that the bulk copy engine could not read: it takes addresses that are multiples of 16."""
    weights = problem.weights
    if not any(place_of(weight) % 16 for weight in (weights.gate_up_EJH, weights.down_EHI)):
        return problem
    gate_up, down, *biases = weights.tensors()
    copied = (each.clone(memory_format=torch.contiguous_format) for each in (gate_up, down))
    return problem._replace(weights=type(weights).of((*copied, *biases), weights.constants()))
