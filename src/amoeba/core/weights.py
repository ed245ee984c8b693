"""What the experts are and where they live. Placement and precision belong to the weights, not to the layer.

E experts · H hidden · I intermediate · J = 2I (gated: gate and up) or I · R LoRA rank

    weights = ExpertWeights(gate_up_EJH, down_EHI, activation=Activation("silu"))
    lora = LoraFactors(down_lora_a=a_ERI, down_lora_b=b_EHR, scaling=2.0)

Shapes are logical: a checkpoint that stores (E, H, J) passes `stored.transpose(1, 2)`, a view; strides say the rest and
gradients come back in the stored layout.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.operators import Operand, operands_of

_ACTIVATION_FIELDS = tuple(operand.name for operand in operands_of(Activation))


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Experts resident as plain tensors on one device, all in one dtype.

    gate_up_EJH: the up projection, J = 2I with a gate (all gates first, unless activation.interleaved) or I without.
    down_EHI: the down projection.
    gate_up_bias_EJ, down_bias_EH: biases, or None.
    activation: what comes between the two; silu with a gate by default.
    """

    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None
    activation: Activation = None  # type: ignore[assignment]  # None: Activation(), which torch.compile cannot trace here

    placement = "resident"
    trains = True

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
    def own_experts(self) -> int:
        return self.num_experts

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

    def takes(self, device: torch.device) -> bool:
        """Whether x may come from there."""
        return device == self.device

    @classmethod
    def operands(cls) -> tuple[Operand, ...]:
        return tuple(operand._replace(name=operand.name.rstrip("EJHI").rstrip("_")) for operand in operands_of(cls))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.gate_up_EJH, self.down_EHI, self.gate_up_bias_EJ, self.down_bias_EH

    def constants(self) -> tuple[Any, ...]:
        return tuple(getattr(self.activation, name) for name in _ACTIVATION_FIELDS)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> ExpertWeights:
        return cls.unchecked(*tensors, _activation(constants))

    @classmethod
    def unchecked(cls, *fields: Any) -> ExpertWeights:
        """The same without the checks, which take 5 µs, for what passed them before. torch.compile cannot trace it."""
        weights = object.__new__(cls)
        names = ("gate_up_EJH", "down_EHI", "gate_up_bias_EJ", "down_bias_EH", "activation")
        weights.__dict__.update(zip(names, fields, strict=True))
        return weights

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same experts in another dtype, differentiably."""
        gate_up, down, gate_up_bias, down_bias = (None if t is None else t.to(dtype) for t in self.tensors())
        assert gate_up is not None
        assert down is not None
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, self.activation)


@functools.lru_cache
def _activation(constants: tuple[Any, ...]) -> Activation:
    return Activation(*constants)


class AnyExperts(Protocol):
    """What every kind of weights says of itself. Where its experts are is for the backends that serve it to know.

    placement: in a word, for messages.
    trains:    whether the weights themselves can get gradients.
    dtype:     that x has to have, and y comes in.
    device:    where LoRA factors belong; `takes` tells where x may come from.
    own_experts: how many of num_experts this process has; LoRA factors are for these.
    tensors:   what autograd sees of the weights.

    A kind whose experts may come while a CUDA graph is replayed has `replays` too, see `amoeba.core.graph_replays`.
    """

    placement: str

    @property
    def trains(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def own_experts(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def activation(self) -> Activation: ...
    def takes(self, device: torch.device) -> bool: ...
    def to(self, dtype: torch.dtype) -> AnyExperts: ...
    def tensors(self) -> tuple[Tensor | None, ...]: ...


class OperatorExperts(AnyExperts, Protocol):
    """A kind that a `PassesBackend` serves: its operator gets it taken apart, `tensors` and `constants` in the order of
    `operands` (the tensors first), of which `of` makes the kind again."""

    @classmethod
    def operands(cls) -> tuple[Operand, ...]: ...
    def constants(self) -> tuple[Any, ...]: ...
    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Self: ...


class ExpertsByHandle:
    """To derive a kind of weights from that is no set of tensors, or whose memory is used again between the passes:
    an operator gets a handle, a number in a tensor, by which it finds the weights. They are frozen: no gradient flows
    to what torch does not see.

    A handle keeps nothing alive. The autograd graph of an ordinary call does; a compiled one does not, so keep the
    weights until its backward is done.
    """

    trains = False
    _numbers: ClassVar = itertools.count()
    _by_number: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

    handle: Tensor
    num_experts: Any  # an attribute or a property of the kind itself

    def __new__(cls, *_: Any, **__: Any) -> Self:
        weights, number = super().__new__(cls), next(cls._numbers)
        cls._by_number[number] = weights
        object.__setattr__(weights, "handle", torch.tensor(number, dtype=torch.int64, device="cpu"))
        return weights

    @property
    def own_experts(self) -> int:
        return self.num_experts

    @classmethod
    def operands(cls) -> tuple[Operand, ...]:
        return (Operand("handle", "Tensor"),)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.handle,)

    def constants(self) -> tuple[Any, ...]:
        return ()

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> Self:
        (handle,) = tensors
        assert handle is not None
        return cls._by_number[int(handle)]

    def __deepcopy__(self, memo: dict) -> Self:
        return self


@dataclass(frozen=True, eq=False)
class LoraFactors:
    """Low-rank updates of the three projections: W + scaling · b @ a. A projection without factors is left out.

    Experts without a gate have `up` and `down`. R may differ from projection to projection. The factors are on the
    device of the weights, in their dtype or in fp32; fp32 factors on weights of half precision are rounded to the
    weights' dtype for each pass and get fp32 gradients, as under autocast.
    """

    gate_lora_a: Tensor | None = None  # (E, R, H)
    gate_lora_b: Tensor | None = None  # (E, I, R)
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None  # (E, R, I)
    down_lora_b: Tensor | None = None  # (E, H, R)
    scaling: float = 1.0

    def six(self) -> tuple[Tensor | None, ...]:
        """The six in the order of the fields, None where there is none."""
        up_projection = self.gate_lora_a, self.gate_lora_b, self.up_lora_a, self.up_lora_b
        return (*up_projection, self.down_lora_a, self.down_lora_b)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in zip(LORA_NAMES, self.six(), strict=True) if tensor is not None}

    @property
    def shares_a(self) -> bool:
        """Whether gate and up have one A, the same tensor, as adapters from PEFT do."""
        return self.gate_lora_a is not None and self.gate_lora_a is self.up_lora_a

    def to(self, dtype: torch.dtype) -> LoraFactors:
        """The same factors in another dtype, differentiably; an A that gate and up share stays shared."""
        if all(tensor.dtype == dtype for tensor in self.tensors().values()):
            return self
        return self.each(lambda factor: factor.to(dtype))

    def each(self, change: Callable[[Tensor], Tensor]) -> LoraFactors:
        """These changed one by one; an A that gate and up share stays shared."""
        gate_a, gate_b, up_a, up_b, down_a, down_b = (None if t is None else change(t) for t in self.six())
        return LoraFactors(gate_a, gate_b, gate_a if self.shares_a else up_a, up_b, down_a, down_b, self.scaling)

    def check(self, weights: AnyExperts) -> None:
        """Raises ValueError unless these are factors for these experts."""
        if not math.isfinite(self.scaling):
            raise bad_value("scaling", "a finite number", self.scaling, "PEFT calls it lora_alpha / rank")
        experts, hidden, intermediate = weights.own_experts, weights.hidden, weights.intermediate
        for name, a, b in (
            ("gate", self.gate_lora_a, self.gate_lora_b),
            ("up", self.up_lora_a, self.up_lora_b),
            ("down", self.down_lora_a, self.down_lora_b),
        ):
            if a is None and b is None:
                continue
            if name == "gate" and not weights.activation.gated:
                raise bad_value(
                    "gate_lora_a",
                    "no gate factors for experts without a gate",
                    "a pair of them",
                    "name the factors of the up projection up_lora_a and up_lora_b, or check activation.gated",
                )
            fan_in, fan_out = (intermediate, hidden) if name == "down" else (hidden, intermediate)
            self._check_pair(name, a, b, (experts, fan_in, fan_out))
        for name, tensor in self.tensors().items():
            dtypes = (weights.dtype, torch.float32) if weights.dtype.itemsize < 4 else (weights.dtype,)
            if tensor.dtype not in dtypes or tensor.device != weights.device:
                raise bad_value(
                    name,
                    f"{' or '.join(str(dtype) for dtype in dtypes)} on {weights.device}, to go with the weights",
                    f"{tensor.dtype} on {tensor.device}",
                    "move and cast the factors to where the weights are",
                )

    @staticmethod
    def _check_pair(name: str, a: Tensor | None, b: Tensor | None, sizes: tuple[int, int, int]) -> None:
        experts, fan_in, fan_out = sizes
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (a, b)]
        rank = a.shape[1] if a is not None and a.dim() == 3 else 0
        if rank < 1 or shapes != [(experts, rank, fan_in), (experts, fan_out, rank)]:
            raise bad_value(
                f"{name}_lora_a and {name}_lora_b",
                f"shapes ({experts}, R, {fan_in}) and ({experts}, {fan_out}, R) with R >= 1",
                f"{shapes[0]} and {shapes[1]}",
                "pass both factors of a projection or neither, stacked along the experts",
            )


LORA_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
