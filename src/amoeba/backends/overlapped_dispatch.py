"""Sorted rows of which some are under way when a pass begins: own ones are computed meanwhile. On Hopper.

N = T·K routed rows · H hidden · I intermediate · J = 2I or I

The products walk over lists of tiles, so they run twice: over tiles of own rows alone, and over all others (a tile with
rows of both is one of these). Own rows are read where they lie, if they are still being copied to where all will be.
Forward up: own tiles, wait, the others. Down: the others, whose sums then leave, and own tiles while they travel.
Backward begins as up does, with dy; dx leaves ahead of the last weight gradient. These are the tiles of a pass without
travel, and weight gradients see all rows at once in their order: every bit is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.triton_rows import HopperRows, TritonRows, sorted_maps, why_not_hopper, with_plain_rows
from amoeba.core.problem import OverlappedDispatch, Problem, Saved
from amoeba.kernels.combine import combine
from amoeba.kernels.lora.epilogue import Addend


def why_not_overlapped(problem: Problem) -> str | None:
    """The reason why all rows are waited for first."""
    if problem.lora is not None:
        return "LoRA needs all rows before the products"
    weights = problem.weights
    if weights.activation.interleaved or weights.gate_up_EJH.stride(2) != 1:
        return "the up projection and its activation are two passes"
    return why_not_hopper(problem)


class OverlappedRows(HopperRows):
    _part: Tensor | None = None  # the tiles of the product that is to be launched; None: all

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> TritonRows:
        problem = with_plain_rows(problem)
        if why_not_overlapped(problem) is None:  # rows came into memory of our own, in one piece
            return cls(problem, *(saved[1:] if saved else sorted_maps(problem)))
        assert problem.overlapped is not None
        problem.overlapped.wait()
        return TritonRows.dispatch(problem, saved)

    def _multiply_x_and_activate(self, h_NJ: Tensor | None, a_NI: Tensor, addend: Addend | None) -> Tensor | None:
        for part in self._as_rows_come():
            self._part = part
            super()._multiply_x_and_activate(h_NJ, a_NI, addend)
        self._part = None
        return h_NJ

    def _multiply_dy(self, dy_TH: Tensor, da_NI: Tensor, addend: Addend | None, scales_NB: Tensor | None) -> None:
        for part in self._as_rows_come():
            self._part = part
            super()._multiply_dy(dy_TH, da_NI, addend, scales_NB)
        self._part = None

    def _as_rows_come(self) -> Iterator[Tensor]:
        own, rest = self._parts
        yield own
        self._overlapped.wait()
        yield rest

    def _gathered(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        if isinstance(rows, ByToken) and self._part is not None and self._part is self._parts[0]:
            own_TH = self._overlapped.own_rows(rows.rows_TW)
            if own_TH is not None:
                return own_TH, self._order_of_own_N
        return super()._gathered(rows)

    @cached_property
    def _order_of_own_N(self) -> Tensor:
        """Of the tiles of own rows alone, whose slots are counted from the first own token; elsewhere it is nothing."""
        first = self._overlapped.own.start * self.top_k
        return self.order_N - first if first else self.order_N

    def overlapped_output(self, a_NI: Any) -> Tensor:
        problem, weights = self.problem, self.problem.weights
        y_NH = self.new_rows(weights.hidden)
        own, rest = self._parts
        if self._overlapped.straight:
            return self._straight(a_NI, y_NH)
        y_TH = torch.empty_like(problem.x_TH)
        tokens = self._overlapped.own
        for self._part, ranges in ((rest, (slice(0, tokens.start), slice(tokens.stop, None))), (own, (tokens,))):
            self._multiply(a_NI, weights.down_EHI, y_NH, bias_EO=weights.down_bias_EH)
            for each in ranges:
                slots_TK, weight_TK = self.slot_row_TK[each], problem.weight_TK[each]
                combine(y_NH, slots_TK, weight_TK, y_TH[each], sentinel=problem.rows)
            if self._part is rest:
                self._overlapped.leave(y_TH)
        self._part = None
        return y_TH

    def _straight(self, a_NI: Any, y_NH: Tensor) -> Tensor:
        weights, given = self.problem.weights, (y_NH, self.slot_row_TK, self.problem.weight_TK)
        own, rest = self._parts
        for self._part in (rest, own):
            self._multiply(a_NI, weights.down_EHI, y_NH, bias_EO=weights.down_bias_EH)
            if self._part is rest:
                self._overlapped.send_sums(*given)
        self._part = None
        return self._overlapped.add_sums(*given)

    @property
    def _overlapped(self) -> OverlappedDispatch:
        assert self.problem.overlapped is not None
        return self.problem.overlapped

    @property
    def table(self) -> Tensor:
        return self._all_tiles if self._part is None else self._part

    @property
    def product_table(self) -> Tensor:
        return self.table

    @property
    def block_m(self) -> int:
        from amoeba.kernels.hopper.gemm import BLOCK_M

        return BLOCK_M

    @property
    def whole_table(self) -> bool:
        return self._part is None

    @cached_property
    def _all_tiles(self) -> Tensor:
        from amoeba.kernels.hopper.gemm import tile_table

        return tile_table(self.offs_E, self.order_N.shape[0])

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        from amoeba.kernels.hopper.tile_order import split_table

        own = self._overlapped.own
        return split_table(self._all_tiles, self.order_N, own.start * self.top_k, own.stop * self.top_k)
