"""`peers`: kernels that write rows straight into the other ranks' memory, within one machine (NVLink, or one GPU).

T tokens · K experts per token · R rows of all ranks · H hidden · W ranks

The hosts tell each other how many tokens they have, unless `most_tokens` says what is the most; a cell of the heap
grows when more come. What goes where, the kernels see (`amoeba.kernels.peer_rows`). Rows here are those of all ranks'
tokens, by (rank, token), also those that do not come: they have no expert, and nobody reads them. How many slots have
one the host asks where memory counts, in passes with gradients, unless `most_rows` or `most_tokens` is given: then
nothing waits for the GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amoeba.errors import bad_value
from amoeba.parallel.agreement import agree, facts_of
from amoeba.parallel.heap import SPARE, Heap, open_heap
from amoeba.parallel.owners import Owners
from amoeba.parallel.ranks import Ranks, watch
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.transports.transport import Exchange, Transport
from amoeba.routing import Routing
from amoeba.torch_internals import why_not_symmetric_memory

if TYPE_CHECKING:
    from amoeba.kernels.peer_rows import Plan, Post

REMOTE = "AMOEBA_REMOTE_RANKS"
_HOST = torch.device("cpu")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# of the channels of `peer_rows`, for who waits in vain
_NAMES = (
    "ids and routing weights",
    "tokens or gradients of sums",
    "sums of the experts or gradients of tokens",
    "gradients of routing weights",
)


class Peers(Transport):
    name, summary = "peers", "kernels that write to the other ranks' memory, on one machine"

    def why_not_by_itself(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"is for GPUs, x is on {device.type}"

    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        if is_forced_remote():
            return f"is for ranks that reach each other's memory, and {REMOTE}=1 says that they do not"
        if (reason := why_not_kernels(ranks, device)) is not None or ranks.count == 1:
            return reason
        if device.type == "cuda" and (reason := why_not_symmetric_memory()) is not None:
            return f"needs torch's symmetric memory: {reason}"
        return _why_not_between(_places(ranks, device), device)

    def plan(self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool) -> Exchange:
        exchange = planned(PeerExchange, office_of(sharded.ranks, x_TH.device), sharded, x_TH, routing, gradients)
        exchange.travels = sharded.overlap
        return exchange


def is_forced_remote() -> bool:
    """Whether ranks are to be taken for ones on several machines."""
    return os.environ.get(REMOTE) == "1"


def why_not_kernels(ranks: Ranks, device: torch.device) -> str | None:
    """Why kernels cannot wait for each other on these ranks, however the rows travel."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs GPUs (or TRITON_INTERPRET=1, to try it), x is on {device.type}"
    if ranks.count > 1 and not ranks.has_host_backend:
        return "needs a group in which hosts can talk, too: init_process_group('cpu:gloo,cuda:nccl')"
    return None


def planned(
    kind: type[PeerExchange], office: Office, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool
) -> PeerExchange:
    """On all ranks at once."""
    facts = facts_of(sharded.owners, x_TH, routing.weight_TK, gradients)
    tokens = office.prepare(sharded.ranks, facts, x_TH, routing, sharded.most_tokens)
    plan = _plan(tuple(tokens), routing.num_tokens, office)
    exchange = kind(office, sharded.owners, routing.expert_TK, plan, sharded.most_rows)
    exchange.counts = gradients and sharded.most_rows is None and sharded.most_tokens is None
    return exchange


class PeerExchange(Exchange):
    """counts: whether the host asks how many slots have an expert here, while the rows are under way."""

    counts = False

    def __init__(
        self, office: Office, owners: Owners, expert_TK: Tensor, plan: Plan, most_rows: int | None = None
    ) -> None:
        self.office, self.plan, self.slots = office, plan, most_rows
        self.own = plan.places[office.ranks.rank]
        self._gone: set[int] = set()  # channels by which rows have left early
        self._kept: list[Tensor] = []  # what is still read beside
        self.rank_TK, self.local_TK = owners.find(expert_TK)
        device, tokens = expert_TK.device, expert_TK.shape[0]
        self.goes_WT = torch.empty((owners.ranks, tokens), dtype=torch.uint8, device=device)
        self.comes_R = torch.empty(plan.rows, dtype=torch.uint8, device=device)

    def dispatch(self, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows are under way while ids and weights arrive, which say what to do with them."""
        from amoeba.kernels.peer_rows import room_for_rows

        x_TH, weight_TK = x_TH.contiguous(), weight_TK.contiguous()
        self._send_slots(weight_TK)
        x_RH = room_for_rows(self.plan, x_TH)
        self._set_off(x_TH, x_RH)
        expert_RK, weight_RK = self._take_slots(weight_TK)
        if self.counts:
            self.slots = _rounded_up(int((expert_RK >= 0).sum()), expert_RK.numel())
        self._arrive(x_TH, x_RH)
        return x_RH, expert_RK, weight_RK

    def send(self, rows_TH: Tensor, what: str) -> Tensor:
        from amoeba.kernels.peer_rows import room_for_rows

        rows_TH = rows_TH.contiguous()
        rows_RH = room_for_rows(self.plan, rows_TH)
        self._set_off(rows_TH, rows_RH)
        self._arrive(rows_TH, rows_RH)
        return rows_RH

    def _send_slots(self, weight_TK: Tensor) -> None:
        from amoeba.kernels.peer_rows import push_slots

        push_slots(self.office.checked(), self.plan, self.rank_TK, self.local_TK, weight_TK, self.goes_WT)

    def _take_slots(self, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        from amoeba.kernels.peer_rows import take_slots

        return take_slots(self.office.checked(), self.plan, weight_TK, self.comes_R, self.slots)

    def _set_off(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        from amoeba.kernels.peer_copies import copy_there, take_copies
        from amoeba.kernels.peer_rows import ROWS, push_rows

        post = self.office.checked()
        with self.office.beside():
            if self.travels:
                copy_there(post, self.plan, rows_TH)
                take_copies(post, self.plan, out_RH)
                self._kept.append(rows_TH)
            else:
                push_rows(post, self.plan.there, ROWS, rows_TH, self.goes_WT)

    def _arrive(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        """Where rows travel on, own ones alone."""
        from amoeba.kernels.peer_rows import own_rows, take_rows

        post = self.office.checked()
        own_rows(post, self.plan, rows_TH, out_RH, self.comes_R)
        if not self.travels:
            self.office.join()
            take_rows(post, self.plan, out_RH, self.comes_R)

    def wait(self) -> None:
        self.office.join()
        self._kept.clear()

    def leave(self, rows_TH: Tensor, d_weight_TK: Tensor | None = None) -> None:
        from amoeba.kernels.peer_copies import copy_back
        from amoeba.kernels.peer_rows import GRADIENTS, SUMS, push_rows

        post = self.office.checked()
        if d_weight_TK is not None:
            push_rows(post, self.plan.back, GRADIENTS, d_weight_TK.contiguous(), self.comes_R)
            self._gone.add(GRADIENTS)
        with self.office.beside():
            copy_back(post, self.plan, rows_TH)
        self._kept.append(rows_TH)
        self._gone.add(SUMS)

    def start_sending(self, rows_TH: Tensor) -> Tensor | None:
        from amoeba.parallel.transports.early import start_sending

        return start_sending(self.office.checked(), self.plan, rows_TH, self.goes_WT)

    def give_back(self, rows_RH: Tensor, what: str) -> Tensor:
        from amoeba.kernels.peer_rows import GRADIENTS, SUMS

        rows_RH = rows_RH.contiguous()
        channel = GRADIENTS if what == "gradients of routing weights" else SUMS
        if channel in self._gone:
            self._gone.discard(channel)
            self.wait()  # the kernel that ends the epoch must not come ahead of those that read its number
        else:
            self._send_back(channel, rows_RH)
        return self._add_up(channel, rows_RH)

    def _send_back(self, channel: int, rows_RH: Tensor) -> None:
        from amoeba.kernels.peer_rows import push_rows

        push_rows(self.office.checked(), self.plan.back, channel, rows_RH, self.comes_R)

    def _add_up(self, channel: int, rows_RH: Tensor) -> Tensor:
        from amoeba.kernels.peer_rows import add_rows

        return add_rows(self.office.checked(), self.plan, channel, rows_RH, self.goes_WT)


def _rounded_up(slots: int, most: int) -> int:
    """To one of 64 sizes, so that memory of the pass before serves again."""
    step = max(-(-most // (64 * 128)), 1) * 128
    return min(-(-max(slots, 1) // step) * step, most)


@dataclass(frozen=True)
class Size:
    """Of a heap: the most tokens of a rank, experts per token, and bytes of a row."""

    tokens: int
    top_k: int
    row_bytes: int

    def holds(self, other: Size) -> bool:
        return self.tokens >= other.tokens and self.top_k >= other.top_k and self.row_bytes >= other.row_bytes

    def joined(self, other: Size) -> Size:
        return Size(*(max(one, two) for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


class Office:
    """The heap of a group on one device, and what its kernels are told. All layers of a model share it."""

    def __init__(self, ranks: Ranks, device: torch.device, *, remote: bool = False) -> None:
        """remote: of ranks that do not reach each other's memory; half of a heap is an outbox then."""
        self.ranks, self.device, self.remote = ranks, device, remote
        self.size = Size(0, 0, 0)
        self.agreed: tuple[Any, ...] | None = None
        self._heap: Heap | None = None
        self._post: Post | None = None
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        watch(self.check)

    def prepare(
        self, ranks: Ranks, facts: dict[str, int], x_TH: Tensor, routing: Routing, most_tokens: int | None
    ) -> Sequence[int]:
        """The numbers of tokens of all ranks, or what is the most; and a heap that holds so many."""
        self.ranks, tokens = ranks, routing.num_tokens
        if self._post is not None and self._post.seconds != ranks.deadline:
            self._post = replace(self._post, seconds=ranks.deadline)
        if most_tokens is not None and tokens > most_tokens:
            raise bad_value("x_TH", f"at most most_tokens={most_tokens} tokens", tokens, "allow as many as will come")
        same = (most_tokens, *facts.values())
        if most_tokens is not None and same == self.agreed:
            return [most_tokens] * ranks.count
        facts = facts | {"most_tokens": -1 if most_tokens is None else most_tokens}
        told = [count for (count,) in agree(ranks, facts, [tokens], _HOST, "the numbers of tokens to come")]
        counts = told if most_tokens is None else [most_tokens] * ranks.count
        self.agreed = same
        needed = Size(max(*counts, 1), routing.top_k, x_TH.shape[1] * x_TH.element_size())
        if not self.size.holds(needed):
            self._grow(ranks, self.size.joined(needed))
        return counts

    def _grow(self, ranks: Ranks, size: Size) -> None:
        from amoeba.kernels.peer_counters import CHANNELS, RECORD
        from amoeba.kernels.peer_rows import Post, heap_layout, tokens_of_cells

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ranks.gather([size.tokens], _HOST, "the others to be done with the heap")
        self._heap = self._post = None
        cell_at, cell_size, nbytes = heap_layout(ranks.count, *vars(size).values())
        nbytes = 2 * nbytes + SPARE if self.remote else nbytes
        self._heap = open_heap(ranks, self.device, nbytes, remote=self.remote)
        self._post = Post(
            self._heap.addresses,
            epochs=torch.zeros(CHANNELS.value, dtype=torch.int64, device=self.device),
            trouble=torch.zeros(1, dtype=torch.int64, device=self.device),
            record=torch.zeros(RECORD, dtype=torch.int64, device=_HOST, pin_memory=self.device.type == "cuda"),
            cell_at=cell_at,
            cell_size=cell_size,
            tokens=tokens_of_cells(size.tokens),
            rank=ranks.rank,
            count=ranks.count,
            seconds=ranks.deadline,
            heaps=self._heap.bytes_of,
            reaches=not self.remote,
        )
        self.size = size

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside need not be done before what follows, until `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def checked(self) -> Post:
        self.check()
        assert self._post is not None
        return self._post

    def check(self) -> None:
        """RankLost if a kernel gave up waiting, ValueError if more rows came than fit. The host looks at its own
        memory, and waits for nothing."""
        from amoeba.kernels.peer_counters import CROWDED, TAKEN

        post = self._post
        if post is None or not post.record[0]:
            return
        _, channel, whom, epoch, seen, expected, which = post.record.tolist()
        if which == CROWDED.value:
            needed = f"room for all slots with an expert of rank {self.ranks.rank}, {seen} in exchange {epoch}"
            raise bad_value("most_rows", needed, expected, "allow more, or leave it out for room for all")
        of_taken = which == TAKEN.value
        what = f"{_NAMES[channel]}, exchange {epoch}"
        parts = post.takers if of_taken else post.pushers
        found = f"{max(seen - expected + parts, 0)} of {parts} parts {'were taken' if of_taken else 'had come'}"
        raise self.ranks.lost(f"{what} to be taken" if of_taken else what, whom, found)


_offices: dict[tuple[Any, torch.device, bool], Office] = {}  # one per group, device and way, made once


def office_of(ranks: Ranks, device: torch.device, *, remote: bool = False) -> Office:
    key = ranks.group, device, remote
    if key not in _offices:
        _offices[key] = Office(ranks, device, remote=remote)
    return _offices[key]


@functools.lru_cache(maxsize=256)
def _plan(counts: tuple[int, ...], tokens: int, office: Office) -> Plan:
    """counts: rows of each rank's tokens here; tokens: of this rank."""
    from amoeba.kernels.peer_rows import Plan

    ranks = range(len(counts))
    first = [sum(counts[:rank]) for rank in ranks]
    there = [[0 for _ in ranks], [rank * tokens for rank in ranks], [tokens for _ in ranks]]
    tables = [torch.tensor(table, dtype=torch.int64, device=_HOST) for table in (there, [first, first, list(counts)])]
    if office.device.type == "cuda":  # only from pinned memory is a copy sure not to wait for the device
        tables = [table.pin_memory().to(office.device, non_blocking=True) for table in tables]
    places = tuple(slice(begin, begin + count) for begin, count in zip(first, counts, strict=True))
    return Plan(tables[0], tables[1], counts[office.ranks.rank], sum(counts), places)


def _places(ranks: Ranks, device: torch.device) -> list[str]:
    """Of each rank its machine and its device."""
    unit = "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else platform.node()
    return ranks.post(f"place on {device.type}", f"{machine} {platform.node()} {unit}")


def _why_not_between(places: list[str], device: torch.device) -> str | None:
    machine, node, _ = places[0].split(" ")
    for rank, place in enumerate(places):
        other, other_node, unit = place.split(" ")
        if other != machine:
            return f"needs all ranks on one machine; rank 0 is on {node}, rank {rank} on {other_node}"
        if unit and not _reaches(device, unit):
            return f"needs GPUs that reach each other's memory; {device} and that of rank {rank} do not"
    return None


def _reaches(device: torch.device, unit: str) -> bool:
    """Whether the GPU can reach that one's memory, as far as this process sees it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == unit:
            own = torch.cuda.current_device() if device.index is None else device.index
            return index == own or torch.cuda.can_device_access_peer(own, index)
    return True


TRANSPORT = Peers()
