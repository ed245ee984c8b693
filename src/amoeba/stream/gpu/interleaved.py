"""Captured steps of several groups of sequences, interleaved: while one waits for its experts, another computes.

    for number in range(2):                                    # a graph of each, over the same layers
        with replays.as_group(number, 2):
            with replays.rehearsing(): step()
            with replays.capturing() as passes, torch.cuda.graph(graph): step()
    replays.interleave([Member(passes, graph.replay, stream), ...], steps=16)

    stream of A     layer 4 | request 5 ··· waits ··· | layer 5 | request 6 ··· waits ···
    stream of B     request 3 ··· waits ··· | layer 3 | request 4 ··· waits ····· | layer 4
    copies          B, layer 3 | A, layer 5           | B, layer 4                | A, layer 6 ...

Each group has a stream, a mailbox and a number of its own for every request. Slots and the map of a layer are for all.

**Requests about a layer come in the order of the groups**, A, B, A, B: the kernel that asks waits on the GPU until the
group before it has asked about the layer and has its answer in the map (`mailbox.Turn`). So it finds the map
as the host knows it. Here they are served in that order too: B's request about a layer is not looked at before A's has
been answered or was found to miss nothing. If a GPU ran both graphs one after the other, as they were launched, nothing
would wait for ever: A's step t is ahead of B's, which is ahead of A's step t + 1, in every layer.

**What a group may be reading does not leave.** Experts of A's latest pass over a layer may be read while B asks for
others. So no expert is evicted that another group's latest pass over the layer requested: the host knows it, since it
has seen that request. What A's passes before that read is read no more, as A could not have asked again. That needs as
many slots as all groups together can ask for. It does not depend on time: the same tokens end in the same slots.

Numbers are those of steps one after the other: each pass computes with the experts that it asked for. Reads from the
disk of one group do not keep the host from serving another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from amoeba.core.graph_replays import CannotCapture, Member
from amoeba.stream.gpu.device import Event
from amoeba.stream.gpu.fast_path import NOT_THERE, SERVED
from amoeba.stream.gpu.loader import Group, GroupLoads
from amoeba.stream.gpu.mailbox import NO_GROUP, Groups, Mailbox
from amoeba.stream.gpu.pool import SlotPool
from amoeba.stream.gpu.serving import Serving

_LOOKS = 32  # at one group's word before the next group's: a microsecond


@dataclass(eq=False)
class _Place:
    """Where a group is. served: requests since the first step, of which `first` is the serial of the latest step's."""

    member: Member
    mailbox: Mailbox
    launched: int = 0
    served: int = 0
    first: int = 0
    is_ready: bool = False
    ended: Event | None = None  # its latest step
    load: tuple[int, int, Group, dict[int, int]] | None = None  # layer, serial, what is loaded, the answer
    latest: dict[int, list[int]] = field(default_factory=dict)  # what its latest pass over each layer asked for


class Interleaved:
    """This many steps of each group. The stream that computes then waits for all of them."""

    def __init__(
        self,
        pool: SlotPool,
        loads: GroupLoads,
        serving: Serving,
        groups: Groups,
        members: Sequence[Member],
        steps: int,
    ) -> None:
        layers = members[0].passes.layers
        if any(member.passes.layers != layers for member in members) or len({*layers}) < len(layers):
            raise CannotCapture("interleaved groups must pass over the same layers, each of them once")
        numbers = [member.passes.group for member in members]
        if numbers != [*range(len(members))]:
            raise CannotCapture(f"the first, the second and so on of {len(members)} groups are expected, not {numbers}")
        self._pool, self._loads, self._serving, self._groups = pool, loads, serving, groups
        self._layers, self._steps = layers, steps
        mailboxes = (groups.mailbox_of(number) for number in range(len(members)))
        self._places = [_Place(*each) for each in zip(members, mailboxes, strict=True)]

    def run(self) -> None:
        device = self._pool.device
        self._fast = self._serving.by(self._places[0].mailbox)
        self._groups.set_turns(0)
        now = device.record(device.compute)
        for place in self._places:
            self._pool.wait_for_passes(place.member.stream)
            device.wait(place.member.stream, now)
        try:
            self._run()
            for place in self._places:
                if place.ended is not None:
                    device.wait(device.compute, place.ended)
        except BaseException:
            self._drain()
            raise
        finally:
            for layer in {*self._layers}:
                self._fast.hold(layer, ())
        self._groups.set_turns(NO_GROUP)
        self._pool.note_replay()

    def _run(self) -> None:
        for _ in range(1 if self._layers else self._steps):
            for place in self._places:
                if self._steps:
                    self._launch(place)
        every, idle = self._steps * len(self._layers), 0
        while not all(place.served == every for place in self._places):
            moved = [self._serve(number) for number, place in enumerate(self._places) if place.served < every]
            if any(moved):
                idle = 0
            elif self._serving.later:
                self._serving.count_one()
            else:
                idle += 1
                self._rest(idle, every)
        self._serving.count_all()

    def _rest(self, idle: int, every: int) -> None:
        if any(place.load is not None for place in self._places):
            time.sleep(0)  # those who read need Python
        else:
            self._fast.rest()
        if idle % 64:
            return
        if self._groups.in_trouble:
            raise RuntimeError("the GPU continued without experts: its tokens are invalid. Try again.")
        for number, place in enumerate(self._places):
            waits = place.served < every and place.load is None and self._is_next(number)
            if waits and place.ended is not None and place.ended.done() and not self._serve(number):
                raise RuntimeError("a replay ended without a request: was it captured with another memory?")

    def _launch(self, place: _Place) -> None:
        place.first = place.mailbox.expect(len(self._layers))
        place.launched += 1
        place.member.launch()
        place.ended = self._pool.device.record(place.member.stream)
        self._serving.count_passes(place.member.passes)

    def _is_next(self, number: int) -> bool:
        """Whether the groups before it have passed over the layer that it will ask about."""
        wanted = self._places[number].served
        if number == 0:
            return self._places[-1].served > wanted - len(self._layers)
        return self._places[number - 1].served > wanted

    def _serve(self, number: int) -> bool:
        """Whether the group's next request came, or was answered."""
        place = self._places[number]
        if place.load is not None:
            return self._end_load(place)
        if not self._is_next(number):
            return False
        at = place.served % len(self._layers)
        layer, serial = self._layers[at], place.first + at
        fast = self._serving.by(place.mailbox)
        if not place.is_ready:
            self._make_ready(number, layer)
            place.is_ready = True
        found = fast.look(layer, serial, _LOOKS)
        if found == NOT_THERE:
            return False
        with self._pool.lock:
            missing, there = place.mailbox.read(serial)
        place.latest[layer] = [*missing, *there]
        if not missing:
            fast.forget_who_leaves(layer)
        elif found == SERVED:
            fast.write_down(layer, serial, missing, there)
        else:
            group, answer = self._serving.begin_load(layer, missing, there, fast.held(layer))
            place.load = layer, serial, group, answer
            place.mailbox.answer(serial, list(answer), list(answer.values()))
            return True
        self._passed(place, layer, [] if missing else there)
        return True

    def _make_ready(self, number: int, layer: int) -> None:
        """Of the layer's passes until now all is counted, and the next is prepared."""
        later = self._serving.later
        for entry in [each for each in later if each[0] == layer]:
            later.remove(entry)
            if entry[1]:
                self._pool.used(layer, entry[1])
            self._fast.prepare(layer)
        others = (other.latest.get(layer, ()) for other in self._places if other is not self._places[number])
        self._fast.hold(layer, {expert for latest in others for expert in latest})

    def _end_load(self, place: _Place) -> bool:
        """Whether all that was read is there, and its copies are called."""
        assert place.load is not None
        layer, serial, group, answer = place.load
        if not all(job.done() for job in group.jobs.values()):
            return False
        self._loads.wait_for_reads(layer, group)  # raises what a read raised
        place.mailbox.go_on(serial)
        self._pool.note_shown(layer, answer)
        place.load = None
        self._loads.let_go(layer, group)
        self._passed(place, layer, [])
        return True

    def _passed(self, place: _Place, layer: int, found: list[int]) -> None:
        self._serving.later.append((layer, found))
        place.served += 1
        place.is_ready = False
        if place.served == place.launched * len(self._layers) and place.launched < self._steps:
            self._launch(place)

    def _drain(self) -> None:
        """All groups go on to the end of what was launched."""
        self._groups.give_up()
        for place in self._places:
            if place.load is not None:
                self._loads.let_go(place.load[0], place.load[2])
                place.load = None
        for place in self._places:
            self._pool.device.record(place.member.stream).wait()
