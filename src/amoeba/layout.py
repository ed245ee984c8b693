"""The row mapping: routed rows, sorted by expert, and the way back.

T tokens · K experts per token · N = T·K routed rows · E experts · W ranks

A routed row is named anywhere in the job by `row_id = (src_rank·T + token)·K + slot`. Rows are sorted by expert and,
within an expert, by row_id. Rows whose expert id lies outside [0, E) are sentinels: they sort behind `offs_E[-1]` and
no backend computes them. The kernels on a GPU have a counting sort of their own, which gives the same maps.

    layout = build_layout(routing.expert_TK, num_experts=E)
    rows_NH = x_TH[layout.token_N]            # sorted rows; expert e owns rows offs_E[e-1] : offs_E[e]

Everything is computed on the device, without host synchronisation and without atomics on floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.errors import bad_value


@dataclass(frozen=True, eq=False)
class Layout:
    """Sorted rows and their inverse.

    order_N:    sorted position -> position in the list of rows as it came; those of sentinels may be left out
    slot_row_N: position as it came -> sorted position; the length of order_N for the row of a sentinel
    offs_E:     int32, cumulative ends of the experts' rows (no leading 0)
    row_id_N:   sorted position -> row_id
    """

    order_N: Tensor
    slot_row_N: Tensor
    offs_E: Tensor
    row_id_N: Tensor
    top_k: int

    @property
    def token_N(self) -> Tensor:
        """Token of each sorted row, counted over the ranks: src_rank·T + token."""
        return self.row_id_N // self.top_k


def build_layout(expert_TK: Tensor, num_experts: int, *, rank: int = 0, most_rows: int | None = None) -> Layout:
    """Layout of the rows that one rank routed. most_rows: what lies behind so many, rows of sentinels, is left out."""
    num_tokens, top_k = expert_TK.shape
    rows = num_tokens * top_k
    found = _sorted_by_expert(
        expert_TK.reshape(rows), num_experts, first_row_id=rank * rows, row_id_N=None, top_k=top_k
    )
    if most_rows is None or most_rows >= rows:
        return found
    check_most_rows(most_rows, found.offs_E)
    slot_row_N = found.slot_row_N.clamp(max=most_rows)
    return Layout(found.order_N[:most_rows], slot_row_N, found.offs_E, found.row_id_N[:most_rows], top_k)


def check_most_rows(most_rows: int, offs_E: Tensor) -> None:
    """On a CPU. A GPU would be waited for: there it is the caller's to know."""
    if offs_E.device.type == "cpu" and int(offs_E[-1]) > most_rows:
        expected = f"at least as many as slots with an expert, {int(offs_E[-1])}"
        raise bad_value("most_rows", expected, most_rows, "leave it out where it is not known")


def build_layout_from_rows(expert_N: Tensor, row_id_N: Tensor, num_experts: int, *, top_k: int) -> Layout:
    """Layout of rows that came from any ranks in any order; expert_N holds local ids."""
    if expert_N.shape != row_id_N.shape or expert_N.dim() != 1:
        raise bad_value(
            "row_id_N",
            f"one id per row, shape {tuple(expert_N.shape)}",
            tuple(row_id_N.shape),
            "send the row_id along with every row",
        )
    by_name = torch.argsort(row_id_N)
    inner = _sorted_by_expert(expert_N[by_name], num_experts, first_row_id=0, row_id_N=row_id_N[by_name], top_k=top_k)
    slot_row_N = torch.empty_like(inner.slot_row_N)
    slot_row_N[by_name] = inner.slot_row_N
    return Layout(by_name[inner.order_N], slot_row_N, inner.offs_E, inner.row_id_N, top_k)


def split_row_id(row_id_N: Tensor, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """row_id -> (src_rank, token, slot); the exact inverse of the naming rule."""
    slot_N = row_id_N % top_k
    token_N = row_id_N // top_k
    return token_N // num_tokens, token_N % num_tokens, slot_N


def _sorted_by_expert(
    expert_N: Tensor, num_experts: int, *, first_row_id: int, row_id_N: Tensor | None, top_k: int
) -> Layout:
    rows = expert_N.shape[0]
    owned_N = (expert_N >= 0) & (expert_N < num_experts)
    key_N = torch.where(owned_N, expert_N, num_experts)
    sorted_N, order_N = torch.sort(key_N, stable=True)
    bounds_E = torch.arange(num_experts, device=expert_N.device, dtype=sorted_N.dtype)
    offs_E = torch.searchsorted(sorted_N, bounds_E, right=True, out_int32=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(rows, device=expert_N.device, dtype=torch.int64)
    slot_row_N = torch.where(owned_N, inverse_N, rows)
    row_id_sorted_N = order_N + first_row_id if row_id_N is None else row_id_N[order_N]
    return Layout(order_N, slot_row_N, offs_E, row_id_sorted_N, top_k)
