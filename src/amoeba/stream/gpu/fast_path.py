"""Serving requests, fast: all missing experts are in host memory; copies start first, tables are updated afterwards.

    fast.prepare(layer)                                   # while the GPU computes: all addresses, and who leaves next
    fast.look(layer, serial, looks)                       # NOT_THERE, NOT_SERVED (it takes the slow path) or SERVED
    fast.rest()                                           # between looks that found nothing
    fast.write_down(layer, serial, missing, there)        # where it was served
    fast.forget(layer)                                    # something else is about to change the layer
    fast.drop_half_served()                               # after an error

A GPU that asks waits, so between "request seen" and the first copy there are a few lookups: the slots of those who
leave, the addresses of those who come. Compiled code does that (csrc/serve.cpp), or Python where there is no compiler.
Who leaves is ranked by compiled code when it is asked (csrc/ranking.h), so that a pass that found all of its experts
leaves nothing to prepare; Python, which takes 30 to 50 us for that, ranks ahead, after every pass.
Tables, counters, policy and events follow while the copies run, by the requests that the slow path makes, and with the
same result.

**Why tables may be late.** What was prepared holds until the layer changes, and nothing can change it: a replay has the
turns of all layers, no load of the layer was under way, expected or held when it was prepared, and any pass over
the layer outside of a replay forgets it first. No copy has to wait for an event either: who reads the slots comes ahead
of the request (graphs.py), nothing that leaves is written down, since it has a copy in host memory, and a blob
that is still being written is no source.

**If it ends half-way** (a copy that fails, an interrupt), tables and slots may differ: the layer begins anew, empty.

On a Neoverse-N1 with calls that do nothing (25 % of 128 experts, 1.6 missing, 2026-11-16), from the request to the
first copy: compiled 1.7 us at most, Python 15, the slow path 43.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Iterable, Sequence
from ctypes import c_int8, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

from amoeba.stream.cache.slot_table import LFRU
from amoeba.stream.gpu.device import LEAST_AT_ONCE
from amoeba.stream.gpu.host_compute import HostCompute
from amoeba.stream.gpu.mailbox import Mailbox
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.serve_library import Order, ServedLayer, serving_library
from amoeba.stream.gpu.tiers import LayerTiers

NOT_THERE, NOT_SERVED, SERVED = range(3)
SPARES = 2  # of a layer that has slots enough: a token misses one or two experts of a layer
LEAST_SLOTS = 16  # of a layer; below that two slots are worth more as they are
ABSENT = -1  # no expert in a slot, or no slot for an expert


def spares_of(slots: int, experts: int) -> int:
    """How many of that many slots are better kept spare."""
    return SPARES if LEAST_SLOTS <= slots < experts else 0


class _Prepared:
    """Of one layer: arrays that both languages read."""

    def __init__(self, tiers: LayerTiers, experts: int, slots: int) -> None:
        self.leave, self.slot_of = (c_int32 * slots)(), (c_int32 * experts)()
        self.blob_of = (c_uint64 * experts)()
        self.early_of = (c_int32 * experts)(*[ABSENT] * experts)
        self.expert_in, self.kept = (c_int32 * slots)(), (c_int8 * experts)()
        self.held, self.held_ids = (c_int8 * experts)(), list[int]()
        self.policy: LFRU | None = None  # whose arrays compiled code ranks by
        self.is_known = False  # who is in which slot, and which blob
        self.written: list[tuple[int, int]] = []  # experts and blobs that are being written, as far as is known
        self.parts = tiers.addresses
        self._of_parts = [(c_uint64 * len(self.parts))(*each) for each in zip(*self.parts, strict=True)]
        arrays: tuple[ctypes.Array, ...] = (self.leave, self.slot_of, self.blob_of, *self._of_parts)
        leave, slot_of, blob_of, *of_parts = (ctypes.addressof(array) for array in arrays)
        early_of, *who_stays = (ctypes.addressof(array) for array in (self.early_of, self.kept, self.held))
        self.layer = ServedLayer(leave, 0, slot_of, blob_of, len(self.parts), *of_parts, early_of, Order(), *who_stays)
        self.address = ctypes.addressof(self.layer)

    def rank_by(self, policy: LFRU) -> None:
        """From now on, by what is in `expert_in`."""
        self.policy = policy
        self.layer.order = order_of(policy, self.expert_in)


def order_of(policy: LFRU, expert_in: ctypes.Array) -> Order:
    """For compiled code: reads what the policy remembers, for as long as that and the array live."""
    places = (each.buffer_info()[0] for each in (policy.now, policy.uses, policy.last))
    return Order(*places, ctypes.addressof(expert_in), len(expert_in))


class EarlyCopies:
    """Copies of experts that a layer will probably request, into slots that are not read before it does.

        early.begin(layer, [17, 90])            # while the GPU is busy elsewhere; as many as the layer has spare slots
        early.settle(layer, fetch.from_host)    # the layer has asked, and these were missing
        early.drop(layer)                       # it has asked, and none was; or something else changes the layer

    A layer has a few slots of which neither its table nor its map on the GPU knows. An expert that is expected is
    copied into one of them. If the layer then asks for it, which it does as for any that is missing, the answer names
    that slot, and the slot of the expert that is evicted for it is spare from then on; else its copy was for nothing.
    So a wrong prediction evicts nothing, and nothing has to be kept off slots that are read.

    early_of: of each layer, for serve.cpp: the slot that an expert has early, or ABSENT.
    """

    def __init__(self, pool: SlotPool, early_of: Sequence[ctypes.Array]) -> None:
        self._pool, self._early_of = pool, early_of
        self._slot_of: list[dict[int, int]] = [{} for _ in early_of]

    def __getitem__(self, layer: int) -> dict[int, int]:
        return self._slot_of[layer]

    def begin(self, layer: int, experts: Iterable[int]) -> None:
        """Those of them that are in host memory and not on the device, the first first."""
        pool, here, of_layer = self._pool, self._slot_of[layer], self._early_of[layer]
        loads = []
        with pool.lock:
            table = pool.cache.top(layer)
            for expert in experts:
                if not table.spare:
                    break
                host_slot = pool.cache.host_slot(layer, expert)
                if expert in table or expert in here or host_slot is None:
                    continue
                slot = table.spare.pop()
                here[expert] = of_layer[expert] = slot
                loads.append((slot, host_slot))
            pool.cache.counters.prefetched += len(loads)
        if loads:
            pool.tiers[layer].up_all(loads)

    def settle(self, layer: int, from_host: Sequence[tuple[int, int, int]]) -> None:
        """The table has given slots to these, (expert, host slot, slot); those that were early are in others."""
        here, table = self._slot_of[layer], self._pool.cache.top(layer)
        used = [(expert, slot) for expert, _, slot in from_host if expert in here]
        for expert, slot in used:
            table.move(expert, here.pop(expert))
            table.spare.append(slot)
            self._early_of[layer][expert] = ABSENT
        counters = self._pool.cache.counters
        counters.prefetched_used += len(used)
        counters.from_host -= len(used)  # they were on their way
        counters.waited += len(used)
        self.drop(layer)

    def drop(self, layer: int) -> None:
        """Copies into these slots that come later come after what is under way."""
        here, cache = self._slot_of[layer], self._pool.cache
        if here:
            cache.top(layer).spare.extend(here.values())
            cache.counters.host_bytes += len(here) * self._pool.store.expert_bytes(layer)
            for expert in here:
                self._early_of[layer][expert] = ABSENT
            here.clear()


class FastPath:
    """computing: where the CPU may compute what is missing; needs the compiled one."""

    def __init__(self, pool: SlotPool, mailbox: Mailbox, computing: HostCompute | None = None) -> None:
        self._pool, self._mailbox, self._computing = pool, mailbox, computing
        self._calls = calls = pool.device.calls()
        self._half_served: int | None = None  # a layer
        sizes = zip(pool.tiers, pool.store.layers, pool.slots, pool.spares, strict=True)
        self._layers = [_Prepared(tiers, entry.experts, slots + spares) for tiers, entry, slots, spares in sizes]
        self.early = EarlyCopies(pool, [each.early_of for each in self._layers])
        self._words: dict[Mailbox, c_uint64] = {}
        self._tables: dict[Mailbox, ctypes.Array] = {}  # of addresses, for serve.cpp
        self._compiled: Any = None
        if computing is not None:
            for here, blobs in zip(self._layers, computing.blobs, strict=True):
                here.layer.blobs = blobs
        if calls is not None and (library := serving_library()) is not None:
            self._compiled = library.amoeba_serve
        self.serve(mailbox)
        pool.watchers.append(self)

    def serve(self, mailbox: Mailbox) -> None:
        """Requests of this one from now on."""
        calls = self._calls
        self._mailbox = mailbox
        if mailbox not in self._words:
            self._words[mailbox] = c_uint64(mailbox.arrived_word)
            if calls is not None and self._compiled is not None:
                functions = calls.to_device, calls.write_word, calls.to_device_at_once
                pointers = [0 if call is None else ctypes.cast(call, c_void_p).value or 0 for call in functions]
                addresses = *pointers, calls.stream.value, mailbox.arrived_word, LEAST_AT_ONCE
                self._tables[mailbox] = (c_uint64 * 6)(*addresses)
        self._word = self._words[mailbox]
        self._table_address = ctypes.addressof(self._tables[mailbox]) if mailbox in self._tables else 0

    def hold(self, layer: int, experts: Collection[int]) -> None:
        """None of these leaves, and others may, until the next call: who reads them is not ahead of the request."""
        here = self._layers[layer]
        for expert in here.held_ids:
            here.held[expert] = 0
        here.held_ids = list(experts)
        for expert in experts:
            here.held[expert] = 1

    def held(self, layer: int) -> list[int]:
        return self._layers[layer].held_ids

    def forget(self, layer: int) -> None:
        if self._computing is not None:
            self._computing.wait()  # for who reads blobs
        here = self._layers[layer]
        here.layer.leave_count, here.is_known = 0, False
        self.early.drop(layer)

    def forget_who_leaves(self, layer: int) -> None:
        """A pass used the layer; what is in host memory stays there."""
        self._layers[layer].layer.leave_count = 0

    def prepare(self, layer: int, ids: int) -> None:
        """For requests of at most this many ids: each evicts no expert or one, or is one of those that stay."""
        pool, here = self._pool, self._layers[layer]
        if self._calls is None or any(number == layer for number, _ in pool.expected):
            return
        with pool.lock:
            table, slot_of = pool.cache.top(layer), pool.shown[layer]
            policy = table.policy if self._compiled is not None and isinstance(table.policy, LFRU) else None
            ranks = policy is not None
            if here.is_known and here.written:
                self._find_blobs(layer, here.written)
            if ranks and here.is_known:
                here.layer.leave_count = len(slot_of)
                return
            leave = list(slot_of) if ranks and table.is_full else pool.cache.leave_next(layer, ids)
            if not leave or slot_of != table.slot_of:
                return
            if not here.is_known:
                ctypes.memset(here.blob_of, 0, ctypes.sizeof(here.blob_of))
                self._find_blobs(layer, pool.cache.on_host(layer))
                ctypes.memset(here.expert_in, 0xFF, ctypes.sizeof(here.expert_in))  # -1: no expert
                for expert, slot in slot_of.items():
                    here.slot_of[expert], here.expert_in[slot] = slot, expert
                here.is_known = True
                if policy is not None:
                    ctypes.memset(here.kept, 0, ctypes.sizeof(here.kept))
                    for expert in pool.cache.not_written_back(layer):
                        here.kept[expert] = 1
                    here.rank_by(policy)
        if not ranks:
            here.leave[: len(leave)] = leave  # type: ignore[assignment]
        here.layer.leave_count = len(leave)

    def _find_blobs(self, layer: int, on_host: Sequence[tuple[int, int]]) -> None:
        here, tiers = self._layers[layer], self._pool.tiers[layer]
        for expert, host_slot in on_host:
            here.blob_of[expert] = tiers.blob_address(host_slot)
        here.written = [(expert, host_slot) for expert, host_slot in on_host if not here.blob_of[expert]]

    def look(self, layer: int, serial: int, looks: int) -> int:
        """Whether the request has arrived, after at most this many polls. A prepared one is answered too."""
        mailbox, here = self._mailbox, self._layers[layer]
        is_prepared = bool(here.layer.leave_count)
        if is_prepared:
            self._half_served = layer
        if self._compiled is not None:
            places, number = mailbox.places(serial), mailbox.wrapped(serial)
            compute = 0 if self._computing is None else self._computing.address(layer)
            found = self._compiled(*places, number, looks, here.address, self._table_address, compute)
            if found < 0:
                raise RuntimeError(f"CUDA error {-found}")
        elif not mailbox.is_there_after(serial, looks):
            found = NOT_THERE
        else:
            found = self._serve(here, serial) if is_prepared else NOT_SERVED
        if found != SERVED:
            self._half_served = None
        return found

    def rest(self) -> None:
        """Other threads may run. Looks of compiled code have let them use Python already, so the core is all that is
        left to give away: `time.sleep(0)` takes 60 us in Python 3.11 and 3.12, in which nothing polls."""
        if self._compiled is None or not hasattr(os, "sched_yield"):
            time.sleep(0)
        else:
            os.sched_yield()

    def write_down(self, layer: int, serial: int, missing: list[int], there: list[int]) -> list[int]:
        """Who of them is computed by the CPU."""
        from amoeba.kernels.mailbox import COMPUTED, LATER

        pool, shown, here = self._pool, self._pool.shown[layer], self._layers[layer]
        self.forget_who_leaves(layer)
        answer = self._mailbox.answered(serial)
        came = [(expert, slot % LATER) for expert, slot in answer if slot >= 0]
        comers = [expert for expert, _ in came]
        ids, computed = there + comers, [expert for expert in missing if expert not in comers]
        with pool.lock:
            fetch = pool.cache.request(layer, ids, computed, here.held_ids)
            for expert in comers:
                pool.cache.loaded(layer, expert)
            pool.cache.release(layer, ids)
            self.early.settle(layer, fetch.from_host)
            table = pool.cache.top(layer)
            now = [(expert, table.slot_of[expert]) for expert, _, _ in fetch.from_host]
        pool.tiers[layer].copied_from(host_slot for _, host_slot, _ in fetch.from_host)
        for expert in (expert for expert, slot in answer if slot == -1):
            here.expert_in[shown.pop(expert)] = ABSENT
        for expert, slot in came:
            shown[expert] = here.slot_of[expert] = slot
            here.expert_in[slot] = expert
        if came != now or fetch.writes or fetch.from_disk:
            raise RuntimeError(f"layer {layer}: {answer} was answered, which is not what {fetch} says")
        self._half_served = None
        return [expert for expert, slot in answer if slot == COMPUTED or slot >= LATER]

    def drop_half_served(self) -> None:
        layer, self._half_served = self._half_served, None
        if layer is not None:
            self.forget(layer)
            self._pool.cache.begin_anew(layer)

    def _serve(self, here: _Prepared, serial: int) -> int:
        """What serve.cpp does, in Python."""
        assert self._calls is not None
        copy, write, _, stream, *_ = self._calls
        with self._pool.lock:
            missing, there = self._mailbox.read(serial)
        count, blobs = len(missing), [here.blob_of[expert] for expert in missing]
        waiting = here.leave[: here.layer.leave_count]
        leave = [expert for expert in waiting if expert not in there and not here.held[expert]][:count]
        if not count or len(leave) < count or 0 in blobs:
            return NOT_SERVED
        slots = [here.slot_of[expert] for expert in reversed(leave)]
        for n, (expert, blob) in enumerate(zip(missing, blobs, strict=True)):
            if (early := here.early_of[expert]) != ABSENT:  # its copy has been called
                slots[n] = early
                continue
            slot = slots[n]
            for stack, size, offset in here.parts:
                if code := copy(c_uint64(stack + slot * size), c_uint64(blob + offset), c_uint64(size), stream):
                    raise RuntimeError(f"CUDA error {code}")
        self._mailbox.answer(serial, leave + missing, [-1] * count + slots)
        if code := write(stream, self._word, c_uint32(serial), c_uint32(0)):  # 0: with a fence ahead of it
            raise RuntimeError(f"CUDA error {code}")
        return SERVED
