"""What the experts are and where they live. Placement and precision belong to the weights, not to the layer.

E experts · H hidden · I intermediate · J = 2I (gated: gate and up) or I

    weights = ExpertWeights(gate_up_EJH, down_EHI, activation=Activation("silu"))

Shapes are logical: a checkpoint that stores (E, H, J) passes `stored.transpose(1, 2)`, a view; strides say the rest and
gradients come back in the stored layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.config import Activation
from amoeba.errors import bad_value


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Experts resident as plain tensors on one device."""

    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None
    activation: Activation = None  # type: ignore[assignment]  # None: Activation(), which torch.compile cannot trace here

    placement = "resident"

    def __post_init__(self) -> None:
        if self.activation is None:
            object.__setattr__(self, "activation", Activation())
        if self.gate_up_EJH.dim() != 3 or self.down_EHI.dim() != 3:
            raise bad_value(
                "expert weights",
                "gate_up (E, J, H) and down (E, H, I)",
                f"{tuple(self.gate_up_EJH.shape)} and {tuple(self.down_EHI.shape)}",
                "stack the experts along the first dimension",
            )
        experts, hidden, intermediate = self.down_EHI.shape
        width = self.activation.width(intermediate)
        if self.gate_up_EJH.shape != (experts, width, hidden):
            kind = "gated: J = 2I" if self.activation.gated else "ungated: J = I"
            raise bad_value(
                "gate_up_EJH",
                f"shape ({experts}, {width}, {hidden}) to go with down {tuple(self.down_EHI.shape)} ({kind})",
                tuple(self.gate_up_EJH.shape),
                "pass weights stored as (E, H, J) as weight.transpose(1, 2), and check activation.gated",
            )
        self._check_bias("gate_up_bias_EJ", self.gate_up_bias_EJ, (experts, width))
        self._check_bias("down_bias_EH", self.down_bias_EH, (experts, hidden))
        first = self.gate_up_EJH
        for name in ("down_EHI", "gate_up_bias_EJ", "down_bias_EH"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype != first.dtype or tensor.device != first.device):
                raise bad_value(
                    name,
                    f"{first.dtype} on {first.device}, as gate_up_EJH",
                    f"{tensor.dtype} on {tensor.device}",
                    "move and cast all weights of a layer together",
                )

    def _check_bias(self, name: str, bias: Tensor | None, shape: tuple[int, int]) -> None:
        if bias is not None and bias.shape != shape:
            raise bad_value(name, f"shape {shape}", tuple(bias.shape), "one bias row per expert")

    @property
    def num_experts(self) -> int:
        return self.down_EHI.shape[0]

    @property
    def hidden(self) -> int:
        return self.down_EHI.shape[1]

    @property
    def intermediate(self) -> int:
        return self.down_EHI.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.gate_up_EJH.dtype

    @property
    def device(self) -> torch.device:
        return self.gate_up_EJH.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.gate_up_EJH, self.down_EHI, self.gate_up_bias_EJ, self.down_bias_EH

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same experts in another dtype, differentiably."""
        gate_up, down, gate_up_bias, down_bias = (None if t is None else t.to(dtype) for t in self.tensors())
        assert gate_up is not None
        assert down is not None
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, self.activation)
