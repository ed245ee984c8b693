"""What a session on a GPU machine tells of its tests, by files that need none."""

import json
import math
import time
from pathlib import Path

import pytest

import gpu_session

MARK = "import pytest\n\npytestmark = pytest.mark.gpu\n\n"
FILES = {
    "passes": "def test_one(): pass\n\ndef test_two(): pytest.skip('no second GPU')",
    "fails": "def test_one(): pass\n\ndef test_two():\n    print('what was seen')\n    assert [1, 2] == [1, 3]",
    "hangs": "import time\n\ndef test_one(): pass\n\ndef test_two(): time.sleep(60)",
    "crashes": "import os\n\ndef test_one(): os._exit(3)",
    "not_marked": "",
}


def written(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / f"test_{name}.py").write_text((MARK if text else "") + text + "\n")
    return folder


def outcomes(folder: Path, *given: str) -> tuple[int, dict[str, dict]]:
    code = gpu_session.main([str(folder), "--out", str(folder), "--workers", "4", *given])
    lines = [json.loads(line) for line in (folder / gpu_session.DOCUMENT).read_text().splitlines()]
    began = max(place for place, line in enumerate(lines) if "began" in line)
    return code, {Path(line["file"]).stem.removeprefix("test_"): line for line in lines[began + 1 :]}


def test_each_file_has_told_what_came_of_it(tmp_path: Path) -> None:
    (written(tmp_path) / "test_hangs.py").unlink()
    code, found = outcomes(tmp_path)
    assert code == 1
    told = {name: (each["outcome"], each["passed"], each["failed"]) for name, each in found.items()}
    assert told == {
        "passes": ("passed", 1, 0),
        "fails": ("failed", 1, 1),
        "crashes": ("crashed", 0, 0),
    }
    assert found["passes"]["why_skipped"] == {"Skipped: no second GPU": 1}
    (failure,) = found["fails"]["failures"]
    assert failure["test"].endswith("::test_two")
    assert "[1, 2] == [1, 3]" in failure["text"] and "what was seen" in failure["text"]
    assert found["crashes"]["running"].endswith("::test_one")


def test_a_file_that_reaches_its_limit_is_ended_and_says_where_it_was(tmp_path: Path) -> None:
    file = written(tmp_path) / "test_hangs.py"
    run = gpu_session.Run(str(file), "", "gpu", 600.0, tmp_path)
    while not any("test_two" in path.read_text() for path in tmp_path.glob("*.jsonl")):
        assert run.ended(time.monotonic(), math.inf) is None
        time.sleep(0.05)
    found = run.ended(run.ends, math.inf)
    assert found is not None and (found.outcome, found.passed) == ("timeout", 1)
    assert found.running is not None and found.running.endswith("::test_two") and run.process.poll() is not None


@pytest.mark.thorough  # three processes of pytest one after another
def test_a_later_run_repeats_what_did_not_pass_first_and_not_what_passed(tmp_path: Path) -> None:
    files = written(tmp_path)
    for name in ("hangs", "crashes", "not_marked"):
        (files / f"test_{name}.py").unlink()
    outcomes(files)
    (files / "test_new.py").write_text(MARK + "def test_one(): pass\n")
    _, found = outcomes(files)
    assert list(json.loads(_last_began(files))["files"]) == [
        str(files / f"test_{name}.py") for name in ("fails", "new")
    ]
    assert {name: each["outcome"] for name, each in found.items()} == {"fails": "failed", "new": "passed"}
    for name in ("fails", "new"):
        (files / f"test_{name}.py").unlink()
    (files / "test_passes.py").write_text(MARK + "def test_changed(): pass\n")
    assert "passes" in outcomes(files)[1]


def test_what_no_time_was_left_for_is_told_as_well(tmp_path: Path) -> None:
    code, found = outcomes(written(tmp_path), "--minutes", "0")
    assert code == 1 and {each["outcome"] for each in found.values()} == {"not begun"} and len(found) == 4


def test_tests_that_need_a_gpu_are_found() -> None:
    found = gpu_session.marked_files(["tests"])
    assert {"tests/test_gpu.py", "tests/stream/test_timeline.py"} <= set(found)
    assert sorted(gpu_session.newest_first(found)) == found


def _last_began(folder: Path) -> str:
    lines = (folder / gpu_session.DOCUMENT).read_text().splitlines()
    return next(line for line in reversed(lines) if "began" in json.loads(line))
