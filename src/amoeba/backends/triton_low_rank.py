"""The LoRA side of one pass over `TritonRows`: what it adds to the large products, and the gradients of its factors.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
R LoRA rank · P ranks, joined and padded

    low_rank = LowRank(rows, lora)
    low_rank.add_to_h(), low_rank.add_to_y(a_NI)                                    # forward
    low_rank.add_to_da(dy), low_rank.activate_backward(...), low_rank.add_to_dx()   # backward, in this order
    low_rank.down_gradients(...), low_rank.up_gradients(...)

The mathematics is that of `amoeba.backends.low_rank`. A thin product gives each row its few numbers, and the large one
after it takes them as more of its depth (`Addend`), so that nothing of the size of the rows is written or read for
them. c (x Aᵀ) is saved by forward, N x P; the thin products of dh and of s·a come from the pass that has them in
registers.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amoeba.backends.low_rank import ByToken, Rows
from amoeba.kernels import grouped_product
from amoeba.kernels.activate import activate_backward
from amoeba.kernels.activate_low_rank import WIDEST_RANK, activate_backward_low_rank
from amoeba.kernels.addend import Addend
from amoeba.kernels.join_factors import Pair, join_factors
from amoeba.kernels.launch import next_power_of_2
from amoeba.problem import Needs
from amoeba.weights import LoraFactors

if TYPE_CHECKING:
    from amoeba.backends.triton_rows import TritonRows


class LowRank:
    def __init__(self, rows: TritonRows, lora: LoraFactors, low_NP: Tensor | None = None) -> None:
        """low_NP: c (x Aᵀ), where forward saved it."""
        self.rows, self.lora, self._saved_low_NP = rows, lora, low_NP
        # of backward, each made by the step before the first that reads it
        self._dlow_down_NP: Tensor | None = None
        self._low_down_NR: Tensor | None = None
        self._dlow_NP: Tensor | None = None

    @cached_property
    def _pairs(self) -> tuple[Pair | None, Pair | None]:
        problem = self.rows.problem
        return join_factors(self.lora, problem.weights.activation, problem.x_TH.dtype)

    @cached_property
    def low_NP(self) -> Tensor | None:
        """c (x Aᵀ) of gate and up."""
        if self._saved_low_NP is not None:
            return self._saved_low_NP
        up, _ = self._pairs
        return None if up is None else self._thin(self.rows.x, up.a_EPI.mT)

    def add_to_h(self) -> Addend | None:
        up, low_NP = self._pairs[0], self.low_NP
        return None if up is None or low_NP is None else Addend(low_NP, up.b_EOP)

    def add_to_y(self, a_NI: Tensor) -> Addend | None:
        _, down = self._pairs
        return None if down is None else Addend(self._thin(a_NI, down.a_EPI.mT), down.b_EOP)

    def add_to_da(self, dy: Rows) -> Addend | None:
        _, down = self._pairs
        if down is None:
            return None
        self._dlow_down_NP = self._thin(dy, down.b_EOP)
        return Addend(self._dlow_down_NP, down.a_EPI.mT)

    def activate_backward(self, da_NI: Tensor, h_NJ: Tensor, dh_NJ: Tensor, scaled_a_NI: Tensor | None) -> Tensor:
        """dh and s·a as `kernels.activate.activate_backward` writes them; ds."""
        problem, rows, (up, down) = self.rows.problem, self.rows, self._pairs
        activation = problem.weights.activation
        of_rows = (da_NI, h_NJ, problem.weight_TK, rows.order_N, activation, dh_NJ, scaled_a_NI, rows.offs_E)
        up_rank, down_rank = sum(part.rank for part in self._parts), next_power_of_2(self._down_rank)
        if max(up_rank, down_rank) > WIDEST_RANK:
            ds_N = activate_backward(*of_rows)
            if up is not None:
                self._dlow_NP = self._thin(dh_NJ, up.b_EOP)
            if down is not None and scaled_a_NI is not None:
                self._low_down_NR = self._thin(scaled_a_NI, down.a_EPI.mT)
            return ds_N
        if up is not None:
            self._dlow_NP = rows.new_rows(up.a_EPI.shape[1])
        if down is not None and scaled_a_NI is not None:
            self._low_down_NR = rows.new_rows(max(16, down_rank))
        return activate_backward_low_rank(
            *of_rows,
            scaling=self.lora.scaling,
            b_EJP=None if up is None else up.b_EOP,
            dlow_NP=self._dlow_NP,
            up_rank=up_rank,
            a_EPI=None if down is None else down.a_EPI,
            low_down_NR=self._low_down_NR,
        )

    def down_gradients(self, dy: Rows, scaled_a_NI: Tensor | None, needs: Needs) -> dict[str, Tensor]:
        """By name, those that are needed."""
        found: dict[str, Tensor] = {}
        a_ERI, b_EHR, rank = self.lora.down_lora_a, self.lora.down_lora_b, self._down_rank
        if a_ERI is not None and needs.down_lora_a:
            assert self._dlow_down_NP is not None and scaled_a_NI is not None
            of_rank = self._dlow_down_NP[:, :rank]
            found["down_lora_a"] = self.rows.factor_gradient(of_rank, scaled_a_NI, torch.empty_like(a_ERI))
        if b_EHR is not None and needs.down_lora_b:
            assert self._low_down_NR is not None
            of_rank = self._low_down_NR[:, :rank]
            found["down_lora_b"] = self.rows.factor_gradient(dy, of_rank, torch.empty_like(b_EHR))
        return found

    def add_to_dx(self) -> Addend | None:
        up, _ = self._pairs
        return None if up is None or self._dlow_NP is None else Addend(self._dlow_NP, up.a_EPI.mT)

    def up_gradients(self, dh_NJ: Tensor, needs: Needs) -> dict[str, Tensor]:
        """Of gate's and up's factors by name, those that are needed."""
        found: dict[str, Tensor] = {}
        parts, dlow_NP, low_NP = self._parts, self._dlow_NP, self.low_NP
        if not parts:
            return found
        assert dlow_NP is not None and low_NP is not None
        if needs.gate_lora_a or needs.up_lora_a:
            gradients = [torch.empty_like(part.a) for part in parts]
            self.rows.factor_gradient(dlow_NP[:, : sum(part.rank for part in parts)], self.rows.x, *gradients)
            found |= {f"{part.name}_lora_a": each for part, each in zip(parts, gradients, strict=True)}
        for part in parts:
            if getattr(needs, f"{part.name}_lora_b"):
                dpart, low_NR = dh_NJ[:, part.columns], low_NP[:, part.ranks]
                found[f"{part.name}_lora_b"] = self.rows.factor_gradient(dpart, low_NR, torch.empty_like(part.b))
        return {name: gradient for name, gradient in found.items() if getattr(needs, name)}

    @cached_property
    def _parts(self) -> list[_Part]:
        """Gate and up, where they have factors."""
        lora, activation = self.lora, self.rows.problem.weights.activation
        found: list[_Part] = []
        ranks = 0
        factors = ("gate", lora.gate_lora_a, lora.gate_lora_b), ("up", lora.up_lora_a, lora.up_lora_b)
        for place, (name, a, b) in enumerate(factors):
            if a is None or b is None:
                continue
            rank, intermediate = a.shape[1], b.shape[1]
            if not activation.gated:
                columns = slice(None)
            elif activation.interleaved:
                columns = slice(place, None, 2)
            else:
                columns = slice(place * intermediate, (place + 1) * intermediate)
            found.append(_Part(name, a, b, columns, slice(ranks, ranks + rank), rank))
            ranks += rank
        return found

    @property
    def _down_rank(self) -> int:
        return 0 if self.lora.down_lora_a is None else self.lora.down_lora_a.shape[1]

    def _thin(self, rows: Rows, factor_EIP: Tensor) -> Tensor:
        """c · rows · factor."""
        sorted_rows, of = self.rows, rows.rows_TW if isinstance(rows, ByToken) else rows
        return grouped_product.multiply_rows(
            of,
            factor_EIP,
            sorted_rows.offs_E,
            sorted_rows.new_rows(factor_EIP.shape[2]),
            order_N=sorted_rows.order_N if isinstance(rows, ByToken) else None,
            top_k=sorted_rows.top_k,
            scale=self.lora.scaling,
        )


class _Part(NamedTuple):
    name: str
    a: Tensor
    b: Tensor
    columns: slice  # of h
    ranks: slice  # of the joined ones
    rank: int
