"""Few tokens without gradients, by the C++ core: weights are read where they lie, nothing is sorted.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    if cpu_decode.serves(problem, most_rows): y_TH = cpu_decode.decode(problem)

It is one call, in which an expert is read once for up to four rows. With LoRA each slot is a token of its own: what
factors of gate and up add to h goes in with it, those of down are added to its row afterwards, from the activations
that the core leaves behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.backend import RowsApart
from amoeba.backends.low_rank import Rows
from amoeba.backends.rowwise import sum_slots
from amoeba.cpu.core import load_core
from amoeba.cpu.pointers import CPU, has_lines
from amoeba.problem import Problem


def serves(problem: Problem, most_rows: int) -> bool:
    """most_rows: where sorting becomes the faster way."""
    return (
        has_lines(problem.weights.gate_up_EJH) and has_lines(problem.weights.down_EHI) and 0 < problem.rows <= most_rows
    )


def decode(problem: Problem) -> Tensor:
    if problem.lora is None:
        return _as_weights(_decode(problem, None)[0], problem)
    slots = torch.arange(problem.rows, dtype=torch.int64, device=CPU)
    return combine(decode_rows(problem.of_slots(slots)), problem)


def combine(rows_NH: Tensor, problem: Problem) -> Tensor:
    """Of a row for each slot t·K + k; there may be more."""
    if rows_NH.shape[0] == problem.rows:
        rows_NH = torch.cat((rows_NH, rows_NH.new_empty(1, rows_NH.shape[1])))  # the spare one
    return _as_weights(sum_slots(rows_NH, problem.expert_TK, problem.weights.num_experts), problem)


def decode_rows(problem: Problem) -> Tensor:
    """y in fp32, of a problem with one expert per token."""
    if problem.lora is None:
        return _decode(problem, None)[0]
    x_NH, expert_N, weight_N1 = _plain(problem.x_TH), problem.expert_TK.flatten(), _plain(problem.weight_TK)
    owned_N = (expert_N >= 0) & (expert_N < problem.weights.num_experts)
    products = _SlotProducts(expert_N.where(owned_N, 0), problem.weights.dtype)
    added_NJ = torch.zeros((problem.rows, problem.weights.gate_up_EJH.shape[1]), dtype=torch.float32, device=CPU)
    low_rank.add_to_h(problem, products, x_NH, added_NJ)
    y_NH, a_NI = _decode(problem._replace(x_TH=x_NH), added_NJ)
    assert a_NI is not None  # as something was added
    share_NH = torch.zeros_like(y_NH)
    low_rank.add_to_y(problem, products, a_NI, share_NH)
    y_NH += (share_NH * weight_N1).where(owned_N[:, None], 0)
    return y_NH


def _decode(problem: Problem, added_NJ: Tensor | None) -> tuple[Tensor, Tensor | None]:
    expert_TK, weights = problem.expert_TK, problem.weights
    if expert_TK.dtype != torch.int64 or not expert_TK.is_contiguous():
        expert_TK = expert_TK.to(torch.int64).contiguous()
    b1, b2 = (None if b is None else _plain(b) for b in (weights.gate_up_bias_EJ, weights.down_bias_EH))
    given = weights.gate_up_EJH, weights.down_EHI, b1, b2, weights.activation
    return load_core().decode(_plain(problem.x_TH), expert_TK, _plain(problem.weight_TK), *given, added_NJ)


def _as_weights(y_TH: Tensor, problem: Problem) -> Tensor:
    dtype = problem.weights.down_EHI.dtype
    return y_TH if y_TH.dtype == dtype else y_TH.to(dtype)


class _SlotProducts:
    """Products of rows in the order of the slots, each with the thin matrix of its expert, which is copied for it, and
    rounded to the dtype of the weights."""

    def __init__(self, expert_N: Tensor, dtype: torch.dtype) -> None:
        self.expert_N, self.dtype = expert_N, dtype

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        assert isinstance(rows, Tensor)
        return torch.bmm(rows.unsqueeze(1), self._of_slots(matrix_EIO)).squeeze(1)

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        out_NO += self.multiply(rows_NI, matrix_EIO)

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        raise AssertionError("decoding has no gradients")

    def _of_slots(self, matrix_EIO: Tensor) -> Tensor:
        # whole rows are copied, so the dimension that is contiguous has to be the last one
        if matrix_EIO.stride(2) == 1:
            return matrix_EIO.index_select(0, self.expert_N).to(self.dtype).float()
        return matrix_EIO.mT.index_select(0, self.expert_N).to(self.dtype).float().mT


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor if plain else tensor.to(torch.float32).contiguous()


APART = RowsApart(decode, lambda problem, save: (decode_rows(problem), None), combine)
