"""The LoRA factors of one layer of experts, and the form in which PEFT keeps them.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    stacked = to_peft(factors)                                   # LoraFactors -> what a PEFT file holds
    factors = from_peft(stacked.gate_up, stacked.down, num_experts=8, gate_rank=stacked.gate_rank)
    experts.lora_factors = ExpertsLora(factors, torch.float32, device)      # as parameters of an experts module

We keep an A and a B for each of gate, up and down, per expert. PEFT adapts the stacked parameters `gate_up_proj` and
`down_proj` as wholes, each with one A of shape (E·R, in), expert after expert, and one B of shape (out, R·E), in which
the experts alternate.

- Read from PEFT, gate and up have the same A (one tensor, one parameter gate_up_lora_a) and each its half of B.
- Written to PEFT, gate and up that have equal A keep their rank; others become one factor pair of both ranks together,
  A = [gate A; up A] and B block diagonal, which is the same update. `gate_rank` says where to cut it again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.parallel.sharded import own_parameter
from amoeba.proof.reference.experts import join_gate_up, split_gate_up


class StackedLora(NamedTuple):
    """The factors of one stacked parameter, as PEFT has them: W_e + scaling · B_e @ A_e."""

    lora_A: Tensor  # (E·R, in), row e·R + rank
    lora_B: Tensor  # (out, R·E), column rank·E + e
    scaling: float = 1.0


class PeftFactors(NamedTuple):
    gate_up: StackedLora | None
    down: StackedLora | None
    gate_rank: int | None  # how many of gate_up's ranks are gate's, the rest being up's; None: all belong to both


def from_peft(
    gate_up: StackedLora | None,
    down: StackedLora | None,
    num_experts: int,
    *,
    gated: bool = True,
    interleaved: bool = False,
    swapped: bool = False,
    gate_rank: int | None = None,
) -> LoraFactors:
    """The six factors (four without a gate).

    swapped: A and B have changed places, as PEFT before 0.19 wrote them for weights stored as (E, out, in).
    gate_rank: as to_peft gave it, for factors of gate and up that were apart.

    Where the two scalings differ, that of down is brought to gate_up's by a factor on down_lora_b.
    """
    first = gate_up or down
    scaling = 1.0 if first is None else first.scaling
    factors: dict[str, Tensor] = {}
    if down is not None:
        a, b = _unstack(down, num_experts, swapped)
        factors |= {"down_lora_a": a, "down_lora_b": rescaled(b, down.scaling / scaling)}
    if gate_up is not None:
        a_ERH, b_EJR = _unstack(gate_up, num_experts, swapped)
        if not gated:
            factors |= {"up_lora_a": a_ERH, "up_lora_b": b_EJR}
        else:
            gate_b, up_b = (half.mT for half in split_gate_up(b_EJR.mT, Activation(interleaved=interleaved)))
            gate_a = up_a = a_ERH
            if gate_rank is not None:
                gate_a, gate_b = a_ERH[:, :gate_rank].contiguous(), gate_b[:, :, :gate_rank]
                up_a, up_b = a_ERH[:, gate_rank:].contiguous(), up_b[:, :, gate_rank:]
            if gate_a.shape[1]:
                factors |= {"gate_lora_a": gate_a, "gate_lora_b": gate_b.contiguous()}
            if up_a.shape[1]:
                factors |= {"up_lora_a": up_a, "up_lora_b": up_b.contiguous()}
    return LoraFactors(**factors, scaling=scaling)


def to_peft(factors: LoraFactors, *, gated: bool = True, interleaved: bool = False) -> PeftFactors:
    """What PEFT would keep for the same update; `gate_up` stands for `up_proj` where there is no gate."""
    gate, up, down = (_pair(factors, name) for name in ("gate", "up", "down"))
    stacked_down = None if down is None else _stack(*down, factors.scaling)
    if not gated and gate is not None:
        raise bad_value("gate_lora_a", "none for experts without a gate", tuple(gate[0].shape), "leave gate_* out")
    if gate is None and up is None:
        return PeftFactors(None, stacked_down, None)
    if not gated:
        assert up is not None
        return PeftFactors(_stack(*up, factors.scaling), stacked_down, None)

    activation = Activation(interleaved=interleaved)
    if gate is not None and up is not None and torch.equal(gate[0], up[0]):
        b_EJR = join_gate_up(gate[1].mT, up[1].mT, activation).mT
        return PeftFactors(_stack(gate[0], b_EJR, factors.scaling), stacked_down, None)
    gate, up = gate or _nothing_like(up), up or _nothing_like(gate)
    gate_rank, up_rank = gate[0].shape[1], up[0].shape[1]
    gate_rows = torch.nn.functional.pad(gate[1], (0, up_rank))
    up_rows = torch.nn.functional.pad(up[1], (gate_rank, 0))
    b_EJR = join_gate_up(gate_rows.mT, up_rows.mT, activation).mT
    return PeftFactors(_stack(torch.cat((gate[0], up[0]), 1), b_EJR, factors.scaling), stacked_down, gate_rank)


def fit_together(
    gate_up: StackedLora | None, down: StackedLora | None, layout: ExpertsLayout | None, gated: bool, swapped: bool
) -> bool:
    """Whether these can be factors of such experts or, where no layout is known, of the same experts at all."""
    step = -1 if swapped else 1
    up_sides, down_sides = (
        None if pair is None else (pair.lora_A.shape[1], pair.lora_B.shape[0])[::step] for pair in (gate_up, down)
    )
    if layout is not None:
        width = layout.intermediate * (2 if gated else 1)
        return up_sides in (None, (layout.hidden, width)) and down_sides in (None, (layout.intermediate, layout.hidden))
    if up_sides is None or down_sides is None:
        return True
    return up_sides == (down_sides[1], down_sides[0] * (2 if gated else 1))


def wrong_shapes(factors: LoraFactors, layout: ExpertsLayout) -> Iterator[tuple[str, tuple, tuple]]:
    """(name, expected, got) of every factor that is not one for such experts."""
    experts, hidden, intermediate = layout.num_experts, layout.hidden, layout.intermediate
    for name, tensor in factors.tensors().items():
        fan_in, fan_out = (intermediate, hidden) if name.startswith("down") else (hidden, intermediate)
        is_a = name.endswith("_a")
        rank = tensor.shape[1 if is_a else 2]
        expected = (experts, rank, fan_in) if is_a else (experts, fan_out, rank)
        if tensor.shape != expected:
            yield name, expected, tuple(tensor.shape)


def rescaled(b: Tensor, ratio: float) -> Tensor:
    return b if ratio == 1 else (b.double() * ratio).to(b.dtype)


def _unstack(stacked: StackedLora, num_experts: int, swapped: bool) -> tuple[Tensor, Tensor]:
    """(E, R, in) and (E, out, R)."""
    a = stacked.lora_A.unflatten(0, (num_experts, -1))
    b = stacked.lora_B.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    if swapped:
        a, b = b.mT, a.mT
    return a.contiguous(), b.contiguous()


def _stack(a: Tensor, b: Tensor, scaling: float) -> StackedLora:
    return StackedLora(a.flatten(0, 1), b.permute(1, 2, 0).flatten(1), scaling)


def _nothing_like(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    assert pair is not None
    return pair[0][:, :0], pair[1][:, :, :0]


def _pair(factors: LoraFactors, name: str) -> tuple[Tensor, Tensor] | None:
    a, b = getattr(factors, f"{name}_lora_a"), getattr(factors, f"{name}_lora_b")
    if a is None and b is None:
        return None
    shapes = [None if t is None else tuple(t.shape) for t in (a, b)]
    if a is None or b is None or a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[1]) != (b.shape[0], b.shape[2]):
        expected = "(E, R, in) and (E, out, R) of the same E and R"
        remedy = "pass both factors of a projection or neither"
        raise bad_value(f"{name}_lora_a and {name}_lora_b", expected, f"{shapes[0]} and {shapes[1]}", remedy)
    return a.detach(), b.detach()


PROJECTIONS = ("gate", "up", "down")
SHARED_A = "gate_up_lora_a"


class ExpertsLora(nn.Module):
    """stays: the factors remain where they are when the model is moved, since the experts they belong to do too.
    own: they are those of one rank's experts, and of no other rank's."""

    def __init__(
        self, factors: LoraFactors, dtype: torch.dtype, device: torch.device, stays: bool = False, own: bool = False
    ) -> None:
        super().__init__()
        self.scaling, self.stays = factors.scaling, stays
        for name, tensor in stored_tensors(factors).items():
            placed = tensor.to(device, dtype)
            # a share is a view, with which all factors would stay in memory
            self.register_parameter(name, own_parameter(placed.clone()) if own else nn.Parameter(placed))

    def factors(self, device: torch.device | None = None) -> LoraFactors:
        """What the seam takes. device: where to, differentiably, if they are not there."""
        own: Mapping[str, Tensor | None] = self._parameters
        if device is not None and any(tensor.device != device for tensor in own.values() if tensor is not None):
            own = {name: None if tensor is None else tensor.to(device) for name, tensor in own.items()}
        shared = own.get(SHARED_A)
        return LoraFactors(
            gate_lora_a=own.get("gate_lora_a") if shared is None else shared,
            gate_lora_b=own.get("gate_lora_b"),
            up_lora_a=own.get("up_lora_a") if shared is None else shared,
            up_lora_b=own.get("up_lora_b"),
            down_lora_a=own.get("down_lora_a"),
            down_lora_b=own.get("down_lora_b"),
            scaling=self.scaling,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertsLora:
        return self if self.stays else super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in self.named_parameters())


def stored_tensors(factors: LoraFactors) -> dict[str, Tensor]:
    """The tensors by the names of the parameters, an A that gate and up share once."""
    tensors = factors.tensors()
    if factors.gate_lora_a is not None and factors.gate_lora_a is factors.up_lora_a:
        del tensors["gate_lora_a"], tensors["up_lora_a"]
        tensors[SHARED_A] = factors.gate_lora_a
    return tensors


def fresh_factors(
    layout: ExpertsLayout,
    projections: Collection[str],
    *,
    r: int,
    scaling: float,
    dtype: torch.dtype,
    share_a: bool = True,
) -> LoraFactors:
    """A uniform in ±1/√in, as PEFT draws it, and B zero: the model is the same until the first step.

    On the CPU, so that one seed gives the same factors for every device.
    """
    found: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        if name not in projections:
            continue
        fan_in, fan_out = layout.hidden, layout.intermediate
        if name == "down":
            fan_in, fan_out = fan_out, fan_in
        if name == "up" and share_a and "gate_lora_a" in found:
            found["up_lora_a"] = found["gate_lora_a"]
        else:
            bound = 1 / math.sqrt(fan_in)
            a_ERI = torch.empty(layout.num_experts, r, fan_in, dtype=dtype, device="cpu")
            found[f"{name}_lora_a"] = a_ERI.uniform_(-bound, bound)
        found[f"{name}_lora_b"] = torch.zeros(layout.num_experts, fan_out, r, dtype=dtype, device="cpu")
    return LoraFactors(**found, scaling=scaling)
