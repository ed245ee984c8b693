"""What computes with slots on a GPU: the kernels of the same experts resident, plain numbers or codes.

    kernels = kernels_of(weights.slots)
    y_TH = kernels.decode(problem_in_slots, Like(tokens, experts))
    y_TH = kernels.sorted(problem_in_slots)

Importing this file does not import Triton.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from amoeba.backends import quantised_triton, triton
from amoeba.core.problem import Gradients, Needs, Problem
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.store.layers import StoredExperts

if TYPE_CHECKING:
    from amoeba.kernels.decode import Like


class SlotKernels(ABC):
    @abstractmethod
    def decodes(self, problem: Problem) -> bool:
        """Whether a pass without gradients is one of few tokens, of which the chosen experts alone are needed."""

    @abstractmethod
    def decodes_all(self, problem: Problem) -> bool:
        """Whether one of more tokens is decoded by expert, too, of which nearly all are needed."""

    def decode(self, problem: Problem, like: Like) -> Tensor:
        from amoeba.kernels.decode import decode

        return decode(problem, like=like)

    def is_by_slot(self, problem: Problem, like: Like) -> bool:
        from amoeba.kernels.decode import is_by_slot

        return is_by_slot(problem, like)

    def decode_rows(self, problem: Problem, y_NH: Tensor, like: Like) -> None:
        from amoeba.kernels.decode import decode_rows

        decode_rows(problem, y_NH, like)

    @abstractmethod
    def sorted(self, problem: Problem) -> Tensor:
        """y_TH, the sorted way, however few rows there are."""

    @abstractmethod
    def backward(self, problem: Problem, dy_TH: Tensor, needs: Needs) -> Gradients: ...


class _PlainKernels(SlotKernels):
    def decodes(self, problem: Problem) -> bool:
        return problem.x_TH.shape[0] <= triton.DECODE_TOKENS

    def decodes_all(self, problem: Problem) -> bool:
        return False

    def sorted(self, problem: Problem) -> Tensor:
        return triton.BACKEND.forward_sorted(problem, "nothing")[0]

    def backward(self, problem: Problem, dy_TH: Tensor, needs: Needs) -> Gradients:
        return triton.BACKEND.backward(problem, None, dy_TH, needs)


class _CodeKernels(SlotKernels):
    def decodes(self, problem: Problem) -> bool:
        return quantised_triton.is_few(problem)

    def decodes_all(self, problem: Problem) -> bool:
        return quantised_triton.is_few_of_each(problem, problem.weights.num_experts)

    def sorted(self, problem: Problem) -> Tensor:
        return quantised_triton.BACKEND.forward_sorted(problem, "nothing")[0]

    def backward(self, problem: Problem, dy_TH: Tensor, needs: Needs) -> Gradients:
        return quantised_triton.BACKEND.backward(problem, None, dy_TH, needs)


_PLAIN, _CODES = _PlainKernels(), _CodeKernels()


def kernels_of(slots: StoredExperts) -> SlotKernels:
    return _CODES if isinstance(slots, QuantisedExperts) else _PLAIN
