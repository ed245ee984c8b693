"""Stages that work at the same time, each in threads of its own, with few items in flight.

    blobs = ahead(read, experts, threads=2)
    with closing(ahead(write, ahead(quantise, blobs))) as written:
        for name in written:        # in the order of the experts
            show(name)

Each stage is a function of one item. An error of any stage is raised where the results are taken, and so is Ctrl-C; by
then no thread works on anything any more, and what had not begun never will.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    stage: Callable[[Item], Result], items: Iterable[Item], *, threads: int = 1, most: int | None = None
) -> Generator[Result, None, None]:
    """stage(item) of each, in order. At most `most` of them, default one more than threads, are begun, waiting or done
    before the first of these is taken: that bounds memory."""
    source: Any = iter(items)
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"amoeba-{getattr(stage, '__name__', 'stage').strip('_')}")
    try:
        for item in source:
            waiting.append(pool.submit(stage, item))
            if len(waiting) >= (most or threads + 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if hasattr(source, "close"):
            source.close()
