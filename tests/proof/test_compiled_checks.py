"""The order of checks while kernels are compiled: what is ready first, and nothing waits that need not."""

import itertools
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import typer

from amoeba.commands import verify_run
from amoeba.commands.output import Output
from amoeba.proof import compiled_checks, conformance
from amoeba.proof.cases import Case, cases, most_telling_first
from amoeba.proof.compiled_checks import as_they_are_ready


def told(*lines: str | None) -> queue.SimpleQueue:
    found: queue.SimpleQueue = queue.SimpleQueue()
    for line in lines:
        found.put(line)
    return found


def soon() -> float:
    return time.monotonic() + 60


def test_the_most_revealing_check_that_is_ready_is_next() -> None:
    lines = told("5", "3", "7")
    order = as_they_are_ready(8, soon(), lines)
    assert [next(order), next(order)] == [3, 5], "0 to 2 are still compiled and hold up nothing"
    lines.put("1")
    assert [next(order), next(order)] == [1, 7], "1 became ready, and is more revealing than 7"


def test_each_check_comes_once() -> None:
    lines = told("2", "2", "0", "2", None)
    assert list(as_they_are_ready(5, soon(), lines)) == [0, 1, 2, 3, 4]
    lines = told("2", "4")
    order = as_they_are_ready(5, soon(), lines)
    found = [next(order), next(order)]
    for line in ("2", "0", None):
        lines.put(line)
    assert [*found, *order] == [2, 4, 0, 1, 3]


def test_without_the_second_process_checks_come_one_after_the_other() -> None:
    assert list(as_they_are_ready(8, soon(), told(None))) == list(range(8))


def test_it_waits_for_what_is_compiled_and_ends_in_time() -> None:
    began = time.monotonic()
    assert list(as_they_are_ready(8, began + 0.2, told("5"))) == [5]
    assert 0.2 <= time.monotonic() - began < 5


def test_a_check_is_ready_with_the_last_that_it_waits_for() -> None:
    ready: list[int] = []
    waiting = compiled_checks._Waiting(ready.append)
    waiting.compiled("early")
    waiting.add(0, {"early"})
    waiting.add(1, {"early", "a", "b"})
    waiting.add(2, {"b"})
    waiting.add(3, set())
    assert ready == [0, 3]
    waiting.compiled("b")
    assert ready == [0, 3, 2]
    waiting.compiled("a")
    assert ready == [0, 3, 2, 1]


def test_cases_that_share_kernels_follow_each_other() -> None:
    checks = [(case, torch.float32, "plain") for case in most_telling_first(cases())]
    places = compiled_checks._in_groups(checks, 2)
    assert sorted(places) == list(range(2, len(checks)))
    groups = [tuple(getattr(checks[place][0], name) for name in compiled_checks._COMPILED_FOR) for place in places]
    changes = sum(before != after for before, after in itertools.pairwise(groups))
    assert changes == len(set(groups)) - 1


@pytest.mark.thorough
def test_the_second_process_tells_of_every_check_that_launches_no_kernel() -> None:
    """Without a GPU, for one that is named."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = json.dumps([["float32"], ["grouped", "eager"]])
    command = [sys.executable, "-m", compiled_checks.__name__, "sm_90"]
    finished = subprocess.run(command, input=given, env=surroundings, capture_output=True, text=True, check=True)
    assert sorted(map(int, finished.stdout.split())) == list(range(2 * len(cases())))


class TestTheCommand:
    """With a stand-in for the process."""

    CASES = (Case(3, 2), Case(0, 2))
    BACKENDS = ("eager", "composed")

    @pytest.fixture(autouse=True)
    def few_cases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (conformance, verify_run):
            monkeypatch.setattr(module, "cases", lambda thorough=False: list(self.CASES))

    def test_what_was_not_reached_is_said(self, capsys: pytest.CaptureFixture[str]) -> None:
        threads, used = torch.get_num_threads(), set[int]()

        def order(checks: list, ends: float) -> Iterator[int]:
            """Of one backend both cases are ready, of another one the first; then the time is over."""
            ready = [str(checks.index((self.CASES[0], torch.float64, "composed")))]
            ready += [str(checks.index((case, torch.float32, "eager"))) for case in self.CASES]
            for place in itertools.islice(as_they_are_ready(len(checks), soon(), told(*ready)), len(ready)):
                used.add(torch.get_num_threads())
                yield place

        document, ok = verify_run.run(
            torch.device("cpu"), [torch.float32, torch.float64], self.BACKENDS, False, Output(), order
        )
        assert ok and (document["checks"], document["checks_left_out"], document["cases"]) == (3, 5, 0)
        done = {
            (row["backend"], row["dtype"]): (row["cases_checked"], row["cases_left_out"])
            for row in document["backends"]
        }
        assert list(done.items()) == [(("eager", "float32"), (2, 0)), (("composed", "float64"), (1, 1))]
        assert document["not_reached"] == [
            {"backend": "eager", "dtype": "float64"},
            {"backend": "composed", "dtype": "float32"},
        ]
        said = capsys.readouterr().out
        assert "not reached in the time" in said and "\n  eager: float64\n" in said and "3 of 8 checks" in said
        assert used == {min(threads, compiled_checks.OWN_CORES)}, "the other cores compile"
        assert torch.get_num_threads() == threads

    def test_an_interrupted_run_says_what_was_done(self, capsys: pytest.CaptureFixture[str]) -> None:
        def order(checks: list, ends: float) -> Iterator[int]:
            yield checks.index((self.CASES[0], torch.float32, "eager"))
            raise KeyboardInterrupt

        with pytest.raises(typer.Exit) as ended:
            verify_run.run(torch.device("cpu"), [torch.float32], self.BACKENDS, False, Output(), order)
        assert ended.value.exit_code == 130
        said = capsys.readouterr()
        assert "eager    float32      1" in said.out and "\n  composed: float32\n" in said.out
        assert "interrupted: 1 of 4 checks were done" in said.err
