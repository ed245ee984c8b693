"""`peers`: kernels that write rows straight into the other ranks' memory, within one machine (NVLink, or one GPU).

T tokens · K experts per token · R rows of all ranks · H hidden · W ranks

The hosts tell each other how many tokens they have, unless `most_tokens` says what is the most; a cell of the heap
grows when more come. What goes where, the kernels see (`amoeba.kernels.peer_rows`). Rows here are those of all ranks'
tokens, by (rank, token), also those that do not arrive: they have no expert and are never read. How many slots have
one the host asks where memory counts, in passes with gradients, unless `most_rows` or `most_tokens` is given: then
nothing waits for the GPU. It asks when the first product has been launched, with the room of the layer's last pass.

Where ranks are, on which machines and GPUs, they tell each other once, through the group's store.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amoeba.core.phase_timer import mark
from amoeba.core.torch_internals import why_not_symmetric_memory
from amoeba.parallel.agreement import facts_of
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.transports.symmetric_buffer import (
    SymmetricBuffer,
    layer_of,
    plan_of,
    rounded_up,
    symmetric_buffer_of,
)
from amoeba.parallel.transports.transport import Exchange, Transport
from amoeba.routing.router import Routing

if TYPE_CHECKING:
    from amoeba.kernels.peer_context import Plan
    from amoeba.tasks.triton.arrivals import Sender


REMOTE = "AMOEBA_REMOTE_RANKS"
# From this many bytes of rows on, sums go straight to their ranks. Such a pass is launched kernel by kernel, without a
# launch plan: below it is the host that counts. Not measured.
STRAIGHT_BYTES = 16 * 2**20


class Peers(Transport):
    name, summary = "peers", "kernels that write to the other ranks' memory, on one machine"

    def why_not_by_itself(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"is for GPUs; x is on {device.type}"

    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        if is_forced_remote():
            return f"needs ranks that can access each other's memory; {REMOTE}=1 says that they cannot"
        if (reason := why_not_kernels(ranks, device)) is not None or ranks.count == 1:
            return reason
        if device.type == "cuda" and (reason := why_not_symmetric_memory()) is not None:
            return f"needs torch's symmetric memory: {reason}"
        return why_not_between(ranks, device)

    def plan(
        self, sharded: ShardedExperts, x_TH: Tensor, routing: Routing, gradients: bool, row_format: int = 0
    ) -> Exchange:
        buffer = symmetric_buffer_of(sharded.ranks, x_TH.device)
        exchange = planned(PeerExchange, buffer, sharded, x_TH, routing, gradients, row_format)
        exchange.under_way = sharded.overlap
        exchange.straight = _goes_straight(sharded.straight, exchange.plan.rows, x_TH)
        exchange.leaves_early = exchange.under_way or exchange.straight
        exchange.guesses = exchange.counts and exchange.leaves_early
        return exchange


def _goes_straight(asked: bool | None, rows: int, x_TH: Tensor) -> bool:
    if asked is not None:
        return asked
    return rows * x_TH.shape[1] * x_TH.element_size() >= STRAIGHT_BYTES


def is_forced_remote() -> bool:
    """Whether ranks are to be taken for ones on several machines."""
    return os.environ.get(REMOTE) == "1"


def why_not_kernels(ranks: Ranks, device: torch.device) -> str | None:
    """Why kernels cannot wait for each other on these ranks, however the rows travel."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs GPUs (or TRITON_INTERPRET=1, to try it); x is on {device.type}"
    if ranks.count > 1 and not ranks.has_host_backend:
        return "needs a group with a CPU backend as well: init_process_group('cpu:gloo,cuda:nccl')"
    return None


def planned(
    kind: type[PeerExchange],
    buffer: SymmetricBuffer,
    sharded: ShardedExperts,
    x_TH: Tensor,
    routing: Routing,
    gradients: bool,
    row_format: int,
) -> PeerExchange:
    """On all ranks at once."""
    if shares_its_gpu(sharded.ranks, x_TH.device):
        from amoeba.kernels.launch.persistent_grid import share_the_gpu  # needs Triton

        share_the_gpu()
    facts = facts_of(sharded.owners, x_TH, routing.weight_TK, gradients)
    tokens = buffer.prepare(sharded.ranks, facts, x_TH, routing, sharded.most_tokens, row_format)
    plan = plan_of(tuple(tokens), routing.num_tokens, buffer)
    exchange = kind(buffer, sharded.owners, routing.expert_TK, plan, sharded.most_rows)
    exchange.counts = gradients and sharded.most_rows is None and sharded.most_tokens is None
    exchange.layer, exchange.row_format = layer_of(sharded.local), buffer.row_format
    return exchange


class PeerExchange(Exchange):
    """counts:  whether the host asks how many slots have an expert here.
    guesses: whether it may ask when the pass has begun, see `room`; else while rows are under way.
    layer:   as `CapacityEstimate` know it.
    """

    counts = guesses = False
    layer = 0

    def __init__(
        self, buffer: SymmetricBuffer, owners: Owners, expert_TK: Tensor, plan: Plan, most_rows: int | None = None
    ) -> None:
        self.buffer, self.plan, self.slots, self.tokens = buffer, plan, most_rows, plan.rows
        self.own = plan.places[buffer.ranks.rank]
        self._gone: set[int] = set()  # channels by which rows have left early
        self._kept: list[Tensor] = []  # what the other stream still reads
        self._under_way: tuple[int, Tensor] | None = None  # rows that own ones are copied to, too; where own ones lie
        self._dy_RH: Tensor | None = None  # of a backward whose dx may take its place
        self._started_RH: Tensor | None = None  # rows of dy that a backward is to send itself
        self._own_TH: Tensor | None = None  # sums of own tokens, to which those that come are to be added
        self._sums_TH: Tensor | None = None  # to which they were added
        self._stays = False  # rows of dy are read where they have come to
        self._guessed: tuple[Callable[[], list[int]], Tensor] | None = None  # what tells the number, and the ids
        self.owners, self.expert_TK = owners, expert_TK.contiguous()
        device, tokens = expert_TK.device, expert_TK.shape[0]
        self.goes_WT = torch.empty((owners.ranks, tokens), dtype=torch.uint8, device=device)
        self.comes_R = torch.empty(plan.rows, dtype=torch.uint8, device=device)

    def dispatch(self, x_TH: Tensor, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows are under way while ids and weights arrive, which say what to do with them."""
        from amoeba.kernels.peer_rows import room_for_rows

        x_TH, weight_TK = x_TH.contiguous(), weight_TK.contiguous()
        mark("before the exchange")
        self._send_slots(weight_TK)
        mark("ids: sent")
        x_RH = room_for_rows(self.plan, x_TH)
        self._set_off(x_TH, x_RH)
        if self.guesses:
            self.slots = self.buffer.capacity.guess(self.layer, self.plan.rows * weight_TK.shape[1])
        expert_RK, weight_RK, owned = self._take_slots(weight_TK)
        mark("ids: taken")
        told = self.buffer.ask(owned) if self.counts else None
        self._arrive(x_TH, x_RH)  # meanwhile
        if told is not None:
            self._guessed = told, expert_RK
            if self.slots is None:
                self.room(None)
        return x_RH, expert_RK, weight_RK

    def room(self, most_rows: int | None) -> int | None:
        """Where the pass has begun with a guess, the host waits for the number of rows here, once, while the device
        computes the first product. If there are more, no slot had an expert in it: nothing was written behind the end
        of a buffer, and no sum has left, so no other rank has to know."""
        if self._guessed is not None:
            (told, expert_RK), self._guessed = self._guessed, None
            guess, owned, slots = self.slots, sum(told()), expert_RK.numel()
            self.slots = rounded_up(owned, slots)
            self.buffer.capacity.remember(self.layer, self.slots, slots, guess)
            if guess is not None and owned > guess:
                from amoeba.kernels.peer_rows import put_back

                put_back(expert_RK)
        return most_rows if self.slots is None else max(self.slots, 1)

    def send(self, rows_TH: Tensor, what: str) -> Tensor:
        from amoeba.kernels.peer_rows import room_for_rows

        mark("before the exchange")
        rows_TH = rows_TH.contiguous()
        rows_RH = self._in_place(rows_TH)
        self._stays = rows_RH is not None
        if rows_RH is None:
            rows_RH = room_for_rows(self.plan, rows_TH)
        self._set_off(rows_TH, rows_RH)
        self._arrive(rows_TH, rows_RH)
        self._dy_RH = rows_RH if self.straight else None
        self.buffer.holds = self._stays
        return rows_RH

    def _in_place(self, rows_TH: Tensor) -> Tensor | None:
        """Where rows come to, if the pass says when it has read them (`rows_read`). The others can send nothing more to
        this rank until then: it must not wait for them in between."""
        from amoeba.kernels.peer_copies import cells_as_rows

        if not self.straight:
            return None
        return cells_as_rows(self.buffer.checked(), self.plan, rows_TH)

    def rows_read(self) -> None:
        from amoeba.kernels.peer_copies import rows_taken

        if self._stays:
            self._stays = self.buffer.holds = False
            rows_taken(self.buffer.checked())

    def _send_slots(self, weight_TK: Tensor) -> None:
        from amoeba.kernels.peer_rows import push_slots

        tables = self.owners.tables(self.expert_TK.device)
        push_slots(self.buffer.checked(), self.plan, self.expert_TK, tables, weight_TK, self.goes_WT)

    def _take_slots(self, weight_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from amoeba.kernels.peer_rows import take_slots

        peers = self.buffer.checked()
        return take_slots(peers, self.plan, weight_TK, self.comes_R, self.slots, guessed=self.guesses)

    def _set_off(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        from amoeba.kernels.peer_context import ROWS
        from amoeba.kernels.peer_copies import copy_own, copy_there, take_copies
        from amoeba.kernels.peer_rows import push_rows, wait_for_all

        peers = self.buffer.checked()
        self._under_way = None
        if self.buffer.holds:
            raise RuntimeError(
                "cannot send rows between ranks while a backward still reads the previous ones in place: an exchange "
                "inside the backward of other experts is not supported. Set straight=False for these experts"
            )
        with self.buffer.other_stream():
            if self.under_way:
                copy_there(peers, self.plan, rows_TH)
                if rows_TH.data_ptr() % 16 == 0:  # else the products could not read them there
                    copy_own(peers, self.plan, rows_TH, out_RH)
                    self._under_way = out_RH.data_ptr(), rows_TH
                if self._stays:
                    wait_for_all(peers, ROWS)
                else:
                    take_copies(peers, self.plan, out_RH)
                self._kept.append(rows_TH)
            else:
                push_rows(peers, self.plan.there, ROWS, rows_TH, self.goes_WT)

    def _arrive(self, rows_TH: Tensor, out_RH: Tensor) -> None:
        """Where rows travel on, own ones alone, unless these are copied on the other stream as well."""
        from amoeba.kernels.peer_context import ROWS
        from amoeba.kernels.peer_rows import own_rows, take_rows, wait_for_all

        peers = self.buffer.checked()
        if self._under_way is None:
            own_rows(peers, self.plan, rows_TH, out_RH, self.comes_R)
            mark("rows: own ones copied")
        if not self.under_way:
            self.buffer.join()
            if self._stays:
                wait_for_all(peers, ROWS)
            else:
                take_rows(peers, self.plan, out_RH, self.comes_R)
                mark("rows: taken")

    def wait(self) -> None:
        mark("products")
        self.buffer.join()
        mark("rows: waited for")
        self._kept.clear()
        self._under_way = None

    def own_rows(self, rows_RH: Tensor) -> Tensor | None:
        place, own_TH = self._under_way or (None, None)
        return own_TH if rows_RH.data_ptr() == place else None

    def leave(self, rows_TH: Tensor, d_weight_TK: Tensor | None = None) -> None:
        from amoeba.kernels.peer_context import SUMS
        from amoeba.kernels.peer_copies import copy_back

        peers = self.buffer.checked()
        self._leave_gradients(d_weight_TK)
        with self.buffer.other_stream():
            copy_back(peers, self.plan, rows_TH)
        self._kept.append(rows_TH)
        self._gone.add(SUMS)

    def _leave_gradients(self, d_weight_TK: Tensor | None) -> None:
        from amoeba.kernels.peer_context import GRADIENTS
        from amoeba.kernels.peer_rows import push_rows

        if d_weight_TK is not None:
            push_rows(self.buffer.checked(), self.plan.back, GRADIENTS, d_weight_TK.contiguous(), self.comes_R)
            self._gone.add(GRADIENTS)

    def send_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> None:
        from amoeba.kernels.peer_sums import send_sums

        mark("products")
        send_sums(self.buffer.checked(), self.plan, rows_NH, slot_row_TK, weight_TK, self.comes_R)
        mark("sums: sent")

    def add_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
        from amoeba.kernels.peer_sums import add_sums

        peers = self.buffer.checked()
        mark("products")
        self._sums_TH = add_sums(peers, self.plan, rows_NH, slot_row_TK, weight_TK, self.goes_WT)
        mark("sums: added")
        return self._stand_in(rows_NH)

    def keep_sums(self, rows_NH: Tensor, slot_row_TK: Tensor, d_weight_TK: Tensor | None) -> Tensor:
        """Own ones lie where dy of own tokens lay."""
        from amoeba.kernels.peer_sums import own_sums

        tokens = slice(self.own.start, self.own.start + self.goes_WT.shape[1])
        own_TH = rows_NH.new_empty((self.goes_WT.shape[1], rows_NH.shape[1]))
        if self._dy_RH is not None:
            own_TH, self._dy_RH = self._dy_RH[tokens], None
        own_sums(self.buffer.checked(), self.plan, rows_NH, slot_row_TK, own_TH)
        self._own_TH = own_TH
        self._leave_gradients(d_weight_TK)
        mark("sums: own ones")
        return self._stand_in(rows_NH)

    def _stand_in(self, rows_NH: Tensor) -> Tensor:
        """For rows of all tokens, which are never read: one number."""
        shape = self.plan.rows, rows_NH.shape[1]
        return torch.empty_strided(shape, (0, 0), dtype=rows_NH.dtype, device=rows_NH.device)

    def start_sending(self, rows_TH: Tensor) -> Tensor | None:
        from amoeba.tasks.triton.arrivals import start_sending

        peers, plan = self.buffer.checked(), self.plan
        mark("before the exchange")
        self._started_RH = start_sending(
            peers, plan, rows_TH, self.goes_WT, self.comes_R, self._keep_own, self._sender()
        )
        if self._started_RH is not None:
            mark("rows: left to tasks")
        return self._started_RH

    def _sender(self) -> Sender | None:
        """What brings dy and sums of dx to ranks whose memory has no address here."""
        return None

    def _keep_own(self, own_TH: Tensor) -> Tensor:
        """Sums of own tokens: the others' have left."""
        self._own_TH = own_TH
        return self._stand_in(own_TH)

    def _check_that_they_were_sent(self) -> None:
        """By the backward behind `start_sending`, which knows the rows by their memory."""
        if (started_RH := self._started_RH) is not None:
            from amoeba.tasks.triton.arrivals import announced

            self._started_RH = None
            if announced(started_RH) is not None:
                raise RuntimeError(
                    "the scheduled backward should send dy to other ranks, but got a different tensor: something "
                    "between the experts and their sum copies gradients. Remove it, or set "
                    'local_backend="triton"'
                )

    def give_back(self, rows_RH: Tensor, what: str) -> Tensor:
        from amoeba.kernels.peer_context import GRADIENTS, NAMES, SUMS

        self._check_that_they_were_sent()
        channel = GRADIENTS if what == "gradients of routing weights" else SUMS
        own_TH, found, self._dy_RH = self._own_TH, self._sums_TH, None
        if channel == SUMS and found is not None:
            self._sums_TH = None
            return found
        mark("products" if channel == SUMS else "after the sums")
        if channel == SUMS and own_TH is not None:
            self._own_TH = None
            found = self._add_to(own_TH)
        else:
            rows_RH = rows_RH.contiguous()
            if channel in self._gone:
                self._gone.discard(channel)
                self.wait()  # the kernel that ends the epoch must not come ahead of those that read its number
            else:
                self._send_back(channel, rows_RH)
                mark(f"{NAMES[channel]}: sent")
            found = self._add_up(channel, rows_RH)
        mark(f"{NAMES[channel]}: added")
        return found

    def _add_to(self, own_TH: Tensor) -> Tensor:
        from amoeba.kernels.peer_sums import add_kept

        return add_kept(self.buffer.checked(), own_TH, self.goes_WT)

    def _send_back(self, channel: int, rows_RH: Tensor) -> None:
        from amoeba.kernels.peer_rows import push_rows

        push_rows(self.buffer.checked(), self.plan.back, channel, rows_RH, self.comes_R)

    def _add_up(self, channel: int, rows_RH: Tensor) -> Tensor:
        from amoeba.kernels.peer_rows import add_rows

        return add_rows(self.buffer.checked(), self.plan, channel, rows_RH, self.goes_WT)


TRANSPORT = Peers()


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def why_not_between(ranks: Ranks, device: torch.device) -> str | None:
    return _why_not(places(ranks, device), device)


@functools.lru_cache(maxsize=64)
def shares_its_gpu(ranks: Ranks, device: torch.device) -> bool:
    """With MPS their kernels run at the same time. False for a rank with a GPU, or an instance of one, to itself."""
    if device.type != "cuda" or ranks.count == 1:
        return False
    found = places(ranks, device)
    return found.count(found[ranks.rank]) > 1


def places(ranks: Ranks, device: torch.device) -> list[str]:
    """Of each rank its machine, by number and by name, and its device."""
    unit = "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)
    machine = _BOOT.read_text().strip() if _BOOT.is_file() else platform.node()
    return ranks.post(f"place on {device.type}", f"{machine} {platform.node()} {unit}")


def _why_not(places: Sequence[str], device: torch.device) -> str | None:
    machine, node, _ = places[0].split(" ")
    for rank, place in enumerate(places):
        other, other_node, unit = place.split(" ")
        if other != machine:
            return f"needs all ranks on one machine; rank 0 is on {node}, rank {rank} on {other_node}"
        if unit and not _reaches(device, unit):
            return f"needs GPUs that can access each other's memory; {device} and that of rank {rank} cannot"
    return None


def _reaches(device: torch.device, unit: str) -> bool:
    """Whether the GPU can reach that one's memory, as far as this process sees it."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == unit:
            own = torch.cuda.current_device() if device.index is None else device.index
            return index == own or torch.cuda.can_device_access_peer(own, index)
    return True
