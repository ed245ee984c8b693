"""What routers choose, counted on the device, and the gradients that keep them even, as operators for any trace.

T tokens · K experts per token · E experts · L layers

    ledger = Ledger([64, 64])                                     # experts of each layer
    ledger.pull, ledger.z_pull = 0.01 / 2, 0.0                    # coefficients of the losses of one layer
    weight_TK = count_choices(weight_TK, expert_TK, ledger.key(0))
    weight_TK = attach_balance(weight_TK, logits_TE, ledger.key(0))

Both hand their first argument on. `attach_balance` has the gradients for the logits of two losses, which are therefore
never made: Switch's load balancing, E · Σ_e f_e P_e with f_e = (rows sent to e) / T and P_e e's mean probability, of
the choices counted last in that layer; and the z-loss, mean(logsumexp(logits)²). Where several processes share a batch,
`ledger.add_up` sums over them: the losses are then those of the whole batch. Each process keeps its own counts.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core import operators
from amoeba.core.operators import Operand
from amoeba.core.torch_internals import inside_backward

ENTROPY_UNIT = 2.0**-20  # nats: sums of integers are the same in any order
_LAYERS = 1 << 16  # more than any model has
PAIRS_OF = 4096  # tokens of a pass, the first ones, in which pairs of experts are counted

_ledgers: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Ledger:
    """Counts of all layers since the last reset, and the coefficients with which their routers are pulled."""

    def __init__(self, experts: Sequence[int], device: torch.device | str | None = None) -> None:
        layers, most = len(experts), max(experts, default=0)
        self.experts = list(experts)
        # Of each expert, and behind the last one of slots that no expert here serves. All rows begin at a multiple of
        # 16 bytes: kernels are compiled once for them all.
        last_LE = torch.zeros(layers, most + 1 + (most + 1) % 2, dtype=torch.int64, device=device)
        self.last_LE = last_LE[:, : most + 1]  # in the last pass
        self.load_LE = torch.zeros(layers, most + 1, dtype=torch.int64, device=device)
        self.entropy_L2 = torch.zeros(layers, 2, dtype=torch.int64, device=device)  # tokens, and their entropies' sum
        self.together_LEE = torch.zeros(layers, most, most, dtype=torch.float32, device=device)
        self.pull = self.z_pull = 0.0
        self.pulled = False  # whether a gradient was asked for
        self.add_up: Callable[[Tensor], Tensor] | None = None  # over the processes that share a batch
        self.idle = False  # whether the tokens of this pass are dummies that only serve other ranks
        self.tokens_of = [0] * layers  # in the last pass, of all processes
        self.number = next(_numbers)
        _ledgers[self.number] = self

    def key(self, layer: int) -> Tensor:
        """Names ledger and layer to the operators. A tensor on the CPU: one compiled layer then serves all."""
        return torch.tensor(self.number * _LAYERS + layer, dtype=torch.int64, device="cpu")

    def reset(self) -> None:
        self.load_LE.zero_()
        self.entropy_L2.zero_()

    def count(self, layer: int, expert_TK: Tensor) -> None:
        experts = self.experts[layer]
        last_E1 = self.last_LE[layer, : experts + 1].zero_()
        if expert_TK.is_cuda:
            from amoeba.kernels.router_balance import count_experts

            count_experts(expert_TK.reshape(-1).contiguous(), last_E1)
        else:
            last_E1 += torch.bincount(_inside(expert_TK, experts).reshape(-1), minlength=experts + 1)
        if self.idle:
            last_E1.zero_()
        if not inside_backward():
            self.load_LE[layer] += self.last_LE[layer]
        self.tokens_of[layer] = len(expert_TK)
        if self.add_up is not None and (self.pull or self.z_pull):
            tokens = 0 if self.idle else len(expert_TK)
            numbers = self.add_up(torch.cat((last_E1, last_E1.new_tensor([tokens]))))
            last_E1.copy_(numbers[:-1])
            self.tokens_of[layer] = int(numbers[-1])
        if inside_backward() or self.idle:
            return
        some_TK = _inside(expert_TK[:PAIRS_OF], experts)
        chosen_TE = torch.zeros(len(some_TK), experts + 1, dtype=torch.float32, device=expert_TK.device)
        chosen_TE.scatter_(1, some_TK, 1.0)
        self.together_LEE[layer, :experts, :experts] += chosen_TE[:, :experts].T @ chosen_TE[:, :experts]

    def add_entropy(self, layer: int, logits_TE: Tensor) -> None:
        if inside_backward() or self.idle:
            return
        totals = self.entropy_L2[layer]
        if logits_TE.is_cuda:
            from amoeba.kernels.router_balance import add_entropy

            return add_entropy(logits_TE.contiguous(), totals, ENTROPY_UNIT)
        logarithm_TE = logits_TE.float().log_softmax(-1)
        entropy_T = -(logarithm_TE.exp() * logarithm_TE.clamp(min=-1e30)).sum(-1)
        totals[0] += len(entropy_T)
        totals[1] += (entropy_T / ENTROPY_UNIT).round().long().sum()

    def gradient(self, layer: int, logits_TE: Tensor) -> Tensor:
        self.pulled = True
        experts = logits_TE.shape[1]
        if self.idle:
            return torch.zeros_like(logits_TE)
        tokens = max(len(logits_TE) if self.add_up is None else self.tokens_of[layer], 1)
        last_E = self.last_LE[layer, :experts]
        pull, z_pull = self.pull * experts / tokens**2, self.z_pull / tokens
        if logits_TE.is_cuda:
            from amoeba.kernels.router_balance import balance_gradient

            return balance_gradient(logits_TE.contiguous(), last_E, pull, z_pull)
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        probability_TE, logsumexp_T1 = wide_TE.softmax(-1), wide_TE.logsumexp(-1, keepdim=True)
        slope_E = pull * last_E.to(wide_TE.dtype)
        mean_T1 = (probability_TE * slope_E).sum(-1, keepdim=True)
        return (probability_TE * (slope_E - mean_T1 + 2 * z_pull * logsumexp_T1)).to(logits_TE.dtype)


def _inside(expert_TK: Tensor, experts: int) -> Tensor:
    return torch.where((expert_TK >= 0) & (expert_TK < experts), expert_TK, experts)


def count_choices(weight_TK: Tensor, expert_TK: Tensor, key: Tensor) -> Tensor:
    """weight_TK, its choices counted."""
    return _count(weight_TK, expert_TK, key)[0]


def attach_balance(carrier: Tensor, logits_TE: Tensor, key: Tensor) -> Tensor:
    """carrier: whatever of the router's results the loss depends on."""
    return _attach(carrier, logits_TE, key)[0]


def _found(key: Tensor) -> tuple[Ledger, int]:
    number, layer = divmod(int(key), _LAYERS)
    return _ledgers[number], layer


def _count_forward(weight: Tensor, expert: Tensor, key: Tensor) -> tuple[Tensor]:
    ledger, layer = _found(key)
    ledger.count(layer, expert)
    return (weight.clone(),)


def _attach_forward(carrier: Tensor, logits: Tensor, key: Tensor) -> tuple[Tensor]:
    ledger, layer = _found(key)
    ledger.add_entropy(layer, logits)
    return (carrier.clone(),)


def _attach_backward(arguments: tuple, saved: tuple, gradients: Sequence[Any], needs: Sequence[bool]) -> Sequence[Any]:
    _, logits, key = arguments
    ledger, layer = _found(key)
    return gradients[0].clone() if needs[0] else None, ledger.gradient(layer, logits) if needs[1] else None


_count = operators.define(
    "count_choices",
    (Operand("weight", "Tensor", True), Operand("expert", "Tensor"), Operand("key", "Tensor")),
    results=("handed_on",),
    forward=_count_forward,
    backward=lambda arguments, saved, gradients, needs: [gradients[0].clone()],
    fake=lambda weight, expert, key: (torch.empty_like(weight),),
)
_attach = operators.define(
    "attach_balance",
    (Operand("carrier", "Tensor", True), Operand("logits", "Tensor", True), Operand("key", "Tensor")),
    results=("handed_on",),
    forward=_attach_forward,
    backward=_attach_backward,
    fake=lambda carrier, logits, key: (torch.empty_like(carrier),),
)
