"""Frozen quantised experts: a kind of weights that is never dequantised as a whole.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    weights = quantise_experts(ExpertWeights(gate_up_EJH, down_EHI), MXFP4)
    y_TH = experts(x_TH, routing, weights, lora=lora)

x, the routing weights and LoRA factors get gradients, the experts do not. Codes and scales are kept as integers, so
that a module that holds them may be moved and cast: `model.to(torch.bfloat16)` leaves integers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.operators import Operand, operands_of
from amoeba.core.weights import ExpertWeights
from amoeba.precision.formats import FP8_128, Format, format_named
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.system.cpu_features import compute_dtype

_ACTIVATION = operands_of(Activation)
_MATRIX = (("data", "Tensor"), ("scales", "Tensor"), ("matrix_scale", "Tensor?"))


Products = Literal["bf16", "w8a8", "auto"]
Stored = tuple[Tensor, Tensor, Tensor | None]  # data, scales and matrix_scale of a `QuantisedMatrix`, as integers


def _store(matrix: QuantisedMatrix) -> Stored:
    def integers(tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor, requires_grad=False)

    matrix_scale = None if matrix.matrix_scale is None else integers(matrix.matrix_scale)
    return integers(matrix.data), integers(matrix.scales), matrix_scale


def _read(stored: Stored, format: Format, columns: int, parts: int) -> QuantisedMatrix:
    data, scales, matrix_scale = stored
    scales = scales.view(torch.float32) if format.scale == "fp32" else scales
    matrix_scale = None if matrix_scale is None else matrix_scale.view(torch.float32)
    return QuantisedMatrix(data, scales, format, columns, parts, matrix_scale)


@dataclass(frozen=True, eq=False)
class QuantisedExperts:
    """Made by `quantise_experts`, or of the matrices of a file by `QuantisedExperts.holding`.

    format: of gate_up; down_format: of down, where that is another one.
    parts: of gate_up, see `QuantisedMatrix`.
    dtype: of x and y; products are computed in it, unless they are in fp8.
    products: of passes without gradients and LoRA. "bf16": rows as they are, in dtype, with dequantised weights.
        "w8a8": rows are quantised to e4m3 as well, with a scale in fp32 for each 1 x 128, and codes are multiplied (of
        fp8-128 alone). "auto": w8a8 where it was measured to be faster, see `amoeba.backends.fp8_choice`.
    """

    stored_gate_up: Stored
    stored_down: Stored
    stored_gate_up_bias: Tensor | None
    stored_down_bias: Tensor | None
    format: Format
    hidden: int
    intermediate: int
    parts: int
    activation: Activation
    dtype: torch.dtype
    products: Products = "bf16"
    down_format: Format | None = None

    placement = "quantised"
    trains = False

    @classmethod
    def holding(
        cls,
        gate_up: QuantisedMatrix,
        down: QuantisedMatrix,
        gate_up_bias_EJ: Tensor | None = None,
        down_bias_EH: Tensor | None = None,
        activation: Activation | None = None,
        dtype: torch.dtype = torch.bfloat16,
        products: Products = "bf16",
    ) -> QuantisedExperts:
        """gate_up: of shape (E, J, H). down: (E, H, I), in the same format, or both in blocks."""
        activation = activation or Activation()
        experts, hidden, intermediate = down.shape if len(down.shape) == 3 else (0, 0, 0)
        width = activation.width(intermediate)
        fits = gate_up.shape == (experts, width, hidden) and down.parts == 1
        fits = fits and (gate_up.format == down.format or gate_up.format.scale == down.format.scale == "inside")
        if not fits or gate_up.data.device != down.data.device:
            expected = f"gate_up ({experts}, {width}, {hidden}) and down (E, H, I) in one format on one device"
            got = f"{gate_up.shape} in {gate_up.format.name} and {down.shape} in {down.format.name}"
            raise bad_value(
                "quantised experts", expected, got, "check activation.gated, and quantise both in the same format"
            )
        biases = [(gate_up_bias_EJ, (experts, width)), (down_bias_EH, (experts, hidden))]
        for bias, shape in biases:
            if bias is not None and tuple(bias.shape) != shape:
                raise bad_value("bias", f"shape {shape}", tuple(bias.shape), "one row per expert")
        up_bias, down_bias = (None if b is None else nn.Parameter(b.detach().clone(), False) for b, _ in biases)
        sizes = hidden, intermediate, gate_up.parts
        found = cls(_store(gate_up), _store(down), up_bias, down_bias, gate_up.format, *sizes, activation, dtype)
        if down.format != gate_up.format:
            found = replace(found, down_format=down.format)
        return found.with_products(products)

    @property
    def num_experts(self) -> int:
        return self.stored_down[0].shape[0]

    @property
    def own_experts(self) -> int:
        return self.num_experts

    @property
    def device(self) -> torch.device:
        return self.stored_down[0].device

    @property
    def gate_up_EJH(self) -> ReadInBlocks:
        return ReadInBlocks(_read(self.stored_gate_up, self.format, self.hidden, self.parts), self.dtype)

    @property
    def down_EHI(self) -> ReadInBlocks:
        format = self.down_format or self.format
        return ReadInBlocks(_read(self.stored_down, format, self.intermediate, 1), self.dtype)

    @property
    def gate_up_bias_EJ(self) -> Tensor | None:
        return None if self.stored_gate_up_bias is None else self.stored_gate_up_bias.to(self.dtype)

    @property
    def down_bias_EH(self) -> Tensor | None:
        return None if self.stored_down_bias is None else self.stored_down_bias.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not None)

    def takes(self, device: torch.device) -> bool:
        return device == self.device

    def to(self, dtype: torch.dtype) -> QuantisedExperts:
        """The same experts for x in another dtype."""
        return replace(self, dtype=dtype)

    def with_products(self, products: Products) -> QuantisedExperts:
        """The same experts, see above; ValueError where their codes cannot be multiplied with those of rows."""
        if products == "w8a8" and (reason := self.why_not_w8a8()) is not None:
            remedy = 'keep products="bf16", or quantise them to fp8-128'
            raise bad_value("products", "e4m3 in blocks of 128 x 128 for w8a8", reason, remedy)
        return self if products == self.products else replace(self, products=products)

    def why_not_w8a8(self) -> str | None:
        """Why codes of rows cannot be multiplied with these, or None."""
        if self.format != FP8_128:
            return f"multiplies e4m3 in blocks of 128 x 128 (fp8-128), these experts are in {self.format.name}"
        return None

    @classmethod
    def operands(cls) -> tuple[Operand, ...]:
        matrices = (Operand(f"{name}_{part}", kind) for name in ("gate_up", "down") for part, kind in _MATRIX)
        biases = Operand("gate_up_bias", "Tensor?"), Operand("down_bias", "Tensor?")
        numbers = (Operand(name, "int") for name in ("hidden", "intermediate", "parts"))
        words = Operand("dtype", "str"), Operand("products", "str"), Operand("down_format", "str")
        return (*matrices, *biases, Operand("format", "str"), *numbers, *words, *_ACTIVATION)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*self.stored_gate_up, *self.stored_down, self.stored_gate_up_bias, self.stored_down_bias)

    def constants(self) -> tuple[Any, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        activation = (getattr(self.activation, operand.name) for operand in _ACTIVATION)
        sizes = self.hidden, self.intermediate, self.parts
        down_format = (self.down_format or self.format).name
        return (self.format.name, *sizes, dtype, self.products, down_format, *activation)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], constants: tuple[Any, ...]) -> QuantisedExperts:
        format, hidden, intermediate, parts, dtype, products, down_format, *activation = constants
        gate_up, down, (gate_up_bias, down_bias) = tuple(tensors[:3]), tuple(tensors[3:6]), tensors[6:]
        return cls(
            gate_up,  # type: ignore[arg-type]
            down,  # type: ignore[arg-type]
            gate_up_bias,
            down_bias,
            format_named(format),
            hidden,
            intermediate,
            parts,
            Activation(*activation),
            getattr(torch, dtype),
            products,
            None if down_format == format else format_named(down_format),
        )


@dataclass(frozen=True, eq=False)
class ReadInBlocks:
    """Experts' matrices in a quantised format where a backend for resident experts has a tensor: of the same shape,
    to be transposed like one, but no number is there before one expert is asked for.

    matrix: as it is stored; transposed: whether it is read the other way round.
    """

    matrix: QuantisedMatrix
    dtype: torch.dtype
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, columns = self.matrix.shape
        return (experts, columns, rows) if self.transposed else (experts, rows, columns)

    @property
    def device(self) -> torch.device:
        return self.matrix.data.device

    @property
    def mT(self) -> ReadInBlocks:
        return replace(self, transposed=not self.transposed)

    def transpose(self, *dimensions: int) -> ReadInBlocks:
        """dimensions: the last two; there are no others to exchange."""
        return self.mT

    def unbind(self, *dimension: int) -> ReadInBlocks:
        """dimension: the first, that of the experts, by which the result is indexed."""
        return self

    def __getitem__(self, expert: int) -> Tensor:
        """Dequantised, in the dtype in which a product with it is computed."""
        found = self.matrix[expert].dequantise(compute_dtype(self.dtype, self.device))
        return found.t() if self.transposed else found


def quantise_experts(
    weights: ExpertWeights, format: Format, products: Products = "bf16", *, closest: bool = False
) -> QuantisedExperts:
    """Gate and up have blocks of their own, unless their rows take turns. The weights may go afterwards. closest: as
    `quantise` takes it, and `amoeba quantise` writes it."""
    activation = weights.activation
    parts = 2 if activation.gated and not activation.interleaved else 1
    return QuantisedExperts.holding(
        quantise(weights.gate_up_EJH, format, parts=parts, closest=closest),
        quantise(weights.down_EHI, format, closest=closest),
        weights.gate_up_bias_EJ,
        weights.down_bias_EH,
        activation,
        weights.dtype,
        products,
    )


def dequantise_experts(weights: QuantisedExperts, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    """As resident weights, all of them in memory: what quantised experts are compared with."""
    biases = weights.stored_gate_up_bias, weights.stored_down_bias
    gate_up_bias, down_bias = (None if bias is None else bias.detach().to(dtype) for bias in biases)
    gate_up, down = (each.matrix.dequantise(dtype) for each in (weights.gate_up_EJH, weights.down_EHI))
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias, weights.activation)
