"""Ctrl-C, and what a scheduler sends before it takes the machine away: the run ends in order, at the second at once.

with stop_at_signals(run_log):
    ...                             # run_log.stopped_by is the signal's number once one came
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amoeba.jobs.metrics import RunLog

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_at_signals(run_log: RunLog) -> Iterator[None]:
    came = False  # to this process: another rank may have asked for the end already

    def ask(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)
        came = True
        if run_log.stopped_by is not None:
            return
        run_log.stopped_by = number
        with suppress(RuntimeError):  # the signal may have come in the middle of another line
            run_log.console.say("stopping after this step; once more to stop at once")

    before = {}
    try:
        for number in STOPPING:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, ask)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
