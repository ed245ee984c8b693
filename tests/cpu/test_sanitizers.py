"""The compiled core under AddressSanitizer and UndefinedBehaviorSanitizer: every operation on awkward sizes and layouts
reads and writes within its memory, and does nothing that C++ leaves undefined, also where Python drops our asserts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guarded_memory import SANITIZED_FLAGS

from amoeba.cpu import build

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++")
SANITIZED = {
    "CXX": str(COMPILER),
    # Python frees little at its end; and where locals leave the stack, GCC before 14 aligns them to 32 bytes at most,
    # too little for vectors of AVX-512
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def runtimes() -> list[str]:
    """The libraries that have to be in the process before all others, in this order."""
    if COMPILER is None or sys.platform != "linux":
        return []
    found = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        found += [path] if os.path.isabs(path) else []  # the bare name where the compiler has none
    return found if len(found) == 2 else []


def run(*command: str, sanitized: bool) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests/support", "tests/cpu"))
    environment = os.environ | {"PYTHONPATH": paths} | (SANITIZED if sanitized else {})
    if sanitized:
        environment["LD_PRELOAD"] = " ".join(runtimes())
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


SCRIPT = str(ROOT / "tests" / "cpu" / "core_operations.py"), str(ROOT / "src")


@pytest.fixture(scope="module")
def sanitized_libraries() -> None:
    """Built beforehand: with the runtimes preloaded the compiler, too, would run under them, many times slower."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SANITIZED.items():
            patch.setenv(name, value)
        patch.setattr(
            build, "_TIMEOUT_SECONDS", 1200
        )  # a third of a minute of one core, which is busy with other tests
        patch.setattr(build, "_FLAGS", SANITIZED_FLAGS)
        for name, sources in build.LIBRARIES.items():
            if sources == build.LIBRARIES["core"]:
                build.compiled_library(name)


def assert_all_right(done: subprocess.CompletedProcess[str], report: str) -> None:
    found = re.findall(r"all right, (\d+) modules without asserts", done.stdout)
    assert found and int(found[0]) > 30, report


@pytest.mark.thorough  # that no assert guards anything: dev/source_rules.py
def test_every_operation_is_right_where_python_drops_asserts() -> None:
    done = run(*SCRIPT, sanitized=False)
    report = done.stdout[-1000:] + done.stderr[-6000:]
    assert_all_right(done, report)
    assert done.returncode == 0, report


@pytest.mark.thorough  # a core is busy for half a minute, of which compiling takes most
@pytest.mark.skipif(not runtimes(), reason="this compiler has no sanitizers")
@pytest.mark.usefixtures("sanitized_libraries")
def test_every_operation_stays_within_its_memory() -> None:
    done = run(*SCRIPT, "sanitized", sanitized=True)
    report = done.stdout[-1000:] + done.stderr[-6000:]
    assert_all_right(done, report)
    assert "runtime error:" not in done.stderr, report
    # the first error ends the process: nothing was found before what the script planted at its end
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in done.stderr, report
    assert "amoeba_swiglu_f32" in done.stderr


def test_sanitized_and_plain_builds_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build._recipe("core").stem
    monkeypatch.setattr(build, "_FLAGS", SANITIZED_FLAGS)
    assert build._recipe("core").stem != plain
