"""The proof for the scheduled backward: random layers and schedules, each gradient against the reference.

T tokens · K experts per token · E experts · H hidden · I intermediate · W ranks

    case = make_case(sizes, tiling, tokens=[[5, 3]], owner_E=(0, 1, 1))
    errors = case.check(simulate(case.job(), workers=2, pace=Pace(seed=0, slowness=[1.0] * case.ranks)))

A case is a layer and some passes through it. Each has its own tokens and routing, so that in one pass two ranks
exchange rows and in another they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.core.weights import ExpertWeights
from amoeba.proof.conformance import relative_error
from amoeba.proof.reference.experts import experts_backward
from amoeba.proof.reference.router import router_backward, router_forward
from amoeba.tasks.graph import Graph
from amoeba.tasks.rows import divide_rows
from amoeba.tasks.sizes import Sizes, Tiling, blocks
from benchmarks.schedules.computation import Computation, Layer, Region, Tokens
from benchmarks.schedules.simulator import Ran, Script

# fp64; of d_gate not much more is left where a renormalised weight is close to 1
TOLERANCE = 1e-8

MakeGraph = Callable[..., Graph]


@dataclass(frozen=True, eq=False)
class ScheduleCase:
    """tokens: by pass, by rank. logits: of the router, as tokens. remote: see `Graph`."""

    layer: Layer
    tokens: list[list[Tokens]]
    logits: list[list[Tensor]]
    sizes: Sizes
    tiling: Tiling
    ranks: int
    remote: frozenset[int] = frozenset()
    _compared: dict[int, tuple[list[dict[Region, Tensor]], dict[str, float]]] = field(default_factory=dict)

    def job(self, make_graph: MakeGraph = Graph) -> list[list[Script]]:
        """By pass, by rank. make_graph: as `Graph`."""
        return [self._scripts(epoch, tokens_W, make_graph) for epoch, tokens_W in enumerate(self.tokens, start=1)]

    def _scripts(self, epoch: int, tokens_W: list[Tokens], make_graph: MakeGraph) -> list[Script]:
        expert_WTK = [tokens.expert_TK.tolist() for tokens in tokens_W]
        rows = divide_rows(expert_WTK, self.layer.owner_E, self.ranks, self.tiling.rows)
        options = {"remote": self.remote, "biases": self.layer.down_bias_EH is not None}
        graphs = [make_graph(rank, rows, self.sizes, self.tiling, **options) for rank in range(self.ranks)]
        return [Script(Computation(graph, self.layer, tokens_W, epoch)) for graph in graphs]

    def check(self, ran: Ran) -> dict[str, float]:
        """The worst relative error of each gradient by name."""
        worst: dict[str, float] = {}
        for number, memory_W in enumerate(ran.memory):
            for name, error in self._errors(number, memory_W).items():
                worst[name] = max(worst.get(name, 0.0), error)
        return worst

    def _errors(self, number: int, memory_W: list[dict[Region, Tensor]]) -> dict[str, float]:
        """Of one pass. Schedules of one job share results (see `Script`): the same tensors are compared once."""
        before = self._compared.get(number)
        if before is not None and all(map(_same_tensors, before[0], memory_W)):
            return before[1]
        worst: dict[str, float] = {}
        for found, expected in zip(self._found(memory_W), self._expected[number], strict=True):
            for name, value in expected.items():
                worst[name] = max(worst.get(name, 0.0), relative_error(name, found[name], value, torch.float64))
        self._compared[number] = memory_W, worst
        return worst

    @cached_property
    def _expected(self) -> list[list[dict[str, Tensor]]]:
        """By pass, by rank."""
        return [self._expected_of(*each) for each in zip(self.tokens, self.logits, strict=True)]

    def _expected_of(self, tokens_W: Sequence[Tokens], logits_W: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Of one process that has all tokens, cut into what each rank should have."""
        layer, (x, dy, chosen, expert, weight) = self.layer, (torch.cat(each) for each in zip(*tokens_W, strict=True))
        whole = experts_backward(dy, x, expert, weight, self._weights)
        config = _router_config(self.sizes)
        d_logits = router_backward(whole["weight"], torch.cat(list(logits_W)), chosen, config)
        counts = [len(tokens.x_TH) for tokens in tokens_W]
        owned = [[e for e, owner in enumerate(layer.owner_E) if owner == rank] for rank in range(self.ranks)]
        by_tokens = {
            "x": (whole["x"] + d_logits @ layer.gate_EH).split(counts),
            "weight": whole["weight"].split(counts),
            "gate": [d.T @ x for d, x in zip(d_logits.split(counts), x.split(counts), strict=True)],
        }
        return [
            {name: parts[rank] for name, parts in by_tokens.items()}
            | {name: whole[name][owned[rank]] for name in self._of_experts}
            for rank in range(self.ranks)
        ]

    @property
    def _weights(self) -> ExpertWeights:
        layer = self.layer
        return ExpertWeights(layer.gate_up_EJH, layer.down_EHI, layer.gate_up_bias_EJ, layer.down_bias_EH)

    @property
    def _of_experts(self) -> tuple[str, ...]:
        biases = () if self.layer.down_bias_EH is None else ("gate_up_bias", "down_bias")
        return ("gate_up", "down", *biases)

    def _found(self, memory_W: list[dict[Region, Tensor]]) -> list[dict[str, Tensor]]:
        """As `_expected`, of one pass."""
        return [self._gradients(rank, memory) for rank, memory in enumerate(memory_W)]

    def _gradients(self, rank: int, memory: dict[Region, Tensor]) -> dict[str, Tensor]:
        hidden, intermediate, _, top_k = self.sizes
        own = sum(owner == rank for owner in self.layer.owner_E)

        def rows(name: str, width: int) -> Tensor:
            found = sorted((region.at, value) for region, value in memory.items() if region.name == name)
            return torch.cat([value for _, value in found]) if found else self.layer.gate_EH.new_empty(0, width)

        def matrices(name: str, count: int, width: int) -> list[Tensor]:
            columns = blocks(width, self.tiling.weight_columns)
            found = []
            for expert in range(count):
                parts = {
                    region.at[1]: value
                    for region, value in memory.items()
                    if region.name == name and region.at[0] == expert
                }
                lines = [
                    torch.cat([parts[line + column] for column in range(columns)], dim=1)
                    for line in range(0, len(parts), columns)
                ]
                found.append(torch.cat(lines))
            return found

        def biases(name: str, like: Tensor | None) -> dict[str, Tensor]:
            if like is None:
                return {}
            found = sorted((r.at, v) for r, v in memory.items() if r.name == f"d_{name}")
            return {name: torch.cat([value for _, value in found]).view(own, -1) if own else like[:0]}

        gate = [value for _, value in sorted((r.at, v) for r, v in memory.items() if r.name == "d_gate")]
        gate_up, down = matrices("d_gate_up", own, hidden), matrices("d_down", own, intermediate)
        return {
            "x": rows("dx" if gate else "dx of experts", hidden),
            "weight": rows("d_weight", top_k),
            **({"gate": torch.cat(gate, dim=1)} if gate else {}),
            "gate_up": torch.stack(gate_up) if own else self.layer.gate_up_EJH[:0],
            "down": torch.stack(down) if own else self.layer.down_EHI[:0],
            **biases("gate_up_bias", self.layer.gate_up_bias_EJ),
            **biases("down_bias", self.layer.down_bias_EH),
        }


def _same_tensors(left: dict[Region, Tensor], right: dict[Region, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[region] is right[region] for region in left)


def _router_config(sizes: Sizes) -> RouterConfig:
    return RouterConfig(num_experts=sizes.experts, top_k=sizes.top_k, score="softmax", renormalize=True)


def make_case(
    sizes: Sizes,
    tiling: Tiling,
    tokens: Sequence[Sequence[int]],
    owner_E: tuple[int, ...],
    remote: frozenset[int] = frozenset(),
    *,
    seed: int = 0,
    dropped: float = 0.0,
    skew: float = 0.0,
    biases: bool = False,
) -> ScheduleCase:
    """tokens: by pass, by rank. dropped: the share of slots that have no expert. skew: how much the first experts are
    preferred to the others."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    hidden, intermediate, experts, top_k = sizes
    layer = Layer(
        normal(experts, 2 * intermediate, hidden),
        normal(experts, hidden, intermediate),
        normal(experts, hidden),
        owner_E,
        *((normal(experts, 2 * intermediate), normal(experts, hidden)) if biases else ()),
    )
    preference_E = -skew * torch.arange(experts, dtype=torch.float64, device="cpu")
    config = _router_config(sizes)
    all_tokens, all_logits = [], []
    for counts in tokens:
        tokens_W, logits_W = [], []
        for count in counts:
            x_TH, dy_TH = normal(count, hidden), normal(count, hidden)
            logits_TE = x_TH @ layer.gate_EH.T + preference_E
            chosen_TK, weight_TK = router_forward(logits_TE, config)
            gone_TK = torch.rand(count, top_k, generator=generator, dtype=torch.float64, device="cpu") < dropped
            tokens_W.append(Tokens(x_TH, dy_TH, chosen_TK, chosen_TK.masked_fill(gone_TK, -1), weight_TK))
            logits_W.append(logits_TE)
        all_tokens.append(tokens_W)
        all_logits.append(logits_W)
    return ScheduleCase(layer, all_tokens, all_logits, sizes, tiling, len(tokens[0]), remote)
