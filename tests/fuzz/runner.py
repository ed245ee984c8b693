"""Runs workers for a while and counts. A worker that dies or hangs is a failure of its case; another one goes on.

counts = run(Plan(seconds=600, jobs=4))
"""

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST_SECONDS_PER_CASE = 300.0
PROGRESS_EVERY = 30.0


@dataclass(frozen=True)
class Plan:
    what: str = "experts"
    device: str = "cpu"
    seconds: float = 60.0
    most_cases: int = sys.maxsize
    first_seed: int = 0
    jobs: int = 1
    changes: dict[str, Any] = field(default_factory=dict)

    def again(self, seed: int) -> str:
        """The command that runs this case alone, and makes it simpler."""
        words = [sys.executable, "-m", "tests.fuzz", "--what", self.what, "--device", self.device]
        for name, value in self.changes.items():
            words += ["--set", f"{name}={json.dumps(value)}"]
        return shlex.join([*words, "--case", str(seed), "--shrink"])


@dataclass
class Counts:
    verdicts: Counter = field(default_factory=Counter)
    rows: Counter = field(default_factory=Counter)  # of what passed
    refusals: Counter = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(self.verdicts.values())

    def add(self, said: dict[str, Any]) -> None:
        self.verdicts[said["verdict"]] += 1
        if said.get("digest"):
            self.digests[said["seed"]] = said["digest"]
        if said["verdict"] == "passed":
            self.rows[said["row"]] += 1
        elif said["verdict"] == "refused":
            self.refusals[re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", said["reason"])[:150]] += 1
        else:
            self.failures.append((said["seed"], said["reason"]))

    def lines(self) -> list[str]:
        table = [f"  passed {count:6d}  {row}" for row, count in sorted(self.rows.items())]
        table += [f"  refused {count:5d}  {reason}" for reason, count in self.refusals.most_common()]
        return [*table, f"{self.cases} cases, {self.verdicts['refused']} refused, {len(self.failures)} failed"]


def run(plan: Plan, say: Callable[[str], None] = print) -> Counts:
    counts, lock = Counts(), threading.Lock()
    until = time.monotonic() + plan.seconds

    def take(said: dict[str, Any]) -> bool:
        """Whether to go on."""
        with lock:
            if counts.cases >= plan.most_cases:
                return False
            counts.add(said)
            if said["verdict"] == "failed":
                say(f"FAILED seed {said['seed']}: {said['reason']}\n  {said['case']}")
                say(f"  again: {plan.again(said['seed'])}")
            return counts.cases < plan.most_cases

    jobs = [threading.Thread(target=_job, args=(plan, number, until, take), daemon=True) for number in range(plan.jobs)]
    for job in jobs:
        job.start()
    shown = time.monotonic()
    while any(job.is_alive() for job in jobs):
        time.sleep(0.2)
        if time.monotonic() - shown > PROGRESS_EVERY:
            shown = time.monotonic()
            with lock:
                by_place = Counter()
                for row, count in counts.rows.items():
                    by_place[row.rpartition(" ")[0]] += count
                places = ", ".join(f"{place} {count}" for place, count in by_place.most_common(8))
                refused = counts.verdicts["refused"]
                say(f"{counts.cases} cases, {refused} refused, {len(counts.failures)} failed; passed: {places}")
    return counts


def _job(plan: Plan, number: int, until: float, take: Callable[[dict], bool]) -> None:
    """One worker after another, until the time is over."""
    seed = plan.first_seed + number
    while time.monotonic() < until:
        worker = _start(plan, seed)
        try:
            last, went_on = _listen(worker, until, take)
        finally:
            worker.kill()
            worker.wait()
        if not went_on:
            return
        seed = last + plan.jobs


def _start(plan: Plan, seed: int) -> subprocess.Popen:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {"OMP_WAIT_POLICY": "passive", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ
    source = os.path.join(root, "src")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), source)))
    words = ["--what", plan.what, "--device", plan.device, "--first", str(seed), "--step", str(plan.jobs)]
    command = [sys.executable, "-m", "tests.fuzz.worker", *words, "--changes", json.dumps(plan.changes)]
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)


def _listen(worker: subprocess.Popen, until: float, take: Callable[[dict], bool]) -> tuple[int, bool]:
    """(the last seed that was begun, whether a new worker is to go on after it)."""
    assert worker.stdout is not None
    begun: dict[str, Any] | None = None
    pending = b""
    deadline = time.monotonic() + MOST_SECONDS_PER_CASE
    while True:
        now = time.monotonic()
        if now >= until:
            return 0, False
        ready, _, _ = select.select([worker.stdout], [], [], min(deadline, until) - now)
        if not ready:
            if time.monotonic() < deadline:
                continue
            return _dead(begun, f"no end after {MOST_SECONDS_PER_CASE:.0f} seconds", take)
        chunk = os.read(worker.stdout.fileno(), 65536)
        if not chunk:
            return _dead(begun, _last_word(worker.wait()), take)
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "verdict" in said:
                if not take(said):
                    return said["seed"], False
            else:
                begun, deadline = said, time.monotonic() + MOST_SECONDS_PER_CASE


def _dead(begun: dict[str, Any] | None, how: str, take: Callable[[dict], bool]) -> tuple[int, bool]:
    if begun is None:
        raise RuntimeError(f"a worker did not come as far as its first case: {how}")
    return begun["seed"], take(begun | {"verdict": "failed", "reason": how})


def _last_word(status: int) -> str:
    return f"the process died of {signal.Signals(-status).name}" if status < 0 else f"the process left with {status}"
