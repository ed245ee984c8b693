"""A question whose experts are not all in host memory, or for which nothing was prepared: tables first, then copies.

    load(memory, channel, layer, serial, missing, there, stay, meanwhile)      # all of it; `meanwhile`, while reads run

    group, answer = begin_load(memory, layer, missing, there, stay)      # reads and copies have begun
    ...                                                                  # the answer is given, the reads waited for
    note_shown(memory, layer, answer); memory.loads.let_go(layer, group)

What is on the disk begins ahead of the tables where one question is served at a time (direct_loads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amoeba.stream.gpu.channel import Channel
    from amoeba.stream.gpu.direct_loads import DirectLoad
    from amoeba.stream.gpu.loads import Group
    from amoeba.stream.gpu.memory import DeviceMemory


def load(
    memory: DeviceMemory,
    channel: Channel,
    layer: int,
    serial: int,
    missing: list[int],
    there: list[int],
    stay: Collection[int],
    meanwhile: Callable[[], None],
) -> None:
    direct = memory.direct.begin(layer, missing)
    try:
        group, answer = begin_load(memory, layer, missing, there, stay, direct)
    except BaseException:
        if direct is not None:
            direct.drop()
        raise
    try:
        channel.answer(serial, list(answer), list(answer.values()))
        if direct is not None:  # of others Python has to see that they are there
            direct.open(*(() if group.jobs else (channel.arrived_word, channel.wrapped(serial))))
        if group.jobs or direct is not None:
            meanwhile()
        memory.loads.wait_for_reads(layer, group)  # their copies are called when this returns
        if direct is None or not direct.has_told:
            channel.go_on(serial)
        note_shown(memory, layer, answer)
    finally:
        memory.loads.let_go(layer, group)


def begin_load(
    memory: DeviceMemory,
    layer: int,
    missing: list[int],
    there: list[int],
    stay: Collection[int],
    direct: DirectLoad | None = None,
) -> tuple[Group, dict[int, int]]:
    """What is loaded, to be let go of when that is done; and which slots change, as an answer has it."""
    memory.replays.serving.forget(layer)
    group = memory.loads.begin(layer, [*there, *missing], stay, direct)
    shown, now = memory._shown[layer], memory.cache.top(layer)
    answer = {expert: -1 for expert in shown if expert not in now}
    answer |= {expert: group.slot_of[expert] for expert in missing}
    if len(answer) > 2 * len(missing):  # for more the kernel does not look
        memory.loads.let_go(layer, group)
        raise RuntimeError(f"layer {layer}: {len(answer)} slots changed, {len(missing)} experts were missing")
    return group, answer


def note_shown(memory: DeviceMemory, layer: int, answer: dict[int, int]) -> None:
    """The kernel that got this answer puts it into the map."""
    shown = memory._shown[layer]
    for expert, slot in answer.items():
        if slot < 0:
            del shown[expert]
        else:
            shown[expert] = slot
