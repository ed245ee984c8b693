"""The router's backward as tasks of the scheduled backward in plain Triton, for one rank.

T tokens · K experts per token · E experts · H hidden

    router = RouterTasks(config, gate_EH, expert_TK, weight_TK, scores_TE, logits_TE)
    found = scheduled_backward(..., router=router)           # found.x has the router's part; also router.d_gate

ROUTER waits until COMBINE has left dx and the weights' gradient of a block of tokens, takes the latter back to the
logits with the tile of `amoeba.kernels.router`, and adds d_logits · gate to dx. ROUTER_WEIGHTS waits for all blocks and
sums up some columns of d_gate. Logits are fp32, as in `amoeba.MoE`.

`amoeba.MoE` does not use it: its products with the gate, in fp32, are those of cuBLAS.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv
from amoeba.kernels.router import backward_constants, needs_logits, router_backward_tile
from amoeba.tasks.triton.arrivals import address_table, numbers_at

# Experts, columns of H and tokens that are multiplied at a time; columns of a task of d_gate. Not measured yet.
EXPERT_STEP, COLUMN_STEP, TOKEN_STEP, GATE_COLUMNS = 32, 64, 32, 32
GATE, CHOSEN, WEIGHT, SCORES, LOGITS, D_LOGITS, D_GATE = map(tl.constexpr, range(7))


class RouterTasks:
    """expert_TK: as the router chose, also where a slot was dropped. weight_TK: fp32. scores_TE, logits_TE: of the
    forward, where the configuration needs them (see `amoeba.kernels.router.router_backward`)."""

    def __init__(
        self,
        config: RouterConfig,
        gate_EH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        scores_TE: Tensor,
        logits_TE: Tensor | None = None,
    ) -> None:
        if logits_TE is None and needs_logits(config):
            raise ValueError(
                f"logits_TE: expected them for the score {config.score}; got None. Pass the router's logits"
            )
        self._config, self._given = config, (gate_EH, expert_TK, weight_TK, scores_TE, logits_TE)
        self.d_logits = weight_TK.new_empty((weight_TK.shape[0], config.num_experts), dtype=torch.float32)
        self.d_gate = torch.empty_like(gate_EH)

    @property
    def parts(self) -> int:
        """Tickets of ROUTER_WEIGHTS."""
        return cdiv(self.d_gate.shape[1], GATE_COLUMNS)

    def context(self) -> Tensor:
        """Addresses for the kernel, in the order of the fields above."""
        return address_table(*self._given, self.d_logits, self.d_gate)

    def constants(self) -> Group:
        return Group(
            **backward_constants(self._config),
            PARTS=self.parts,
            EXPERT_STEP=EXPERT_STEP,
            COLUMN_STEP=COLUMN_STEP,
            TOKEN_STEP=TOKEN_STEP,
            GATE_COLUMNS=GATE_COLUMNS,
        )


NO_ROUTER: Any = Group(PARTS=0)


@triton.jit
def router_block(router, block, d_x, d_weight, tokens, TOKENS: tl.constexpr, H: tl.constexpr, ROUTER: tl.constexpr):
    """ROUTER: d_logits of a block of tokens, and what they add to dx."""
    d_logits = numbers_at(router, D_LOGITS, tl.float32)
    row = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    router_backward_tile(
        row, row < tokens, numbers_at(router, LOGITS, tl.float32), numbers_at(router, CHOSEN, tl.int64),
        numbers_at(router, WEIGHT, tl.float32), numbers_at(router, SCORES, tl.float32), d_weight, None, d_logits,
        ROUTER, TOKENS,
    )  # fmt: skip
    tl.debug_barrier()
    gate = numbers_at(router, GATE, d_x.dtype.element_ty)
    for first in range(0, H, ROUTER.COLUMN_STEP):
        column = first + tl.arange(0, ROUTER.COLUMN_STEP)
        added = tl.zeros((TOKENS, ROUTER.COLUMN_STEP), tl.float32)
        for first_expert in range(0, ROUTER.EXPERTS, ROUTER.EXPERT_STEP):
            expert = first_expert + tl.arange(0, ROUTER.EXPERT_STEP)
            left = _logits(d_logits, row, expert, tokens, ROUTER)
            inside = (expert < ROUTER.EXPERTS)[:, None] & (column < H)[None, :]
            right = tl.load(gate + expert[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
            added = tl.dot(left, right, added, input_precision="ieee")
        inside = (row < tokens)[:, None] & (column < H)[None, :]
        out = d_x + row[:, None] * H + column[None, :]
        of_experts = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        total = of_experts + added.to(d_x.dtype.element_ty).to(tl.float32)  # rounded before, as a sum of two tensors is
        tl.store(out, total.to(d_x.dtype.element_ty), mask=inside)


@triton.jit
def gate_columns(router, part, x_TH, tokens, H: tl.constexpr, ROUTER: tl.constexpr):
    """ROUTER_WEIGHTS: some columns of d_gate, over all tokens in their order."""
    d_logits = numbers_at(router, D_LOGITS, tl.float32)
    d_gate = numbers_at(router, D_GATE, x_TH.dtype.element_ty)
    column = part * ROUTER.GATE_COLUMNS + tl.arange(0, ROUTER.GATE_COLUMNS)
    for first_expert in range(0, ROUTER.EXPERTS, ROUTER.EXPERT_STEP):
        expert = first_expert + tl.arange(0, ROUTER.EXPERT_STEP)
        total = tl.zeros((ROUTER.EXPERT_STEP, ROUTER.GATE_COLUMNS), tl.float32)
        for first in range(0, tokens, ROUTER.TOKEN_STEP):
            row = first + tl.arange(0, ROUTER.TOKEN_STEP).to(tl.int64)
            left = tl.trans(_logits(d_logits, row, expert, tokens, ROUTER))
            inside = (row < tokens)[:, None] & (column < H)[None, :]
            right = tl.load(x_TH + row[:, None] * H + column[None, :], mask=inside, other=0.0).to(tl.float32)
            total = tl.dot(left, right, total, input_precision="ieee")
        inside = (expert < ROUTER.EXPERTS)[:, None] & (column < H)[None, :]
        tl.store(d_gate + expert[:, None] * H + column[None, :], total.to(d_gate.dtype.element_ty), mask=inside)


@triton.jit
def _logits(d_logits, row, expert, tokens, ROUTER: tl.constexpr):
    inside = (row < tokens)[:, None] & (expert < ROUTER.EXPERTS)[None, :]
    return tl.load(d_logits + row[:, None] * ROUTER.EXPERTS + expert[None, :], mask=inside, other=0.0)
