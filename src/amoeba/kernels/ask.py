"""Behind a router, inside a CUDA graph: expert ids become slots, and where experts are missing the GPU waits for them.

T tokens · K experts per token · N = T·K ids · E experts of the layer · S slots

    ask(expert_TK, slot_TK, shown, experts, talk, due, limit=10.0)
    ask(expert_TK, slot_TK, shown, experts, talk, due, 10.0, handed, x_TH, weight_TK)   # the host may compute experts

One program, in this order:

    1  its serial: one more than that of the question before, kept on the device: a graph that is replayed counts on
    2  slot_TK by the map of the layer, and a row for the host as `index_export` writes it, where something is missing
       and the host may compute it x, ids and weights too, and the serial last, behind a fence for the whole system: who
       reads this serial reads the rest
    3  where nothing is missing, that is all: the host need not have looked. But for copies that an earlier answer said
       will be there by now: `due` is the serial to wait for
    4  else it looks again and again at the host's answer, which experts are in which slots now: the host gives it ahead
       of the copies, so that the way over the link costs nothing while these run
    5  then at `arrived`, on the device, which the stream of copies writes behind the copies of the missing experts;
       puts the answer into the map, and translates once more

An answer says of each expert its slot, -1: it left, COMPUTED: the host computes it in this pass, so that it is nobody's
here and `add_computed` adds it; LATER + slot: the same, and from the next pass on it is in that slot.

`shown` is the map: slot of each of E experts (-1: in none), then the expert in each of S slots.

Where several graphs pass over the layers in turns, each in its own stream with its own words, the map is for all of
them. `turn` is then a word of the layer that says whose turn it is: ahead of 2 the program waits for its own, and when
all is done it is the next group's. So a layer's questions come one after the other in the order of the groups, and who
asks finds the map as the one before left it. Below 0 nobody waits.

After `limit` seconds of waiting, or where the answer is not to this question, or an id is still without a slot, the
serial is written to `trouble`, and the kernel ends with -1 in slot_TK, which decode kernels take for nobody's. The host
may write there too. From then on nothing waits any more, until the host has cleared it: tokens mean nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.fences import fenced, microseconds
from amoeba.kernels.index_export import MOST_IDS, row_length, sizes, write_row
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.talk import (
    ANSWER_HEADER,
    COMPUTED,
    COMPUTES,
    LATER,
    MOVED,
    PROMOTED,
    Handed,
    Talk,
    Turn,
    answer_length,
)

LOOKS = tl.constexpr(64)  # at `arrived`, for one at `trouble`
HANDED_TILE = tl.constexpr(2048)  # numbers of x that one warp has under way
SUM_TILE = 1024
_MOVED, _PROMOTED, _COMPUTES = tl.constexpr(MOVED), tl.constexpr(PROMOTED), tl.constexpr(COMPUTES)
_COMPUTED, _LATER = tl.constexpr(COMPUTED), tl.constexpr(LATER)


def ask(
    expert_TK: Tensor,
    slot_TK: Tensor,
    shown: Tensor,
    experts: int,
    talk: Talk,
    due: Tensor,
    limit: float,
    handed: Handed | None = None,
    x_TH: Tensor | None = None,
    weight_TK: Tensor | None = None,
    turn: Turn | None = None,
) -> None:
    """due: (1,) int32 on the device, of the layer. limit: seconds. x_TH, weight_TK: where something is handed.
    turn: where others pass over the layer too."""
    given = handed, x_TH, weight_TK, turn
    operands, constants = question_of(expert_TK, slot_TK, shown, experts, talk, due, limit, *given)
    _ask[(1,)](*operands, **constants)


def question_of(
    expert_TK: Tensor,
    slot_TK: Tensor,
    shown: Tensor,
    experts: int,
    talk: Talk,
    due: Tensor,
    limit: float,
    handed: Handed | None,
    x_TH: Tensor | None,
    weight_TK: Tensor | None,
    turn: Turn | None = None,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """What `question` takes, in its order, and its constants."""
    ids, ring, row = expert_TK.numel(), *talk.questions.shape
    most = (talk.answers.shape[1] - ANSWER_HEADER) // 2
    fit = ids <= MOST_IDS and row >= row_length(experts, ids) and most >= answer_length(experts, ids)
    fit = fit and expert_TK.is_contiguous() and slot_TK.is_contiguous() and slot_TK.shape == expert_TK.shape
    fit = fit and ring & (ring - 1) == 0 and talk.answers.shape[0] == ring
    expected = f"at most {MOST_IDS} contiguous ids, rows of {row_length(experts, ids)}, a power of two of them"
    check_arguments(fit, expected, expert_TK=expert_TK, slot_TK=slot_TK, questions=talk.questions, answers=talk.answers)
    given: tuple[Tensor, ...] = (talk.state,) * 6
    numbers = 0
    if handed is not None:
        assert x_TH is not None and weight_TK is not None
        numbers = x_TH.numel()
        fit = x_TH.is_contiguous() and weight_TK.is_contiguous() and weight_TK.numel() == ids
        fit = fit and numbers <= handed.x.numel() and ids <= handed.expert.numel()
        expected = f"contiguous rows of {handed.x.numel()} numbers and {handed.expert.numel()} ids at most"
        check_arguments(fit, expected, x_TH=x_TH, weight_TK=weight_TK)
        given = x_TH, weight_TK, handed.x, handed.expert, handed.weight, handed.arrived
    told = talk.questions, talk.answers, talk.trouble, talk.times
    word, mine, groups = (talk.state, 0, 1) if turn is None else (turn.word, turn.mine, turn.groups)
    numbers_of = int(limit * 1e6), ids, numbers, mine
    operands = expert_TK, slot_TK, shown, talk.state, due, word, *told, *given, *numbers_of
    constants: dict[str, object] = {
        "EXPERTS": experts,
        "RING": ring,
        "ROW": row,
        "MOST": most,
        "ENTRIES": max(2, next_power_of_2(min(most, answer_length(experts, ids)))),
        "HANDS": handed is not None,
        "TURNS": groups,
        "ON_GPU": expert_TK.is_cuda,
        **sizes(experts, ids),
        "num_warps": 1,  # so that all threads see the same words: they look in one instruction
    }
    return operands, constants


def add_computed(y_TH: Tensor, talk: Talk, handed: Handed, limit: float) -> None:
    """Behind the kernels of the experts in slots: adds the sum of those that the host computes, once it is there. It is
    rounded once more for that."""
    tokens, hidden = y_TH.shape
    check_arguments(y_TH.is_contiguous() and y_TH.numel() <= handed.y.numel(), "contiguous rows", y_TH=y_TH)
    grid = tokens, cdiv(hidden, SUM_TILE)
    _add[grid](
        y_TH,
        talk.state,
        handed.y,
        handed.word,
        talk.trouble,
        int(limit * 1e6),
        hidden,
        ON_GPU=y_TH.is_cuda,
        TILE=SUM_TILE,
        num_warps=1,  # as above
    )


@quick
@triton.jit(do_not_specialize=["limit", "N", "NUMBERS", "mine"])
def _ask(
    expert_N,
    slot_N,
    shown,
    state,
    due,
    turn,
    questions,
    answers,
    trouble,
    times,
    x_TH,
    weight_N,
    handed_x,
    handed_expert,
    handed_weight,
    handed_arrived,
    limit,
    N,
    NUMBERS,
    mine,
    EXPERTS: tl.constexpr,
    RING: tl.constexpr,
    ROW: tl.constexpr,
    MOST: tl.constexpr,
    ENTRIES: tl.constexpr,
    HANDS: tl.constexpr,
    TURNS: tl.constexpr,
    ON_GPU: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
):
    question(
        expert_N,
        slot_N,
        shown,
        state,
        due,
        turn,
        questions,
        answers,
        trouble,
        times,
        x_TH,
        weight_N,
        handed_x,
        handed_expert,
        handed_weight,
        handed_arrived,
        limit,
        N,
        NUMBERS,
        mine,
        EXPERTS,
        RING,
        ROW,
        MOST,
        ENTRIES,
        HANDS,
        TURNS,
        ON_GPU,
        BINS,
        PIECE,
    )


@triton.jit
def question(
    expert_N,
    slot_N,
    shown,
    state,
    due,
    turn,
    questions,
    answers,
    trouble,
    times,
    x_TH,
    weight_N,
    handed_x,
    handed_expert,
    handed_weight,
    handed_arrived,
    limit,
    N,
    NUMBERS,
    mine,
    EXPERTS: tl.constexpr,
    RING: tl.constexpr,
    ROW: tl.constexpr,
    MOST: tl.constexpr,
    ENTRIES: tl.constexpr,
    HANDS: tl.constexpr,
    TURNS: tl.constexpr,
    ON_GPU: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
):
    serial = tl.load(state) + 1
    wanted = tl.load(due)
    arrived = tl.load(state + 1, volatile=True)
    place = serial & (RING - 1)
    row = questions + place * ROW
    began = microseconds(tl.zeros((), tl.int64), ON_GPU)
    whose = serial * 0
    if TURNS > 1:
        whose = tl.load(turn, volatile=True)
        now = began
        looks = serial * 0
        stop = looks
        while (whose != mine) & (whose >= 0) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, mask=looks % LOOKS == 0, other=0, volatile=True)
            whose = tl.load(turn, volatile=True)
            now = microseconds(now, ON_GPU)
            looks += 1
        whose = fenced(whose, ON_GPU, FOR_HOST=False)
        tl.debug_barrier()  # who came before has left the map as it is now
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=(whose != mine) & (whose >= 0))
        began = now
    if ON_GPU:
        tl.store(times + 2 * place, began.to(tl.int32))
    misses = write_row(expert_N, shown, slot_N, row, N, EXPERTS, BINS, PIECE)
    if HANDS:  # noqa: SIM102  it is of compiling
        if misses > 0:
            tl.store(handed_arrived, arrived)
            for first in range(0, NUMBERS, HANDED_TILE):
                index = first + tl.arange(0, HANDED_TILE)
                x = tl.load(x_TH + index, mask=index < NUMBERS, other=0)
                tl.store(handed_x + index, x.to(tl.float32), mask=index < NUMBERS)
            for first in range(0, N, PIECE):
                index = first + tl.arange(0, PIECE)
                expert = tl.load(expert_N + index, mask=index < N, other=-1)
                weight = tl.load(weight_N + index, mask=index < N, other=0)
                tl.store(handed_expert + index, expert.to(tl.int64), mask=index < N)
                tl.store(handed_weight + index, weight.to(tl.float32), mask=index < N)
    tl.debug_barrier()  # every thread has written its part of the row, and read the serial
    tl.store(row + 2, fenced(serial, ON_GPU))
    tl.store(state, serial)
    now = began
    looks = serial * 0  # a number of the device, as a mask has to be
    stop = looks
    about = looks
    if misses > 0:
        answer = answers + place * (2 * MOST + 3)
        told = tl.load(answer, volatile=True)
        while (told != serial) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, volatile=True)
            told = tl.load(answer, volatile=True)
            now = microseconds(now, ON_GPU)
        fenced(told, ON_GPU)
        tl.debug_barrier()
        is_mine = told == serial
        n = tl.arange(0, ENTRIES)
        count = tl.load(answer + 1, volatile=True)
        about = tl.where(is_mine, tl.load(answer + 2, volatile=True), 0)
        expert = tl.load(answer + 3 + n, mask=n < MOST, other=0, volatile=True)
        slot = tl.load(answer + 3 + MOST + n, mask=n < MOST, other=-1, volatile=True)
        wanted = tl.where((about & _MOVED) != 0, serial, wanted)
        while (arrived - wanted < 0) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, mask=looks % LOOKS == 0, other=0, volatile=True)  # far away: on the host
            arrived = tl.load(state + 1, volatile=True)
            now = microseconds(now, ON_GPU)
            looks += 1
        arrived = fenced(arrived, ON_GPU)
        tl.debug_barrier()
        is_served = is_mine & (arrived - wanted >= 0)
        mask = n < tl.where(is_served, count, 0)
        is_later = slot >= _LATER
        tl.store(shown + expert, tl.where(is_later, _COMPUTED, slot), mask=mask)
        tl.store(shown + EXPERTS + slot, expert, mask=mask & (slot >= 0) & (slot < _LATER))
        tl.debug_barrier()  # the map is whole for every thread
        lacking = tl.zeros((PIECE,), tl.int32)
        for first in range(0, N, PIECE):
            index = first + tl.arange(0, PIECE)
            wants = tl.load(expert_N + index, mask=index < N, other=-1)
            owned = (wants >= 0) & (wants < EXPERTS)
            found = tl.load(shown + tl.where(owned, wants, 0).to(tl.int32), mask=owned, other=-1)
            tl.store(slot_N + index, tl.maximum(found, -1).to(slot_N.dtype.element_ty), mask=index < N)
            lacking = tl.maximum(lacking, (owned & (found == -1)).to(tl.int32))
        tl.debug_barrier()
        after = tl.where(is_later, slot - _LATER, -1)
        tl.store(shown + expert, after, mask=mask & (is_later | (slot == _COMPUTED)))
        tl.store(shown + EXPERTS + after, expert, mask=mask & is_later)
        in_trouble = (tl.max(lacking, axis=0) > 0) | (is_served == 0)
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=in_trouble)
        if ON_GPU:
            tl.store(times + 2 * place + 1, now.to(tl.int32))
    elif arrived - wanted < 0:
        while (arrived - wanted < 0) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, mask=looks % LOOKS == 0, other=0, volatile=True)
            arrived = tl.load(state + 1, volatile=True)
            now = microseconds(now, ON_GPU)
            looks += 1
        arrived = fenced(arrived, ON_GPU)  # here alone: it waits for what was written to the host
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=arrived - wanted < 0)
    # as late as can be, so that serials that wrap stay comparable
    tl.store(due, tl.where((about & _PROMOTED) != 0, serial, arrived))
    tl.store(state + 2, about & _COMPUTES)
    if TURNS > 1:
        tl.debug_barrier()  # every thread has written its part of the map
        tl.store(turn, fenced((mine + 1) % TURNS, ON_GPU, FOR_HOST=False), mask=whose == mine)


@quick
@triton.jit(do_not_specialize=["limit"])
def _add(y_TH, state, rows, word, trouble, limit, H, ON_GPU: tl.constexpr, TILE: tl.constexpr):
    if tl.load(state + 2) != 0:
        serial = tl.load(state)
        began = microseconds(tl.zeros((), tl.int64), ON_GPU)
        now = began
        stop = serial * 0
        told = tl.load(word, volatile=True)
        while (told != serial) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, volatile=True)
            told = tl.load(word, volatile=True)
            now = microseconds(now, ON_GPU)
        told = fenced(told, ON_GPU)
        tl.debug_barrier()
        h = tl.program_id(1) * TILE + tl.arange(0, TILE)
        at = tl.program_id(0) * H + h
        y = tl.load(y_TH + at, mask=h < H, other=0).to(tl.float32)
        y += tl.load(rows + at, mask=h < H, other=0, volatile=True)
        tl.store(y_TH + at, y.to(y_TH.dtype.element_ty), mask=h < H)
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=told != serial)
