"""Sends Ctrl-C to each command after varying delays, as a terminal does: to the whole group of processes.

    python tests/support/interrupted_commands.py --moments 6            # of each command, spread over the time it takes
    python tests/support/interrupted_commands.py --command pack merge

A command that is interrupted ends with 130 (or, while Python shuts down, by the signal itself), without a traceback,
and with one JSON document as the last line of stdout. What it promises to go on with, it goes on with; a result that
is there is a whole one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[2] / "src"
ENDED_BY_CTRL_C = (130, -signal.SIGINT)
# Python itself prints a traceback until our code runs: the moments are counted from here, with nothing imported yet.
START = "import sys; from amoeba.__main__ import main; sys.stderr.write('started\\n'); sys.stderr.flush(); main()"


class Job(NamedTuple):
    """words: of the command, which writes into a folder. check: of what is in it after an interruption.
    goes_on: it is called again, and has to go on with what is there."""

    words: Callable[[Path, Path], list[object]]
    check: Callable[[Path], None] = lambda folder: None
    goes_on: bool = False


def train(inputs: Path, out: Path) -> list[object]:
    if (out / "run" / "config.json").exists():
        return ["train", "--resume", out / "run"]
    words = ["--steps", 8, "--save-every", 2, "--eval-every", 4, "--batch-size", 2, "--sequence-length", 32]
    return ["train", "--model", inputs / "base", "--data", inputs / "train.jsonl", "--out", out / "run", *words]


def finetune(inputs: Path, out: Path) -> list[object]:
    if (out / "run" / "config.json").exists():
        return ["finetune", "--resume", out / "run"]
    words = ["--steps", 8, "--save-every", 2, "--eval-every", 4, "--batch-size", 2, "--r", 2]
    return ["finetune", inputs / "base", "--data", inputs / "finetune.jsonl", "--out", out / "run", *words]


def generate_many(inputs: Path, out: Path) -> list[object]:
    words = ["--prompts", inputs / "prompts.txt", "--out", out / "answers.jsonl", "--max-new-tokens", 40]
    return ["generate", inputs / "base", *words]


def whole_lines(folder: Path) -> None:
    path = folder / "answers.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        json.loads(line)


def whole_or_absent(*names: str) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        for path in (folder / name for name in names):
            if path.suffix == ".json" and path.exists():
                json.loads(path.read_text())
            if path.suffix in (".svg", ".html") and path.exists():
                assert path.read_text().rstrip().endswith(("</svg>", "</html>")), path

    return check


def no_half_model(folder: Path) -> None:
    """`merge` writes all of it or nothing."""
    found = sorted(path.name for path in folder.iterdir())
    assert found in ([], ["merged"]), found
    assert not found or (folder / "merged" / "config.json").exists()


JOBS: dict[str, Job] = {
    "doctor": Job(lambda inputs, out: ["doctor"]),
    "verify": Job(lambda inputs, out: ["verify", "--backend", "eager", "--dtype", "float64"]),
    "verify over ranks": Job(lambda inputs, out: ["verify", "--ranks", 2, "--dtype", "float64"]),
    "bench": Job(
        lambda inputs, out: ["bench", "--shape", "37,32,16,6,2", "--repeats", 1, "--device", "cpu", "--ours", "eager"]
    ),
    "train": Job(train, goes_on=True),
    "finetune": Job(finetune, goes_on=True),
    "generate": Job(lambda inputs, out: ["generate", inputs / "base", "In one", "--max-new-tokens", 60]),
    "generate many": Job(generate_many, whole_lines, goes_on=True),
    "pack": Job(lambda inputs, out: ["pack", inputs / "base", "--out", out / "packed.store"], goes_on=True),
    "quantise": Job(
        lambda inputs, out: ["quantise", inputs / "base", "--format", "mxfp4", "--out", out / "quantised"], goes_on=True
    ),
    "merge": Job(
        lambda inputs, out: ["merge", inputs / "base", "--adapter", inputs / "adapter", "--out", out / "merged"],
        no_half_model,
        goes_on=True,
    ),
    "trace": Job(lambda inputs, out: ["trace", "--out", out / "t.json"], whole_or_absent("t.json", "t.svg")),
    "report": Job(
        lambda inputs, out: ["report", inputs / "run", "--out", out / "page.html"], whole_or_absent("page.html")
    ),
}


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    seconds: float


def call(words: list[object], after: float | None, folder: Path) -> Ended:
    """after: seconds from its start to the signal; None for a command that is left alone."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", START, *map(str, words), "--json"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder, "env": environment}
    process = subprocess.Popen(command, start_new_session=True, **options)  # type: ignore[call-overload]
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    began = time.monotonic()
    if after is not None:
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=600)
    return Ended(process.returncode, out, err, time.monotonic() - began)


def interrupted(name: str, inputs: Path, folder: Path, after: float) -> str:
    """What came of it, in a word; AssertionError where it is not what is promised."""
    job = JOBS[name]
    folder.mkdir()
    ended = call(job.words(inputs, folder), after, folder)
    told = f"{name} after {after:.2f} s ended with {ended.code}:\n{ended.err}\n{ended.out}"
    assert ended.code in (0, *ENDED_BY_CTRL_C), told
    assert "Traceback" not in ended.err and "KeyboardInterrupt" not in ended.err, told
    if ended.code >= 0:
        assert isinstance(json.loads(ended.out.splitlines()[-1]), dict), told
    job.check(folder)
    if ended.code == 0:
        return "was done"
    how = "by the signal" if ended.code < 0 else "130"
    if not job.goes_on:
        return how
    again = call(job.words(inputs, folder), None, folder)
    assert again.code == 0, f"{told}\nand again with {again.code}:\n{again.err}"
    job.check(folder)
    return f"{how}, and went on"


def prepare(inputs: Path) -> None:
    """A model, data, an adapter and a finished run."""
    from tiny_runs import Quiet, make_inputs, tiny_run, tiny_settings

    make_inputs(inputs)
    (inputs / "prompts.txt").write_text("In one\nIn two\nIn many\n")
    tiny_run(tiny_settings("finetune", inputs / "tuned", inputs, steps=2), Quiet())
    (inputs / "tuned" / "adapter").rename(inputs / "adapter")
    tiny_run(tiny_settings("train", inputs / "run", inputs, steps=2), Quiet())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=6, help="at which each command is interrupted")
    parser.add_argument("--command", nargs="+", choices=list(JOBS), default=list(JOBS))
    asked = parser.parse_args()
    # a shell starts what it runs in the background with SIGINT ignored, and so would the commands be
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place:
        inputs = Path(place) / "inputs"
        inputs.mkdir()
        prepare(inputs)
        failures = 0
        for name in asked.command:
            folder = Path(place) / f"{name}-whole"
            folder.mkdir()
            whole = call(JOBS[name].words(inputs, folder), None, folder)
            if whole.code:
                sys.exit(f"{name} ended with {whole.code}:\n{whole.err}")
            results = []
            for moment in range(asked.moments):
                after = whole.seconds * (moment + 0.5) / asked.moments
                try:
                    result = interrupted(name, inputs, Path(place) / f"{name}-{moment}", after)
                except AssertionError as error:
                    failures += 1
                    result = f"FAILED: {error}"
                results.append(result)
                print(f"{name}, after {after:.2f} of {whole.seconds:.2f} s: {result}", flush=True)
            if all(result == "was done" for result in results):
                failures += 1
                print(f"{name}: FAILED: Ctrl-C never stopped it")
        sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
