"""What a backend computes with and what it gives back, below backends and kernels alike.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

    y_TH, saved = forward(problem, save="h")
    gradients = backward(problem, saved, dy_TH, needs)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from amoeba.core.layout import Layout, build_layout
from amoeba.core.weights import LORA_NAMES, LoraFactors

# What forward saves for backward: h and how the rows were sorted; nothing beyond the inputs, which autograd keeps, so
# that backward computes h again; or nothing, since there will be no backward.
Save = Literal["h", "inputs", "nothing"]


class OverlappedDispatch(ABC):
    """Of a pass that begins while rows of other processes are under way to it, and whose sums for them go back early.

    own:      the tokens whose rows are there from the beginning: of x in forward, of dy in backward; see `own_rows`.
    under_way:  whether those of the others are still under way when the pass begins, until `wait`.
    straight: whether rows are given to it before they are summed, to `send_sums` and what follows, and not to `leave`.
    """

    own: slice
    under_way: bool = True
    straight: bool = False

    def room(self, most_rows: int | None) -> int | None:
        """most_rows of the pass, which may have begun with a guess of it: to be asked when its first product has been
        launched, so that the device has something to do while the host waits for the number. Of a guess that was too
        low no row has been computed, all ids are put back, and the pass begins anew with the result."""
        return most_rows

    @abstractmethod
    def wait(self) -> None:
        """Ahead of whatever reads the others' rows. The device waits, not the host."""

    def rows_read(self) -> None:  # noqa: B027 - mostly it has a copy of them
        """Nothing reads rows of dy any more, so others may take their place."""

    def own_rows(self, rows_TH: Tensor) -> Tensor | None:
        """Until `wait`, rows_TH being what others' rows are on their way to: own ones, where these are on their way to
        it as well; None where they are in it."""
        return None

    @abstractmethod
    def leave(self, rows_TH: Tensor, d_weight_TK: Tensor | None = None) -> None:
        """The others' tokens have their sums in rows_TH, or their gradients, and go while the pass goes on."""

    def send_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> None:
        """Sums the rows of each of the others' tokens, as `combine` does, straight into the memory of its rank."""
        raise NotImplementedError

    def add_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
        """The same of own tokens, and adds what the others sent. The result stands for the sums of all tokens: it has
        their shape, and no memory."""
        raise NotImplementedError

    def keep_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, d_weight_TK: Tensor | None) -> Tensor:
        """As `add_sums`, for gradients, and what the others sent is added after the pass. dy is not read any more."""
        raise NotImplementedError


class Problem(NamedTuple):
    """All that goes into the experts of one layer in one pass."""

    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    weights: Any  # a kind of weights, which its backends know: for most of them ExpertWeights
    lora: LoraFactors | None = None
    most_rows: int | None = None  # see `Routing`
    onto_TH: Tensor | None = None  # y is this and the experts' sum; for operators that have it, and without a gradient
    overlapped: OverlappedDispatch | None = None  # of rows that are not there yet; for backends that overlap
    # x as it arrived from other processes, a QuantisedMatrix; x_TH then has its shape, and no numbers
    quantised_x: Any = None

    @property
    def rows(self) -> int:
        return self.expert_TK.shape[0] * self.expert_TK.shape[1]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of an operator's arguments: x, ids and weights of the routing, the kind's own, the factors; an A
        that gate and up share once, as gate's."""
        factors = _NO_FACTORS if self.lora is None else self.lora.six()
        if self.lora is not None and self.lora.shares_a:
            factors = tuple(None if name == "up_lora_a" else f for name, f in zip(LORA_NAMES, factors, strict=True))
        return (*self[:3], *self.weights.tensors(), *factors)

    def with_factors_as_weights(self) -> Problem:
        """LoRA factors in the dtype of the weights, differentiably."""
        return self if self.lora is None else self._replace(lora=self.lora.to(self.weights.dtype))

    def of_slots(self, slot_N: Tensor) -> Problem:
        """These slots (t·K + k) alone, each as a token with one expert."""
        top_k = self.expert_TK.shape[1]
        expert_N, weight_N = (each.reshape(-1).index_select(0, slot_N) for each in (self.expert_TK, self.weight_TK))
        x_NH = self.x_TH.index_select(0, slot_N // top_k)
        return self._replace(x_TH=x_NH, expert_TK=expert_N[:, None], weight_TK=weight_N[:, None])

    def differentiable(self) -> dict[str, Tensor | None]:
        """By the names of `Needs`, those that can have a gradient."""
        of_weights = zip(self.weights.operands(), self.weights.tensors(), strict=False)
        factors = _NO_FACTORS if self.lora is None else self.lora.six()
        return {
            "x": self.x_TH,
            "weight": self.weight_TK,
            **{operand.name: tensor for operand, tensor in of_weights if operand.differentiable},
            **dict(zip(LORA_NAMES, factors, strict=True)),
        }


_NO_FACTORS = (None,) * len(LORA_NAMES)


class Saved(NamedTuple):
    """What forward saves for backward where rows are sorted: h, the maps of the rows; of LoRA, c (x Aᵀ) and c (a Aᵀ).

    The maps are empty where a backend sorts again in backward, and so are the last two where it multiplies again.
    """

    h_NJ: Tensor
    order_N: Tensor
    slot_row_N: Tensor
    offs_E: Tensor
    low_NP: Tensor
    low_down_NP: Tensor

    @staticmethod
    def of(h_NJ: Tensor, layout: Layout) -> Saved:
        return Saved(h_NJ, layout.order_N, layout.slot_row_N, layout.offs_E, h_NJ.new_empty(0), h_NJ.new_empty(0))

    @staticmethod
    def without_maps(h_NJ: Tensor, map_dtype: torch.dtype = torch.int64) -> Saved:
        dtypes = (map_dtype, map_dtype, torch.int32, h_NJ.dtype, h_NJ.dtype)
        return Saved(h_NJ, *(h_NJ.new_empty(0, dtype=dtype) for dtype in dtypes))

    @property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.order_N, self.slot_row_N, self.offs_E

    def layout(self, top_k: int) -> Layout:
        return Layout(self.order_N, self.slot_row_N, self.offs_E, top_k)


def layout_of(problem: Problem, saved: Saved | None) -> Layout:
    if saved is None:
        return build_layout(problem.expert_TK, problem.weights.num_experts, most_rows=problem.most_rows)
    return saved.layout(problem.expert_TK.shape[1])


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weight: bool
    gate_up: bool = False
    down: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False
    gate_lora_a: bool = False
    gate_lora_b: bool = False
    up_lora_a: bool = False
    up_lora_b: bool = False
    down_lora_a: bool = False
    down_lora_b: bool = False

    @property
    def scaled_a(self) -> bool:
        """Whether gradients are asked for that are sums over routing weight · a."""
        return self.down or self.down_lora_a or self.down_lora_b


class Gradients(NamedTuple):
    """By the names of `Needs`, those that were asked for."""

    x: Tensor | None
    weight: Tensor | None
    gate_up: Tensor | None = None
    down: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_lora_a: Tensor | None = None
    gate_lora_b: Tensor | None = None
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None
    down_lora_b: Tensor | None = None

    @staticmethod
    def zeros(problem: Problem, needs: Needs) -> Gradients:
        """What no routed rows at all give."""
        sources = problem.differentiable().items()
        wanted = {name: source for name, source in sources if source is not None and getattr(needs, name)}
        nothing = {"x": None, "weight": None}
        return Gradients(**nothing | {name: torch.zeros_like(source) for name, source in wanted.items()})
