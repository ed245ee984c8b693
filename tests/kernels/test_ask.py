"""A kernel that asks the host for experts: what it writes, when it waits, and that it never waits for ever.

N ids · E experts · S slots

With a GPU all of this runs on it. That it compiles for Hopper, with its fences in the right places, is seen without
one, in a process of its own (this file as a program), since Triton's interpreter cannot compile.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from test_hopper_compiles import compiled_by
from torch import Tensor

from amoeba.kernels.ask import Talk, answer_length, ask
from amoeba.kernels.index_export import row_length

E, S, RING, IDS = 8, 3, 4, 6
ROW, MOST = row_length(E, IDS), answer_length(E, IDS)

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def talk_of(device: torch.device, serial: int = 0) -> Talk:
    def mapped(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")

    state = torch.full((2,), serial, dtype=torch.int32, device=device)
    return Talk(state, mapped(RING, ROW), mapped(RING, 2 + 2 * MOST), mapped(1), mapped(RING, 2))


def asked(talk: Talk, ids: list[int], slots: dict[int, int], device: torch.device) -> tuple[list[int], Tensor]:
    """Slots of the ids, and the map afterwards."""
    shown = torch.full((E + S,), -1, dtype=torch.int32)
    for expert, slot in slots.items():
        shown[expert], shown[E + slot] = slot, expert
    shown, expert_N = shown.to(device), torch.tensor(ids, dtype=torch.int64, device=device)
    slot_N = torch.full_like(expert_N, -77)
    ask(expert_N, slot_N, shown, E, talk, limit=1e-3)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return slot_N.tolist(), shown.cpu()


def answer(talk: Talk, serial: int, slot_of: dict[int, int]) -> None:
    row = talk.answers[serial % RING]
    row[0], row[1] = serial, len(slot_of)
    for at, (expert, slot) in enumerate(slot_of.items()):
        row[2 + at], row[2 + MOST + at] = expert, slot


def test_where_all_are_there_it_does_not_wait(device) -> None:
    talk = talk_of(device, serial=5)
    slots, shown = asked(talk, [4, 1, 4, -1, E], {1: 2, 4: 0}, device)
    assert slots == [0, 2, 0, -1, -1] and shown[:E].tolist() == [-1, 2, -1, -1, 0, -1, -1, -1]
    assert talk.questions[6 % RING].tolist()[:5] == [0, 2, 6, 1, 4]
    assert talk.state.tolist() == [6, 5] and talk.trouble.tolist() == [0]


def test_what_the_host_answered_goes_into_the_map_and_the_slots(device) -> None:
    talk = talk_of(device, serial=5)
    answer(talk, 6, {7: 1, 3: -1, 2: 0, 1: -1})
    talk.state[1] = 6  # arrived
    slots, shown = asked(talk, [7, 4, 2], {3: 1, 4: 2, 1: 0}, device)
    assert slots == [1, 2, 0] and talk.trouble.tolist() == [0]
    assert shown.tolist() == [-1, -1, 0, -1, 2, -1, -1, 1, 2, 7, 4]
    assert talk.questions[6 % RING].tolist()[:6] == [2, 3, 6, 2, 7, 4]


@pytest.mark.parametrize("trouble", ["late", "stopped", "another answer", "one lacks"])
def test_without_a_right_answer_it_goes_on_and_says_so(trouble: str, device) -> None:
    talk = talk_of(device, serial=5)
    answer(talk, 2 if trouble == "another answer" else 6, {7: 1} if trouble == "one lacks" else {7: 1, 2: 0})
    if trouble == "stopped":
        talk.trouble[0] = 1
    elif trouble != "late":
        talk.state[1] = 6
    slots, shown = asked(talk, [7, 4, 2], {4: 2}, device)
    assert talk.trouble.item() != 0
    assert slots == ([1, 2, -1] if trouble == "one lacks" else [-1, 2, -1])
    assert talk.state.tolist()[0] == 6, "serials go on"
    if trouble != "one lacks":
        assert shown[:E].tolist() == [-1, -1, -1, -1, 2, -1, -1, -1], "a map by half"


@pytest.mark.parametrize("serial", [2**31 - 1, -(2**31), -1])
def test_serials_wrap(serial: int, device) -> None:
    talk, following = talk_of(device, serial), -(2**31) if serial == 2**31 - 1 else serial + 1
    answer(talk, following, {7: 1})
    talk.state[1] = following
    assert asked(talk, [7], {}, device)[0] == [1]
    assert talk.questions[following % RING].tolist()[:4] == [1, 1, following, 7] and talk.trouble.tolist() == [0]


def test_what_does_not_fit_is_refused(device) -> None:
    with pytest.raises(ValueError, match="rows of"):
        asked(talk_of(device), list(range(E)), {}, device)


@pytest.mark.thorough  # compiles for some seconds
def test_on_hopper_the_serial_is_written_behind_a_fence_and_the_answer_read_behind_another(tmp_path) -> None:
    found = compiled_by(__file__, tmp_path)["order"]
    one_line = " ".join(found)
    # the row, then a barrier, then the fence, then the serial and the state
    assert re.search(r"(store )+barrier fence store store ", one_line), one_line
    # looks, the fence, and only then the answer; looks and a fence again, and nothing of the host's behind that but the
    # map and, behind a barrier, the slots
    answer = r"(look ){5}fence barrier (look ){4}"
    assert re.search(answer + r"(look ){2}fence barrier store store barrier (load )+(store ?)+$", one_line), one_line


def main() -> dict[str, list[str]]:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from amoeba.kernels import ask as module
    from amoeba.kernels.index_export import sizes

    kernel = module._ask.kernel
    constants = {"EXPERTS": 128, "RING": 64, "ROW": 131, "MOST": 128, "ENTRIES": 16, "ON_GPU": True, **sizes(128, 8)}
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(("expert_N", "slot_N"), "*i64") | dict.fromkeys(("limit", "N"), "i32")
    signature |= dict.fromkeys(("shown", "state", "questions", "answers", "trouble", "times"), "*i32")
    source = ASTSource(kernel, signature, constexprs=constants)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    kinds = {
        "ld.volatile.global": "look",
        "ld.global": "load",
        "st.global": "store",
        "fence.acq_rel.sys": "fence",
        "bar.sync": "barrier",
    }
    found = re.findall("|".join(re.escape(each) for each in kinds), ptx)
    return {"order": [kinds[each] for each in found]}


if __name__ == "__main__":
    print(json.dumps(main()))
