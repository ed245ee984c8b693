"""Several processes on this machine that form a group and compute what they are sent: ranks without a launcher.

    with LocalRanks(3) as processes:
        results = processes.run(compute_share, [(share,) for share in shares])      # one call per rank, all at once

`function` is sent by name, so it has to be importable. A process whose function raises ends, so that the others do not
wait for it; then the group has to be started again. The store is kept by this process, so that it outlives a rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from amoeba.core.errors import bad_value

_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 5.0
_STDERR, _KEPT_BYTES = 2, 4000


class RankFailed(RuntimeError):
    """What went wrong in which processes, and what came of the others."""

    def __init__(self, failures: dict[int, str], results: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.failures, self.results = failures, results


class LocalRanks:
    """What the processes write to stderr appears on this one's, and its end in what RankFailed says of one that ended.

    threads: of torch in each process; several ranks on one machine share its cores.
    preload: modules that they will need, imported once where that can be (by the first LocalRanks of a process)."""

    def __init__(self, count: int, threads: int = 1, preload: Sequence[str] = ()) -> None:
        if not dist.is_available():
            raise bad_value("ranks", "a torch that was built with torch.distributed", "one without", "use one process")
        self.count = count
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _context(preload)
        self.processes, self._connections, self._heard = [], [], list[_Heard]()
        try:
            with _interrupts_later():
                for rank in range(count):
                    ours, theirs = context.Pipe()
                    reader, writer = context.Pipe(duplex=False)
                    given = theirs, writer, rank, count, self._store.port, threads
                    process = context.Process(target=_serve, args=given, daemon=True)
                    process.start()
                    theirs.close()
                    writer.close()
                    self._heard.append(_Heard(reader))
                    self.processes.append(process)
                    self._connections.append(ours)
            self._collect(list(range(count)), _SECONDS_TO_START)  # each says that it is there
        except BaseException:
            for process in self.processes:
                process.kill()
            raise

    def run(self, function: Callable[..., Any], arguments: Sequence[tuple], *, seconds: float = 300.0) -> list[Any]:
        """The result of each rank; RankFailed if one raised, died, or was not done in time.

        arguments: for each of the first ranks; the others have nothing to do.
        """
        for connection, given in zip(self._connections, arguments, strict=False):
            with contextlib.suppress(OSError):  # a process that has ended is noticed below
                connection.send_bytes(pickle.dumps((function, given)))
        return self._collect(list(range(len(arguments))), seconds)

    def _collect(self, ranks: list[int], seconds: float) -> list[Any]:
        ends = time.monotonic() + seconds
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        for rank in ranks:
            try:
                if not self._connections[rank].poll(max(ends - time.monotonic(), 0.0)):
                    failures[rank] = f"not done after {seconds:g} s"
                    continue
                ok, result = pickle.loads(self._connections[rank].recv_bytes())
                (results if ok else failures)[rank] = result
            except (EOFError, OSError):
                self.processes[rank].join(_SECONDS_TO_END)
                said = self._heard[rank].end()
                failures[rank] = f"the process ended, exit code {self.processes[rank].exitcode}"
                failures[rank] += f"; it had written\n{said}" if said else ""
        if failures:
            raise RankFailed(failures, results)
        return [results[rank] for rank in ranks]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        ends = time.monotonic() + _SECONDS_TO_END
        for process in self.processes:
            process.join(max(ends - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Heard:
    """What a process writes to stderr is passed on; its end is kept, where a library that ends a process says why."""

    def __init__(self, reader: Connection) -> None:
        self._reader, self._kept = reader, b""
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with self._reader, contextlib.suppress(OSError):
            while said := os.read(self._reader.fileno(), 1 << 16):
                self._kept = (self._kept + said)[-_KEPT_BYTES:]
                os.write(_STDERR, said)

    def end(self) -> str:
        """Of a process that has ended."""
        self._thread.join(_SECONDS_TO_END)  # longer where a process of its own still writes
        return self._kept.decode(errors="replace").strip()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C counts when all processes are started. They inherit that it waits: one that is importing would end
    with a traceback of its own; `_serve` lets it through again."""
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True

    resource_tracker.ensure_running()  # lets the signal through when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    here = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, note) if here else None  # another thread may get it, and this one would stop
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


def _context(preload: Sequence[str]) -> Any:
    """torch's threads do not survive a fork. A server that imports and never computes has none: that one is forked, and
    what takes seconds is imported once for all ranks. macOS has libraries that no fork survives."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preload])
    return context


_groups: dict[int, Any] = {}  # in a process that was started here: the first N as a group


def first_processes(count: int) -> Any:
    """In one of the processes: the group of the first `count` of them."""
    return _groups[count]


def _serve(connection: Connection, said: Connection, rank: int, count: int, port: int, threads: int) -> None:
    os.dup2(said.fileno(), _STDERR)
    said.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(threads)
    # gloo would look up the machine's name, which not every machine can
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        # all of them now: every process has to take part in making a group, also in one that it is not in
        _groups.update({few: dist.new_group(list(range(few))) for few in range(2, count)})
        _groups[count] = dist.group.WORLD
        connection.send_bytes(pickle.dumps((True, None)))
        with contextlib.suppress(EOFError, KeyboardInterrupt):  # the parent has closed it, or is gone
            ok = True
            while ok:
                ok, result = _answer(connection.recv_bytes())
                connection.send_bytes(pickle.dumps((ok, result)))
    finally:
        connection.close()
        # no orderly farewell from the group: another rank may be gone, and would be waited for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(message: bytes) -> tuple[bool, Any]:
    try:
        function, given = pickle.loads(message)
        return True, function(*given)
    except Exception:
        return False, traceback.format_exc()
