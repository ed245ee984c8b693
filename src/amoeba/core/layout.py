"""The row mapping: routed rows, sorted by expert, and the way back.

T tokens · K experts per token · N = T·K routed rows · E experts

A routed row is one slot of one token, number `token·K + slot`. Rows are sorted by expert and keep their order within
an expert. Rows whose expert id lies outside [0, E) are sentinels: they sort behind `offs_E[-1]` and no backend
computes them. The kernels on a GPU have a counting sort of their own, which gives the same maps.

    layout = build_layout(routing.expert_TK, num_experts=E)
    rows_NH = x_TH[layout.token_N]            # sorted rows; expert e owns rows offs_E[e-1] : offs_E[e]

Everything is computed on the device, without host synchronisation and without atomics on floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.core.errors import bad_value


@dataclass(frozen=True, eq=False)
class Layout:
    """Sorted rows and their inverse.

    order_N:    sorted position -> number of the row; those of sentinels may be left out
    slot_row_N: number of the row -> sorted position; the length of order_N for the row of a sentinel
    offs_E:     int32, cumulative ends of the experts' rows (no leading 0)
    """

    order_N: Tensor
    slot_row_N: Tensor
    offs_E: Tensor
    top_k: int

    @property
    def token_N(self) -> Tensor:
        """Token of each sorted row."""
        return self.order_N // self.top_k


def build_layout(expert_TK: Tensor, num_experts: int, *, most_rows: int | None = None) -> Layout:
    """most_rows: rows after this many, which are those of sentinels, are left out."""
    top_k = expert_TK.shape[1]
    expert_N = expert_TK.flatten()
    rows = expert_N.shape[0]
    owned_N = (expert_N >= 0) & (expert_N < num_experts)
    sorted_N, order_N = torch.sort(torch.where(owned_N, expert_N, num_experts), stable=True)
    bounds_E = torch.arange(num_experts, device=expert_N.device, dtype=sorted_N.dtype)
    offs_E = torch.searchsorted(sorted_N, bounds_E, right=True, out_int32=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(rows, device=expert_N.device, dtype=torch.int64)
    slot_row_N = torch.where(owned_N, inverse_N, rows)
    if most_rows is None or most_rows >= rows:
        return Layout(order_N, slot_row_N, offs_E, top_k)
    check_most_rows(most_rows, offs_E)
    return Layout(order_N[:most_rows], slot_row_N.clamp(max=most_rows), offs_E, top_k)


def check_most_rows(most_rows: int, offs_E: Tensor) -> None:
    """On a CPU. A GPU would be waited for: there it is the caller's to know."""
    if offs_E.device.type == "cpu" and int(offs_E[-1]) > most_rows:
        expected = f"at least as many as slots with an expert, {int(offs_E[-1])}"
        raise bad_value("most_rows", expected, most_rows, "leave it out where it is not known")
