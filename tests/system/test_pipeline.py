"""Stages that work at the same time: order, bounded memory, errors, and an end that leaves no thread at work."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from amoeba.system.pipeline import ahead


@pytest.mark.parametrize(("threads", "most"), [(1, 1), (1, None), (3, None), (2, 7)])
def test_results_come_in_the_order_of_the_items(threads: int, most: int | None) -> None:
    def square(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # the first of three is done first
        return number * number

    assert list(ahead(square, range(20), threads=threads, most=most)) == [n * n for n in range(20)]


def test_no_more_items_are_in_flight_than_was_said() -> None:
    taken, given, most_at_once = 0, 0, 0

    def items() -> Iterator[int]:
        nonlocal given, most_at_once
        for number in range(50):
            given += 1
            most_at_once = max(most_at_once, given - taken)
            yield number

    for _ in ahead(lambda each: each, ahead(lambda each: each, items(), threads=2), most=2):
        taken += 1
    assert taken == 50 and most_at_once <= 3 + 2


def test_stages_work_at_the_same_time() -> None:
    """Each waits for the other: one after the other, neither would ever end."""
    met = threading.Barrier(2)

    def first(number: int) -> int:
        if number == 1:
            met.wait(10)
        return number

    def second(number: int) -> int:
        if number == 0:
            met.wait(10)
        return number

    assert list(ahead(second, ahead(first, range(4)))) == [0, 1, 2, 3]


@pytest.mark.parametrize("stage", ["reads", "writes"])
def test_an_error_of_a_stage_is_raised_and_ends_the_others(stage: str) -> None:
    written: list[int] = []

    def read(number: int) -> int:
        if stage == "reads" and number == 3:
            raise OSError("cut short")
        return number

    def write(number: int) -> int:
        if stage == "writes" and number == 3:
            raise OSError("cut short")
        written.append(number)
        return number

    with pytest.raises(OSError, match="cut short"):
        list(ahead(write, ahead(read, range(100))))
    assert written[:3] == [0, 1, 2] and len(written) < 8
    assert not [each for each in threading.enumerate() if each.name.startswith(("amoeba-read_", "amoeba-write_"))]


def test_ctrl_c_waits_for_what_has_begun_and_begins_nothing_else() -> None:
    begun, ended = [], []

    def write(number: int) -> int:
        begun.append(number)
        time.sleep(0.01)
        ended.append(number)
        return number

    def run() -> None:
        with closing(ahead(write, range(100), most=4)) as written:
            for number in written:
                if number == 2:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert begun == ended and len(begun) < 10
