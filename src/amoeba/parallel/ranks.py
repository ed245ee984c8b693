"""The processes that share a layer's experts, and how they communicate; every wait has a deadline.

W ranks

    ranks = Ranks(group, deadline=60.0)
    ranks.exchange(rows, sent=[3, 0], received=[3, 5], what="tokens")
    ranks.add_up(y_TH, "sums of the experts")

A wait that fails says who waited for whom, and for what. Nothing is said over the network for that while all goes well:
a rank that gives up leaves a note in the group's store, and reads those of the others.

Tensors on a GPU whose group has no backend for it (gloo alone) travel through host memory. NCCL does not let the host
wait; there the group's own timeout is the deadline (`init_process_group(timeout=...)`).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amoeba.core.errors import RankLost, bad_value, one_line
from amoeba.core.torch_internals import default_store

# The others reach their deadlines a little later, and their notes are worth waiting for.
_SECONDS_FOR_NOTES = 3.0
_watched: list[Callable[[], None]] = []
_host_names: dict[int, str] = {}  # of each process, where there are several hosts


__all__ = ["RankLost", "Ranks", "as_bytes", "spoken_ranks", "watch"]


class Ranks:
    """group:    a process group; None for all processes, or for this one if there are no others.
    deadline: seconds after which a rank gives up waiting."""

    def __init__(self, group: Any = None, deadline: float = 600.0) -> None:
        if not deadline > 0:
            raise bad_value("deadline", "seconds, more than 0", deadline, "leave it out for ten minutes")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group, self.deadline = group, deadline
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.count: int = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise bad_value("group", "a group that this process is in", "another one", "shard over its own group")
        self._names = [0] if group is None else dist.get_process_group_ranks(group)
        self._backends = {} if group is None else _backends(group)
        self._members = ",".join(map(str, self._names))
        self._exchanges = 0

    def gather(self, numbers: Sequence[int], device: torch.device, what: str) -> list[list[int]]:
        """As many numbers from each rank, on the host."""
        if self.count == 1:
            return [list(numbers)]
        carrier = self._carrier(device)
        mine = torch.tensor(numbers, dtype=torch.int64, device=carrier)
        everyones = [torch.empty_like(mine) for _ in range(self.count)]
        self._wait(dist.all_gather(everyones, mine, group=self.group, async_op=True), carrier, what)
        return torch.stack(everyones).tolist()

    def gather_texts(self, text: str, what: str) -> list[str]:
        """A text from each rank."""
        cpu, written = torch.device("cpu"), text.encode()
        lengths = [length for (length,) in self.gather([len(written)], cpu, what)]
        if self.count == 1 or not any(lengths):
            return [text] * self.count
        mine = torch.tensor(list(written), dtype=torch.uint8, device=cpu).reshape(-1, 1)
        received = self.exchange(mine.repeat(self.count, 1), [len(mine)] * self.count, lengths, what)
        return [bytes(part.flatten().tolist()).decode() for part in received.split(lengths)]

    def exchange(self, rows: Tensor, sent: list[int], received: list[int], what: str) -> Tensor:
        """rows: those for rank 0, then those for rank 1, ...; the result the same by where they come from."""
        device, carrier = rows.device, self._carrier(rows.device)
        bytes_sent = as_bytes(rows).to(carrier)  # gloo does not know every dtype
        bytes_received = bytes_sent.new_empty(sum(received), bytes_sent.shape[1])
        work = dist.all_to_all_single(bytes_received, bytes_sent, received, sent, group=self.group, async_op=True)
        self._wait(work, carrier, what)
        return bytes_received.to(device).view(rows.dtype)

    def add_up(self, tensor: Tensor, what: str) -> Tensor:
        """The sum over the ranks, of integers exactly, else in fp32 or wider; the same bits on every rank."""
        if self.count == 1:
            return tensor.clone()
        wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        carrier = self._carrier(tensor.device)
        total = tensor.to(carrier, wide, copy=True)
        self._wait(dist.all_reduce(total, group=self.group, async_op=True), carrier, what)
        return total.to(tensor.device, tensor.dtype)

    @property
    def global_ranks(self) -> list[int]:
        """What each rank is called among all processes."""
        return list(self._names)

    @property
    def has_host_backend(self) -> bool:
        """Whether numbers of the host travel without a GPU."""
        return "cpu" in self._backends

    @property
    def has_own_gpu(self) -> bool:
        """Whether tensors on GPUs travel by NCCL, which does not let two ranks share one."""
        return self._backends.get("cuda") == "nccl"

    def post(self, about: str, text: str) -> list[str]:
        """What each rank has to say about something, by way of the group's store: said once, and read at any time."""
        store, keys = default_store(), [f"amoeba {about} {self._members} {name}" for name in self._names]
        store.set(keys[self.rank], text)
        began = time.monotonic()
        try:
            store.wait(keys, datetime.timedelta(seconds=self.deadline))
        except RuntimeError as error:
            raise RankLost(self._told(about, time.monotonic() - began, error)) from error
        return [store.get(key).decode() for key in keys]

    def lost(self, what: str, whom: int, seen: str) -> RankLost:
        """For a wait that was not the host's."""
        self._exchanges += 1
        failed = self._failed()
        name = self._names[whom]
        who = f"rank {name}, who failed: {failed[name]}" if name in failed else f"rank {name}"
        return RankLost(
            f"rank {self._names[self.rank]} waited {self.deadline:g} s on its device for {what}, from {who.rstrip('.')}"
            f"; {seen}. {_advice([name])}"
        )

    @contextmanager
    def told_of(self, what: str) -> Iterator[None]:
        """Inside, others wait for these ranks, as FSDP2 does. What fails of that is told as of a wait of our own."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankLost) or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            raise RankLost(self._told(what, None, error)) from error

    def leave_word(self, text: str) -> None:
        """For the others, who will wait for this rank in vain."""
        if self.count > 1:
            with contextlib.suppress(RuntimeError, ValueError):
                default_store().set(f"amoeba failed {self._names[self.rank]}", text)

    def said_by_first(self, text: str) -> bool:
        """Whether the first rank leaves the same word: then all failed alike, and it tells."""
        key, ends = f"amoeba failed {self._names[0]}", time.monotonic() + _SECONDS_FOR_NOTES
        with contextlib.suppress(RuntimeError, ValueError):
            while self.rank > 0 and time.monotonic() < ends:
                if default_store().check([key]) and (said := default_store().get(key).decode()):
                    return said == text
                time.sleep(0.05)
        return False

    def _carrier(self, device: torch.device) -> torch.device:
        """Where a tensor has to be to travel."""
        backend = self._backends.get(device.type)
        return torch.device("cpu") if backend in (None, "gloo") else device

    def _wait(self, work: Any, carrier: torch.device, what: str) -> None:
        self._exchanges += 1
        began = time.monotonic()
        for check in _watched:
            check()
        try:
            if carrier.type == "cpu":
                work.wait(datetime.timedelta(seconds=self.deadline))
            else:
                work.wait()  # of the stream, not of the host
        except RuntimeError as error:
            raise RankLost(self._told(what, time.monotonic() - began, error)) from error

    def _told(self, what: str, seconds: float | None, error: RuntimeError) -> str:
        name = self._names[self.rank]
        missing, elsewhere = self._others(what)
        failed = self._failed()
        if failed:
            whom = "; ".join(f"rank {other}, which failed: {text}" for other, text in failed.items())
        elif missing:
            whom = f"{spoken_ranks(missing)}, which did not report"
        elif elsewhere:
            whom = "; ".join(f"rank {other}, which waits for {note}" for other, note in elsewhere.items())
        else:
            whom = "the others, which wait for the same: the network between them is slow or broken"
        dead = not failed and "timed out" not in str(error).lower()
        # gloo begins with the place in its source, and goes on with what it is typically
        said = re.sub(r"^\[.*?\] ", "", one_line(error)).partition(". ")[0]
        reason = f"; the connection says: {said[:200]}" if dead else ""
        suspects = list(failed) or missing or list(elsewhere) or self._names
        waited = "" if seconds is None else f" {seconds:.1f} s"
        return (
            f"rank {name} waited{waited} (deadline {self.deadline:g} s) for {what}, "
            f"exchange {self._exchanges}, from {whom.rstrip('.')}{reason}. "
            f"{_advice(suspects)}"
        )

    def _failed(self) -> dict[int, str]:
        """Ranks that left word of what went wrong with them."""
        found: dict[int, str] = {}
        with contextlib.suppress(RuntimeError, ValueError):
            store = default_store()
            for name in self._names:
                if name != self._names[self.rank] and store.check([f"amoeba failed {name}"]):
                    found[name] = store.get(f"amoeba failed {name}").decode()
        return {name: text for name, text in found.items() if text}

    def _others(self, what: str) -> tuple[list[int], dict[int, str]]:
        """Ranks that left no note, and those that wait for something else."""
        others = [name for place, name in enumerate(self._names) if place != self.rank]
        mine = f"{what}, exchange {self._exchanges}"
        notes: dict[int, str] = {}
        # the store may be gone together with the rank that kept it
        with contextlib.suppress(RuntimeError, ValueError):
            store = default_store()
            for about in (self._members, "anywhere"):
                store.set(f"amoeba waits {about} {self._names[self.rank]}", mine)
            ends = time.monotonic() + _SECONDS_FOR_NOTES
            while len(notes) < len(others) and time.monotonic() < ends:
                for name, about in itertools.product(others, (self._members, "anywhere")):  # also in other groups
                    key = f"amoeba waits {about} {name}"
                    if name not in notes and store.check([key]):
                        notes[name] = store.get(key).decode()
                time.sleep(0.05)
        missing = [name for name in others if name not in notes]
        return missing, {name: note for name, note in notes.items() if note != mine}


def watch(check: Callable[[], None]) -> None:
    """check: raises what a device has noticed meanwhile; called whenever ranks exchange something."""
    _watched.append(check)


def as_bytes(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    if rows.stride(-1) != 1:  # of a single column any stride counts as contiguous
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def note_hosts(names: Sequence[str]) -> None:
    """Of all processes, in order: told with a rank that is lost."""
    _host_names.clear()
    _host_names.update(enumerate(names))


def _advice(suspects: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(_host_names[rank] for rank in suspects if rank in _host_names))
    where = f" on {', '.join(hosts)}" if hosts else ""
    return (
        f"Look at the output of {spoken_ranks(suspects)}{where}: a rank that failed, was killed, took another way "
        "through the model, or needs a longer deadline."
    )


def spoken_ranks(names: Sequence[int]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(map(str, names))}"


def _backends(group: Any) -> dict[str, str]:
    """By type of device."""
    return dict(each.split(":") for each in dist.get_backend_config(group).split(","))
