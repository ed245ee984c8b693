"""Which of racecheck's reports benchmarks/sanitize_gpu.py counts as faults."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon", reason="the kernels that are watched are Gluon's")

ROOT = Path(__file__).parent.parent.parent
KERNELS = sorted(path for path in (ROOT / "src").rglob("*.py") if "gl.warp_specialize(" in path.read_text())


@pytest.fixture(scope="module")
def sanitize() -> Any:
    spec = importlib.util.spec_from_file_location("sanitize_gpu", ROOT / "benchmarks" / "sanitize_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(kind: str, *places: tuple[str, int]) -> str:
    """As racecheck writes it."""
    accesses = "".join(
        f"=========     {what} Thread (96,0,0) at some_kernel+0x1230 in {file}:{line}\n"
        for what, (file, line) in zip(("Write", "Read"), places, strict=True)
    )
    head = f"========= Error: Potential {kind} hazard detected at __shared__ 0x38 in block (0,0,0) :\n"
    return f"{head}{accesses}=========\n"


def test_the_dispatch_of_every_kernel_with_specialised_warps_is_known(sanitize) -> None:
    assert len(KERNELS) >= 5
    for path in KERNELS:
        lines = path.read_text().splitlines()
        begins = next(n for n, line in enumerate(lines, 1) if "_kernel(" in line and line.startswith("def "))
        calls = next(n for n, line in enumerate(lines, 1) if "gl.warp_specialize(" in line)
        told = report("RAW", (path.name, calls), (path.name, begins)) + report(
            "RAW", (path.name, begins), (path.name, 1)
        )
        found = sanitize.read_report("racecheck", told)
        assert found.dispatch == 1 and found.handed_over == 0 and len(found.faults) == 1, path.name


def test_what_is_handed_over_is_counted_by_itself(sanitize) -> None:
    for file in sanitize.HANDED_OVER:
        stored, loaded = sorted(sanitize.handing_lines(file))  # each mark is in one line
        found = sanitize.read_report("racecheck", report("RAW", (file, stored), (file, loaded)))
        assert found == sanitize.Found([], 0, 1)
        for other in (report("RAW", (file, stored), (file, loaded + 1)), report("WAR", (file, stored), (file, loaded))):
            assert sanitize.read_report("racecheck", other).faults


@pytest.mark.parametrize(
    ("layer", "handed_over", "follows", "clean"),
    [
        ("fp8", 0, True, True),
        ("scheduled backward", 5, False, True),  # racecheck does not see the order in the control, either
        ("scheduled backward", 5, True, False),
        ("handed over, not waited for", 5, True, True),
        ("handed over, not waited for", 0, True, False),  # what is wrong on purpose has to be found
    ],
)
def test_the_control_decides_whether_that_is_a_fault(sanitize, layer, handed_over, follows, clean) -> None:
    assert sanitize.is_clean(layer, "racecheck", sanitize.Found([], 0, handed_over), follows) == clean
    assert not sanitize.is_clean("fp8", "racecheck", sanitize.Found(["1 x WAW"], 0, 0), follows)


def test_a_tool_that_ends_without_a_report_is_a_fault(sanitize) -> None:
    for tool in ("memcheck", "racecheck"):
        assert sanitize.read_report(tool, "Segmentation fault").faults == ["Segmentation fault"]
    assert sanitize.read_report("memcheck", "========= ERROR SUMMARY: 0 errors\n").faults == []
    for other in ("========= ERROR SUMMARY: 1 error", "Traceback (most recent call last):"):  # of the second process
        assert sanitize.read_report("memcheck", f"========= ERROR SUMMARY: 0 errors\n{other}\n").faults
    silent = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert sanitize.read_report("racecheck", silent).faults == []
