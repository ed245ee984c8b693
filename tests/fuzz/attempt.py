"""The call of a case, in its surroundings, and what came of it.

    attempt(draw(1234)).verdict        # "passed", "refused" or "failed"

A refusal is an error in the project's form: what was expected, what came, what to do. Any other exception is a failure.
"""

import ast
import contextlib
import hashlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from amoeba import ExpertWeights, Routing, experts
from amoeba.core.weights import LoraFactors
from amoeba.cpu.packed_experts import pack_experts
from amoeba.placements import placement_named
from amoeba.proof.conformance import poisoned_memory

from .case import Case
from .compare import faults
from .tensors import Made, bits, make

QUOTED_BY_DYNAMO = re.compile(r"raised exception ValueError\((.*)\)$", re.MULTILINE)
OUR_FORM = re.compile(r".+: expected .+; got .+\. [A-Z`].*\.", re.DOTALL)


@dataclass(frozen=True)
class Outcome:
    verdict: Literal["passed", "refused", "failed"]
    reason: str = ""
    digest: str = field(default="", compare=False)  # of the bits of the output and of every gradient


def attempt(case: Case) -> Outcome:
    made = make(case)
    try:
        with surroundings(case), poisoned_memory():
            found, again = _call(case, made)
    except Exception as error:
        return verdict_on(error)
    lines = faults(case, made, found)
    lines += [f"{name}: other bits the second time" for name in again if not _same_bits(found[name], again[name])]
    lines += [f"{name}: was written to" for name in made.touched()]
    return Outcome("failed" if lines else "passed", "; ".join(lines), _digest(found))


def _digest(found: dict[str, Tensor]) -> str:
    content = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        content.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content.update(bits(tensor).cpu().numpy().tobytes())
    return content.hexdigest()[:16]


def verdict_on(error: Exception) -> Outcome:
    """Whether an exception is a refusal in our words."""
    text = str(error)
    if quoted := QUOTED_BY_DYNAMO.search(text):
        error = ValueError(ast.literal_eval(quoted[1])).with_traceback(error.__traceback__)
        text = str(error)
    ours = isinstance(error, ValueError) and OUR_FORM.fullmatch(text)
    if ours or (isinstance(error, NotImplementedError) and text.startswith("amoeba")):
        return Outcome("refused", text)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/amoeba/" in frame.filename]
    where = f" ({frames[-1].filename.rpartition('/amoeba/')[2]}:{frames[-1].lineno})" if frames else ""
    return Outcome("failed", f"{type(error).__name__}: {text.strip()[:600] or 'without a word'}{where}")


@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """The defaults of the process as this case has them, and back."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(case.threads)
    torch.set_default_dtype(getattr(torch, case.default_dtype))
    device = contextlib.nullcontext() if case.default_device == "none" else torch.device(case.default_device)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def _call(case: Case, made: Made) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients by name, and those of a second call (none unless the case repeats)."""
    if case.mode == "cuda_graph":
        return _captured(case, made), {}
    if case.mode == "side_stream":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = _passes(case, made)
        torch.cuda.current_stream().wait_stream(stream)
        return results
    return _passes(case, made)


def _passes(case: Case, made: Made) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with _mode(case):
        weights = _weights(case, made)
        y_TH = _forward(case, made, weights)
        again = {"output": _forward(case, made, weights)} if case.repeats else {}
    found = {"output": y_TH}
    wanted = _distinct_leaves(made)
    if y_TH.requires_grad:
        # a backward that is followed by another one may not use up what it reads
        found |= _gradients(y_TH, wanted, made, retain_graph=case.repeats)
        if case.repeats:
            again |= _gradients(y_TH, wanted, made)
    elif wanted and case.mode not in ("no_grad", "inference_mode"):
        raise AssertionError("the output does not require a gradient")
    return found, again


def _captured(case: Case, made: Made) -> dict[str, Tensor]:
    """As a CUDA graph replays it, with an x that was not there at the capture."""
    weights, wanted = _weights(case, made), _distinct_leaves(made)
    x_TH = made.tensors["x"].detach()
    content = x_TH.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def step() -> dict[str, Tensor]:
        y_TH = _forward(case, made, weights)
        return {"output": y_TH} | (_gradients(y_TH, wanted, made) if y_TH.requires_grad else {})

    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    expanded = 0 in x_TH.stride()  # which nobody can write to
    if not expanded:
        x_TH.zero_()
    with torch.cuda.graph(graph):
        found = step()
    if not expanded:
        x_TH.copy_(content)
    graph.replay()
    torch.cuda.synchronize()
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _mode(case: Case) -> Any:
    if case.mode == "no_grad":
        return torch.no_grad()
    if case.mode == "inference_mode":
        return torch.inference_mode()
    if case.mode == "autocast":
        return torch.autocast(case.device, torch.bfloat16)
    return contextlib.nullcontext()


def _weights(case: Case, made: Made) -> Any:
    named = made.tensors
    biases = named.get("gate_up_bias"), named.get("down_bias")
    weights = ExpertWeights(named["gate_up"], named["down"], *biases, case.activation)
    if case.placement == "resident":
        return weights
    if not case.packed:
        return placement_named(case.placement).make(weights)
    return pack_experts(weights, case.placement.removeprefix("cpu-"), case.nodes, threads=case.threads)


def _forward(case: Case, made: Made, weights: Any) -> Tensor:
    named = made.tensors
    factors = {name: tensor for name, tensor in named.items() if "_lora_" in name}
    lora = LoraFactors(**factors, scaling=case.scaling) if factors else None

    def call(x_TH: Tensor, weight_TK: Tensor) -> Tensor:
        routing = Routing(made.expert_TK, weight_TK, trusted=case.trusted)
        return experts(x_TH, routing, weights, lora=lora, backend=case.backend, recompute=case.recompute)

    if case.mode == "checkpoint":
        return torch.utils.checkpoint.checkpoint(call, named["x"], named["weight"], use_reentrant=False)
    if case.mode == "compile":
        # to dynamo all cases are one function, which it compiles anew eight times and no more; code that was kept on
        # the disk may be of operators that were changed since
        torch.compiler.reset()
        torch.compiler.config.force_disable_caches = True
        call = torch.compile(call, fullgraph=True, dynamic=False)
    return call(named["x"], named["weight"])


def _gradients(y_TH: Tensor, wanted: dict[str, Tensor], made: Made, retain_graph: bool = False) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(y_TH, list(wanted.values()), made.dy_TH, retain_graph=retain_graph)
    return dict(zip(wanted, gradients, strict=True))


def _distinct_leaves(made: Made) -> dict[str, Tensor]:
    """Whoever wants a gradient; the A that gate and up share once, as the gate's."""
    return {
        name: tensor
        for name, tensor in made.tensors.items()
        if tensor.requires_grad and not (name == "up_lora_a" and tensor is made.tensors.get("gate_lora_a"))
    }


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(bits(one), bits(other))
