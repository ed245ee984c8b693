"""Rows under way while own ones are computed: what is read when, what leaves when, and every bit as without travel.

The products of Hopper are stood in for by torch, tile by tile as the lists say; the lists are the kernels' own.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from amoeba.backends import overlapped_dispatch, sorted_rows
from amoeba.backends.overlapped_dispatch import OverlappedRows
from amoeba.backends.triton_rows import HopperRows, with_plain_rows
from amoeba.core.problem import Needs, OverlappedDispatch, Problem, Saved
from amoeba.core.weights import ExpertWeights
from amoeba.kernels.combine import combine
from amoeba.kernels.hopper import gemm
from amoeba.kernels.hopper.tile_order import split_table
from amoeba.kernels.sort import sort_rows
from amoeba.proof.cases import SILU
from amoeba.proof.conformance import poisoned_memory
from selection import each_value_once, quick

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for kernels that a GPU has")
T, K, E, H, I = 220, 4, 2, 16, 8  # several tiles of each expert
OWN = slice(30, 200)


class Watched(OverlappedDispatch):
    """The others' rows of `coming` are NaN until they are waited for."""

    def __init__(self, coming: Tensor) -> None:
        self.own, self.coming, self.true = OWN, coming, coming.clone()
        self.left: dict[str, Tensor] = {}
        for part in (coming[: OWN.start], coming[OWN.stop :]):
            part.fill_(float("nan"))

    def wait(self) -> None:
        self.coming.copy_(self.true)

    def leave(self, rows_TH: Tensor, d_weight_TK: Tensor | None = None) -> None:
        assert not self.left
        self.left["rows"] = rows_TH.clone()
        if d_weight_TK is not None:
            self.left["d_weight"] = d_weight_TK.clone()


class Elsewhere(Watched):
    """Own rows are under way, too, and are read where they come from."""

    def __init__(self, coming: Tensor) -> None:
        super().__init__(coming)
        self.elsewhere = coming[OWN].clone()
        coming[OWN].fill_(float("nan"))
        self.came = False

    def wait(self) -> None:
        super().wait()
        self.elsewhere.fill_(float("nan"))
        self.came = True

    def own_rows(self, rows_TH: Tensor) -> Tensor | None:
        return self.elsewhere if rows_TH is self.coming and not self.came else None


class Straight(Watched):
    """Sums rows itself: those of the others' tokens first, while own ones are yet to come."""

    straight = True

    def send_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> None:
        assert not self.left
        self.left["rows"] = self._summed(rows_NH, slot_row_TK, weight_TK)

    def add_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
        return self._summed(rows_NH, slot_row_TK, weight_TK)

    def keep_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, d_weight_TK: Tensor | None) -> Tensor:
        assert d_weight_TK is not None
        self.left["d_weight"] = d_weight_TK.clone()
        return self._summed(rows_NH, slot_row_TK, None)

    def _summed(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
        return combine(rows_NH, slot_row_TK, weight_TK, torch.empty(T, H))


def tiles_of(table: Tensor) -> list[tuple[int, int, int]]:
    count = int(table[0])
    entries = table[4 : 4 + 4 * count].view(-1, 4).tolist()
    return [(expert, row, min(row + gemm.BLOCK_M, end)) for expert, row, end, _ in entries]


def multiply(rows: Tensor, matrix_EOI: Tensor, table: Tensor, out: Tensor, **options: Any) -> None:
    order_N, top_k = options.get("order_N"), options.get("top_k", 1)
    for expert, row, end in tiles_of(table):
        read = rows[row:end] if order_N is None else rows[order_N[row:end].long() // top_k]
        out[row:end] = read @ matrix_EOI[expert].mT


def up(x: Tensor, order_N: Tensor, top_k: int, gate_up: Tensor, table: Tensor, _: Any, a: Tensor, **options: Any):
    h = options["h_NJ"] if options["h_NJ"] is not None else x.new_empty(a.shape[0], gate_up.shape[1])
    multiply(x, gate_up, table, h, order_N=order_N, top_k=top_k)
    for _, row, end in tiles_of(table):
        gate, of_up = h[row:end].chunk(2, 1)
        a[row:end] = torch.nn.functional.silu(gate) * of_up


def weight_gradient(self: HopperRows, grad: Any, rows: Any, weight_EOI: Tensor) -> Tensor:
    return super(HopperRows, self).weight_gradient(grad, rows, weight_EOI)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "multiply", multiply)
    monkeypatch.setattr(gemm, "up", up)
    monkeypatch.setattr(HopperRows, "weight_gradient", weight_gradient)
    monkeypatch.setattr(overlapped_dispatch, "why_not_hopper", lambda problem: None)


def problem_of(seed: int = 0) -> tuple[Problem, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TH, dy_TH = (torch.randn(T, H, generator=generator) for _ in range(2))
    weights = ExpertWeights(
        torch.randn(E, 2 * I, H, generator=generator), torch.randn(E, H, I, generator=generator), activation=SILU
    )
    expert_TK = torch.randint(-1, E, (T, K), generator=generator)
    return Problem(x_TH, expert_TK, torch.rand(T, K, generator=generator), weights), dy_TH


class Whole(HopperRows):
    """Without travel, whatever the device."""

    @classmethod
    def dispatch(cls, problem: Problem, saved: Saved | None) -> HopperRows:
        return cls(with_plain_rows(problem), *(saved[1:] if saved else sort_rows(problem.expert_TK, E)))


@quick(lambda kind: kind is Straight)  # it is Watched, and sums itself
@pytest.mark.parametrize("kind", [Watched, Elsewhere, Straight])
def test_own_tiles_come_before_the_wait_sums_leave_early_and_no_bit_changes(without_gpu, kind):
    problem, dy_TH = problem_of()
    y_TH, saved = sorted_rows.forward(problem, "h", Whole)
    assert saved is not None
    needs = Needs(True, True, True, True)
    expected = sorted_rows.backward(problem, Saved(*(each.clone() for each in saved)), dy_TH, needs, Whole)

    there = kind(problem.x_TH.clone())
    travelling = problem._replace(x_TH=there.coming, overlapped=there)
    with poisoned_memory():
        found, also_saved = sorted_rows.forward(travelling, "h", OverlappedRows)
    assert torch.equal(found, y_TH)
    others = torch.ones(T, dtype=torch.bool)
    others[OWN] = False
    assert torch.equal(there.left["rows"][others], y_TH[others])  # whole when they left
    assert not torch.equal(there.left["rows"][OWN], y_TH[OWN])  # while own ones were yet to come

    back = kind(dy_TH.clone())
    assert also_saved is not None
    with poisoned_memory():
        gradients = sorted_rows.backward(
            travelling._replace(x_TH=problem.x_TH, overlapped=back), also_saved, back.coming, needs, OverlappedRows
        )
    for name, one, other in zip(Needs._fields, gradients, expected, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), name
    assert torch.equal(back.left["rows"], expected.x) and torch.equal(back.left["d_weight"], expected.weight)


def test_what_reads_rows_ahead_of_the_products_waits_for_all_of_them(without_gpu: None) -> None:
    problem, _ = problem_of()
    assert overlapped_dispatch.why_not_overlapped(problem) is None
    transposed = problem.weights.gate_up_EJH.mT.contiguous().mT
    other = problem._replace(weights=ExpertWeights(transposed, problem.weights.down_EHI, activation=SILU))
    assert overlapped_dispatch.why_not_overlapped(other) == "the up projection and its activation are two passes"


@each_value_once()
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1500), (200, 1300), (1499, 1500), (700, 701)])
def test_each_tile_is_on_one_of_the_two_lists_by_whose_rows_it_has(first: int, last: int) -> None:
    generator = torch.Generator().manual_seed(1)
    expert_TK = torch.randint(-1, 7, (1500, 2), generator=generator)
    order_N, _, offs_E = sort_rows(expert_TK, 7)
    table = gemm.tile_table(offs_E, order_N.shape[0])
    own, rest = split_table(table, order_N, 2 * first, 2 * last)
    expected: tuple[list, list] = ([], [])
    for tile in tiles_of(table):
        tokens = order_N[tile[1] : tile[2]] // 2
        expected[not bool(((tokens >= first) & (tokens < last)).all())].append(tile)
    assert (tiles_of(own), tiles_of(rest)) == expected
