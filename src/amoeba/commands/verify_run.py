"""`amoeba verify`: the conformance suite on this machine, as a table of the worst error of each gradient."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amoeba.backends.registry import is_known
from amoeba.commands.exits import interrupted
from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.core.weights import LORA_NAMES
from amoeba.proof.compiled_checks import OWN_CORES
from amoeba.proof.conformance import (
    STAGES,
    Check,
    Planned,
    Result,
    backend_names,
    cases,
    names_of_named_backends,
    results_of,
    tolerance,
    worst,
)
from amoeba.proof.over_ranks import verify_over_ranks
from amoeba.system.machine import commit, machine, versions

# Columns of the table, in the order in which a token and its gradient meet them.
_NAMES = ("inference", "output", "x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", *LORA_NAMES, *STAGES)
_FAILURES_SHOWN = 10
# Of the short form. With torch's own start and the last check, it ends within a minute.
SECONDS = 45
_SECONDS_BETWEEN_LINES = 5.0
_MOST_RANKS = 16


def check_backends(names: Sequence[str], device: torch.device) -> list[str]:
    """The backends asked for, or all of this device, with those that are otherwise taken by name only."""
    known = (*backend_names(device), *names_of_named_backends(device))
    for name in names:
        if name not in known and not is_known(name):
            raise bad_value("--backend", f"one of {', '.join(known)}", repr(name), "leave it out for all of them")
    return list(dict.fromkeys(names or known))


def run(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    backends: Sequence[str],
    thorough: bool,
    output: Output,
    order: Callable[[list[Planned], float], Iterator[int]] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document and whether all that was checked is right.

    order: of the checks, while other processes compile what they need (see `amoeba.proof.compiled_checks`).
    """
    seconds = None if thorough else SECONDS
    output.progress(
        f"checking {', '.join(backends)} on {device.type} in {', '.join(map(dtype_name, dtypes))}, "
        + ("every case, without a time limit" if thorough else f"the most revealing cases first, for {SECONDS} s")
    )
    began = time.monotonic()

    def tell(check: Check) -> None:
        now = f"{check.backend} in {dtype_name(check.dtype)}: {check.case.name}"
        output.at_times(f"{check.done} of {check.total} done, now {now}", _SECONDS_BETWEEN_LINES)

    results: list[Result] = []
    stopped = False
    with output.working(), _threads(torch.get_num_threads() if order is None else OWN_CORES):
        try:
            for result in results_of(device, dtypes, backends, thorough, tell, seconds, order):
                results.append(result)
        except KeyboardInterrupt:
            stopped = True
    results.sort(key=lambda result: (dtypes.index(result.dtype), backends.index(result.backend)))
    pairs = list(itertools.product(backends, dtypes))
    finished = Counter((result.backend, result.dtype) for result in results)
    each = len(cases(thorough))
    document = _document(results, device, thorough) | {
        "seconds": time.monotonic() - began,
        "cases": min(finished[pair] for pair in pairs),
        "cases_left_out": each - min(finished[pair] for pair in pairs),
        "checks": len(results),
        "checks_left_out": each * len(pairs) - len(results),
        "not_reached": [
            {"backend": backend, "dtype": dtype_name(dtype)} for backend, dtype in pairs if not finished[backend, dtype]
        ],
    }
    for row in document["backends"]:
        row["cases_left_out"] = each - row["cases_checked"] - row["cases_refused"]
    _print(document, output)
    if stopped:
        raise interrupted(f"{len(results)} of {each * len(pairs)} checks were done, see the table")
    return document, document["ok"]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_ranks(ranks: int, device: str, backends: Sequence[str], thorough: bool) -> None:
    if ranks > _MOST_RANKS:
        raise bad_value("--ranks", f"at most {_MOST_RANKS}", ranks, "each rank is a process on this machine")
    for option, given in (("--device", device == "cuda"), ("--backend", backends), ("--thorough", thorough)):
        if given:
            remedy = "drop it"
            raise bad_value(option, "no such option with --ranks, which runs its own cases on the CPU", "both", remedy)


def run_over_ranks(ranks: int, dtypes: Sequence[torch.dtype], output: Output) -> tuple[dict[str, Any], bool]:
    """The same for experts over processes that are started here; also compared bit by bit with one process."""
    output.progress(f"checking experts over {ranks} processes on cpu in {', '.join(map(dtype_name, dtypes))}")
    began = time.monotonic()

    def tell(done: int, total: int, case: str) -> None:
        output.at_times(f"{done} of {total} done, now {case}", _SECONDS_BETWEEN_LINES)

    with output.working():
        results = verify_over_ranks(ranks, dtypes, tell)
    document = _document(results, torch.device("cpu"), thorough=True)
    document |= {"ranks": ranks, "seconds": time.monotonic() - began}
    _print(document, output)
    if document["ok"]:
        output.line("gradients of weights, biases, factors and routing weights: bitwise identical to one process")
    return document, document["ok"]


def _document(results: Sequence[Result], device: torch.device, thorough: bool) -> dict[str, Any]:
    errors = worst(results)
    rows = []
    for backend, dtype in dict.fromkeys((result.backend, result.dtype) for result in results):
        mine = [result for result in results if (result.backend, result.dtype) == (backend, dtype)]
        checked = [result for result in mine if result.refused is None]
        found = errors.get((backend, dtype), {})
        judged = ("output", "gradients", *(name for name in STAGES if name in found))
        row: dict[str, Any] = {"backend": backend, "dtype": dtype_name(dtype), "worst": found}
        row |= {"tolerance": {name: tolerance(mine[0].judge, dtype, name) for name in judged}}
        row |= {"cases_checked": len(checked), "cases_refused": len(mine) - len(checked)}
        rows.append(row | {"ok": all(result.ok for result in checked)})
    names, failures = ("backend", "case", "failure", "out_of_tolerance"), []
    for result in (each for each in results if not each.ok):
        failures.append({name: getattr(result, name) for name in names} | {"dtype": dtype_name(result.dtype)})
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
        "failures": failures,
    }


def _refusals(results: Sequence[Result]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        if result.refused is not None:
            found.setdefault((result.backend, result.refused), Counter())[dtype_name(result.dtype)] += 1
    return [{"backend": key[0], "reason": key[1], "cases": dict(counts)} for key, counts in found.items()]


def _print(document: dict[str, Any], output: Output) -> None:
    rows = [row for row in document["backends"] if row["cases_checked"]]
    columns, lines = _every_error(rows) if output.verbose else _worst_errors(rows)
    output.table(f"worst relative error on {document['device']}", columns, lines, text=("backend", "dtype", "of"))
    _print_refusals(document, output)
    if pairs := document.get("not_reached"):
        output.heading("not reached in the time, nothing is known of them")
        for backend in dict.fromkeys(pair["backend"] for pair in pairs):
            dtypes = ", ".join(pair["dtype"] for pair in pairs if pair["backend"] == backend)
            output.line(f"  {backend}: {dtypes}")
    _print_failures(document["failures"], output)
    output.line()
    if not document["thorough"]:
        output.line(_left_out(document))
    if not rows:
        output.line("FAIL: nothing was checked, every case was refused", style="bold red")
    elif document["ok"]:
        backends, names = document["backends"], ("cases_checked", "cases_refused")
        checked, refused = (sum(row[name] for row in backends) for name in names)
        output.line(f"ok: {checked} checks, every gradient within tolerance; {refused} more were refused")
    else:
        output.line(f"FAIL: {len(document['failures'])} cases out of tolerance or in error", style="bold red")


def _print_refusals(document: dict[str, Any], output: Output) -> None:
    if output.verbose and document["refusals"]:
        output.heading("not served, and why")
        for refusal in document["refusals"]:
            cases_of = ", ".join(f"{count} in {dtype}" for dtype, count in refusal["cases"].items())
            output.line(f"  {refusal['backend']} (cases: {cases_of}): {refusal['reason']}")
    elif document["refusals"]:
        output.heading("not supported (-v shows why)")
        refused = [row for row in document["backends"] if row["cases_refused"]]
        for backend in dict.fromkeys(row["backend"] for row in refused):
            mine = [row for row in refused if row["backend"] == backend]
            output.line(f"  {backend}: {', '.join(map(_refused, mine))}")


def _refused(row: dict[str, Any]) -> str:
    if row["cases_checked"]:
        return f"{row['cases_refused']} of the cases in {row['dtype']}"
    # the first case, which has every property, is refused by backends that serve others
    only_first = row["cases_refused"] == 1 and row.get("cases_left_out")
    return f"{row['dtype']} (the first case, no other was reached)" if only_first else row["dtype"]


def _left_out(document: dict[str, Any]) -> str:
    done, left_out = document["checks"], document["checks_left_out"]
    everything = f"amoeba verify --thorough has {len(cases(thorough=True))} cases and no limit"
    if left_out:
        said = f"{done} of {done + left_out} checks (a case on a backend in a dtype) in {document['seconds']:.0f} s"
        return f"{said}, the rest were skipped; {everything}"
    return f"all {document['cases']} cases of the short form; {everything}"


def _worst_errors(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in rows:
        errors = dict(row["worst"])
        output = max(errors.pop("inference", 0.0), errors.pop("output", 0.0))
        name = max(errors, key=lambda one: errors[one], default=None)
        gradient = ["-", ""] if name is None else [f"{errors[name]:.1e}", _spoken(name)]
        lines.append([*_named(row), f"{output:.1e}", *gradient, *_judged(row)])
    return ["backend", "dtype", "cases", "output", "gradients", "of", "tolerance", ""], lines


def _every_error(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = [name for name in _NAMES if any(name in row["worst"] for row in rows)]
    lines = [
        [*_named(row), *(f"{row['worst'][name]:.1e}" if name in row["worst"] else "-" for name in names), *_judged(row)]
        for row in rows
    ]
    return ["backend", "dtype", "cases", *map(_spoken, names), "tolerance", ""], lines


def _spoken(name: str) -> str:
    return name.replace("_bias", " bias").replace("_lora_", " ")


def _named(row: dict[str, Any]) -> list[str]:
    return [row["backend"], row["dtype"], str(row["cases_checked"])]


def _judged(row: dict[str, Any]) -> list[str]:
    limits = ", ".join(dict.fromkeys(f"{limit:.0e}" for limit in row["tolerance"].values()))
    return [limits, "ok" if row["ok"] else "FAIL"]


def _print_failures(failures: Sequence[dict[str, Any]], output: Output) -> None:
    if not failures:
        return
    output.heading("failures")
    for failure in failures[:_FAILURES_SHOWN]:
        wrong = ", ".join(f"{name} {error:.1e}" for name, error in failure["out_of_tolerance"].items())
        output.line(f"  {failure['backend']} {failure['dtype']}, {failure['case']}: {failure['failure'] or wrong}")
    if len(failures) > _FAILURES_SHOWN:
        output.line(f"  ... and {len(failures) - _FAILURES_SHOWN} more (all of them with --json)")
