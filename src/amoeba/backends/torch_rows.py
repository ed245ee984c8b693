"""Sorted rows in plain torch, expert by expert: the rows of `eager` and, with the C++ core's products, of `cpu`.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

Products write straight into their place in the sorted rows; on a CPU half precision is computed in fp32 where there are
no instructions for it. What `combine` reads has one spare row at the end, which stands for sentinels.

Large buffers on the CPU are asked for in huge pages. A fresh 32 MB gradient costs 8000 page faults of 4 KiB: 9.9 ms
where the product that fills it takes 6.1 ms; advised to use 2 MiB pages it costs 3.2 ms (2-core Xeon, 2026-11-15).
Where the system refuses the advice nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.rowwise import activate_rows, activate_rows_backward, slot_gradient, sum_rows
from amoeba.backends.sorted_rows import ActivationGradients, SortedRows
from amoeba.core.layout import Layout
from amoeba.core.problem import Needs, Problem, Saved, layout_of
from amoeba.cpu.pointers import place_of
from amoeba.system.cpu_features import compute_dtype


class RowsInTorch(SortedRows):
    """What the products of torch have in common: maps from `build_layout`, activations and sums in torch."""

    weights_first = True
    spare = 0  # extra rows in every buffer of rows

    activate = staticmethod(activate_rows)
    activate_backward = staticmethod(activate_rows_backward)

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.problem, self.layout, self.rows = problem, layout, layout.order_N.shape[0]
        self.token_N = layout.token_N
        self.scale_N = problem.weight_TK.reshape(-1).index_select(0, layout.order_N)

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> RowsInTorch:
        return cls(problem, layout_of(problem, saved))

    def save(self, h_NJ: Tensor) -> Saved:
        return Saved.of(h_NJ, self.layout)

    @property
    def x(self) -> Rows:
        return ByToken(self.problem.x_TH)

    def gather(self, rows_TH: Tensor) -> Tensor:
        return rows_TH.index_select(0, self.token_N)

    def new_rows(self, width: int) -> Tensor:
        return empty_rows(self.rows + self.spare, width, self.problem.x_TH)

    def up(self, want_h: bool) -> tuple[Tensor | None, Tensor]:
        h_NJ, weights = self.hidden(), self.problem.weights
        a_NI = self.new_rows(weights.intermediate)
        self.activate(h_NJ, self.scale_N, weights.activation, a_NI)
        return h_NJ if want_h else None, a_NI

    @abstractmethod
    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        """dh · gate_up, without LoRA."""

    def up_backward(self, dh_NJ: Tensor, needs: Needs) -> tuple[Tensor | None, dict[str, Tensor]]:
        dx_NH = self.rows_gradient(dh_NJ) if needs.x else None
        return dx_NH, low_rank.up_gradients(self.problem, self, self.x, dh_NJ, dx_NH, needs)

    def down_factor_gradients(
        self, dy: Rows, dlow_NR: Tensor | None, scaled_a_NI: Tensor | None, needs: Needs
    ) -> dict[str, Tensor]:
        return low_rank.down_gradients(self.problem, self, dy, dlow_NR, scaled_a_NI, needs)

    def activation_backward(self, dy: Rows, h_NJ: Tensor, needs: Needs, *, overwrite_h: bool) -> ActivationGradients:
        problem = self.problem
        intermediate = problem.weights.intermediate
        da_NI = self.multiply(dy, problem.weights.down_EHI)
        dlow_NR = low_rank.add_to_da(problem, self, dy, da_NI)
        dh_NJ = self.new_rows(h_NJ.shape[1])
        scaled_a_NI = self.new_rows(intermediate) if needs.scaled_a else None
        ds_N = self.activate_backward(da_NI, h_NJ, self.scale_N, problem.weights.activation, dh_NJ, scaled_a_NI)
        return ActivationGradients(dh_NJ, scaled_a_NI, ds_N, dlow_NR)

    def combine(self, rows_NH: Tensor, *, weighted: bool) -> Tensor:
        return sum_rows(rows_NH, self.layout.slot_row_N.view_as(self.problem.expert_TK))

    def slot_gradient(self, ds_N: Tensor, dy: Rows) -> Tensor:
        if self.problem.weights.down_bias_EH is not None:
            self.add_through_bias(ds_N, dy)
        return slot_gradient(ds_N, self.layout, self.problem.weight_TK)

    @abstractmethod
    def add_through_bias(self, ds_N: Tensor, dy: Rows) -> None:
        """ds += <dy, bias of down>."""

    @abstractmethod
    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor: ...

    @abstractmethod
    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None: ...


class TorchRows(RowsInTorch):
    def __init__(self, problem: Problem, layout: Layout) -> None:
        super().__init__(problem, layout)
        self.groups = self.groups_of(layout.offs_E, self.rows)

    @staticmethod
    def groups_of(offs_E: Tensor, rows: int) -> Groups:
        return Groups(offs_E, rows)

    def hidden(self) -> Tensor:
        problem, weights = self.problem, self.problem.weights
        h_NJ = self.new_rows(weights.gate_up_EJH.shape[1])
        matrix_EHJ, bias_EJ = weights.gate_up_EJH.transpose(1, 2), weights.gate_up_bias_EJ
        self.groups.multiply_rows(problem.x_TH, matrix_EHJ, out=h_NJ, bias_EO=bias_EJ, index_N=self.token_N)
        low_rank.add_to_h(problem, self, self.x, h_NJ)
        return h_NJ

    def down(self, a_NI: Tensor) -> Tensor:
        problem, weights = self.problem, self.problem.weights
        y_NH = empty_rows(self.rows + 1, weights.hidden, problem.x_TH)
        self.groups.multiply_rows(a_NI, weights.down_EHI.transpose(1, 2), out=y_NH[: self.rows])
        low_rank.add_to_y(problem, self, a_NI, y_NH)
        if weights.down_bias_EH is not None:
            for e, y, scale in self.groups.each(y_NH, self.scale_N):
                y += scale[:, None].to(y.dtype) * weights.down_bias_EH[e]
        return y_NH

    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        weights = self.problem.weights
        dx_NH = empty_rows(self.rows + 1, weights.hidden, self.problem.x_TH)
        self.groups.multiply_rows(dh_NJ, weights.gate_up_EJH, out=dx_NH[: self.rows])
        return dx_NH

    def add_through_bias(self, ds_N: Tensor, dy: Rows) -> None:
        assert isinstance(dy, Tensor)
        bias_EH, wide = self.problem.weights.down_bias_EH, ds_N.dtype
        for e, ds, grad in self.groups.each(ds_N, dy):
            ds += grad.to(wide) @ bias_EH[e].to(wide)

    def bias_gradient(self, grad: Rows, bias_EO: Tensor, *, weighted: bool) -> Tensor:
        assert isinstance(grad, Tensor)
        gradient = torch.zeros_like(bias_EO)
        wide = torch.promote_types(bias_EO.dtype, torch.float32)
        for e, rows, scale in self.groups.each(grad, self.scale_N):
            gradient[e] = scale.to(wide) @ rows.to(wide) if weighted else rows.sum(0, dtype=wide)
        return gradient

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        out_NO = empty_rows(self.rows, matrix_EIO.shape[2], matrix_EIO)
        rows, index_N = self._gathered(rows)
        self.groups.multiply_rows(rows, matrix_EIO, out=out_NO, index_N=index_N)
        return out_NO

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        self.groups.add_product(rows_NI, matrix_EIO, out_NO)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        assert isinstance(grad, Tensor)
        rows, index_N = self._gathered(rows)
        return self.groups.weight_gradient(grad, rows, weight_EOI, index_N=index_N)

    def _gathered(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        return (rows.rows_TW, self.token_N) if isinstance(rows, ByToken) else (rows, None)


class Groups:
    """The sorted rows as each expert sees them, and torch's products over them.

    Reading the row counts is the one wait for the device in a pass.
    """

    def __init__(self, offs_E: Tensor, rows: int) -> None:
        self.offs_E, self.rows = offs_E, rows
        ends = offs_E.tolist()
        counts = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self._with_rows = [e for e, count in enumerate(counts) if count]
        self._without_rows = [e for e, count in enumerate(counts) if not count]
        self._sizes = [*filter(None, counts), rows - ends[-1]]  # the last part: rows of sentinels

    def each(self, *row_tensors: Tensor) -> Iterator[tuple]:
        """(expert, its rows of each tensor) for the experts that have rows; what a tensor has beyond N is left out."""
        own = (tensor if tensor.shape[0] == self.rows else tensor[: self.rows] for tensor in row_tensors)
        # Tensor.split goes through Python, which takes as long again
        return zip(self._with_rows, *(tensor.split_with_sizes(self._sizes) for tensor in own), strict=False)

    def rest(self, rows_NW: Tensor) -> Tensor:
        """The rows of sentinels."""
        return rows_NW.split_with_sizes(self._sizes)[-1]

    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        """out[n] = rows[n] (or rows[index[n]]) @ matrix of n's expert (+ bias); the rest of out is left as it is."""
        rows_NI = rows if index_N is None else rows.index_select(0, index_N)
        matrices = matrix_EIO.unbind(0)
        dtype = compute_dtype(rows_NI.dtype, rows_NI.device)
        for e, part, target in self.each(rows_NI, out):
            if dtype != part.dtype:
                product = part.to(dtype) @ matrices[e].to(dtype)
                target.copy_(product if bias_EO is None else product.add_(bias_EO[e]))
            elif bias_EO is not None:
                torch.addmm(bias_EO[e], part, matrices[e], out=target)
            else:
                torch.mm(part, matrices[e], out=target)

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        """out[n] += rows[n] @ matrix of n's expert."""
        matrices = matrix_EIO.unbind(0)
        dtype = compute_dtype(rows_NI.dtype, rows_NI.device)
        for e, part, target in self.each(rows_NI, out_NO):
            if dtype != part.dtype:
                target.copy_((part.to(dtype) @ matrices[e].to(dtype)).add_(target))
            else:
                target.addmm_(part, matrices[e])

    def weight_gradient(
        self, grad_NO: Tensor, rows: Tensor, weight_EOI: Tensor, *, index_N: Tensor | None = None
    ) -> Tensor:
        """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight; zeros where no rows came."""
        rows_NI = rows if index_N is None else rows.index_select(0, index_N)
        gradient = empty_gradient(weight_EOI)
        targets = gradient.unbind(0)
        for e in self._without_rows:
            targets[e].zero_()
        dtype = compute_dtype(grad_NO.dtype, grad_NO.device)
        for e, grad, part in self.each(grad_NO, rows_NI):
            if dtype != grad.dtype:
                targets[e].copy_(grad.to(dtype).t() @ part.to(dtype))
            else:
                torch.mm(grad.t(), part, out=targets[e])
        return gradient


_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_LEAST_BYTES = 2 * _HUGE_PAGE


def empty_rows(rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return advise_huge_pages(torch.empty((rows, width), dtype=dtype or like.dtype, device=like.device))


def empty_gradient(weight: Tensor) -> Tensor:
    """Uninitialised, with the strides of the weight, so that autograd takes it over without a copy."""
    return advise_huge_pages(torch.empty_like(weight))


def advise_huge_pages(tensor: Tensor) -> Tensor:
    if tensor.nbytes >= _LEAST_BYTES and tensor.is_cpu:
        madvise = _madvise()
        if madvise is not None:
            start = place_of(tensor)
            first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
            last = (start + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
            if last > first:
                madvise(first, last - first, _MADV_HUGEPAGE)
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
