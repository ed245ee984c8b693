"""Which backends there are, which of them can serve a request, and the choice among them.

A backend is a name, `why_not(request) -> str | None` (the reason it cannot serve this request, or None) and `run`.
They are listed fastest first; `auto` takes the first without a reason.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends import cpu, eager, grouped, packed, triton
from amoeba.backends.operator import Operator, Problem
from amoeba.cpu.core import why_no_core
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu_features import has_bf16_instructions
from amoeba.errors import bad_value
from amoeba.routing import Routing
from amoeba.weights import AnyExperts, ExpertWeights, LoraFactors

logger = logging.getLogger("amoeba")

_TRITON_FOUND = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, eq=False)
class Request:
    """One call of the seam, as a backend sees it."""

    x_TH: Tensor
    routing: Routing
    weights: AnyExperts
    lora: LoraFactors | None = None
    recompute: bool = False


@dataclass(frozen=True)
class Backend:
    name: str
    summary: str
    why_not: Callable[[Request], str | None]
    operator: Operator  # for resident weights
    # Whether, without gradients, it takes this problem's factors in fp32 and rounds those that it meets. Else all are
    # rounded to the dtype of the weights beforehand, which with few tokens takes longer than the experts.
    rounds_factors: Callable[[Problem], bool] = lambda problem: False

    def run(self, request: Request) -> Tensor:
        weights, routing = request.weights, request.routing
        if isinstance(weights, PackedExperts):
            return packed.run(weights, request.x_TH, routing, request.lora, request.recompute)
        assert isinstance(weights, ExpertWeights)
        tensors = request.x_TH, routing.expert_TK, routing.weight_TK, *weights.tensors()
        problem = Problem(*tensors, weights.activation, request.lora)
        gradient = _wants_gradient(problem)
        if problem.lora is not None:
            # asked while tracing, it would tie the graph to this number of tokens
            rounds = not gradient and not torch.compiler.is_compiling() and self.rounds_factors(problem)
            problem = problem if rounds else problem._replace(lora=problem.lora.to(weights.dtype))
        return self.operator(problem, keep_h=gradient and not request.recompute, gradient=gradient)


def _wants_gradient(problem: Problem) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in problem.tensors())


def _not_resident(request: Request) -> str | None:
    if request.weights.placement != "resident":
        return f"serves resident weights, these are {request.weights.placement}"
    return None


def _eager_why_not(request: Request) -> str | None:
    if not request.weights.dtype.is_floating_point or request.weights.dtype.itemsize < 2:
        return f"serves fp64, fp32, bf16 and fp16, these weights are {request.weights.dtype}"
    return _not_resident(request)


def _cpu_why_not(request: Request) -> str | None:
    weights = request.weights
    if isinstance(weights, PackedExperts):
        return None
    if weights.device.type != "cpu":
        return f"computes on the CPU, these weights are on {weights.device}"
    if weights.dtype not in (torch.float32, torch.bfloat16):
        return f"the C++ core takes fp32 and bf16, these weights are {weights.dtype}"
    return _not_resident(request) or why_no_core()


def _triton_why_not(request: Request) -> str | None:
    weights = request.weights
    if weights.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"serves bf16, fp16 and fp32, these weights are {weights.dtype}"
    if weights.device.type == "cuda":
        if torch.cuda.get_device_capability(weights.device) < (8, 0):
            return "needs compute capability 8.0 or newer"
    elif weights.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"computes on a CUDA device (or in Triton's interpreter), these weights are on {weights.device}"
    elif weights.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bf16 wrongly"
    return _not_resident(request) or (None if _TRITON_FOUND else "needs Triton, which is not installed")


def _grouped_why_not(request: Request) -> str | None:
    weights = request.weights
    if not hasattr(F, "grouped_mm"):
        return f"needs torch.nn.functional.grouped_mm (torch >= 2.10), this is torch {torch.__version__}"
    if weights.device.type == "cuda":
        if weights.dtype != torch.bfloat16:
            return f"torch's grouped product without host synchronisation is bf16 only, these are {weights.dtype}"
        if torch.cuda.get_device_capability(weights.device) < (9, 0):
            return "torch's grouped product synchronises with the host below compute capability 9.0"
    elif weights.device.type != "cpu":
        return f"not tried on {weights.device.type}"
    elif weights.dtype == torch.bfloat16 and not has_bf16_instructions():
        return "torch's bf16 product is emulated on this CPU; eager computes it in fp32"
    elif weights.dtype not in (torch.float32, torch.bfloat16):
        return f"torch's grouped product on a CPU takes fp32 and bf16, these weights are {weights.dtype}"
    return _not_resident(request) or _misaligned(weights)


def _misaligned(weights: AnyExperts) -> str | None:
    """Rows of x, h and a are operands too, so every width counts, however the weights are stored."""
    assert isinstance(weights, ExpertWeights)
    size = weights.dtype.itemsize
    for name, width in (("H", weights.hidden), ("I", weights.intermediate), ("J", weights.gate_up_EJH.shape[1])):
        if width * size % 16:
            return f"torch's grouped product needs rows of a multiple of 16 bytes, {name} = {width} is {width * size}"
    for name, tensor in (("gate_up", weights.gate_up_EJH), ("down", weights.down_EHI)):
        _, row, column = tensor.stride()
        rows_apart = row >= tensor.shape[2] if column == 1 else row == 1 and column >= tensor.shape[1]
        if not rows_apart or any(stride * size % 16 for stride in tensor.stride() if stride != 1):
            needs = "torch's grouped product needs rows of a multiple of 16 bytes that do not overlap"
            return f"{needs}, {name} has strides {tensor.stride()}"
        if tensor.device.type == "cuda" and tensor.storage_offset() * size % 16:
            needs = "torch's grouped product on a GPU needs memory that begins at a multiple of 16 bytes"
            return f"{needs}, {name} begins at element {tensor.storage_offset()} of its storage"
    return None


_CPU = Backend("cpu", "the C++ core, compiled for this machine", _cpu_why_not, cpu.operator, cpu.decodes)
_TRITON = Backend("triton", "our kernels on the GPU", _triton_why_not, triton.operator)
_GROUPED = Backend("grouped", "torch's grouped matrix product on sorted rows", _grouped_why_not, grouped.operator)
_EAGER = Backend("eager", "one matrix product after another", _eager_why_not, eager.operator)

# Fastest first. On the 2-core Xeon, T=512 H=512 I=256 E=32 K=4 in fp32, forward+backward: cpu 46.3 ms, eager 54.6,
# grouped 57.6; decoding one token 0.32, 0.46, 0.94 (benchmarks/results, 2026-11-15). On a GPU eager has to wait for the
# device.
_BY_DEVICE = {"cpu": (_CPU, _EAGER, _GROUPED, _TRITON)}
_ELSEWHERE = (_TRITON, _GROUPED, _EAGER, _CPU)


def backends_for(device: torch.device) -> tuple[Backend, ...]:
    """All backends, fastest first on this kind of device."""
    return _BY_DEVICE.get(device.type, _ELSEWHERE)


def choose(name: str, request: Request) -> Backend:
    candidates = backends_for(request.weights.device)
    if name == "auto":
        return _choose_auto(candidates, request)
    for backend in candidates:
        if backend.name == name:
            reason = backend.why_not(request)
            if reason is not None:
                raise bad_value(
                    "backend", f"one that serves this request, {name} does not", reason, 'use backend="auto"'
                )
            return backend
    names = ", ".join(("auto", *(backend.name for backend in candidates)))
    raise bad_value("backend", f"one of {names}", repr(name), "`amoeba doctor` tells which run here")


_announced: set[str] = set()


def _choose_auto(candidates: tuple[Backend, ...], request: Request) -> Backend:
    refused: list[str] = []
    for backend in candidates:
        reason = backend.why_not(request)
        if reason is None:
            if not torch.compiler.is_compiling():
                _announce(backend, refused, request)
            return backend
        refused.append(f"{backend.name} {reason}")
    raise bad_value(
        "backend",
        "at least one that serves this request",
        "; ".join(refused),
        "change the weights' dtype or placement, or ask for what a backend serves",
    )


def _announce(backend: Backend, refused: list[str], request: Request) -> None:
    weights = request.weights
    key = f"{backend.name} {weights.placement} {weights.device.type} {weights.dtype}"
    if key not in _announced:
        _announced.add(key)
        because = f" ({'; '.join(refused)})" if refused else ""
        logger.info(
            "experts of %s on %s%s: backend %s%s",
            weights.dtype,
            weights.device,
            "" if weights.placement == "resident" else f", {weights.placement}",
            backend.name,
            because,
        )
