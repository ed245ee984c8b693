"""A question whose experts are not all in host memory, or for which nothing was prepared: tables first, then copies.

group, answer = begin_load(memory, layer, missing, there, stay)      # reads and copies have begun
...                                                                  # the answer is given, the reads waited for
note_shown(memory, layer, answer); memory._let_go(layer, group)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amoeba.stream.gpu.memory import DeviceMemory, Group


def begin_load(
    memory: DeviceMemory, layer: int, missing: list[int], there: list[int], stay: Collection[int]
) -> tuple[Group, dict[int, int]]:
    """What is loaded, to be let go of when that is done; and which slots change, as an answer has it."""
    memory.replays.forget(layer)
    group = memory._begin(layer, [*there, *missing], stay)
    shown, now = memory._shown[layer], memory.cache.top(layer)
    answer = {expert: -1 for expert in shown if expert not in now}
    answer |= {expert: group.slot_of[expert] for expert in missing}
    if len(answer) > 2 * len(missing):  # for more the kernel does not look
        memory._let_go(layer, group)
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
