"""The list of backends: which of them supports a request, and why the others do not.

T tokens · K experts per token · E experts · H hidden · I intermediate

    explanation = explain(Request(x_TH, routing, weights))
    explanation.backend.name, explanation.refused        # "triton", {"grouped": "needs ..."}
    register_backend(MyBackend())

Each backend says itself which kinds of weights it serves and which requests it cannot take. Nothing here knows where
experts are.

A table lists layers for which another backend was measured to be faster than the default one:

    name = faster_than("triton", request)        # "tasks", or None: `auto` takes it then, see `explain`

Data, by the GPU's name, also of layers where it is no faster: to measure anew is to write other numbers here. What is
not in the table was not measured. Both have the same bits. What is faster needs more memory; where that is more than a
share of the GPU's, the default is kept.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from amoeba.backends import (
    cpu,
    eager,
    fp8,
    fp8_triton,
    grouped,
    packed,
    quantised_cpu,
    quantised_eager,
    quantised_triton,
    triton,
)
from amoeba.backends.backend import Backend, Request
from amoeba.core.errors import bad_value
from amoeba.core.weights import AnyExperts, ExpertWeights
from amoeba.system.machine import warn_about_torch
from amoeba.tasks.sizes import Sizes, extra_bytes

logger = logging.getLogger("amoeba")

_backends: list[Backend] = [
    module.BACKEND
    for module in (
        *(cpu, eager, grouped, triton, packed),
        *(quantised_eager, quantised_cpu, quantised_triton),
        *(fp8, fp8_triton),
    )
]
# Those that come when they are asked for by name, or because they were measured to be faster: where they register.
_BY_NAME = {
    "tasks": "amoeba.backends.tasks",
    "cpu-fused": "amoeba.backends.quantised_cpu_fused",
    "exact": "amoeba.backends.exact",
}
_serving: dict[tuple[type, str], list[Backend]] = {}  # by kind and type of device, the preferred ones first
_announced: set[str] = set()


class Explanation(NamedTuple):
    """backend: the one that would serve the request, None if none does.
    refused: what was preferred to it, by name, with the reason against it."""

    backend: Backend | None
    refused: dict[str, str]

    @property
    def reasons(self) -> str:
        """Why not those that were preferred; empty if none was."""
        return "; ".join(f"{name} {reason}" for name, reason in self.refused.items())

    def __str__(self) -> str:
        if self.backend is None:
            return f"no backend: {self.reasons}"
        return f"{self.backend.name}, {self.backend.summary}" + (f" ({self.reasons})" if self.refused else "")


def register_backend(backend: Backend) -> None:
    """Lets `experts` choose this backend for the kinds of weights that it names. Registering it again replaces it."""
    same = [other for other in _backends if other.name == backend.name and set(other.kinds) & set(backend.kinds)]
    if any(type(other).__qualname__ != type(backend).__qualname__ for other in same):
        kinds = ", ".join(kind.__name__ for kind in backend.kinds)
        raise bad_value("backend", f"a name that no other backend of {kinds} has", backend.name, "choose another name")
    for other in same:
        _backends.remove(other)
    _backends.append(backend)
    _sort_backends()


def backends_of(kind: type, device: torch.device) -> list[Backend]:
    """Those that serve this kind of weights, the preferred ones first."""
    found = _serving.get((kind, device.type))
    return _sorted(kind, device) if found is None else found


def named_backends() -> list[Backend]:
    """Those of any weights that `auto` takes only where they were measured to be faster; they go on waiting."""
    return [backend for name in _BY_NAME for backend in _waiting(name)]


def all_backends_of(kind: type, device: torch.device) -> list[Backend]:
    """Also those that wait to be asked for by name; they go on waiting."""
    here = {backend.name for backend in _backends}
    waiting = [backend for name in _BY_NAME if name not in here for backend in _waiting(name)]
    return [*backends_of(kind, device), *(backend for backend in waiting if kind in backend.kinds)]


def _waiting(name: str) -> tuple[Backend, ...]:
    return import_module(_BY_NAME[name]).BACKENDS


def _sort_backends() -> None:
    """Ahead of use: what a first pass noted down, torch.compile would find changed in the second, and compile again."""
    _serving.clear()
    for kind in {kind for backend in _backends for kind in backend.kinds}:
        for device in ("cpu", "cuda"):
            _serving[kind, device] = _sorted(kind, torch.device(device))


def _sorted(kind: type, device: torch.device) -> list[Backend]:
    serving = [backend for backend in _backends if kind in backend.kinds]
    return sorted(serving, key=lambda backend: -backend.preference(device))


def explain(request: Request) -> Explanation:
    """Which backend "auto" chooses for this request, and why not a faster one."""
    refused: dict[str, str] = {}
    for backend in backends_of(type(request.weights), request.weights.device):
        reason = backend.why_not(request)
        if reason is None:
            return Explanation(_measured_faster(backend, request) or backend, refused)
        refused[backend.name] = reason
    return Explanation(None, refused)


def _measured_faster(backend: Backend, request: Request) -> Backend | None:
    name = faster_than(backend.name, request)
    if name is None or not is_known(name):
        return None
    serving = backends_of(type(request.weights), request.weights.device)
    return next((other for other in serving if other.name == name and other.why_not(request) is None), None)


def is_known(name: str) -> bool:
    """Whether there is such a backend; one that waits to be asked for by name is there from now on."""
    if name in _BY_NAME and not any(backend.name == name for backend in _backends):
        for backend in _waiting(name):
            register_backend(backend)
    return any(backend.name == name for backend in _backends)


def choose(name: str, request: Request) -> Backend:
    if name == "auto":
        return _choose_auto(request)
    is_known(name)
    serving = backends_of(type(request.weights), request.weights.device)
    for backend in serving:
        if backend.name == name:
            reason = backend.why_not(request)
            if reason is not None:
                raise bad_value(
                    "backend", f"one that supports this request; {name} does not", reason, 'use backend="auto"'
                )
            return backend
    if any(backend.name == name for backend in _backends):
        raise bad_value(
            "backend", f"one that supports {_described(request)}", f"{name}, which does not", 'use backend="auto"'
        )
    names = ", ".join(("auto", *(backend.name for backend in serving)))
    raise bad_value("backend", f"one of {names}", repr(name), "`amoeba doctor` shows which ones run here")


def _choose_auto(request: Request) -> Backend:
    explanation = explain(request)
    if explanation.backend is None:
        raise bad_value(
            "backend",
            "at least one that supports this request",
            explanation.reasons or f"no backend for {_described(request)}",
            "change the weights' dtype or placement, or register a backend for them (amoeba.register_backend)",
        )
    if not torch.compiler.is_compiling():
        _announce(explanation, request)
    return explanation.backend


def _described(request: Request) -> str:
    return f"{request.weights.placement} weights ({type(request.weights).__name__})"


def _announce(explanation: Explanation, request: Request) -> None:
    weights, backend = request.weights, explanation.backend
    assert backend is not None
    key = f"{backend.name} {weights.placement} {weights.device.type} {weights.dtype}"
    if key not in _announced:
        _announced.add(key)
        waits = backend.waits_on_gpu and weights.device.type == "cuda"
        logger.log(
            logging.WARNING if waits else logging.INFO,
            "experts of %s on %s%s: backend %s%s%s",
            weights.dtype,
            weights.device,
            "" if weights.placement == "resident" else f", {weights.placement}",
            backend.name,
            ", each pass waits for the GPU" if waits else "",
            f" ({explanation.reasons})" if explanation.refused else "",
        )


_sort_backends()
warn_about_torch()  # once, where a process first computes experts


class Ratio(NamedTuple):
    """times: speed-up over the other: whole backward in bf16, CUDA graphs, replayed alternately."""

    backend: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int
    times: float


# By the GPU's name and the backend that is replaced. A layer may have several rows, of even and of skewed routing; a
# number of tokens between two of its rows needs both. H200, 2026-11-17, with rests: document `tasks-graphs` of 1a0ceba;
# 32 to 128 tokens: benchmarks/small_backward.py of 67f4b0d0, 2026-11-18, the lowest of three.
RATIOS: dict[tuple[str, str], tuple[Ratio, ...]] = {
    ("NVIDIA H200", "triton"): (
        Ratio("tasks", 1536, 256, 128, 8, 1024, 0.980),
        Ratio("tasks", 1536, 256, 128, 8, 24576, 0.946),
        Ratio("tasks", 2048, 768, 128, 8, 32, 1.063),
        Ratio("tasks", 2048, 768, 128, 8, 64, 1.038),
        Ratio("tasks", 2048, 768, 128, 8, 128, 1.036),
        Ratio("tasks", 2048, 768, 128, 8, 8192, 0.947),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.979),
        Ratio("tasks", 2048, 768, 128, 8, 32768, 0.951),  # skewed
        Ratio("tasks", 2048, 1024, 64, 8, 32768, 0.979),
        Ratio("tasks", 4096, 256, 256, 16, 32768, 0.959),
        Ratio("tasks", 4096, 1024, 128, 8, 32768, 0.965),
        Ratio("tasks", 4096, 14336, 8, 2, 8192, 0.968),
        Ratio("tasks", 7168, 2048, 32, 8, 8192, 0.944),
    ),
}
# Taken from here on. Back to back, as in training, ratios of large layers are up to 0.038 smaller than alternating with
# rests; that of 128 tokens is the same there (1.039, dev/log).
AT_LEAST = 1.03
EXTRA_SHARE = 1 / 32  # of the GPU's memory, at most: 4.4 GiB of an H200's, where none of these layers needs 3


def faster_than(name: str, request: Request) -> str | None:
    """Of weights in 16 bits. A traced graph keeps to the default: it is made once for many sizes."""
    weights = request.weights
    if not RATIOS or torch.compiler.is_compiling() or not _is_measured(weights):
        return None
    assert isinstance(weights, ExpertWeights)
    gate_up, down, *biases = weights.tensors()
    if any(bias is not None for bias in biases):
        return None  # none of the layers measured had biases
    if not (gate_up.requires_grad and down.requires_grad):
        return None  # the scheduled kernel computes the gradients of both, whoever wants them
    (tokens, hidden), top_k = request.x_TH.shape, request.routing.expert_TK.shape[1]
    layer = hidden, weights.intermediate, weights.num_experts, top_k
    of_layer = [each for each in RATIOS.get((gpu_name(weights.device), name), ()) if each[1:5] == layer]
    fewer, more = (
        max((each.tokens for each in of_layer if each.tokens <= tokens), default=None),
        min((each.tokens for each in of_layer if each.tokens >= tokens), default=None),
    )
    found = [each for each in of_layer if each.tokens in (fewer, more)]
    if fewer is None or more is None or min(each.times for each in found) < AT_LEAST:
        return None
    extra = extra_bytes(Sizes(*layer), tokens * top_k, weights.dtype.itemsize)
    return found[0].backend if extra <= EXTRA_SHARE * gpu_bytes(weights.device) else None


def _is_measured(weights: AnyExperts) -> bool:
    """Whether the table can say something of such weights."""
    if not isinstance(weights, ExpertWeights) or weights.device.type != "cuda":
        return False
    return weights.dtype in (torch.bfloat16, torch.float16)


@cache
def gpu_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


@cache
def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
