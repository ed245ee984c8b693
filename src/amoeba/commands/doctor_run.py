"""`amoeba doctor`: what this machine is, what is installed, and which backend runs on what."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import torch

from amoeba.backends import fp8_choice
from amoeba.backends.backend import Backend, Request
from amoeba.backends.registry import backends_of, explain, named_backends
from amoeba.commands.options import DTYPES, dtype_name
from amoeba.commands.output import Output
from amoeba.core.weights import ExpertWeights
from amoeba.cpu.build import library_states
from amoeba.placements import all_placements
from amoeba.plan.machine import measured_machine, rates_in_words
from amoeba.precision.formats import MXFP4
from amoeba.precision.quantised_experts import quantise_experts
from amoeba.precision.recipes import AUTO, SUMMARIES, summary_of, with_precision
from amoeba.routing.router import Routing
from amoeba.system import tuned
from amoeba.system.cpu_features import compute_dtype, cpu_flags
from amoeba.system.machine import available_memory, commit, flags_looked_for, machine, untried, versions

_GIB = 2**30
# A small layer that no backend has a reason to refuse for its sizes.
_TOKENS, _TOP_K, _EXPERTS, _HIDDEN, _INTERMEDIATE = 4, 2, 4, 128, 128


def run(output: Output) -> dict[str, Any]:
    document: dict[str, Any] = {
        "document": "amoeba doctor",
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "untried_versions": {name: why for name, version in versions().items() if (why := untried(name, version))},
        "waiting_threads": _waiting_threads(),
        "bfloat16_on_cpu": _bfloat16_on_cpu(),
        "placements": _placements(),
        "backends": [row for device in _devices() for row in _backends_on(device)],
        "precisions": [row for device in _devices() for row in _precisions_on(device)],
        "rates": measured_machine().rates,
    }
    folder, states = library_states()  # after those that were just asked for
    document["compiled_libraries"] = {"folder": folder, "libraries": [asdict(state) for state in states]}
    _print(document, output)
    return document


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def _waiting_threads() -> dict[str, str | None]:
    policy = os.environ.get("OMP_WAIT_POLICY")
    if torch.get_num_threads() == 1 or not torch.backends.openmp.is_available():
        what = "torch has one thread here"
    elif policy is None:
        what = "OMP_WAIT_POLICY is not set: they spin; where others compute too, set it to passive before Python starts"
        what += ", or import amoeba before torch (every command but bench and doctor does so)"
    else:
        what = f"OMP_WAIT_POLICY={policy}"
    return {"omp_wait_policy": policy, "what": what}


def _bfloat16_on_cpu() -> dict[str, str]:
    chosen = compute_dtype(torch.bfloat16, torch.device("cpu"))
    instructions = sorted(flag for flag in cpu_flags() if "bf16" in flag)
    if chosen == torch.bfloat16:
        why = f"this CPU multiplies bf16 ({', '.join(instructions)})"
    elif cpu_flags():
        why = "this CPU has no bf16 instructions, torch would emulate them: stored in bf16, computed in fp32"
    else:
        why = "the system does not tell the CPU's instruction sets: stored in bf16, computed in fp32"
    return {"computed_in": dtype_name(chosen), "why": why}


def _placements() -> list[dict[str, str | None]]:
    rows: list[dict[str, str | None]] = []
    for placement in all_placements():
        if placement.offered:
            why_not = placement.why_not()
            how = placement.how() if why_not is None else None
            rows.append({"name": placement.name, "summary": placement.summary, "how": how, "why_not": why_not})
    return rows


def _backends_on(device: torch.device) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    requests = {name: _request(device, getattr(torch, name)) for name in DTYPES}
    chosen = backends_of(ExpertWeights, device)
    by_name = [backend for backend in named_backends() if backend.name not in {each.name for each in chosen}]
    for backend in (*chosen, *by_name):
        refusals = {name: backend.why_not(_of_its_kind(backend, request)) for name, request in requests.items()}
        row = {"backend": backend.name, "summary": backend.summary, "device": device.type, "refusals": refusals}
        rows.append(row | {"auto": [], "by_name": backend in by_name})
    for name in DTYPES:
        first = next((row for row in rows if row["refusals"][name] is None and not row["by_name"]), None)
        if first is not None:
            first["auto"].append(name)
    return rows


def _of_its_kind(backend: Backend, request: Request) -> Request:
    if ExpertWeights in backend.kinds:
        return request
    assert isinstance(request.weights, ExpertWeights)
    return replace(request, weights=quantise_experts(request.weights, MXFP4))


def _precisions_on(device: torch.device) -> list[dict[str, str]]:
    """Which backend computes experts that train in each precision, and in bf16, and why no faster one does."""
    rows = []
    for precision, summary in SUMMARIES.items():
        request = _request(device, torch.bfloat16)
        explanation = explain(replace(request, weights=with_precision(request.weights, precision)))
        rows.append({"name": precision, "device": device.type, "summary": summary, "backend": str(explanation)})
    return [*rows, {"name": AUTO, "device": device.type, "summary": summary_of(AUTO), "backend": _by_auto(device)}]


def _by_auto(device: torch.device) -> str:
    request = _request(device, torch.bfloat16)
    in_fp8 = replace(request, weights=with_precision(request.weights, fp8_choice.RECIPE))
    if (reason := fp8_choice.BACKEND.why_not(in_fp8)) is not None:
        return f"{explain(request)}; never fp8, which {reason}"
    rows, unchanged = fp8_choice.FEWEST_ROWS_PER_EXPERT, fp8_choice.FEWEST_ROWS_UNCHANGED
    fewest = f"for experts of 2048 x 768 and more, from {rows} rows an expert on ({unchanged} within UnchangedWeights)"
    return f"{explain(in_fp8)}, {fewest}; else {explain(request)}"


def _request(device: torch.device, dtype: torch.dtype) -> Request:
    x_TH = torch.zeros(_TOKENS, _HIDDEN, device=device, dtype=dtype)
    expert_TK = torch.zeros(_TOKENS, _TOP_K, device=device, dtype=torch.int64)
    weights = ExpertWeights(
        torch.zeros(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN, device=device, dtype=dtype),
        torch.zeros(_EXPERTS, _HIDDEN, _INTERMEDIATE, device=device, dtype=dtype),
    )
    weight_TK = torch.ones(_TOKENS, _TOP_K, device=device, dtype=torch.float32)
    return Request(x_TH, Routing(expert_TK, weight_TK), weights)


def _print(document: dict[str, Any], output: Output) -> None:
    found = document["machine"]
    cpu = found["cpu"]
    missing = " ".join(flag for flag in flags_looked_for() if flag not in cpu["instruction_sets"])
    free = available_memory(torch.device("cpu"))
    output.heading("machine")
    output.facts(
        [
            ("system", found["system"]),
            ("cpu", f"{cpu['model']}, {cpu['cores']} cores, {cpu['threads']} threads used by torch"),
            *_standing_for(cpu["features_override"]),
            ("waiting threads", document["waiting_threads"]["what"]),
            ("has", " ".join(cpu["instruction_sets"]) or "none of the instruction sets looked for"),
            ("has not", missing or "all looked for are there"),
            ("memory", f"{_gib(found['memory_bytes'])}, {_gib(free)} free"),
            ("huge pages", found["huge_pages"] or "no such setting on this system"),
            *(("gpu", _gpu(gpu)) for gpu in found["gpus"] or [None]),
            *(("tuned", _tuned(gpu)) for gpu in found["gpus"]),
        ]
    )
    output.heading("versions")
    versions_of = document["versions"] | document["untried_versions"]
    versions_of["commit"] = document["commit"] or "unknown (not a git checkout)"
    output.facts((name, version or "not installed") for name, version in versions_of.items())
    output.heading("bf16 on this CPU")
    bfloat16 = document["bfloat16_on_cpu"]
    output.line(f"  computed in {bfloat16['computed_in']}: {bfloat16['why']}")
    output.heading("placements of experts")
    where = ((row, f"not here: {row['why_not']}" if row["why_not"] else row["how"]) for row in document["placements"])
    output.facts((row["name"], f"{row['summary']}; {what}" if what else row["summary"]) for row, what in where)
    output.heading("measured, for amoeba plan")
    output.facts(rates_in_words(document["rates"]))
    compiled = document["compiled_libraries"]
    output.heading("compiled libraries")
    output.facts([("folder", compiled["folder"]), *((each["name"], each["what"]) for each in compiled["libraries"])])
    _print_backends(document["backends"], output)
    output.heading("precisions of experts that train")
    output.facts(
        (f"{row['name']} on {row['device']}", f"{row['summary']}; backend {row['backend']}")
        for row in document["precisions"]
    )


def _standing_for(override: str | None) -> list[tuple[str, str]]:
    if override is None:
        return []
    return [("stands for", f"a CPU with {override} at best: AMOEBA_CPU_FEATURES={override} hides what came after")]


def _print_backends(rows: list[dict[str, Any]], output: Output) -> None:
    def cell(row: dict[str, Any], dtype: str) -> str:
        if row["refusals"][dtype] is not None:
            return "no"
        if row["by_name"]:
            return "by name"
        return "auto" if dtype in row["auto"] else "runs"

    lines = [[row["backend"], row["device"], *(cell(row, dtype) for dtype in DTYPES), row["summary"]] for row in rows]
    columns = ["backend", "device", *DTYPES, "what it is"]
    title = "backends, fastest first (auto: taken by default; by name: when asked for, or measured to be faster)"
    output.table(title, columns, lines, text=columns)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for dtype, reason in row["refusals"].items():
            if reason is not None:
                reasons.setdefault((row["backend"], row["device"], reason), []).append(dtype)
    if reasons:
        output.heading("not run, and why")
        for (backend, device, reason), dtypes in reasons.items():
            output.line(f"  {backend} on {device} in {', '.join(dtypes)}: {reason}")


def _gpu(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return f"none that torch {torch.__version__} can use"
    return (
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, {_gib(gpu['memory_bytes'])}, "
        f"{gpu['multiprocessors']} multiprocessors"
    )


def _tuned(gpu: dict[str, Any]) -> str:
    if not tuned.is_wanted():
        return f"ignored, since {tuned.VARIABLE}=off; our own tables are used"
    count = gpu["tuned_configurations"]
    if not count:
        return "nothing measured here, our own tables are used: `amoeba tune` searches"
    return f"{count} configurations measured by `amoeba tune` are in use; results may differ in the last bits"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.1f} GiB"
