"""The proof: every backend's output and every gradient, by name, against the reference in fp64.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank · N routed rows

    results = verify(torch.device("cpu"), [torch.float32, torch.bfloat16])
    worst(results)["eager", torch.float32]["gate_up"]      # 2.1e-07
    all(result.ok for result in results)

An error is relative in the L2 norm. Inputs are rounded to the dtype before the reference sees them, so that the error
is the backend's alone. Uninitialised memory holds NaN while a backend runs, and only deterministic operations are
allowed. The tests run the same cases as the command `amoeba verify`.

The products of a recipe are proven one by one too, each fed the operands that the rows under proof have themselves:

    errors = stage_errors(problem, Fp8Rows, dy_TH)        # {"stage h": 1.6e-3, ...}, relative in the L2 norm

fp8 is 6 % away from fp64, which hides mistakes. From fp64 on the same quantised operands a product is as far as the
rounding of its result: 1.7e-3 in bf16.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.backends.backend import Backend, Request
from amoeba.backends.custom_activation import experts_composed
from amoeba.backends.registry import backends_of, explain, named_backends
from amoeba.backends.sorted_rows import SortedRows
from amoeba.core.errors import bad_value
from amoeba.core.layout import build_layout
from amoeba.core.placement import Placement
from amoeba.core.problem import Needs, Problem
from amoeba.core.torch_internals import deterministic_algorithms
from amoeba.core.weights import ExpertWeights
from amoeba.experts import experts
from amoeba.placements import all_placements
from amoeba.precision.quantised import QuantisedMatrix
from amoeba.precision.recipes import Fp8Experts
from amoeba.proof.cases import (
    FREEZABLE,
    Case,
    Example,
    cases,
    example,
    lora_of,
    most_telling_first,
    weight_dtype,
    weights_of,
    without_truth,
)
from amoeba.proof.reference import experts as reference
from amoeba.proof.reference.experts import activate, activate_backward
from amoeba.proof.reference.recipes import (
    kept,
    operands_of_backward,
    operands_of_weights,
    quantised_rows,
    quantised_weight,
)
from amoeba.routing.router import Routing

# Worst seen in all cases on a CPU with AMX (2026-11-15): 9e-16, 7e-7, 7e-3, 9e-4.
TOLERANCE: dict[torch.dtype, float] = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}

# The name under which `experts_composed` stands among the backends.
COMPOSED = "composed"

# Backends of other weights than resident ones that are taken by name: the placement whose experts they are checked on.
_CHECKED_ON: dict[str, str] = {"cpu-fused": "mxfp4-weights"}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fills whatever torch allocates uninitialised with NaN, and makes nondeterministic operations raise."""
    # cuBLAS is deterministic with a fixed workspace only, and torch refuses it without this
    name = "CUBLAS_WORKSPACE_CONFIG"
    was_set = name in os.environ
    os.environ.setdefault(name, ":4096:8")
    switch: Any = torch.utils.deterministic
    fill = switch.fill_uninitialized_memory
    with deterministic_algorithms():
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            switch.fill_uninitialized_memory = fill
            if not was_set:
                del os.environ[name]


def backend_names(device: torch.device) -> tuple[str, ...]:
    """All that can be checked on this kind of device and need not be asked for by name."""
    waiting = {backend.name for backend in named_backends()}  # one that was asked for is among the others from then on
    backends = (backend.name for backend in backends_of(ExpertWeights, device) if backend.name not in waiting)
    return (*backends, COMPOSED, *(placement.name for placement in all_placements()))


def names_of_named_backends(device: torch.device) -> tuple[str, ...]:
    """Those that a user has to ask for by name."""
    found = (backend for backend in named_backends() if backend.name not in _CHECKED_ON or device.type == "cpu")
    return tuple(backend.name for backend in found)


def _named(backend_name: str) -> Backend | None:
    return next((backend for backend in named_backends() if backend.name == backend_name), None)


def why_not(case: Case, backend_name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason for which the backend does not serve this case; None if it does."""
    if backend_name == COMPOSED:
        return "saves what autograd saves; there is nothing to recompute" if case.recompute else None
    placement = _placement(backend_name)
    reason = None if placement is None else why_not_placed(placement, device, dtype)
    named = _named(backend_name)
    if reason is not None or (placement is not None and not placement.trains and named is None):
        return reason
    tensors, routing, _ = _placed(without_truth(case, dtype), case, device, dtype)
    weights, lora = weights_of(tensors, case.activation), lora_of(tensors)
    if named is not None:
        made_of = weights if placement is None else placement.make(weights)
        return named.why_not(Request(tensors["x"], routing, made_of, lora, case.recompute))
    if placement is not None:  # making those that train costs nothing: they share the tensors
        explanation = explain(Request(tensors["x"], routing, placement.make(weights), lora, case.recompute))
        return explanation.reasons if explanation.backend is None else None
    request = Request(tensors["x"], routing, weights, lora, case.recompute)
    for backend in backends_of(ExpertWeights, device):
        if backend.name == backend_name:
            return backend.why_not(request)
    raise bad_value(
        "backend",
        f"one of {', '.join(backend_names(device))}",
        repr(backend_name),
        "leave backends at None to check them all",
    )


def _placement(backend_name: str) -> Placement | None:
    """Experts that are placed elsewhere stand among the backends under the name of their placement."""
    name = _CHECKED_ON.get(backend_name, backend_name)
    return next((placement for placement in all_placements() if placement.name == name), None)


def why_not_placed(placement: Placement, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in placement.tolerances:
        dtypes = ", ".join(str(each).removeprefix("torch.") for each in placement.tolerances)
        return f"computes in {dtypes}; x would be {dtype}"
    if device.type not in placement.x_from:
        return f"takes x from {' or '.join(placement.x_from)}, not from {device.type}"
    return placement.why_not()


def check(case: Case, backend_name: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Errors by name: output (with gradient), inference (without), and the gradient of each input that wants one."""
    placement = _placement(backend_name)
    made = example(case, dtype, None if placement is None else placement.represent)
    tensors, routing, dy_TH = _placed(made, case, device, dtype, placement)
    found = _computed(tensors, routing, case, backend_name, dy_TH)
    stages = _stages(tensors, routing, case, placement, dy_TH)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return {
        name: relative_error(name, found[name], made.truth[name], dtypes.get(name, dtype)) for name in found
    } | stages


def is_computed_on_cpu(backend_name: str, dtype: torch.dtype) -> bool:
    """Whether experts of that name are in the CPU's memory wherever x is, and take it in this dtype."""
    placement = _placement(backend_name)
    at_home = placement is not None and placement.home is not None and placement.home.type == "cpu"
    return at_home and placement is not None and dtype in placement.tolerances


def rehearse(case: Case, backend_name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Launches what `check` launches, on tensors that may be without numbers; nothing where experts are on the CPU."""
    placement = _placement(backend_name)
    if placement is not None and (placement.home or why_not_placed(placement, device, dtype)):
        return
    tensors, routing, dy_TH = _placed(without_truth(case, dtype), case, device, dtype, placement)
    _computed(tensors, routing, case, backend_name, dy_TH)
    _stages(tensors, routing, case, placement, dy_TH)


def _computed(
    tensors: dict[str, Tensor], routing: Routing, case: Case, backend_name: str, dy_TH: Tensor
) -> dict[str, Tensor]:
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    placement, weights = _placement(backend_name), weights_of(tensors, case.activation)
    with poisoned_memory():
        made = weights if placement is None else placement.make(weights)
        with torch.no_grad():
            found = {"inference": _run(tensors, routing, made, case, backend_name)}
        found["output"] = _run(tensors, routing, made, case, backend_name)
        gradients = torch.autograd.grad(found["output"], list(wanted.values()), dy_TH)
    return found | dict(zip(wanted, gradients, strict=True))


def _stages(
    tensors: dict[str, Tensor], routing: Routing, case: Case, placement: Placement | None, dy_TH: Tensor
) -> dict[str, float]:
    """Of experts that train in fp8 the error of each product by itself, too."""
    if placement is None or not placement.trains:
        return {}
    weights = placement.make(weights_of(tensors, case.activation))
    if not isinstance(weights, Fp8Experts):
        return {}
    with poisoned_memory(), torch.no_grad():
        backend: Any = explain(Request(tensors["x"], routing, weights)).backend
        problem = Problem(tensors["x"], routing.expert_TK, routing.weight_TK, weights)
        return stage_errors(problem, backend.rows(weights), dy_TH)


def _placed(
    made: Example, case: Case, device: torch.device, dtype: torch.dtype, placement: Placement | None = None
) -> tuple[dict[str, Tensor], Routing, Tensor]:
    """The inputs, the routing, and dy, as a user would hand them in; the weights of most placements are frozen."""
    tensors = {}
    at_home = device if placement is None or placement.home is None else placement.home
    frozen = case.frozen or (placement is not None and not placement.trains)
    for name, tensor in made.inputs.items():
        home = device if name in ("x", "weight") else at_home
        # detached: in fp64 on the CPU it is the very tensor that the reference computes with
        placed = tensor.detach().to(home, weight_dtype(case, dtype) if name == "weight" else dtype)
        if case.storage == "transposed" and placed.dim() == 3:
            placed = placed.transpose(1, 2).contiguous().transpose(1, 2)
        tensors[name] = placed.requires_grad_(not (frozen and name in FREEZABLE))
    return tensors, Routing(made.expert_TK.to(device), tensors["weight"]), made.dy_TH.to(device, dtype)


def _run(tensors: dict[str, Tensor], routing: Routing, weights: Any, case: Case, backend_name: str) -> Tensor:
    x_TH, lora = tensors["x"], lora_of(tensors)
    if _placement(backend_name) is not None:
        backend = "auto" if _named(backend_name) is None else backend_name
        return experts(x_TH, routing, weights, lora=lora, backend=backend, recompute=case.recompute)
    if backend_name != COMPOSED:
        return experts(x_TH, routing, weights, lora=lora, backend=backend_name, recompute=case.recompute)
    wide = torch.promote_types(x_TH.dtype, torch.float32)

    def foreign_function(h_NJ: Tensor) -> Tensor:
        return reference.activate(h_NJ.to(wide), case.activation).to(h_NJ.dtype)

    interleaved = case.activation.interleaved
    return experts_composed(
        x_TH, routing, *weights.tensors(), gate=foreign_function, lora=lora, interleaved=interleaved
    )


def tolerance(backend_name: str, dtype: torch.dtype, name: str) -> float:
    """How far that output or gradient may be from the truth, in every case."""
    if name in STAGES:
        return min(STAGE_TOLERANCE, TOLERANCE[dtype])
    placement = _placement(backend_name)
    if placement is None or dtype not in placement.tolerances:
        return TOLERANCE[dtype]
    output, gradients, inference = placement.tolerances[dtype]
    if name == "inference" and inference is not None:
        return inference
    return (output if name in ("output", "inference") else gradients) or TOLERANCE[dtype]


def relative_error(name: str, found: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    if found.shape != truth.shape or found.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype} {tuple(truth.shape)}; got {found.dtype} {tuple(found.shape)}.")
    found = found.detach().cpu().double()
    if not found.isfinite().all():
        return math.inf
    # An expert without rows, a token without experts, a sentinel: their zeros are exact, not small.
    nothing = truth == 0 if truth.dim() < 3 and name == "weight" else (truth == 0).flatten(1).all(1)
    if found[nothing].count_nonzero():
        return math.inf
    size = float(truth.norm())
    return float((found - truth).norm()) / size if size else 0.0


@dataclass(frozen=True)
class Result:
    """What came of one case on one backend: errors, or the reason for a refusal, or a failure's text.
    judged_as: the placement whose tolerances hold, unless they are the backend's own."""

    backend: str
    dtype: torch.dtype
    case: str
    errors: dict[str, float] = field(default_factory=dict)
    out_of_tolerance: dict[str, float] = field(default_factory=dict)
    refused: str | None = None
    failure: str | None = None
    judged_as: str | None = None

    @property
    def judge(self) -> str:
        """Whose tolerances hold."""
        return self.judged_as or self.backend

    @property
    def ok(self) -> bool:
        """False for a wrong number or an exception; a refusal with its reason is no failure."""
        return self.failure is None and not self.out_of_tolerance


Planned = tuple[Case, torch.dtype, str]


class Check(NamedTuple):
    """What is about to be checked, and how far that is."""

    done: int  # before this one
    total: int
    backend: str
    dtype: torch.dtype
    case: Case


def verify(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[str] | None = None,
    thorough: bool = False,
    progress: Callable[[Check], None] | None = None,
    seconds: float | None = None,
) -> list[Result]:
    """Every case on every backend (or those named) in every dtype; `progress` is called before each of them.

    seconds: what is not begun by then is left out, but for the first case, which every backend meets in every dtype,
             and the second for those that refused it.
    """
    return list(results_of(device, dtypes, backends or backend_names(device), thorough, progress, seconds))


def results_of(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[str],
    thorough: bool = False,
    progress: Callable[[Check], None] | None = None,
    seconds: float | None = None,
    order: Callable[[list[Planned], float], Iterator[int]] | None = None,
) -> Iterator[Result]:
    """As `verify`, one after the other.

    order: (checks, when the time is over) -> which of them is next, by their places; by default as they stand.
    """
    ends = math.inf if seconds is None else time.monotonic() + seconds
    chosen = cases(thorough) if seconds is None else most_telling_first(cases(thorough))
    checks = list(itertools.product(chosen, dtypes, backends))
    computed: set[tuple[str, torch.dtype]] = set()
    for done, place in enumerate(_in_turn(checks, chosen, ends, computed) if order is None else order(checks, ends)):
        case, dtype, name = checks[place]
        if progress is not None:
            progress(Check(done, len(checks), name, dtype, case))
        result = verify_case(case, name, device, dtype)
        if result.refused is None:
            computed.add((name, dtype))
        yield result


def _in_turn(
    checks: list[Planned], chosen: list[Case], ends: float, computed: set[tuple[str, torch.dtype]]
) -> Iterator[int]:
    for place, (case, dtype, name) in enumerate(checks):
        if case is not chosen[0] and time.monotonic() >= ends:
            if case not in chosen[:2]:
                break
            if (name, dtype) in computed:
                continue
        yield place


def verify_case(case: Case, backend_name: str, device: torch.device, dtype: torch.dtype) -> Result:
    refused = why_not(case, backend_name, device, dtype)
    if refused is not None:
        return Result(backend_name, dtype, case.name, refused=refused)
    try:
        errors = check(case, backend_name, device, dtype)
        limits = {name: tolerance(backend_name, dtype, name) for name in errors}
        wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
        return Result(backend_name, dtype, case.name, errors, wrong)
    except Exception as error:
        return Result(backend_name, dtype, case.name, failure=f"{type(error).__name__}: {error}")


def worst(results: Sequence[Result]) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    """The largest error of each name, for every backend and dtype that computed anything."""
    table: dict[tuple[str, torch.dtype], dict[str, float]] = {}
    for result in results:
        row = table.setdefault((result.backend, result.dtype), {}) if result.errors else {}
        for name, error in result.errors.items():
            row[name] = max(row.get(name, 0.0), error)
    return table


STAGES = ("stage h", "stage y", "stage dh", "stage ds", "stage dx", "stage dW1", "stage dW2")
STAGE_TOLERANCE = 3e-3

_NEEDS = Needs(x=True, weight=True, gate_up=True, down=True)


def stage_errors(problem: Problem, rows_type: type[SortedRows], dy_TH: Tensor) -> dict[str, float]:
    """h of x; y, each token's sum over its experts, of a; dh and ds of dy and h; dx of dh; dW1 of dh and x, dW2 of
    dy and s · a."""
    layout = build_layout(problem.expert_TK, problem.weights.num_experts)
    ends = [0, *layout.offs_E.tolist()]
    if not ends[-1]:
        return {}
    rows = rows_type.dispatch(problem, None)
    h_NJ, dy = rows.hidden(), rows.gather(dy_TH)
    _, a_NI = rows.up(want_h=False)
    y_NH = rows.down(a_NI)
    dh_NJ, scaled_a_NI, ds_N, _ = rows.activation_backward(dy, h_NJ, _NEEDS, overwrite_h=False)
    assert scaled_a_NI is not None
    d_gate_up = rows.weight_gradient(dh_NJ, rows.x, problem.weights.gate_up_EJH)
    d_down = rows.weight_gradient(dy, scaled_a_NI, problem.weights.down_EHI)
    dx_NH, _ = rows.up_backward(dh_NJ, _NEEDS)
    assert dx_NH is not None

    def wide(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().double()

    def own(tensor: Tensor) -> Tensor:
        """Without rows of sentinels."""
        return wide(tensor[: ends[-1]])

    token_N = layout.token_N[: ends[-1]].cpu()
    tensors = [None if tensor is None else wide(tensor) for tensor in problem.weights.tensors()]
    weights = Fp8Experts.of(tensors, problem.weights.constants())
    s = wide(problem.weight_TK).reshape(-1)[layout.order_N[: ends[-1]].cpu(), None]
    back, back_gate_up, back_down = operands_of_backward(weights)

    def multiply(rows_NI: Tensor, matrix: Callable[[int], Tensor], bias_EO: Tensor | None = None) -> Tensor:
        parts = [
            rows_NI[start:end] @ matrix(e) + (0 if bias_EO is None else bias_EO[e])
            for e, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        return torch.cat(parts)

    def in_format(rows: Tensor) -> Tensor:
        return quantised_rows(rows, weights.row_format)

    gate_up, down = (quantised_weight(weight, weights) for weight in (weights.gate_up_EJH, weights.down_EHI))
    x_NH, h, dout = wide(problem.x_TH)[token_N], kept(own(h_NJ), weights), wide(dy_TH)[token_N]
    da = wide(multiply(back(dout), lambda e: back_down[e]).to(problem.x_TH.dtype))
    truth = {
        "stage h": (h_NJ, multiply(in_format(x_NH), lambda e: gate_up[e].T, weights.gate_up_bias_EJ)),
        "stage dh": (dh_NJ, activate_backward(s * da, h, weights.activation)),
        "stage ds": (ds_N, (da * activate(h, weights.activation)).sum(-1)),
        "stage dx": (dx_NH, multiply(back(own(dh_NJ)), lambda e: back_gate_up[e])),
    }
    errors = {name: _error(own(found), expected) for name, (found, expected) in truth.items()}
    by_token, by_expert = operands_of_weights(weights)

    def gradient(by_token_TW: Tensor, sorted_NW: Tensor) -> Tensor:
        """Of each expert, (width of the sorted rows, width of the tokens')."""
        rows_NW, sorted_rows = by_token(wide(by_token_TW))[token_N], own(sorted_NW)
        parts = [by_expert(sorted_rows[start:end]).T @ rows_NW[start:end] for start, end in itertools.pairwise(ends)]
        return torch.stack(parts)

    errors["stage dW1"] = _error(wide(d_gate_up), gradient(problem.x_TH, dh_NJ))
    errors["stage dW2"] = _error(wide(d_down), gradient(dy_TH, scaled_a_NI).mT)
    # Whether a row of y has its routing weight in it already is the rows' own affair; summed up it has.
    activated = a_NI.dequantise() if isinstance(a_NI, QuantisedMatrix) else a_NI
    y = s * multiply(in_format(own(activated)), lambda e: down[e].T, weights.down_bias_EH)
    y_TH = torch.zeros(dy_TH.shape, dtype=torch.float64, device="cpu").index_add_(0, token_N, y)
    return errors | {"stage y": _error(wide(rows.combine(y_NH, weighted=True)), y_TH)}


def _error(found: Tensor, truth: Tensor) -> float:
    size = float(truth.norm())
    return float((found - truth).norm()) / size if size else float(found.norm())
