"""Which slots a program by expert computes with: lists of them, and whose chunk is whose.

T tokens · K experts per token · N = T·K slots (t, k) · E experts

    list_slots(problem, chosen)(expert_TK, lists)           # a launch ahead of up, where `lists_are` says "ahead"
    owner, expert, count, begin, end = work_of(expert_TK, lists, program, ...)
    slot = slots_of(expert_TK, lists, owner, expert, first_rank, count, ...)

`lists` holds how many slots the expert of each owner has (see `my_expert`), and then, for each, its slots in order: as
many places as there are slots. A launch before up writes it, or up's programs do for down's, or it does not exist.

Where a launch ahead writes it, an owner's programs compute the first chunk of its expert, and spare ones behind them
the later chunks of all experts: one that half of the tokens chose does not keep everybody waiting. Else an owner's
programs compute all chunks of its expert, one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from amoeba.core.problem import Problem
from amoeba.kernels.decode.configuration import Configuration
from amoeba.kernels.launch import Launch, next_power_of_2, quick

LIST_WARPS = 4


def lists_are(problem: Problem, chosen: Configuration) -> str:
    """What writes them, for down's programs: "ahead" a launch, "by up" up's programs, "" nothing."""
    if chosen.lists(problem):
        return "ahead"
    return "by up" if chosen.early else ""


def spares(problem: Problem, chosen: Configuration) -> int:
    """As many as there can be chunks that are not an expert's first: a whole one is ahead of each."""
    return (problem.rows - 1) // chosen.rows if chosen.lists(problem) else 0


def list_slots(problem: Problem, chosen: Configuration) -> Launch:
    """To the lists of all experts."""
    ids = next_power_of_2(problem.rows)
    return _list_slots.fixed(
        (problem.weights.num_experts,), (problem.rows,), BLOCK_N=ids, OVERLAP=chosen.overlap, num_warps=LIST_WARPS
    )


@quick
@triton.jit(do_not_specialize=["N"])
def _list_slots(expert_TK, lists, N, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr):
    """How many slots an expert has, and these, in order."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    index_N = tl.arange(0, BLOCK_N)
    match_N = tl.load(expert_TK + index_N, mask=index_N < N, other=-1) == expert
    rank_N = tl.cumsum(match_N.to(tl.int32), axis=0)
    tl.store(list_of(lists, expert, tl.num_programs(0), N) + rank_N - 1, index_N, mask=match_N)
    tl.store(lists + expert, tl.max(rank_N, axis=0))


@triton.jit
def list_of(lists, owner, owners, N):
    """Its slots; how many there are stands at `lists + owner`."""
    return lists + owners + owner * N


@triton.jit
def my_expert(expert_TK, owner, N, E, OWNER_IS_EXPERT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The expert that this program computes, and how many slots it has; 0 where there is nothing to do.

    Among the slots that name the same expert it is the first one's programs that compute it.
    """
    index_N = tl.arange(0, BLOCK_N)
    expert_N = tl.load(expert_TK + index_N, mask=index_N < N, other=-1)
    if OWNER_IS_EXPERT:
        mine = owner.to(tl.int64)
        count = tl.sum((expert_N == mine).to(tl.int32), axis=0)
    else:
        mine = tl.load(expert_TK + owner).to(tl.int64)
        match_N = (expert_N == mine).to(tl.int32)
        earlier = tl.sum(tl.where(index_N < owner, match_N, 0), axis=0)
        count = tl.where((mine >= 0) & (mine < E) & (earlier == 0), tl.sum(match_N, axis=0), 0)
    return mine, count


@triton.jit
def slots_of_chunk(expert_TK, expert, first_rank, N, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """The slots of the expert's ranks first_rank .. first_rank + ROWS; 0 for ranks past the last."""
    wanted = first_rank + tl.arange(0, ROWS)
    slot = tl.zeros((ROWS,), tl.int32)
    before = 0
    for start in range(0, N, PIECE):
        index = start + tl.arange(0, PIECE)
        match = (tl.load(expert_TK + index, mask=index < N, other=-1) == expert).to(tl.int32)
        rank = tl.where(match == 1, before + tl.cumsum(match, axis=0) - 1, -1)
        slot += tl.sum(tl.where(rank[None, :] == wanted[:, None], index[None, :], 0), axis=1)
        before += tl.sum(match, axis=0)
    return slot


@triton.jit
def work_of(expert_TK, lists, owner, N, E, TILE: tl.constexpr):
    """What a program computes: whose expert, which one, how many slots that has, the rank of the first slot, and up to
    where from there on: one is in one chunk, and the compiler sees it. Lists are there once the launches ahead are
    done; a sentinel's is empty."""
    if TILE.LISTS == "ahead":
        if TILE.OVERLAP:
            tl.extra.cuda.gdc_wait()
        first_rank = 0
        if owner >= E:
            owner, first_rank = _later_chunk(lists, owner - E, TILE.EXPERTS, TILE.ROWS)
        count = tl.load(lists + owner, mask=owner < E, other=0)
        return owner, owner.to(tl.int64), count, first_rank, 1
    elif TILE.LISTS == "by up":
        if TILE.OWNER_IS_EXPERT:
            expert = owner.to(tl.int64)
        else:
            expert = tl.load(expert_TK + owner).to(tl.int64)
        if TILE.OVERLAP:
            tl.extra.cuda.gdc_wait()
        count = tl.load(lists + owner)
        return owner, expert, count, 0, count
    else:
        expert, count = my_expert(expert_TK, owner, N, E, TILE.OWNER_IS_EXPERT, TILE.BLOCK_N)
        return owner, expert, count, 0, count


@triton.jit
def _later_chunk(lists, number, E: tl.constexpr, ROWS: tl.constexpr):
    """Of experts' chunks after their first, in order, that one's expert, E or more where there are not so many, and the
    rank of its first slot."""
    e = tl.arange(0, triton.next_power_of_2(E))
    later_E = tl.maximum(tl.load(lists + e, mask=e < E, other=0) - 1, 0) // ROWS
    expert = tl.sum((tl.cumsum(later_E, axis=0) <= number).to(tl.int32), axis=0)
    ahead = tl.sum(tl.where(e < expert, later_E, 0), axis=0)
    return expert, (number - ahead + 1) * ROWS


@triton.jit
def slots_of(expert_TK, lists, owner, expert, first_rank, count, N, E, TILE: tl.constexpr):
    """As `slots_of_chunk`."""
    if TILE.LISTS != "":
        rank = first_rank + tl.arange(0, TILE.ROWS)
        owners = E if TILE.OWNER_IS_EXPERT else N
        return tl.load(list_of(lists, owner, owners, N) + rank, mask=rank < count, other=0)
    else:
        return slots_of_chunk(expert_TK, expert, first_rank, N, TILE.ROWS, TILE.PIECE)
