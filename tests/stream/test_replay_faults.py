"""Failed reads and copies, interrupts, a device that waits too long: nothing hangs, and the next try is right."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
from served_layers import Served
from test_device_memory import E

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads stand for a GPU")


def test_after_a_failed_read_nothing_hangs_and_the_next_try_is_right() -> None:
    for seed in (0, 2):
        with closing(Served(seed, 3, 1, layers=3)) as served:
            served.capture()
            served.replay([[0, 1]] * 3)
            served.store.failing = {(seed, 5)}
            with pytest.raises(OSError, match="expert 5 cannot be read"):
                served.replay([[5, 4]] * 3)
            assert served.device.compute.done == served.device.compute.enqueued, "the device still waits"
            served.wrong.clear()
            served.shown_as_it_is()
            served.store.failing = set()
            for ids in ([[5, 4]] * 3, [[0, 1]] * 3, [[5, 2], [5, 3], [5, 6]]):
                served.replay(ids)
            served.ended()


@pytest.mark.parametrize("fails_at", [1, 9])
def test_after_a_failed_copy_nothing_hangs_and_the_next_try_is_right(fails_at: int) -> None:
    with closing(Served(0, 3, E, layers=3)) as served:
        served.capture()
        served.replay([[0, 1]] * 3)
        served.ended()
        served.replay_with_a_copy_that_fails(fails_at)
        served.wrong.clear()
        served.shown_as_it_is()
        for ids in ([[5, 4]] * 3, [[0, 1]] * 3):
            served.replay(ids)
        served.ended()


def test_an_interrupt_in_the_middle_of_serving_lets_the_device_go_on(monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        with monkeypatch.context() as patched:
            patched.setattr(served.memory.replays.serving, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                served.replay([[0, 1], [2, 3]])
        served.wrong.clear()
        served.replay([[0, 1], [2, 3]])
        served.ended()


@pytest.mark.parametrize("when", ["launch", "behind it"])
def test_an_interrupt_around_the_launch_leaves_both_sides_counting_alike(when: str, monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.capture()
        with monkeypatch.context() as patched:
            if when == "launch":
                patched.setattr(served.graph, "replay", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
            else:
                patched.setattr(
                    served.memory.replays.serving, "serve", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
                )
            with pytest.raises(KeyboardInterrupt):
                served.replay([[0, 1], [2, 3]])
        served.wrong.clear()
        for ids in ([[0, 1], [2, 3]], [[4, 5], [6, 7]]):
            served.replay(ids)
        served.ended()


def test_a_device_that_waited_too_long_goes_on_and_says_so(monkeypatch) -> None:
    with closing(Served(0, 3, 0)) as served:
        served.memory.replays.mailbox.limit = 2e-5  # 20 looks of the interpreter
        served.capture()
        replays, go_on = served.memory.replays, threading.Event()
        load = replays.serving.load

        def late(*arguments) -> None:
            go_on.wait(5)
            load(*arguments)

        monkeypatch.setattr(replays.serving, "load", late)
        served.device.launch(lambda: None)
        watch = threading.Thread(target=lambda: (until_in_trouble(replays), go_on.set()))
        watch.start()
        served.replay([[0, 1], [2, 3]])
        watch.join()
        with pytest.raises(RuntimeError, match="went on without them"):
            served.ended()
        served.wrong.clear()
        served.shown_as_it_is()
        monkeypatch.undo()
        replays.mailbox.limit = 20.0
        served.replay([[0, 1], [2, 3]])
        served.ended()


def until_in_trouble(replays) -> None:
    while not replays.mailbox.in_trouble:
        pass


def test_a_closed_memory_says_so() -> None:
    served = Served(0, 2, 0)
    served.capture()
    served.close()
    with pytest.raises(ValueError, match="Attach the model again"):
        served.replay([[0, 1], [0, 1]])
