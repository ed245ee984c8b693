"""A small layer whose tensors lie in memory in any way torch allows, run on every way through the CPU and compared with
the fp64 reference. It imports no pytest and asserts nothing: it also runs under `python -O` and under sanitizers.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

import torch
from torch import Tensor

from amoeba import Routing, experts
from amoeba.backends import cpu_fused
from amoeba.cpu.packed_experts import pack_experts
from amoeba.precision.formats import format_named
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.reference import experts as reference
from small_layer import E, Layer

# relative L2 against fp64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def first_dimension_last(tensor: Tensor) -> Tensor:
    """As `torch.randn(16, 8, 4).permute(2, 0, 1)` has it: no inner stride is 1."""
    order = [*range(1, tensor.dim()), 0]
    return contiguous(tensor.permute(order)).permute([tensor.dim() - 1, *range(tensor.dim() - 1)])


def inner_dimensions_swapped(tensor: Tensor) -> Tensor:
    return contiguous(tensor.mT).mT


def every_other(tensor: Tensor) -> Tensor:
    """Of a larger tensor, in every dimension; what is between is NaN, where there is NaN."""
    filler = float("nan") if tensor.is_floating_point() else 10**6
    whole = torch.full([2 * size for size in tensor.shape], filler, dtype=tensor.dtype, device=tensor.device)
    view = whole[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def columns_of_a_larger_one(tensor: Tensor) -> Tensor:
    """Contiguous along the last dimension, with gaps between the rows."""
    shape = *tensor.shape[:-1], tensor.shape[-1] + 3
    whole = torch.full(shape, 7, dtype=tensor.dtype, device=tensor.device)
    return whole[..., : tensor.shape[-1]].copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """All along the first dimension the same memory."""
    return tensor[:1].clone().expand(tensor.shape)


LAYOUTS = [first_dimension_last, inner_dimensions_swapped, every_other, columns_of_a_larger_one, expanded]
SIZES = {
    "plain": {"tokens": 7},
    "H=1": {"hidden": 1},
    "I=1": {"inner": 1},
    "H=I=1": {"hidden": 1, "inner": 1},
    "T=1": {"tokens": 1},
    "T=0": {"tokens": 0},
}
# ids of nobody's and experts without rows
SENTINELS = torch.tensor([[0, E], [-1, 2], [2**40, 0], [E + 3, -7], [2, 2]])
WAYS = {
    "cpu": torch.float32,
    "eager": torch.float32,
    "grouped": torch.float32,
    "cpu in bf16": torch.bfloat16,
    "cpu fused in bf16": torch.bfloat16,
    "packed in bf16": torch.bfloat16,
}
FROZEN = ("gate_up", "down", "gate_up_bias", "down_bias")  # once they are packed


class Laid:
    """A small layer, all of whose tensors lie as `layout` lays them."""

    def __init__(
        self,
        layout,
        dtype: torch.dtype,
        sizes: dict[str, int],
        narrow_ids: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layer, self.dtype = Layer(**({"rank": 2} | sizes)).to(device), dtype
        self.named = {
            name: layout(tensor.detach().to(torch.float32 if name == "weight" else dtype)).requires_grad_()
            for name, tensor in self.layer.tensors.items()
        }
        ids = layout(self.layer.expert_TK)
        self.expert_TK = ids.to(torch.int32) if narrow_ids else ids
        self.dy_TH = layout(self.layer.dy_TH.to(dtype))
        self.weights, self.lora = self.layer.weights(self.named), self.layer.lora(self.named)
        self.routing = Routing(self.expert_TK, self.named["weight"])

    def truth(self, way: str = "") -> dict[str, Tensor]:
        """way: of codes, for what they stand for."""
        wide = {name: tensor.detach().double().cpu() for name, tensor in self.named.items()}
        coded = way.startswith("codes")
        weights = dequantise_experts(self._quantised(way), torch.float64) if coded else self.layer.weights(wide)
        problem = wide["x"], self.expert_TK.cpu(), wide["weight"], weights, self.layer.lora(wide)
        output = reference.experts_forward(*problem)
        return {"output": output} | reference.experts_backward(self.dy_TH.double().cpu(), *problem)

    def found(self, way: str) -> dict[str, Tensor]:
        """Output and gradients by name, and what a few tokens without gradients give, which go another way."""
        before = cpu_fused._multiplies_bf16
        cpu_fused._multiplies_bf16 = lambda: "fused" in way  # as on a CPU that does, or does not
        try:
            return self._found(way)
        finally:
            cpu_fused._multiplies_bf16 = before

    def _found(self, way: str) -> dict[str, Tensor]:
        named, weights = self.named, self.weights
        if way.startswith("packed"):
            named = {name: tensor for name, tensor in named.items() if name not in FROZEN}
            weights = pack_experts(self.weights, way.split()[-1], nodes=2 if self.weights.intermediate > 1 else 1)
        backend = way.split()[0].replace("packed", "auto")
        if way.startswith("codes"):
            named = {name: tensor for name, tensor in named.items() if name not in FROZEN}
            weights, backend = self._quantised(way), way.split()[-1]
        call = {"lora": self.lora, "backend": backend}
        y = experts(self.named["x"], self.routing, weights, **call)
        gradients = torch.autograd.grad(y, list(named.values()), self.dy_TH)
        with torch.no_grad():
            decoded = experts(self.named["x"][:2], Routing(self.expert_TK[:2], named["weight"][:2]), weights, **call)
        return {"decoded": decoded, "output": y.detach()} | dict(zip(named, gradients, strict=True))

    def _quantised(self, way: str) -> QuantisedExperts:
        _, _, format, *_ = way.split()
        return quantise_experts(self.weights, format_named(format))


def check(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """Raises where one of them is not right."""
    truth = truth | {"decoded": truth["output"][:2]}
    for name, got in found.items():
        if got.shape != truth[name].shape:
            raise AssertionError(f"{name}: shape {tuple(got.shape)} instead of {tuple(truth[name].shape)}")
        error = float((got.double().cpu() - truth[name]).norm() / truth[name].norm().clamp(min=1e-9))
        print(f"{name}: {error:.1e}")
        if not error < tolerance:
            raise AssertionError(f"{name}: relative error {error:.1e}, at most {tolerance} is right")
