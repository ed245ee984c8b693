"""The LoRA factors of one layer of experts, and the form in which PEFT keeps them.

E experts · H hidden · I intermediate · J = 2I (gated) or I · R LoRA rank

    stacked = to_peft(factors)                                   # LoraFactors -> what a PEFT file holds
    factors = from_peft(stacked.gate_up, stacked.down, num_experts=8, gate_rank=stacked.gate_rank)

We keep an A and a B for each of gate, up and down, per expert. PEFT adapts the stacked parameters `gate_up_proj` and
`down_proj` as wholes, each with one A of shape (E·R, in), expert after expert, and one B of shape (out, R·E), in which
the experts alternate. `in` is what the projection reads and `out` what it makes, however the weight itself is stored.

- Read from PEFT, gate and up have the same A (one tensor, `gate_lora_a is up_lora_a`) and each its half of B.
- Written to PEFT, gate and up that have equal A keep their rank; others become one factor pair of both ranks together,
  A = [gate A; up A] and B block diagonal, which is the same update. `gate_rank` says where to cut it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import LoraFactors
from amoeba.integrations.experts_module import ExpertsLayout
from amoeba.proof.reference.experts import join_gate_up, split_gate_up


class StackedLora(NamedTuple):
    """The factors of one stacked parameter, as PEFT has them: W_e + scaling · B_e @ A_e."""

    lora_A: Tensor  # (E·R, in), row e·R + rank
    lora_B: Tensor  # (out, R·E), column rank·E + e
    scaling: float = 1.0


class PeftFactors(NamedTuple):
    gate_up: StackedLora | None
    down: StackedLora | None
    gate_rank: int | None  # so many of gate_up's ranks are gate's and the rest up's; None: all are both's


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
        return up_sides in (None, (layout.hidden, width)) and down_sides in (
            None,
            (layout.intermediate, layout.hidden),
        )
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
    """Factors of rank 0."""
    assert pair is not None
    return pair[0][:, :0], pair[1][:, :, :0]


def _pair(factors: LoraFactors, name: str) -> tuple[Tensor, Tensor] | None:
    a, b = getattr(factors, f"{name}_lora_a"), getattr(factors, f"{name}_lora_b")
    if a is None and b is None:
        return None
    shapes = [None if t is None else tuple(t.shape) for t in (a, b)]
    if a is None or b is None or a.dim() != 3 or b.dim() != 3 or (a.shape[0], a.shape[1]) != (b.shape[0], b.shape[2]):
        raise bad_value(
            f"{name}_lora_a and {name}_lora_b",
            "(E, R, in) and (E, out, R) of the same E and R",
            f"{shapes[0]} and {shapes[1]}",
            "pass both factors of a projection or neither",
        )
    return a.detach(), b.detach()
