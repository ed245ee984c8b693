"""A worker process, as the suite sees it: told once what to measure, it answers line by line.

with WorkerProcess("training") as worker:       # imports meanwhile
    worker.begin(job)
    line = worker.next_line(deadline)           # None: it has ended, or the time is over
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import amoeba
import benchmarks

COMMAND = [sys.executable, "-m", "benchmarks.models.worker"]
_LOOK_EVERY_SECONDS = 0.05


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
