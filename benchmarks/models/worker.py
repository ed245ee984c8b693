"""The process that the candidates of one family are measured in, one after another.

    python -m benchmarks.models.worker RESULTS KIND

imports what measuring KIND needs, waits for one line on stdin, {"candidates": [...], "size": ..., "kind": ..., ...},
and appends a line to the file RESULTS for each candidate, also for one that failed, with what it said. After one that
failed, or has left memory behind, it ends: the rest is for another process. It also ends with whoever holds its stdin.
The other side:

    with WorkerProcess("training") as worker:       # imports meanwhile
        worker.begin(job)
        line = worker.next_line(deadline)           # None: it has ended, or the time is over
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import amoeba
import benchmarks
from amoeba.core.errors import one_line
from amoeba.integrations.compiled_layers import keep_compiled_code
from benchmarks.models.candidates import CANDIDATES, Candidate
from benchmarks.models.measure import ModelMeasurement, measure, without_figures
from benchmarks.models.problem import SIZES, Problem

# Of a training or LoRA step, whose model is gone: libraries keep some workspaces.
LEFT_BEHIND_BYTES = 1 << 30
COMMAND = [sys.executable, "-m", "benchmarks.models.worker"]
_LOOK_EVERY_SECONDS = 0.05


def run(job: dict[str, Any]) -> Iterator[ModelMeasurement]:
    problem = Problem(SIZES[job["size"]], job["kind"], torch.device(job["device"]))
    for name in job["candidates"]:
        candidate = next(each for each in CANDIDATES if (each.name, each.kind) == (name, problem.kind))
        found = _measured(candidate, problem, job["repeats"], job["flops_per_token"])
        yield found
        if found.status == "failed" or _has_left_memory(problem):
            return


def _measured(candidate: Candidate, problem: Problem, repeats: int, flops_per_token: float) -> ModelMeasurement:
    try:
        return measure(candidate, problem, repeats, flops_per_token)
    except Exception as error:  # whatever it raises is its answer to this problem
        return without_figures(candidate, "failed", f"{type(error).__name__}: {one_line(error)[:300]}")


def _has_left_memory(problem: Problem) -> bool:
    torch.compiler.reset()
    gc.collect()
    if problem.device.type != "cuda":
        return False
    torch.cuda.empty_cache()
    holds_a_model = problem.kind == "decode"  # for the next one, see `decoding`
    return not holds_a_model and torch.cuda.memory_allocated(problem.device) > LEFT_BEHIND_BYTES


def _import_all(kind: str) -> None:
    import amoeba.integrations.transformers

    if kind != "decode":
        import amoeba.jobs.train.training_loop  # noqa: F401


def _end_with(stdin: int) -> None:
    while os.read(stdin, 1):
        pass
    os._exit(1)


def main(results: str, kind: str) -> None:
    keep_compiled_code()
    _import_all(kind)
    line = sys.stdin.readline()
    if not line:
        return
    threading.Thread(target=_end_with, args=[sys.stdin.fileno()], daemon=True).start()
    with Path(results).open("a") as file:
        for found in run(json.loads(line)):
            file.write(json.dumps(asdict(found)) + "\n")
            file.flush()


class WorkerProcess:
    def __init__(self, kind: str) -> None:
        folders = (str(Path(package.__file__).parent.parent) for package in (amoeba, benchmarks) if package.__file__)
        paths = [*dict.fromkeys(folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self._folder = tempfile.TemporaryDirectory()
        self._results, self._said = (Path(self._folder.name) / name for name in ("results", "said"))
        self._results.touch()
        self._read = 0
        with self._said.open("w") as said:
            # a session of its own: what it starts to compile goes with it
            self.process = subprocess.Popen(
                [*COMMAND, str(self._results), kind],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it with all that it has started; nothing of it is left where it has ended by itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of nobody but the ended one
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self._folder.cleanup()

    def begin(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `next_line` will tell
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def next_line(self, deadline: float) -> str | None:
        """deadline: by time.monotonic()."""
        while True:
            ended = self.process.poll() is not None  # before the look: what it wrote before it ended is read
            text = self._results.read_bytes()[self._read :]
            line, newline, _ = text.partition(b"\n")
            if newline:
                self._read += len(line) + 1
                return line.decode()
            if ended or time.monotonic() >= deadline:
                return None
            time.sleep(_LOOK_EVERY_SECONDS)

    def last_words(self) -> str:
        lines = self._said.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"


if __name__ == "__main__":
    main(*sys.argv[1:])
