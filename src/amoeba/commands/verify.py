"""`amoeba verify`: the conformance suite on this machine, as a table of the worst error of each gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output
from amoeba.conformance import Result, backend_names, cases, tolerance, verify, worst
from amoeba.errors import bad_value
from amoeba.machine import commit, machine, versions
from amoeba.weights import LORA_NAMES

# Columns of the table, in the order in which a token and its gradient meet them.
_NAMES = ("inference", "output", "x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", *LORA_NAMES)
_FAILURES_SHOWN = 10


def check_backends(names: Sequence[str], device: torch.device) -> list[str]:
    """The backends asked for, or all of this device."""
    known = backend_names(device)
    for name in names:
        if name not in known:
            raise bad_value("--backend", f"one of {', '.join(known)}", repr(name), "leave it out for all of them")
    return list(dict.fromkeys(names)) or list(known)


def run(
    device: torch.device, dtypes: Sequence[torch.dtype], backends: Sequence[str], thorough: bool, output: Output
) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document and whether all that was checked is right."""
    total = len(cases(thorough)) * len(dtypes) * len(backends)
    output.progress(
        f"verifying {', '.join(backends)} on {device.type}: {len(cases(thorough))} cases in "
        f"{', '.join(map(dtype_name, dtypes))}, output and every gradient against the fp64 reference"
    )
    with output.working():
        results = verify(device, dtypes, backends, thorough, _counting(output, total) if output.on_terminal else None)
    document = _document(results, device, thorough)
    _print(document, output)
    return document, document["ok"]


def _counting(output: Output, total: int) -> Callable[[Result], None]:
    done = 0

    def count(result: Result) -> None:
        nonlocal done
        done += 1
        output.progress(f"{done}/{total} {result.backend} {dtype_name(result.dtype)}")

    return count


def _document(results: Sequence[Result], device: torch.device, thorough: bool) -> dict[str, Any]:
    errors = worst(results)
    rows = []
    for backend, dtype in dict.fromkeys((result.backend, result.dtype) for result in results):
        mine = [result for result in results if (result.backend, result.dtype) == (backend, dtype)]
        checked = [result for result in mine if result.refused is None]
        rows.append(
            {
                "backend": backend,
                "dtype": dtype_name(dtype),
                "tolerance": {name: tolerance(backend, dtype, name) for name in ("output", "gradients")},
                "worst": errors.get((backend, dtype), {}),
                "cases_checked": len(checked),
                "cases_refused": len(mine) - len(checked),
                "ok": all(result.ok for result in checked),
            }
        )
    return {
        "document": "amoeba verify",
        "ok": all(row["ok"] for row in rows) and any(row["cases_checked"] for row in rows),
        "device": device.type,
        "thorough": thorough,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "backends": rows,
        "refusals": _refusals(results),
        "failures": [
            {
                "backend": result.backend,
                "dtype": dtype_name(result.dtype),
                "case": result.case,
                "failure": result.failure,
                "out_of_tolerance": result.out_of_tolerance,
            }
            for result in results
            if not result.ok
        ],
    }


def _refusals(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One entry per backend and reason, with the number of cases in each dtype."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        if result.refused is not None:
            found.setdefault((result.backend, result.refused), Counter())[dtype_name(result.dtype)] += 1
    return [{"backend": key[0], "reason": key[1], "cases": dict(counts)} for key, counts in found.items()]


def _print(document: dict[str, Any], output: Output) -> None:
    rows = [row for row in document["backends"] if row["cases_checked"]]
    names = [name for name in _NAMES if any(name in row["worst"] for row in rows)]
    columns = [
        "backend",
        "dtype",
        "cases",
        *(name.replace("_bias", " bias").replace("_lora_", " ") for name in names),
        "tolerance",
        "",
    ]
    lines = [
        [
            row["backend"],
            row["dtype"],
            str(row["cases_checked"]),
            *(f"{row['worst'][name]:.1e}" if name in row["worst"] else "-" for name in names),
            ", ".join(dict.fromkeys(f"{limit:.0e}" for limit in row["tolerance"].values())),
            "ok" if row["ok"] else "FAIL",
        ]
        for row in rows
    ]
    output.table(f"worst relative error on {document['device']}", columns, lines, text=("backend", "dtype"))
    if document["refusals"]:
        output.heading("not served, and why")
        for refusal in document["refusals"]:
            cases_of = ", ".join(f"{count} in {dtype}" for dtype, count in refusal["cases"].items())
            output.line(f"  {refusal['backend']} (cases: {cases_of}): {refusal['reason']}")
    _print_failures(document["failures"], output)
    output.line()
    if not rows:
        output.line("FAIL: nothing was checked, every case was refused", style="bold red")
    elif document["ok"]:
        output.line(f"ok: {sum(row['cases_checked'] for row in rows)} checks, every gradient within tolerance")
    else:
        output.line(f"FAIL: {len(document['failures'])} cases out of tolerance or in error", style="bold red")


def _print_failures(failures: Sequence[dict[str, Any]], output: Output) -> None:
    if not failures:
        return
    output.heading("failures")
    for failure in failures[:_FAILURES_SHOWN]:
        wrong = ", ".join(f"{name} {error:.1e}" for name, error in failure["out_of_tolerance"].items())
        output.line(f"  {failure['backend']} {failure['dtype']}, {failure['case']}: {failure['failure'] or wrong}")
    if len(failures) > _FAILURES_SHOWN:
        output.line(f"  ... and {len(failures) - _FAILURES_SHOWN} more (all of them with --json)")
