"""Kills training runs at random moments, resumes them, and compares what they keep, bit for bit, with a run that was
never disturbed.

    python tests/support/kill_loop.py --rounds 1 --kills 1         # of each command; what the tests run
    python tests/support/kill_loop.py --seconds 480 --kills 6      # by hand, until the time is up

Each process is a fork of this one, which has imported everything, so that a run begins at once. A kill comes at any
time, while a checkpoint is being written, or a moment after a line of the log. Half of the signals are SIGKILL, half
SIGTERM; how often a run saves changes at every resume.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot have the GPU of the process it came from

import torch

from amoeba.cli import app
from amoeba.jobs.train import metrics as run_log
from tiny_runs import TOLD, WEIGHTS, kept_weights, make_inputs

for name in ("accelerate", "peft", "pydantic", "rich.live", "torch.utils.tensorboard", "transformers"):
    with contextlib.suppress(ImportError):  # what a run imports where it is installed
        importlib.import_module(name)

SECONDS_AT_MOST = 300  # for one process
run_log.measured_ceiling = lambda device: 1e12  # it is measured for longer than such a run lasts


def forked(work: Callable[[], None], said: Path) -> int:
    """The id of a process that does the work and says what it has to say into a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with said.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(child: int, until: Callable[[], bool]) -> int | None:
    """Its exit code (minus the number of the signal that killed it), or None: the moment has come."""
    deadline = time.monotonic() + SECONDS_AT_MOST
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if until() or time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def never() -> bool:
    return False


def a_moment(folder: Path, usual: float, chance: random.Random) -> Callable[[], bool]:
    """When to kill. usual: seconds that a whole run takes."""
    began, log = time.monotonic(), folder / "metrics.jsonl"
    kind, delay = chance.choice(("any time", "checkpoint", "line")), chance.uniform(0, 0.1)
    within, before = chance.uniform(0, usual), log.stat().st_size if log.exists() else 0
    came: list[float] = []

    def until() -> bool:
        if kind == "any time":
            return time.monotonic() > began + within
        here = (folder / "checkpoints" / "writing").exists() if kind == "checkpoint" else log.exists()
        if here and not came and (kind == "checkpoint" or log.stat().st_size > before):
            came.append(time.monotonic())
        return bool(came) and time.monotonic() > came[0] + delay

    return until


def words(command: str, folder: Path, inputs: Path, save_every: int) -> list[str]:
    if (folder / "config.json").exists():
        return [command, "--resume", str(folder), f"--save-every={save_every}"]
    told = TOLD | {"save_every": save_every, "data": inputs / f"{command}.jsonl", "out": folder}
    told |= {"config": inputs / "more.yaml"}
    if command == "finetune":
        told |= {"r": 2, "targets": "experts,q_proj", "accumulation": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in told.items() if name not in MORE]
    if command == "finetune":
        return [command, str(inputs / "base"), "--train-router", *flags]
    return [command, f"--model={inputs / 'base'}", *flags]


MORE = {"warmup_steps": TOLD["warmup_steps"], "held_out": TOLD["held_out"]}  # what has no flag in both commands


def run_through(
    command: str, folder: Path, inputs: Path, kills: int, usual: float, chance: random.Random, count: Counter[str]
) -> None:
    """One run, killed so often and then left to its end. usual: seconds that a whole one takes."""
    said = folder.with_suffix(".txt")
    while True:
        arguments = words(command, folder, inputs, chance.randint(1, 4))
        child = forked(lambda arguments=arguments: app(arguments), said)  # type: ignore[misc]
        number = chance.choice((signal.SIGKILL, signal.SIGTERM))
        code = ended(child, a_moment(folder, usual, chance) if kills else never)
        if code is None:
            os.kill(child, number if kills else signal.SIGKILL)
            code = ended(child, never)
            count[f"{number.name} ended with {code}"] += 1
        if code == 0:
            return
        if not kills or code not in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM):
            sys.exit(f"{command} ended with {code}:\n{said.read_text()}")
        kills -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10**9, help="runs of each command at most")
    parser.add_argument("--seconds", type=float, default=10**9, help="no run begins after these")
    parser.add_argument("--kills", type=int, default=4, help="of each run")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--command", choices=list(WEIGHTS), action="append", help="these alone")
    asked = parser.parse_args()
    commands = asked.command or list(WEIGHTS)
    print(f"seed {asked.seed}", flush=True)
    chance, until = random.Random(asked.seed), time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        assert ended(forked(lambda: make_inputs(here) and None, here / "inputs.txt"), never) == 0
        (here / "more.yaml").write_text(json.dumps(MORE))
        expected, usual, runs, count = {}, {}, Counter[str](), Counter[str]()
        for command in commands:
            began = time.monotonic()
            run_through(command, here / command, here, 0, 0.0, chance, count)
            expected[command] = kept_weights(here / command, command)
            usual[command] = time.monotonic() - began
        for round_ in range(asked.rounds):
            for command in commands:
                if time.monotonic() > until:
                    break
                folder = here / f"{command}-{round_}"
                run_through(command, folder, here, asked.kills, usual[command], chance, count)
                if kept_weights(folder, command) != expected[command]:
                    sys.exit(f"{command}, round {round_}, seed {asked.seed}: other bits at the end")
                runs[command] += 1
            if time.monotonic() > until:
                break
        print(json.dumps({"seed": asked.seed, "identical": runs, "signals": count}))


if __name__ == "__main__":
    main()
