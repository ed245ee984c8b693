"""Few tokens without gradients, by the C++ core: weights are read where they lie, nothing is sorted.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    if cpu_decode.serves(problem, most_rows): y_TH = cpu_decode.decode(problem)

Without factors it is one call, in which an expert is read once for up to four rows. With factors it is one call per
token: what those of gate and up add to h is the same for all rows of a token at one expert, so it goes in as that
expert's bias. Those of down are added to y afterwards, from the activations that the core leaves behind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.backends import low_rank
from amoeba.backends.low_rank import Rows
from amoeba.backends.operator import Problem
from amoeba.cpu.core import load_core

# Up to this many tokens with factors go one by one; an expert that several of them meet is read several times. Against
# sorting them (fp32) and the fused passes, which pack all factors (bf16), ms at 1/4/8/16 tokens, H=2048 I=768 E=64 K=8
# R=16: fp32 15/53/117/240 against 33/91/173/211, bf16 9.5/35/69 against 32/50/71; without factors 12/37/64/93 and
# 7.9/25/40 (2-core Xeon with AMX, others computing beside, 2026-11-15).
DECODE_TOKENS_WITH_LORA = 8


def serves(problem: Problem, most_rows: int) -> bool:
    """most_rows: where sorting becomes the faster way, without factors."""
    contiguous = problem.gate_up_EJH.stride(2) == problem.down_EHI.stride(2) == 1
    few = problem.lora is None or problem.x_TH.shape[0] <= DECODE_TOKENS_WITH_LORA
    return contiguous and few and 0 < problem.rows <= most_rows


def decode(problem: Problem) -> Tensor:
    x_TH, weight_TK, expert_TK = _plain(problem.x_TH), _plain(problem.weight_TK), problem.expert_TK
    if expert_TK.dtype != torch.int64 or not expert_TK.is_contiguous():
        expert_TK = expert_TK.to(torch.int64).contiguous()
    gate_up_bias, down_bias = (
        None if bias is None else _plain(bias) for bias in (problem.gate_up_bias_EJ, problem.down_bias_EH)
    )
    inputs = _Inputs(x_TH, expert_TK, weight_TK, gate_up_bias, down_bias)
    y_TH = _decode(problem, inputs)[0] if problem.lora is None else _decode_with_lora(problem, inputs)
    return y_TH if y_TH.dtype == problem.down_EHI.dtype else y_TH.to(problem.down_EHI.dtype)


class _Inputs(NamedTuple):
    """All but the ids in fp32, contiguous."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    gate_up_bias_EJ: Tensor | None
    down_bias_EH: Tensor | None


def _decode(problem: Problem, given: _Inputs) -> tuple[Tensor, Tensor]:
    """y (T, H), and the activations (N, I), of which the rows of nobody's slots hold anything."""
    weights, biases = (problem.gate_up_EJH, problem.down_EHI), given[3:]
    return load_core().decode(*given[:3], *weights, *biases, problem.activation)


def _decode_with_lora(problem: Problem, given: _Inputs) -> Tensor:
    num_experts, width, _ = problem.gate_up_EJH.shape
    tokens, top_k = given.expert_TK.shape
    owned_TK = (given.expert_TK >= 0) & (given.expert_TK < num_experts)
    id_TK = given.expert_TK.where(owned_TK, 0)
    products = _SlotProducts(id_TK.flatten())
    bias_EJ = given.gate_up_bias_EJ
    added_NJ = torch.zeros(tokens * top_k, width) if bias_EJ is None else bias_EJ[id_TK.flatten()]
    low_rank.add_to_h(problem, products, given.x_TH.repeat_interleave(top_k, 0), added_NJ)

    table_EJ = torch.empty(num_experts, width)  # a call reads the rows of its token's experts alone
    found = []
    for t in range(tokens):
        table_EJ.index_copy_(0, id_TK[t], added_NJ[t * top_k : (t + 1) * top_k])
        x, expert, weight = (tensor[t : t + 1] for tensor in given[:3])
        found.append(_decode(problem, _Inputs(x, expert, weight, table_EJ, given.down_bias_EH)))
    y_TH, a_NI = (torch.cat(parts) for parts in zip(*found, strict=True))
    y_NH = torch.zeros(tokens * top_k, y_TH.shape[1])
    low_rank.add_to_y(problem, products, a_NI, y_NH)
    share_TKH = (y_NH.view(tokens, top_k, -1) * given.weight_TK[..., None]).where(owned_TK[..., None], 0)
    return y_TH.add_(share_TKH.sum(1))


class _SlotProducts:
    """Products of rows in the order of the slots, each with the thin matrix of its expert, which is copied for it."""

    def __init__(self, expert_N: Tensor) -> None:
        self.expert_N = expert_N

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
            return matrix_EIO.index_select(0, self.expert_N).float()
        return matrix_EIO.mT.index_select(0, self.expert_N).float().mT


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return tensor if plain else tensor.to(torch.float32).contiguous()
