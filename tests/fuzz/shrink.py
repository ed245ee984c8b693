"""Makes a failing case as simple as it still fails; in child processes, for a case may also crash.

simple, outcome = shrink(case, attempt)
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import signal
from collections.abc import Callable, Iterator
from typing import Any

from .attempt import Outcome
from .case import simplest

MOST_SECONDS = 120.0


def shrink(case: Any, attempt: Callable[[Any], Outcome]) -> tuple[Any, Outcome]:
    """The case with as many fields at their simplest as possible, and what came of it; as it is if it does not fail."""
    outcome = apart(case, attempt)
    simpler = outcome.verdict == "failed"
    while simpler:
        simpler = False
        for candidate in _simpler(case):
            found = apart(candidate, attempt)
            if found.verdict == "failed":
                case, outcome, simpler = candidate, found, True
                break
    return case, outcome


def apart(case: Any, attempt: Callable[[Any], Outcome]) -> Outcome:
    """In a process of its own. Where it is forked, nothing may have been computed in this one before."""
    context = multiprocessing.get_context("spawn" if case.device == "cuda" else "fork")  # CUDA cannot be forked
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, case, attempt))
    child.start()
    sender.close()
    try:
        outcome = receiver.recv() if receiver.poll(MOST_SECONDS) else Outcome("failed", "no end")
    except EOFError:
        child.join()
        status = child.exitcode or 0
        word = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        outcome = Outcome("failed", f"the process died of {word}")
    child.kill()
    child.join()
    return outcome


def _report(sender: multiprocessing.connection.Connection, case: Any, attempt: Callable[[Any], Outcome]) -> None:
    sender.send(attempt(case))


def _simpler(case: Any) -> Iterator[Any]:
    """One step each: a field at its simplest, a part of it left out, a number halved."""
    for part in dataclasses.fields(case):
        value, least = getattr(case, part.name), simplest(part)
        if part.name in ("seed", "device") or value == least:
            continue
        values = [least]
        if isinstance(value, dict):
            values += [{key: value[key] for key in value if key != gone} for gone in value]
        elif isinstance(value, tuple):
            values += [tuple(each for each in value if each != gone) for gone in value]
        elif isinstance(value, int) and not isinstance(value, bool) and value // 2 > 0:
            values += [value // 2, value - 1]
        for candidate in values:
            if candidate != value:
                yield dataclasses.replace(case, **{part.name: candidate})
