"""Behind a router, inside a CUDA graph: expert ids become slots, and where experts are missing the GPU waits for them.

T tokens · K experts per token · N = T·K ids · E experts of the layer · S slots

    ask(expert_TK, slot_TK, shown, talk, limit=10.0)

One program, in this order:

    1  its serial: one more than that of the question before, kept on the device: a graph that is replayed counts on
    2  slot_TK by the map of the layer, and a row for the host as `index_export` writes it, the serial last, behind a
       fence for the whole system: who reads this serial reads the rest of the row
    3  where nothing is missing, that is all: the host need not have looked
    4  else it looks again and again at the host's answer, which experts are in which slots now: the host gives it ahead
       of the copies, so that the way over the link costs nothing while these run
    5  then at `arrived`, on the device, which the stream of copies writes behind the copies of the missing experts;
       puts the answer into the map, and translates once more

`shown` is the map: slot of each of E experts (-1: in none), then the expert in each of S slots.

After `limit` seconds of waiting, or where the answer is not to this question, or an id is still without a slot, the
serial is written to `trouble`, and the kernel ends with -1 in slot_TK, which decode kernels take for nobody's. The host
may write there too. From then on nothing waits any more, until the host has cleared it: tokens mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.arguments import check_arguments
from amoeba.kernels.index_export import MOST_IDS, row_length, sizes, translate, write_row
from amoeba.kernels.launch import next_power_of_2, quick

ANSWER_HEADER = 2  # serial, count
LOOKS = tl.constexpr(64)  # at `arrived`, for one at `trouble`


@dataclass(frozen=True, eq=False)
class Talk:
    """What host and device tell each other, int32. RING is a power of two, so that serials may wrap.

    state:     on the device: serial of the latest question; of the latest that copies have arrived for.
    questions: mapped, (RING, HEADER + ids): rows as `index_export` has them.
    answers:   mapped, (RING, 2 + 2 MOST): serial, count, experts, slots.
    trouble:   mapped, (1,): not 0 where a question got no answer.
    times:     mapped, (RING, 2): 32 bits of the GPU's clock in microseconds, when it asked, and where it waited when it
               went on; whole when the next question is. To be drawn; the interpreter has no such clock.
    """

    state: Tensor
    questions: Tensor
    answers: Tensor
    trouble: Tensor
    times: Tensor


def answer_length(experts: int, ids: int) -> int:
    """Each id may bring one expert and drive out another."""
    return min(experts, 2 * ids)


def ask(expert_TK: Tensor, slot_TK: Tensor, shown: Tensor, experts: int, talk: Talk, limit: float) -> None:
    """limit: seconds."""
    ids, ring, row = expert_TK.numel(), *talk.questions.shape
    most = (talk.answers.shape[1] - ANSWER_HEADER) // 2
    fit = ids <= MOST_IDS and row >= row_length(experts, ids) and most >= answer_length(experts, ids)
    fit = fit and expert_TK.is_contiguous() and slot_TK.is_contiguous() and slot_TK.shape == expert_TK.shape
    fit = fit and ring & (ring - 1) == 0 and talk.answers.shape[0] == ring
    expected = f"at most {MOST_IDS} contiguous ids, rows of {row_length(experts, ids)}, a power of two of them"
    check_arguments(fit, expected, expert_TK=expert_TK, slot_TK=slot_TK, questions=talk.questions, answers=talk.answers)
    _ask[(1,)](
        expert_TK,
        slot_TK,
        shown,
        talk.state,
        talk.questions,
        talk.answers,
        talk.trouble,
        talk.times,
        int(limit * 1e6),
        ids,
        EXPERTS=experts,
        RING=ring,
        ROW=row,
        MOST=most,
        ENTRIES=max(2, next_power_of_2(min(most, answer_length(experts, ids)))),
        ON_GPU=expert_TK.is_cuda,
        **sizes(experts, ids),
        num_warps=1,  # so that all threads see the same words: they look in one instruction
    )


@triton.jit
def fenced(value, ON_GPU: tl.constexpr):
    """The value, once all reads and writes ahead of it are done for the host too; those behind it come after."""
    if ON_GPU:
        fence: tl.constexpr = "fence.acq_rel.sys; mov.b32 $0, $1;"
        value = tl.inline_asm_elementwise(fence, "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def microseconds(before, ON_GPU: tl.constexpr):
    """A clock. Without a GPU each look at it takes a microsecond."""
    if ON_GPU:
        clock: tl.constexpr = "mov.u64 $0, %globaltimer;"
        return tl.inline_asm_elementwise(clock, "=l", [], dtype=tl.int64, is_pure=False, pack=1) // 1000
    else:
        return before + 1


@quick
@triton.jit(do_not_specialize=["limit", "N"])
def _ask(
    expert_N,
    slot_N,
    shown,
    state,
    questions,
    answers,
    trouble,
    times,
    limit,
    N,
    EXPERTS: tl.constexpr,
    RING: tl.constexpr,
    ROW: tl.constexpr,
    MOST: tl.constexpr,
    ENTRIES: tl.constexpr,
    ON_GPU: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
):
    serial = tl.load(state) + 1
    place = serial & (RING - 1)
    row = questions + place * ROW
    began = microseconds(tl.zeros((), tl.int64), ON_GPU)
    if ON_GPU:
        tl.store(times + 2 * place, began.to(tl.int32))
    misses = write_row(expert_N, shown, slot_N, row, N, EXPERTS, BINS, PIECE)
    tl.debug_barrier()  # every thread has written its part of the row, and read the serial
    tl.store(row + 2, fenced(serial, ON_GPU))
    tl.store(state, serial)
    if misses > 0:
        now = began
        looks = serial * 0  # a number of the device, as a mask has to be
        stop = looks
        answer = answers + place * (2 * MOST + 2)
        arrived = tl.load(state + 1, volatile=True)
        told = tl.load(answer, volatile=True)
        while (told != serial) & (arrived - serial < 0) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, volatile=True)
            arrived = tl.load(state + 1, volatile=True)
            told = tl.load(answer, volatile=True)
            now = microseconds(now, ON_GPU)
        fenced(told, ON_GPU)
        tl.debug_barrier()
        is_mine = tl.load(answer, volatile=True) == serial  # again: copies may have arrived between two looks
        n = tl.arange(0, ENTRIES)
        count = tl.load(answer + 1, volatile=True)
        expert = tl.load(answer + 2 + n, mask=n < MOST, other=0, volatile=True)
        slot = tl.load(answer + 2 + MOST + n, mask=n < MOST, other=-1, volatile=True)
        while (arrived - serial < 0) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, mask=looks % LOOKS == 0, other=0, volatile=True)  # far away: on the host
            arrived = tl.load(state + 1, volatile=True)
            now = microseconds(now, ON_GPU)
            looks += 1
        arrived = fenced(arrived, ON_GPU)
        tl.debug_barrier()
        is_served = is_mine & (arrived - serial >= 0)
        mask = n < tl.where(is_served, count, 0)
        tl.store(shown + expert, slot, mask=mask)
        tl.store(shown + EXPERTS + slot, expert, mask=mask & (slot >= 0))
        tl.debug_barrier()  # the map is whole for every thread
        lacking = tl.zeros((PIECE,), tl.int32)
        for first in range(0, N, PIECE):
            _, owned, found = translate(expert_N, shown, slot_N, first + tl.arange(0, PIECE), N, EXPERTS)
            lacking = tl.maximum(lacking, (owned & (found < 0)).to(tl.int32))
        in_trouble = (tl.max(lacking, axis=0) > 0) | (is_served == 0)
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=in_trouble)
        if ON_GPU:
            tl.store(times + 2 * place + 1, now.to(tl.int32))
