"""The training recipes (fp8, fp8-ste, fp8-saved, fp8-all, mxfp8, nvfp4): experts whose products are computed in 8 or 4
bits.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    weights = with_precision(ExpertWeights(gate_up_EJH, down_EHI), "fp8")
    y_TH = experts(x_TH, routing, weights)

Q is rounding to e4m3, with a power of two as scale for each 1 x 128 of a row and each 128 x 128 of a weight. In all
recipes the forward pass is

    h = Q(x) Q(W1)ᵀ + b1, rounded to the dtype of x and kept;  a = act(h);  y = Q(a) Q(W2)ᵀ + b2;  out = Σ s · y

and backward, given dO,

    fp8         dA' = Q(dO) Q(W2)      dh = act'(h) ∘ (s · dA')      dx = Q(dh) Q(W1)
    fp8-ste     dA' = dO W2            dh as above                   dx = dh W1

with dA' and dh rounded to the dtype of x, ds = <dA', a> + <dO, b2>, and the gradients of weights and biases as without
a recipe, from x, dO, h and dh as they are: dW2 = Σ (s · dO)ᵀ a, dW1 = Σ dhᵀ x. fp8-saved is fp8 with Q(h) kept, half of
the bytes: in backward all that comes from h, a too, comes from Q(h). fp8-all is fp8 with the gradients of weights in
e4m3 as well:

    dW2 = Σ R(dO)ᵀ B(s · a)    dW1 = Σ B(dh)ᵀ R(x)

where B has a scale for each column of 128 rows of one expert, counted from its first one in the sorted order, and R one
for each column over all tokens, those without experts too; s · a is rounded to the dtype of x before. "auto" is fp8
where that was measured to be faster, else no recipe.

mxfp8 and nvfp4 are fp8 with another Q, as Blackwell's matrix units multiply it:

    mxfp8       e4m3, with a power of two in e8m0, rounded up, for each 1 x 32 of a row and each 32 x 32 of a weight
    nvfp4       e2m1, with a scale in e4m3 for each 1 x 16 of a row and each 16 x 16 of a weight, times a number in fp32
                of that row, or of that expert's matrix

All numbers are rounded to the nearest: nvfp4 has neither stochastic rounding nor a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.core.weights import AnyExperts, ExpertWeights
from amoeba.precision.formats import (
    FP8_TRAINING,
    FP8_TRAINING_ROWS,
    MXFP8_TRAINING,
    MXFP8_TRAINING_ROWS,
    NVFP4_TRAINING,
    NVFP4_TRAINING_ROWS,
    Format,
)

Precision = Literal["bf16", "fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4", "auto"]
UNCHANGED: Precision = "bf16"
W8A8: Literal["w8a8"] = (
    "w8a8"  # of frozen experts, see `QuantisedExperts.products`: of a pass without gradients, and no recipe
)
AUTO: Precision = "auto"  # settled call by call, see `amoeba.backends.fp8_choice`
SUMMARIES = {
    "fp8": "products of forward and the gradients of rows in e4m3, the gradients of weights in the run's dtype",
    "fp8-ste": "products of forward in e4m3, backward in the run's dtype",
    "fp8-saved": "as fp8, and what is kept for backward in e4m3",
    "fp8-all": "as fp8, and the gradients of weights in e4m3",
    "mxfp8": "as fp8, with a scale for each 32 numbers of a row",
    "nvfp4": "as fp8, with e2m1 for e4m3 and a scale for each 16 numbers of a row",
}
_FP8 = FP8_TRAINING_ROWS, FP8_TRAINING
_OPERANDS: dict[str, tuple[Format, Format]] = {
    **dict.fromkeys(("fp8", "fp8-ste", "fp8-saved", "fp8-all", AUTO, W8A8), _FP8),
    "mxfp8": (MXFP8_TRAINING_ROWS, MXFP8_TRAINING),
    "nvfp4": (NVFP4_TRAINING_ROWS, NVFP4_TRAINING),
}
# Has scales over all tokens, of which a rank has a part: not for experts over ranks.
OF_ALL_TOKENS: Precision = "fp8-all"


def operand_formats(recipe: str) -> tuple[Format, Format]:
    """Of rows, and of weights."""
    return _OPERANDS[recipe]


def summary_of(precision: str) -> str:
    return (
        "fp8 where it was measured to be faster, the run's dtype elsewhere"
        if precision == AUTO
        else SUMMARIES[precision]
    )


@dataclass(frozen=True, eq=False)
class Fp8Experts(ExpertWeights):
    """Resident experts with a recipe, see above; made by `with_precision`."""

    recipe: str = "fp8"

    @property
    def row_format(self) -> Format:
        return operand_formats(self.recipe)[0]

    @property
    def weight_format(self) -> Format:
        return operand_formats(self.recipe)[1]

    @property
    def placement(self) -> str:  # type: ignore[override]
        return self.recipe

    def constants(self) -> tuple[Any, ...]:
        return (*super().constants(), self.recipe)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Fp8Experts:
        *activation, recipe = constants
        found = object.__new__(cls)
        found.__dict__.update(vars(ExpertWeights.of(tensors, tuple(activation))), recipe=recipe)
        return found

    def to(self, dtype: torch.dtype) -> Fp8Experts:
        return Fp8Experts(*super().to(dtype).tensors(), self.activation, self.recipe)


def check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        names = ", ".join(get_args(Precision))
        raise bad_value("precision", f"one of {names}", repr(precision), "leave it out for the dtype of the weights")


def with_precision(weights: AnyExperts, precision: str) -> ExpertWeights:
    """The same tensors, to be trained in this precision; "bf16" stands for their own dtype, whatever it is.

    weights: ExpertWeights, which may be sharded over ranks afterwards; other kinds are refused."""
    check_precision(precision)
    if not isinstance(weights, ExpertWeights):
        remedy = "set the precision first, and shard or place these experts then"
        raise bad_value("weights", "experts as ordinary tensors, ExpertWeights", type(weights).__name__, remedy)
    if precision == UNCHANGED:
        return ExpertWeights(*weights.tensors(), weights.activation)
    return Fp8Experts(*weights.tensors(), weights.activation, precision)
