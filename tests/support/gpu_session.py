"""Runs the tests marked gpu file by file, several at once, and writes what came of each file as soon as it is known.

    PYTHONPATH=src python tests/support/gpu_session.py --minutes 9 --out DIR      # make test-gpu
    PYTHONPATH=src python tests/support/gpu_session.py --after DIR/gpu-session.jsonl tests/kernels

For a machine that one has for half an hour: nothing is installed, nothing is waited for longer than its limit, and a
run that is cut off has told all that it knew. Files that were changed last come first, and before them those that did
not pass in the documents of --after; files that passed there, with the same source, are not run again.

The document has a line for the run and one for each file: outcome (passed, skipped, failed, crashed, timeout, "cut
off", "not begun"), seconds, how many tests passed, failed and were skipped and why, the test that was running when the
process ended, and the end of what the failures and the process printed.

Each file is a pytest process of its own, which this module also serves as a plugin: it notes each test's begin and end.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
DOCUMENT = "gpu-session.jsonl"
MARKED = re.compile(r"mark\.gpu\b|without_a_gpu_thorough")
_NOTES = "AMOEBA_TEST_NOTES"  # where the plugin notes tests
_END = 3000  # characters of what was printed
_MOST_FAILURES = 20  # of a file, with their text
_DONE = ("passed", "skipped")


@dataclass
class Outcome:
    file: str
    source: str  # of the file and of all that it may import
    outcome: str = "not begun"
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    running: str | None = None
    slowest: tuple[str, float] | None = None
    why_skipped: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    printed: str = ""


class Run:
    """One file's process."""

    def __init__(self, file: str, source: str, marks: str, seconds: float, folder: Path) -> None:
        self.outcome, self.began, self.ends = Outcome(file, source), time.monotonic(), time.monotonic() + seconds
        name = file.replace("/", "-")
        self._notes, self._printed = folder / f"{name}.jsonl", folder / f"{name}.txt"
        hung = max(seconds - 15, 1.0)  # threads' tracebacks, before the limit ends all
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu_session"]
        command += ["-o", f"faulthandler_timeout={hung:g}", "--tb=short", "--color=no", "-m", marks, file]
        paths = [str(ROOT / "src"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {_NOTES: str(self._notes), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # plugins of other packages take a second to import
        ours = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment = ours | environment
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self, now: float, all_end: float) -> Outcome | None:
        """What came of it, once its process is gone; None before. At a limit it is ended with all its children."""
        code = self.process.poll()
        if code is None and now < min(self.ends, all_end):
            return None
        with_children(self.process, signal.SIGKILL)
        self.process.wait()
        found = self.outcome
        found.seconds = round(time.monotonic() - self.began, 1)
        self._read_notes()
        if code is None:
            found.outcome = "timeout" if now >= self.ends else "cut off"
        elif code == 5:  # pytest's: no test was selected
            found.outcome = "skipped"
        elif code not in (0, 1) or found.running is not None:
            found.outcome = "crashed"
        else:
            found.outcome = "failed" if code else "passed" if found.passed else "skipped"
        if found.outcome not in _DONE:
            found.printed = self._printed.read_text(errors="replace")[-_END:]
        return found

    def _read_notes(self) -> None:
        found, begun, times = self.outcome, [], Counter[str]()
        for line in self._notes.read_text().splitlines() if self._notes.exists() else ():
            note = json.loads(line)
            if "outcome" not in note:
                begun.append(note["test"])
                continue
            times[note["test"]] += note["seconds"]
            if note["when"] == "teardown":
                begun.remove(note["test"])
            if note["outcome"] == "failed":
                found.failed += 1
                if len(found.failures) < _MOST_FAILURES:
                    found.failures.append({"test": note["test"], "text": note["text"]})
            elif note["outcome"] == "skipped":
                found.skipped += 1
                found.why_skipped[note["text"]] = found.why_skipped.get(note["text"], 0) + 1
            elif note["when"] == "call":
                found.passed += 1
        found.running = begun[-1] if begun else None
        if times:
            name, seconds = times.most_common(1)[0]
            found.slowest = name, round(seconds, 1)


def with_children(process: subprocess.Popen, number: int) -> None:
    """Sent to the whole process group, which is this process' own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def marked_files(within: Sequence[str]) -> list[str]:
    """Test files with tests that need a GPU, named from the root of the repository."""
    found = set()
    for place in within:
        path = (ROOT / place).resolve()
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        marked = [file for file in files if MARKED.search(file.read_text())]
        found |= {str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file) for file in marked}
    return sorted(found)


def newest_first(files: Iterable[str]) -> list[str]:
    """By when git saw them change last; without git in the order of their names."""
    command = ["git", "-C", str(ROOT), "log", "--format=", "--name-only", "--", "tests"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        told = ""
    place: dict[str, int] = {}
    for name in told.splitlines():
        place.setdefault(name, len(place))
    return sorted(files, key=lambda file: (place.get(file, len(place)), file))


def sources(files: Iterable[str]) -> dict[str, str]:
    """For each file, a digest of it and of what tests import: a change anywhere in it makes another."""
    shared = hashlib.sha256()
    for folder in ("src", "tests/support", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp", ".toml", ".json") and "results" not in path.parts:
                shared.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return {file: hashlib.sha256(shared.digest() + (ROOT / file).read_bytes()).hexdigest()[:16] for file in files}


def to_run(files: Sequence[str], source: dict[str, str], before: Iterable[Path]) -> list[str]:
    """Without those that passed in an earlier document; first those that did not pass when they last ran."""
    last: dict[str, dict] = {}
    done = set()
    for document in before:
        for line in document.read_text().splitlines():
            note = json.loads(line)
            if "file" in note and note["outcome"] != "not begun":
                last[note["file"]] = note
                if note["outcome"] == "passed":
                    done.add((note["file"], note["source"]))
    left = [file for file in files if (file, source[file]) not in done]

    def place(file: str) -> int:
        return 1 if file not in last else 2 if last[file]["outcome"] in _DONE else 0

    return sorted(left, key=place)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("within", nargs="*", default=["tests"], help="files or folders, default: tests")
    parser.add_argument("--minutes", type=float, default=30.0, help="for the whole run")
    parser.add_argument("--file-minutes", type=float, default=4.0, help="for each file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="files at once, default: the cores")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help=f"folder for {DOCUMENT}, to which it appends")
    parser.add_argument("--after", type=Path, action="append", default=[], help="document of an earlier run")
    parser.add_argument("--marks", default="gpu and not thorough", help="as pytest's -m")
    settings = parser.parse_args(given)
    all_end = time.monotonic() + 60 * settings.minutes
    settings.out.mkdir(parents=True, exist_ok=True)
    document = settings.out / DOCUMENT
    before = [*settings.after, *([document] if document.exists() else [])]
    files = newest_first(marked_files(settings.within))
    source = sources(files)
    waiting = to_run(files, source, before)
    print(f"{len(waiting)} files with tests on a GPU; {len(files) - len(waiting)} passed before", flush=True)
    outcomes = []
    with document.open("a") as out, tempfile.TemporaryDirectory(prefix="amoeba-gpu-session-") as folder:
        _write(out, {"began": time.strftime("%Y-%m-%dT%H:%M:%S"), "files": waiting, "marks": settings.marks})
        for found in _outcomes(waiting, source, settings, all_end, Path(folder)):
            outcomes.append(found)
            _write(out, asdict(found))
            counts = f"{found.passed} passed, {found.failed} failed, {found.skipped} skipped"
            print(f"{found.outcome:9} {found.seconds:6.1f} s  {found.file}: {counts}", flush=True)
    _print_failures(outcomes)
    print(*(f"{count} {outcome}" for outcome, count in Counter(each.outcome for each in outcomes).items()), sep=", ")
    return 0 if all(each.outcome in _DONE for each in outcomes) else 1


def _outcomes(
    waiting: Sequence[str], source: dict[str, str], settings: argparse.Namespace, all_end: float, folder: Path
) -> Iterable[Outcome]:
    left, running = list(waiting), list[Run]()
    try:
        while running or left:
            now = time.monotonic()
            while left and len(running) < settings.workers and now < all_end:
                file = left.pop(0)
                running.append(Run(file, source[file], settings.marks, 60 * settings.file_minutes, folder))
            for run in [*running]:
                found = run.ended(now, all_end)
                if found is not None:
                    running.remove(run)
                    yield found
            if now >= all_end:
                yield from (Outcome(file, source[file]) for file in left)
                left = []
            time.sleep(0.1)
    finally:
        for run in running:
            with_children(run.process, signal.SIGKILL)


def _print_failures(outcomes: Iterable[Outcome]) -> None:
    for found in outcomes:
        for failure in found.failures:
            last = [line for line in failure["text"].splitlines() if line.strip()][-1:]
            print(f"FAILED {failure['test']}: {''.join(last)[:200]}")
        if found.outcome in ("timeout", "crashed", "cut off"):
            print(f"{found.outcome.upper()} {found.file}, in {found.running}")


def _write(out: TextIO, line: dict) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _note(**what) -> None:
    if (path := os.environ.get(_NOTES)) is not None:
        with Path(path).open("a") as notes:
            notes.write(json.dumps(what) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(test=nodeid)


def pytest_runtest_logreport(report) -> None:
    text = ""
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
    elif report.failed:
        text = report.longreprtext[-_END:]
        text += "".join(f"\n{title}\n{said[-_END:]}" for title, said in report.sections)
    _note(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=report.duration, text=text)


if __name__ == "__main__":
    sys.exit(main())
