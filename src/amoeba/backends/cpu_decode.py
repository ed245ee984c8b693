"""Few tokens without gradients, by the C++ core: weights are read where they lie, nothing is sorted.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    if cpu_decode.serves(problem, most_rows): y_TH = cpu_decode.decode(problem)

It is one call, in which an expert is read once for up to four rows. What factors of gate and up add to h goes in with
it; those of down are added to y afterwards, from the activations that the core leaves behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.backend import RowsApart
from amoeba.backends.low_rank import Rows
from amoeba.backends.read_quantised import scaled_codes
from amoeba.core.problem import Problem, Save
from amoeba.cpu.core import load_core
from amoeba.cpu.pointers import CPU, has_lines
from amoeba.cpu.weights import ScaledCodes
from amoeba.precision.quantised_experts import ReadInBlocks


def serves(problem: Problem, most_rows: int) -> bool:
    """most_rows: where sorting becomes the faster way."""
    if not 0 < problem.rows <= most_rows:
        return False
    matrices = problem.weights.gate_up_EJH, problem.weights.down_EHI
    return all(isinstance(matrix, ReadInBlocks) or has_lines(matrix) for matrix in matrices)


def decode(problem: Problem) -> Tensor:
    owned_TK = _owned(problem)
    return _finish(problem, *_decode(problem, owned_TK), owned_TK)


def _decode(problem: Problem, owned_TK: Tensor | None, key_TK: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """y (T, H) without what factors of down add, and that for each slot (N, H), without its weight; all in fp32."""
    x_TH, weight_TK, expert_TK = _plain(problem.x_TH), _plain(problem.weight_TK), _int64(problem.expert_TK)
    b1, b2 = (None if b is None else _plain(b) for b in (problem.weights.gate_up_bias_EJ, problem.weights.down_bias_EH))
    gate_up, down = (_as_read(matrix) for matrix in (problem.weights.gate_up_EJH, problem.weights.down_EHI))
    weights = gate_up, down, b1, b2, problem.weights.activation
    if owned_TK is None:
        return load_core().decode(x_TH, expert_TK, weight_TK, *weights, None, key_TK)
    products = _SlotProducts(expert_TK.where(owned_TK, 0).flatten(), problem.weights.down_EHI.dtype)
    slots, width = expert_TK.numel(), problem.weights.gate_up_EJH.shape[1]
    added_NJ = torch.zeros((slots, width), dtype=torch.float32, device=CPU)
    low_rank.add_to_h(problem, products, x_TH.repeat_interleave(expert_TK.shape[1], 0), added_NJ)
    y_TH, a_NI = load_core().decode(x_TH, expert_TK, weight_TK, *weights, added_NJ)
    assert a_NI is not None  # as something was added
    share_NH = torch.zeros((slots, y_TH.shape[1]), dtype=torch.float32, device=CPU)
    low_rank.add_to_y(problem, products, a_NI, share_NH)
    return y_TH, share_NH


def _finish(problem: Problem, y_TH: Tensor, share_NH: Tensor | None, owned_TK: Tensor | None) -> Tensor:
    if share_NH is not None and owned_TK is not None:
        share_TKH = share_NH.view(*problem.expert_TK.shape, -1) * _plain(problem.weight_TK)[..., None]
        y_TH += share_TKH.where(owned_TK[..., None], 0).sum(1)
    dtype = problem.weights.down_EHI.dtype
    return y_TH if y_TH.dtype == dtype else y_TH.to(dtype)


def _rows(problem: Problem, save: Save) -> tuple[Tensor, None]:
    """Without their weights; and separately what LoRA adds to each."""
    y_NH, share_NH = _decode(problem._replace(weight_TK=torch.ones_like(problem.weight_TK)), _owned(problem))
    return (y_NH if share_NH is None else torch.cat((y_NH, share_NH), 1)), None


def _combine(rows_NH: Tensor, problem: Problem) -> Tensor:
    hidden, rows_NH = problem.x_TH.shape[1], rows_NH[: problem.rows]
    given = _int64(problem.expert_TK), _plain(problem.weight_TK), problem.weights.num_experts
    y_TH = load_core().sum_decoded(rows_NH[:, :hidden], *given)
    return _finish(problem, y_TH, None if problem.lora is None else rows_NH[:, hidden:], _owned(problem))


def _decode_slots(problem: Problem, expert_TK: Tensor) -> Tensor:
    """The core adds up in the order of the experts' numbers."""
    return _finish(problem, *_decode(problem, None, _int64(expert_TK)), None)


APART = RowsApart(_rows, _combine, _decode_slots)


def _owned(problem: Problem) -> Tensor | None:
    """Which slots have an expert here; None if that is not needed, since torch adds nothing to them."""
    if problem.lora is None:
        return None
    return (problem.expert_TK >= 0) & (problem.expert_TK < problem.weights.num_experts)


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


def _as_read(matrix: Tensor | ReadInBlocks) -> Tensor | ScaledCodes:
    return scaled_codes(matrix) if isinstance(matrix, ReadInBlocks) else matrix


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor if plain else tensor.to(torch.float32).contiguous()


def _int64(expert_TK: Tensor) -> Tensor:
    plain = expert_TK.dtype == torch.int64 and expert_TK.is_contiguous()
    return expert_TK if plain else expert_TK.to(torch.int64).contiguous()
