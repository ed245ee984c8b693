"""The LoRA side of one pass over `TritonRows`: what it adds to the large products, and the gradients of its factors.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
R LoRA rank · P ranks, joined and padded

    low_rank = LowRank(rows, lora)
    low_rank.add_to_h(), low_rank.add_to_y(a_NI)                                    # forward
    low_rank.add_to_da(dy), low_rank.add_to_dx(dh_NJ)                               # backward, in this order
    low_rank.down_gradients(dy, scaled_a_NI, needs), low_rank.up_gradients(dh_NJ, needs)

The mathematics is that of `amoeba.backends.low_rank`. A thin product gives each row its few numbers, and the large one
after it takes them as more of its depth (`Addend`), so that nothing of the size of the rows is written or read for
them. c (x Aᵀ) and c (a A_dᵀ) are saved by forward, N x P each. So backward reads dy once for dy B_d and the gradient of
B_d, and dh once for dh B and the gradients of B (`lora_backward`); on Hopper the pass that makes dh gives these, and
the gradient of A_d, which needs a (`activation_backward`). Where gate and up share their A, its ranks are there once:
one x Aᵀ for both, one dh B that is the sum of theirs, and one gradient of A.
"""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.sorted_rows import ActivationGradients
from amoeba.core.problem import Needs, Problem
from amoeba.core.weights import LoraFactors
from amoeba.kernels import grouped_gemm
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.lora.join_factors import Pair, join_factors
from amoeba.kernels.lora.lora_backward import Sums, lora_backward, widest_rank


class RowsOfPass(Protocol):
    """What the LoRA side asks of the pass it belongs to (`TritonRows`)."""

    problem: Problem
    order_N: Tensor
    offs_E: Tensor

    @property
    def x(self) -> ByToken: ...

    @property
    def top_k(self) -> int: ...

    def new_rows(self, width: int) -> Tensor: ...

    def factor_gradient(self, grad: Rows, rows: Rows, gradient: Tensor, more: Tensor | None = None) -> Tensor: ...


class LowRank:
    def __init__(
        self, rows: RowsOfPass, lora: LoraFactors, low_NP: Tensor | None = None, low_down_NP: Tensor | None = None
    ) -> None:
        """low_NP, low_down_NP: where forward saved them."""
        self._rows = weakref.ref(rows)  # they have this one: in a circle, a pass's tensors would outlive it
        self.lora = lora
        self._low_NP, self._low_down_NP = low_NP, low_down_NP
        # of backward: thin products, and sums for gradients, each made by the step before the first that reads it
        self._dlow_NP: Tensor | None = None
        self._dlow_down_NP: Tensor | None = None
        self._db: Sums | None = None
        self._db_down: Sums | None = None
        self._da_down: Sums | None = None

    @property
    def rows(self) -> RowsOfPass:
        rows = self._rows()
        assert rows is not None
        return rows

    @cached_property
    def _pairs(self) -> tuple[Pair | None, Pair | None]:
        problem = self.rows.problem
        return join_factors(self.lora, problem.weights.activation, problem.x_TH.dtype)

    def saved(self) -> tuple[Tensor | None, Tensor | None]:
        """c (x Aᵀ) and c (a A_dᵀ), for the next of this kind."""
        if self.rows.problem.rows == 0:  # nothing was multiplied
            up, down = (None if pair is None else self.rows.new_rows(pair.a_EPI.shape[1]) for pair in self._pairs)
            return up, down
        return self._low_NP, self._low_down_NP

    def add_to_h(self) -> Addend | None:
        up, _ = self._pairs
        if up is None:
            return None
        self._low_NP = self._thin(self.rows.x, up.a_EPI.mT)
        return Addend(self._low_NP, up.b_EOP, self._up_rank)

    def add_to_y(self, a_NI: Tensor) -> Addend | None:
        _, down = self._pairs
        if down is None:
            return None
        self._low_down_NP = self._thin(a_NI, down.a_EPI.mT)
        return Addend(self._low_down_NP, down.b_EOP, self._down_rank)

    def add_to_da(self, dy_TH: Tensor) -> Addend | None:
        _, down = self._pairs
        if down is None:
            return None
        assert self._low_down_NP is not None
        if self._down_rank > widest_rank(dy_TH.dtype):
            self._dlow_down_NP = self._thin(ByToken(dy_TH), down.b_EOP)
        else:
            rows = self.rows
            self._dlow_down_NP, self._db_down = lora_backward(
                dy_TH,
                down.b_EOP,
                self._low_down_NP,
                rows.offs_E,
                rank=self._down_rank,
                scaling=self.lora.scaling,
                order_N=rows.order_N,
                weight_TK=rows.problem.weight_TK,
                top_k=rows.top_k,
            )
        return Addend(self._dlow_down_NP, down.a_EPI.mT, self._down_rank)

    def activation_backward(
        self, da_NI: Tensor, h_NJ: Tensor, dh_NJ: Tensor, table: Tensor, needs: Needs
    ) -> ActivationGradients | None:
        """On Hopper, with all that LoRA makes of dh and a; None where that kernel does not serve, or others read a."""
        from amoeba.kernels.hopper.lora_activation_backward import Down, Up, activate_backward, serves

        rows, (up, _) = self.rows, self._pairs
        experts, activation = rows.offs_E.shape[0], rows.problem.weights.activation
        rank = max(self._up_rank, self._down_rank)
        if up is None or self._db_down is None or needs.down or not needs.down_lora_a:
            return None
        if not serves(activation, da_NI.shape[0], experts, da_NI.shape[1], rank):
            return None
        assert self._low_NP is not None and self._dlow_down_NP is not None
        gate, of_up = (next((p for p in self._parts if p.name == name), None) for name in ("gate", "up"))
        found = activate_backward(
            da_NI,
            h_NJ,
            rows.problem.weight_TK,
            rows.order_N,
            activation,
            dh_NJ,
            rows.offs_E,
            table,
            up=Up(up.b_EOP, self._low_NP, _ranks(gate), _ranks(of_up), self.lora.scaling),
            down=Down(self._dlow_down_NP, self._down_rank),
        )
        self._dlow_NP, self._db, self._da_down = found.dlow_NP, found.db, found.da_down
        return ActivationGradients(dh_NJ, None, found.ds_N, None)

    def down_gradients(self, dy: Rows, scaled_a_NI: Tensor | None, needs: Needs) -> dict[str, Tensor]:
        """By name, those that are needed."""
        found: dict[str, Tensor] = {}
        a_ERI, b_EHR, rank = self.lora.down_lora_a, self.lora.down_lora_b, self._down_rank
        if a_ERI is not None and needs.down_lora_a:
            gradient = torch.empty_like(a_ERI)
            if self._da_down is not None:
                self._da_down.write(gradient.mT)
            else:
                assert self._dlow_down_NP is not None and scaled_a_NI is not None
                self.rows.factor_gradient(self._dlow_down_NP[:, :rank], scaled_a_NI, gradient)
            found["down_lora_a"] = gradient
        if b_EHR is not None and needs.down_lora_b:
            gradient = torch.empty_like(b_EHR)
            if self._db_down is not None:
                found["down_lora_b"] = self._db_down.write(gradient)
            else:
                _, down = self._pairs
                assert down is not None and scaled_a_NI is not None
                low_NP = self._thin(scaled_a_NI, down.a_EPI.mT)
                found["down_lora_b"] = self.rows.factor_gradient(dy, low_NP[:, :rank], gradient)
        return found

    def add_to_dx(self, dh_NJ: Tensor) -> Addend | None:
        up, _ = self._pairs
        if up is None:
            return None
        rank = self._up_rank
        if self._dlow_NP is not None:
            pass  # it came with dh
        elif rank > widest_rank(dh_NJ.dtype):
            self._dlow_NP = self._thin(dh_NJ, up.b_EOP)
        else:
            assert self._low_NP is not None
            self._dlow_NP, self._db = lora_backward(
                dh_NJ, up.b_EOP, self._low_NP, self.rows.offs_E, rank=rank, scaling=self.lora.scaling
            )
        return Addend(self._dlow_NP, up.a_EPI.mT, rank)

    def up_gradients(self, dh_NJ: Tensor, needs: Needs) -> dict[str, Tensor]:
        """Of gate's and up's factors by name, those that are needed; of an A that they share all of it, as gate's."""
        found: dict[str, Tensor] = {}
        parts, dlow_NP, low_NP = self._parts, self._dlow_NP, self._low_NP
        if not parts:
            return found
        assert dlow_NP is not None and low_NP is not None
        if needs.gate_lora_a or needs.up_lora_a:
            own_a = parts[:1] if self.lora.shares_a else parts
            gradients = [torch.empty_like(part.a) for part in own_a]
            self.rows.factor_gradient(dlow_NP[:, : self._up_rank], self.rows.x, *gradients)
            found |= {f"{part.name}_lora_a": each for part, each in zip(own_a, gradients, strict=True)}
        for part in parts:
            gradient, ranks = torch.empty_like(part.b), _ranks(part)
            if not getattr(needs, f"{part.name}_lora_b"):
                continue
            if self._db is not None:
                self._db.write(gradient, first=part.first, step=part.step, rank=part.first_rank)
            else:
                last = part.first + part.step * gradient.shape[1]
                self.rows.factor_gradient(dh_NJ[:, part.first : last : part.step], low_NP[:, ranks], gradient)
            found[f"{part.name}_lora_b"] = gradient
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
            ranks = 0 if lora.shares_a else ranks
            first, step = 0, 1
            if activation.gated:
                first, step = (place, 2) if activation.interleaved else (place * intermediate, 1)
            found.append(_Part(name, a, b, first, step, ranks, rank))
            ranks += rank
        return found

    @property
    def _up_rank(self) -> int:
        return max((part.first_rank + part.rank for part in self._parts), default=0)

    @property
    def _down_rank(self) -> int:
        return 0 if self.lora.down_lora_a is None else self.lora.down_lora_a.shape[1]

    def _thin(self, rows: Rows, factor_EIP: Tensor) -> Tensor:
        """c · rows · factor."""
        sorted_rows, of = self.rows, rows.rows_TW if isinstance(rows, ByToken) else rows
        return grouped_gemm.multiply_rows(
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
    first: int  # column of h, and how far from one to the next
    step: int
    first_rank: int  # of the joined ones
    rank: int


def _ranks(part: _Part | None) -> slice:
    """Of the joined ones."""
    return slice(0, 0) if part is None else slice(part.first_rank, part.first_rank + part.rank)
