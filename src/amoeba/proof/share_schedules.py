"""The proof for one rank's share of the scheduled backward: what the ranks' sums add up to, against the reference.

case = share_case(random_case(seed=3))
errors = case.check(simulate(case.job(), workers=2, pace=Pace(seed=0, slowness=[1.0] * case.ranks)))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amoeba.core.weights import ExpertWeights
from amoeba.proof.reference.experts import experts_backward
from amoeba.proof.schedules import MakeGraph, ScheduleCase
from amoeba.tasks.computation import Tokens
from amoeba.tasks.regions import Region
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.share import ShareComputation, ShareGraph
from amoeba.tasks.simulate import Script


class ShareCase(ScheduleCase):
    """Without the router, and with what the transport adds up added up here."""

    def job(self, make_graph: MakeGraph = ShareGraph) -> list[list[Script]]:
        return super().job(make_graph)

    def _scripts(self, epoch: int, tokens_W: list[Tokens], make_graph: MakeGraph) -> list[Script]:
        expert_WTK = [tokens.expert_TK.tolist() for tokens in tokens_W]
        rows = divide_rows(expert_WTK, self.layer.owner_E, self.ranks, self.tiling.rows, everywhere=True)
        graphs = [make_graph(rank, rows, self.sizes, self.tiling) for rank in range(self.ranks)]
        return [Script(ShareComputation(graph, self.layer, tokens_W, epoch)) for graph in graphs]

    def _expected_of(self, tokens_W: Sequence[Tokens], logits_W: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """One entry: of all ranks."""
        x, dy, _, expert, weight = (torch.cat(each) for each in zip(*tokens_W, strict=True))
        weights = ExpertWeights(self.layer.gate_up_EJH, self.layer.down_EHI)
        return [experts_backward(dy, x, expert, weight, weights)]

    def _found(self, memory_W: list[dict[Region, Tensor]]) -> list[dict[str, Tensor]]:
        parts = [self._gradients(rank, memory) for rank, memory in enumerate(memory_W)]
        found = {name: torch.stack([part[name] for part in parts]).sum(0) for name in ("x", "weight")}
        for name in ("gate_up", "down"):
            owned = {rank: iter(part[name]) for rank, part in enumerate(parts)}
            found[name] = torch.stack([next(owned[owner]) for owner in self.layer.owner_E])
        return [found]


def share_case(case: ScheduleCase) -> ShareCase:
    return ShareCase(case.layer, case.tokens, case.logits, case.sizes, case.tiling, case.ranks)
