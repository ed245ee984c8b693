"""`python -m benchmarks.cold`: a command that takes too long is ended, and the others are measured all the same."""

from pathlib import Path

from benchmarks import cold


def test_a_command_has_a_limit(tmp_path: Path) -> None:
    found = cold.run(["--version"], tmp_path, lambda line: False, until_end=True, limit=0.01)
    assert found["exit_code"] == -9 and found["seconds_to_first"] is None
