"""A kernel that asks the host for experts: what it writes, when it waits, and that it never waits for ever.

N ids · E experts · S slots · H hidden

With a GPU all of this runs on it. That it compiles for Hopper, with its fences in the right places, is seen without
one, in a process of its own (this file as a program), since Triton's interpreter cannot compile.
"""

import json
import re

import pytest
import torch
from compiling import compile_as, compiled_by
from torch import Tensor

from amoeba.kernels.expert_request import add_computed, request_experts
from amoeba.kernels.index_export import row_length
from amoeba.kernels.mailbox import (
    COMPUTED,
    COMPUTES,
    LATER,
    MOVED,
    PROMOTED,
    HostComputeBuffer,
    MailboxWords,
    answer_length,
)
from selection import each_value_once

E, S, RING, IDS, H = 8, 3, 4, 6, 5
MOST = answer_length(E, IDS)

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def mailbox_of(device: torch.device, serial: int = 0, ids: int = IDS, experts: int = E) -> MailboxWords:
    def mapped(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")

    state, words = torch.full((3,), serial, dtype=torch.int32, device=device), 3 + 2 * answer_length(experts, ids)
    return MailboxWords(state, mapped(RING, row_length(experts, ids)), mapped(RING, words), mapped(1), mapped(RING, 2))


def asked(
    mailbox: MailboxWords,
    ids: list[int],
    slots: dict[int, int],
    device: torch.device,
    due: Tensor | None = None,
    *given,
) -> tuple[list[int], Tensor]:
    """Slots of the ids, and the map afterwards."""
    due = mailbox.state[1:2].clone() if due is None else due
    shown = torch.full((E + S,), -1, dtype=torch.int32)
    for expert, slot in slots.items():
        shown[expert], shown[E + slot] = slot, expert
    shown, expert_N = shown.to(device), torch.tensor(ids, dtype=torch.int64, device=device)
    slot_N = torch.full_like(expert_N, -77)
    request_experts(expert_N, slot_N, shown, E, mailbox, due, 1e-3, *given)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return slot_N.tolist(), shown.cpu()


def answer(mailbox: MailboxWords, serial: int, slot_of: dict[int, int], about: int = MOVED) -> None:
    row = mailbox.answers[serial % RING]
    row[0], row[1], row[2] = serial, len(slot_of), about
    for at, (expert, slot) in enumerate(slot_of.items()):
        row[3 + at], row[3 + MOST + at] = expert, slot


def test_where_all_are_there_it_does_not_wait(device) -> None:
    mailbox = mailbox_of(device, serial=5)
    slots, shown = asked(mailbox, [4, 1, 4, -1, E], {1: 2, 4: 0}, device)
    assert slots == [0, 2, 0, -1, -1] and shown[:E].tolist() == [-1, 2, -1, -1, 0, -1, -1, -1]
    assert mailbox.requests[6 % RING].tolist()[:5] == [0, 2, 6, 1, 4]
    assert mailbox.state.tolist() == [6, 5, 0] and mailbox.trouble.tolist() == [0]


def test_what_the_host_answered_goes_into_the_map_and_the_slots(device) -> None:
    mailbox = mailbox_of(device, serial=5)
    answer(mailbox, 6, {7: 1, 3: -1, 2: 0, 1: -1})
    mailbox.state[1] = 6  # arrived
    slots, shown = asked(mailbox, [7, 4, 2], {3: 1, 4: 2, 1: 0}, device)
    assert slots == [1, 2, 0] and mailbox.trouble.tolist() == [0]
    assert shown.tolist() == [-1, -1, 0, -1, 2, -1, -1, 1, 2, 7, 4]
    assert mailbox.requests[6 % RING].tolist()[:6] == [2, 3, 6, 2, 7, 4]


@pytest.mark.parametrize("trouble", ["late", "stopped", "another answer", "one lacks"])
def test_without_a_right_answer_it_goes_on_and_says_so(trouble: str, device) -> None:
    mailbox = mailbox_of(device, serial=5)
    answer(mailbox, 2 if trouble == "another answer" else 6, {7: 1} if trouble == "one lacks" else {7: 1, 2: 0})
    if trouble == "stopped":
        mailbox.trouble[0] = 1
    elif trouble != "late":
        mailbox.state[1] = 6
    slots, shown = asked(mailbox, [7, 4, 2], {4: 2}, device)
    assert mailbox.trouble.item() != 0
    assert slots == ([1, 2, -1] if trouble == "one lacks" else [-1, 2, -1])
    assert mailbox.state.tolist()[0] == 6, "serials go on"
    if trouble != "one lacks":
        assert shown[:E].tolist() == [-1, -1, -1, -1, 2, -1, -1, -1], "a map by half"


@pytest.mark.parametrize("serial", [2**31 - 1, -(2**31), -1])
def test_serials_wrap(serial: int, device) -> None:
    mailbox, following = mailbox_of(device, serial), -(2**31) if serial == 2**31 - 1 else serial + 1
    answer(mailbox, following, {7: 1})
    mailbox.state[1] = following
    assert asked(mailbox, [7], {}, device)[0] == [1]
    assert mailbox.requests[following % RING].tolist()[:4] == [1, 1, following, 7] and mailbox.trouble.tolist() == [0]


def test_what_does_not_fit_is_refused(device) -> None:
    with pytest.raises(ValueError, match="rows of"):
        asked(mailbox_of(device), list(range(E)), {}, device)


# --- experts that the host computes -----------------------------------------------------------------------------------


def buffer_of(device: torch.device) -> HostComputeBuffer:
    def mapped(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")

    x, expert, weight, arrived = mapped(2 * H), mapped(2 * IDS), mapped(IDS), mapped(1)
    y, word = mapped(2 * H), mapped(1)
    x, weight, y = (each.view(torch.float32) for each in (x, weight, y))
    return HostComputeBuffer(x, expert.view(torch.int64), weight, arrived, y, word)


@pytest.mark.parametrize("missing", [True, False])
def test_x_ids_and_weights_are_handed_over_where_something_is_missing(missing: bool, device) -> None:
    mailbox, buffer = mailbox_of(device, serial=5), buffer_of(device)
    x_TH = torch.arange(2 * H, dtype=torch.bfloat16, device=device).view(2, H)
    weight_TK = torch.tensor([[0.5, 0.25], [1.0, 2.0]], device=device)
    answer(mailbox, 6, {7: 1})
    mailbox.state[1] = 6
    slots, _ = asked(mailbox, [7, 4, -1, 7], {4: 2} if missing else {4: 2, 7: 1}, device, None, buffer, x_TH, weight_TK)
    assert slots == [1, 2, -1, 1]
    if not missing:
        assert not buffer.x.any() and not buffer.weight.any()
        return
    assert buffer.x.tolist() == x_TH.float().flatten().tolist()
    assert buffer.arrived.tolist() == [6]
    assert buffer.expert[:4].tolist() == [7, 4, -1, 7] and buffer.weight[:4].tolist() == [0.5, 0.25, 1.0, 2.0]


def test_what_the_host_computes_is_nobodys_here_and_may_be_in_a_slot_later(device) -> None:
    mailbox, due = mailbox_of(device, serial=5), torch.full((1,), 5, dtype=torch.int32, device=device)
    answer(mailbox, 6, {3: -1, 7: LATER + 1, 2: COMPUTED}, PROMOTED | COMPUTES)  # its copy has not arrived
    slots, shown = asked(mailbox, [7, 4, 2], {3: 1, 4: 2}, device, due)
    assert slots == [-1, 2, -1] and mailbox.trouble.tolist() == [0]
    assert shown[E + 1 :].tolist() == [7, 4]
    assert shown[:E].tolist() == [-1, -1, -1, -1, 2, -1, -1, 1]
    assert due.tolist() == [6] and mailbox.state.tolist() == [6, 5, COMPUTES]


@pytest.mark.parametrize("arrives", [True, False])
def test_who_finds_all_there_waits_for_copies_that_are_due(arrives: bool, device) -> None:
    mailbox, due = mailbox_of(device, serial=5), torch.full((1,), 4, dtype=torch.int32, device=device)
    mailbox.state[1] = 4 if arrives else 3
    slots, _ = asked(mailbox, [7], {7: 1}, device, due)
    assert slots == [1] and (mailbox.trouble.item() == 0) is arrives
    assert due.tolist() == [4 if arrives else 3], "serials wrap: it keeps up with what arrives"


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("state", ["computed", "nothing to add", "late", "stopped"])
def test_the_sum_of_the_host_is_added_once_it_is_there(state: str, dtype: torch.dtype, device) -> None:
    mailbox, buffer = mailbox_of(device, serial=6), buffer_of(device)
    mailbox.state[2] = 0 if state == "nothing to add" else COMPUTES
    buffer.y.copy_(torch.arange(2 * H))
    buffer.word[0] = 6 if state == "computed" else 2
    mailbox.trouble[0] = state == "stopped"
    y_TH = torch.full((2, H), 0.5, dtype=dtype, device=device)
    add_computed(y_TH, mailbox, buffer, limit=1e-3)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (mailbox.trouble.item() != 0) is (state in ("late", "stopped"))
    if state == "computed":
        expected = torch.arange(2 * H, dtype=torch.float32).view(2, H).add(0.5).to(dtype)
        assert torch.equal(y_TH.cpu(), expected)
    if state == "nothing to add":
        assert bool((y_TH == 0.5).all())


@pytest.mark.thorough  # compiles for some seconds
def test_on_hopper_words_are_written_and_read_between_fences(tmp_path) -> None:
    found = compiled_by(__file__, tmp_path)
    one_line = " ".join(found["order"])
    # the row and what is handed over, then a barrier, then the fence, then the serial and the state
    assert re.search(r"(store )+barrier fence store store ", one_line), one_line
    # looks, the fence, and only then the answer; looks and a fence again, and only then the map
    assert re.search(r"(look )+fence barrier (look ){4}(look )*fence barrier store store barrier ", one_line), one_line


def main() -> dict[str, list[str]]:
    from amoeba.kernels import expert_request as module
    from amoeba.kernels.constants import Group
    from amoeba.kernels.index_export import sizes

    constants = {"EXPERTS": 128, "RING": 64, "ROW": 131, "MOST": 128, "ENTRIES": 16, **sizes(128, 8)}
    request = Group(**constants, HOST_COMPUTES=True, ON_GPU=True)
    types = dict.fromkeys(("expert_N", "slot_N"), "*i64") | dict.fromkeys(("limit", "N", "NUMBERS"), "i32")
    types |= dict.fromkeys(("shown", "state", "due", "requests", "answers", "trouble", "times"), "*i32")
    types |= {"x_TH": "*bf16", "buffer_expert": "*i64", "buffer_arrived": "*i32"}
    types |= dict.fromkeys(("weight_N", "buffer_x", "buffer_weight"), "*fp32")
    absent = ("logits_TE", "bias_E", "chosen_weight_N", "num_tokens", "ROUTER", "TILE_ROWS")
    ptx = compile_as(
        module._request.kernel, types, {"REQUEST": request, **dict.fromkeys(absent)}, aligned=(), num_warps=1
    ).asm["ptx"]
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
