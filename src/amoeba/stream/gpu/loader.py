"""Threads that load experts, what is needed now before what is only expected.

job = loader.submit(read_and_copy, predicted=True)
loader.promote(job)                 # somebody waits for it now
job.result()
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

Job = Future  # of nothing: it is done, or it failed


class Loader:
    def __init__(self, threads: int) -> None:
        self._queues: tuple[deque, deque] = deque(), deque()  # needed now, predicted
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"amoeba-load-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Callable[[], None], *, predicted: bool = False) -> Job:
        job: Job = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader was closed")
            self._queues[predicted].append((job, load))
            self._changed.notify()
        return job

    def promote(self, job: Job) -> None:
        """Ahead of all that is only expected; nothing where it has begun."""
        needed, predicted = self._queues
        with self._changed:
            for entry in predicted:
                if entry[0] is job:
                    predicted.remove(entry)
                    needed.append(entry)
                    return

    def close(self) -> None:
        """What has not begun is cancelled; waits for the rest."""
        with self._changed:
            self._closed = True
            for queue in self._queues:
                while queue:
                    queue.popleft()[0].cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(self._queues))
                if self._closed and not any(self._queues):
                    return
                job, load = (self._queues[0] or self._queues[1]).popleft()
            if job.set_running_or_notify_cancel():
                try:
                    load()
                except BaseException as error:
                    job.set_exception(error)
                else:
                    job.set_result(None)
                del load
