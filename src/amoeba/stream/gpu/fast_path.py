"""Serving requests, fast: all missing experts are in host memory; copies start first, tables are updated afterwards.

    fast.prepare(layer)                                   # while the GPU computes: all addresses
    fast.look(layer, serial, looks)                       # NOT_THERE, NOT_SERVED (it takes the slow path) or SERVED
    fast.rest()                                           # between looks that found nothing
    fast.write_down(layer, serial, missing, there)        # where it was served
    fast.forget(layer)                                    # something else is about to change the layer
    fast.drop_half_served()                               # after an error

A GPU that asks waits, so between "request seen" and the first copy there are a few lookups: the slots of those who
leave, the addresses of those who come. Compiled code does that (csrc/serve.cpp), and ranks who leaves when it is asked
(csrc/ranking.h), so that a pass that found all of its experts leaves nothing to prepare. Where there is no compiler all
requests take the slow path. Tables, counters, policy and events follow while the copies run, by the requests that the
slow path makes, and with the same result.

**Why tables may be late.** What was prepared holds until the layer changes, and nothing can change it: a replay has the
turns of all layers, no load of the layer was under way, expected or held when it was prepared, and any pass over
the layer outside of a replay forgets it first. No copy has to wait for an event either: who reads the slots comes ahead
of the request (graphs.py), nothing that leaves is written down, since it has a copy in host memory, and a blob
that is still being written is no source.

**If it ends half-way** (a copy that fails, an interrupt), tables and slots may differ: the layer begins anew, empty.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from ctypes import c_int8, c_int32, c_uint64, c_void_p
from typing import Any

from amoeba.stream.cache.slot_table import LFRU
from amoeba.stream.gpu.device import LEAST_AT_ONCE
from amoeba.stream.gpu.host_compute import HostCompute
from amoeba.stream.gpu.mailbox import Mailbox
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.serve_library import Order, ServedLayer, serving_library
from amoeba.stream.gpu.tiers import LayerTiers

NOT_THERE, NOT_SERVED, SERVED = range(3)
ABSENT = -1  # no expert in a slot, or no slot for an expert


class _Prepared:
    """Of one layer: arrays that both languages read."""

    def __init__(self, tiers: LayerTiers, experts: int, slots: int) -> None:
        self.slot_of, self.blob_of = (c_int32 * experts)(), (c_uint64 * experts)()
        self.expert_in, self.kept = (c_int32 * slots)(), (c_int8 * experts)()
        self.policy: LFRU | None = None  # by whose arrays it is ranked
        self.is_known = False  # who is in which slot, and which blob
        self.written: list[tuple[int, int]] = []  # experts and blobs that are being written, as far as is known
        self.parts = tiers.addresses
        self._of_parts = [(c_uint64 * len(self.parts))(*each) for each in zip(*self.parts, strict=True)]
        arrays: tuple[ctypes.Array, ...] = (self.slot_of, self.blob_of, *self._of_parts, self.kept)
        slot_of, blob_of, *of_parts, kept = (ctypes.addressof(array) for array in arrays)
        self.layer = ServedLayer(0, slot_of, blob_of, len(self.parts), *of_parts, Order(), kept)
        self.address = ctypes.addressof(self.layer)

    def rank_by(self, policy: LFRU) -> None:
        """From now on, by what is in `expert_in`."""
        self.policy = policy
        self.layer.order = order_of(policy, self.expert_in)


def order_of(policy: LFRU, expert_in: ctypes.Array) -> Order:
    """For compiled code: reads what the policy remembers, for as long as that and the array live."""
    places = (each.buffer_info()[0] for each in (policy.now, policy.uses, policy.last))
    return Order(*places, ctypes.addressof(expert_in), len(expert_in))


class FastPath:
    """computing: where the CPU may compute what is missing."""

    def __init__(self, pool: SlotPool, mailbox: Mailbox, computing: HostCompute | None = None) -> None:
        self._pool, self.mailbox, self._computing = pool, mailbox, computing
        self._calls = calls = pool.device.calls()  # kept: compiled code has their addresses
        self._half_served: int | None = None  # a layer
        sizes = zip(pool.tiers, pool.store.layers, pool.slots, strict=True)
        self._layers = [_Prepared(tiers, entry.experts, slots) for tiers, entry, slots in sizes]
        self._compiled: Any = None
        if computing is not None:
            for here, blobs in zip(self._layers, computing.blobs, strict=True):
                here.layer.blobs = blobs
        if calls is not None and (library := serving_library()) is not None:
            self._compiled = library.amoeba_serve
            functions = calls.to_device, calls.write_word, calls.to_device_at_once
            pointers = [0 if call is None else ctypes.cast(call, c_void_p).value or 0 for call in functions]
            self._table = (c_uint64 * 6)(*pointers, calls.stream.value, mailbox.arrived_word, LEAST_AT_ONCE)
        pool.watchers.append(self)

    def forget(self, layer: int) -> None:
        if self._computing is not None:
            self._computing.wait()  # for who reads blobs
        here = self._layers[layer]
        here.layer.may_leave, here.is_known = 0, False

    def forget_who_leaves(self, layer: int) -> None:
        """A pass used the layer; what is in host memory stays there."""
        self._layers[layer].layer.may_leave = 0

    def prepare(self, layer: int) -> None:
        pool, here = self._pool, self._layers[layer]
        if self._compiled is None or any(number == layer for number, _ in pool.expected):
            return
        with pool.lock:
            table, slot_of = pool.cache.top(layer), pool.shown[layer]
            policy = table.policy
            if here.is_known and here.written:
                self._find_blobs(layer, here.written)
            if not here.is_known and not (table.is_full and slot_of == table.slot_of and isinstance(policy, LFRU)):
                return
            if not here.is_known:
                ctypes.memset(here.blob_of, 0, ctypes.sizeof(here.blob_of))
                self._find_blobs(layer, pool.cache.on_host(layer))
                ctypes.memset(here.expert_in, 0xFF, ctypes.sizeof(here.expert_in))  # -1: no expert
                for expert, slot in slot_of.items():
                    here.slot_of[expert], here.expert_in[slot] = slot, expert
                ctypes.memset(here.kept, 0, ctypes.sizeof(here.kept))
                for expert in pool.cache.not_written_back(layer):
                    here.kept[expert] = 1
                assert isinstance(policy, LFRU)
                here.rank_by(policy)
                here.is_known = True
            here.layer.may_leave = len(slot_of)

    def _find_blobs(self, layer: int, on_host: Sequence[tuple[int, int]]) -> None:
        here, tiers = self._layers[layer], self._pool.tiers[layer]
        for expert, host_slot in on_host:
            here.blob_of[expert] = tiers.blob_address(host_slot)
        here.written = [(expert, host_slot) for expert, host_slot in on_host if not here.blob_of[expert]]

    def look(self, layer: int, serial: int, looks: int) -> int:
        """Whether the request has arrived, after at most this many polls. A prepared one is answered too."""
        mailbox, here = self.mailbox, self._layers[layer]
        if here.layer.may_leave:
            self._half_served = layer
        if self._compiled is not None:
            places, number = mailbox.places(serial), mailbox.wrapped(serial)
            compute = 0 if self._computing is None else self._computing.address(layer)
            found = self._compiled(*places, number, looks, here.address, ctypes.addressof(self._table), compute)
            if found < 0:
                raise RuntimeError(f"CUDA error {-found}")
        else:
            found = NOT_SERVED if mailbox.is_there_after(serial, looks) else NOT_THERE
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
        answer = self.mailbox.answered(serial)
        came = [(expert, slot % LATER) for expert, slot in answer if slot >= 0]
        comers = [expert for expert, _ in came]
        ids, computed = there + comers, [expert for expert in missing if expert not in comers]
        with pool.lock:
            fetch = pool.cache.request(layer, ids, computed)
            for expert in comers:
                pool.cache.loaded(layer, expert)
            pool.cache.release(layer, ids)
            now = [(expert, slot) for expert, _, slot in fetch.from_host]
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
