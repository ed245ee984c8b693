"""Expert requests, after a router inside a CUDA graph: ids become slots, and the GPU waits for missing experts.

T tokens · K experts per token · N = T·K ids · E experts of the layer · S slots

    request_experts(expert_TK, slot_TK, shown, experts, mailbox, due, limit=10.0)
    request_experts(..., 10.0, buffer, x_TH, weight_TK)                 # the host may compute experts

    if why_not(tokens, config) is None:                                 # the router of a few tokens as well
        found = empty_routed(tokens, config, device)                    # expert_TK, weight_TK, slot_TK
        route_and_request(logits_TE, config, bias_E, *found, shown, mailbox, due, limit=10.0)

One program, in this order:

    1  its serial: one more than that of the request before, kept on the device: a graph that is replayed counts on
    2  slot_TK by the map of the layer, and a row for the host as `index_export` writes it, where something is missing
       and the host may compute it x, ids and weights too, and the serial last, behind a fence for the whole system: who
       reads this serial reads the rest
    3  where nothing is missing, that is all: the host need not have looked. But for copies that an earlier answer said
       will be there by now: `due` is the serial to wait for
    4  else it looks again and again at the host's answer, which experts are in which slots now: the host gives it ahead
       of the copies, so that the way over the link costs nothing while these run
    5  then at `arrived`, on the device, which the stream of copies writes behind the copies of the missing experts;
       puts the answer into the map, and translates once more

An answer says of each expert its slot, -1: it left, COMPUTED: the host computes it in this pass, so that it counts as a
sentinel here and `add_computed` adds it; LATER + slot: the same, and from the next pass on it is in that slot.

`shown` is the map: slot of each of E experts (-1: in none), then the expert in each of S slots.

After `limit` seconds of waiting, or where the answer is not to this request, or an id is still without a slot, the
serial is written to `trouble`, and the kernel ends with -1 in slot_TK, which decode kernels take for sentinels. The
host may write there too. From then on nothing waits any more, until the host has cleared it: tokens mean nothing.

`route_and_request` holds the rows of all tokens in the registers of one warp, as kernels/router.py does, stores ids and
weights, and then is the same program, which reads them. So ids, weights, slots and what the host is told have the bits
of two launches, and the rows are no longer needed while it waits. A softmax over all experts whose weights are not
renormalised is the exception: its sum follows the layout of a row, which depends on the tile. Such a router takes two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.kernels.constants import Group
from amoeba.kernels.fences import fenced, microseconds
from amoeba.kernels.index_export import MOST_IDS, row_length, sizes, write_row
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments
from amoeba.kernels.mailbox import (
    ANSWER_HEADER,
    COMPUTED,
    COMPUTES,
    LATER,
    MOVED,
    PROMOTED,
    HostComputeBuffer,
    MailboxWords,
    answer_length,
)
from amoeba.kernels.router import (
    MAX_COLUMNS,
    MAX_TOP_K,
    SCORES,
    WARP_COLUMNS,
    WIDE_TILE_ROWS,
    choose_experts,
    columns,
    forward_constants,
)

LOOKS = tl.constexpr(64)  # at `arrived`, for one at `trouble`
X_TILE = tl.constexpr(2048)  # numbers of x that one warp has under way
SUM_TILE = 1024
_WARPS = 1  # so that all threads see the same words: they look in one instruction
# Of the rows of all tokens that are routed: 32 registers of each thread; of rows wider than 128, two tokens. In us per
# layer in a CUDA graph, all experts there, two launches and one (H200, 2026-11-18, dev/log/streaming.md):
#   tokens             1            2            4            8           16
#   128 experts   6.3   3.7    8.1   6.0    7.5   5.6    7.9   6.9    9.6  13.0
#   256, groups   7.2   5.6    8.3   7.3    8.4  10.3   10.8  16.4
#   32, top 4     4.6   2.9    4.6   3.2    4.8   3.4    4.9   3.4    5.0   3.8
MOST_ELEMENTS = 1024
_MOVED, _PROMOTED, _COMPUTES = tl.constexpr(MOVED), tl.constexpr(PROMOTED), tl.constexpr(COMPUTES)
_COMPUTED, _LATER = tl.constexpr(COMPUTED), tl.constexpr(LATER)


def request_experts(
    expert_TK: Tensor,
    slot_TK: Tensor,
    shown: Tensor,
    experts: int,
    mailbox: MailboxWords,
    due: Tensor,
    limit: float,
    buffer: HostComputeBuffer | None = None,
    x_TH: Tensor | None = None,
    weight_TK: Tensor | None = None,
    *,
    router: tuple[Tensor, Tensor | None, RouterConfig] | None = None,
) -> None:
    """due: (1,) int32 on the device, of the layer. limit: seconds. x_TH, weight_TK: with a buffer.
    router: logits_TE, bias_E and what else chooses the ids, and writes weight_TK."""
    ids, ring, row = expert_TK.numel(), *mailbox.requests.shape
    most = (mailbox.answers.shape[1] - ANSWER_HEADER) // 2
    fit = ids <= MOST_IDS and row >= row_length(experts, ids) and most >= answer_length(experts, ids)
    fit = fit and expert_TK.is_contiguous() and slot_TK.is_contiguous() and slot_TK.shape == expert_TK.shape
    fit = fit and ring & (ring - 1) == 0 and mailbox.answers.shape[0] == ring
    expected = f"at most {MOST_IDS} contiguous ids, rows of {row_length(experts, ids)}, a power of two of them"
    check_arguments(
        fit, expected, expert_TK=expert_TK, slot_TK=slot_TK, requests=mailbox.requests, answers=mailbox.answers
    )
    given: tuple[Tensor, ...] = (mailbox.state,) * 6
    numbers = 0
    if buffer is not None:
        assert x_TH is not None and weight_TK is not None
        numbers = x_TH.numel()
        fit = x_TH.is_contiguous() and weight_TK.is_contiguous() and weight_TK.numel() == ids
        fit = fit and numbers <= buffer.x.numel() and ids <= buffer.expert.numel()
        expected = f"contiguous rows of {buffer.x.numel()} numbers and {buffer.expert.numel()} ids at most"
        check_arguments(fit, expected, x_TH=x_TH, weight_TK=weight_TK)
        given = x_TH, weight_TK, buffer.x, buffer.expert, buffer.weight, buffer.arrived
    told = mailbox.requests, mailbox.answers, mailbox.trouble, mailbox.times
    numbers_of = int(limit * 1e6), ids, numbers
    operands = expert_TK, slot_TK, shown, mailbox.state, due, *told, *given, *numbers_of
    of_router: tuple[Any, ...] = (None,) * 4
    chosen: dict[str, Any] = {"ROUTER": None, "TILE_ROWS": None}
    if router is not None:
        logits_TE, bias_E, config = router
        bias_E = None if bias_E is None else bias_E.float().contiguous()
        of_router = logits_TE.contiguous(), bias_E, weight_TK, logits_TE.shape[0]
        chosen = {"ROUTER": forward_constants(config), "TILE_ROWS": next_power_of_2(logits_TE.shape[0])}
    entries = max(2, next_power_of_2(min(most, answer_length(experts, ids))))
    constants = Group(
        EXPERTS=experts,
        RING=ring,
        ROW=row,
        MOST=most,
        ENTRIES=entries,
        HOST_COMPUTES=buffer is not None,  # x, ids and weights are written to the buffer too
        ON_GPU=expert_TK.is_cuda,
        **sizes(experts, ids),
    )
    _request[(1,)](*of_router, *operands, REQUEST=constants, **chosen, num_warps=_WARPS)


def add_computed(y_TH: Tensor, mailbox: MailboxWords, buffer: HostComputeBuffer, limit: float) -> None:
    """Behind the kernels of the experts in slots: adds the sum of those that the host computes, once it is there. It is
    rounded once more for that."""
    tokens, hidden = y_TH.shape
    check_arguments(y_TH.is_contiguous() and y_TH.numel() <= buffer.y.numel(), "contiguous rows", y_TH=y_TH)
    grid = tokens, cdiv(hidden, SUM_TILE)
    _add[grid](
        y_TH,
        mailbox.state,
        buffer.y,
        buffer.word,
        mailbox.trouble,
        int(limit * 1e6),
        hidden,
        ON_GPU=y_TH.is_cuda,
        TILE=SUM_TILE,
        num_warps=_WARPS,
    )


def why_not(tokens: int, config: RouterConfig) -> str | None:
    """Why such a pass takes two launches, or None."""
    if columns(config) > MAX_COLUMNS or config.top_k > MAX_TOP_K:
        return "the router's kernel does not support this many experts"
    if config.score not in SCORES:
        return f"the router's kernel does not score by {config.score}"
    if config.score == "softmax" and not config.renormalize:
        return "the sum over all experts could have other last bits"
    if config.capacity_factor is not None:
        return "rows over an expert's capacity are dropped after the router"
    rows, width = next_power_of_2(tokens), columns(config)
    if rows * width > MOST_ELEMENTS or (width > WARP_COLUMNS and rows > WIDE_TILE_ROWS):
        return f"{tokens} tokens take one warp longer than two launches take"
    return None


def empty_routed(tokens: int, config: RouterConfig, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """expert_TK (int64), weight_TK (fp32), slot_TK."""
    expert_TK = torch.empty(tokens, config.top_k, dtype=torch.int64, device=device)
    return expert_TK, torch.empty_like(expert_TK, dtype=torch.float32), torch.empty_like(expert_TK)


def route_and_request(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    expert_TK: Tensor,
    weight_TK: Tensor,
    slot_TK: Tensor,
    shown: Tensor,
    mailbox: MailboxWords,
    due: Tensor,
    limit: float,
    buffer: HostComputeBuffer | None = None,
    x_TH: Tensor | None = None,
) -> None:
    """slot_TK is there once the experts are; the rest as `request_experts` has it."""
    tokens, experts = logits_TE.shape
    reason = why_not(tokens, config)
    fit = reason is None and expert_TK.shape == weight_TK.shape == (tokens, config.top_k) and weight_TK.is_contiguous()
    check_arguments(fit, reason or "contiguous results of (T, K)", logits_TE=logits_TE, weight_TK=weight_TK)
    given = buffer, x_TH, weight_TK
    router = logits_TE, bias_E, config
    request_experts(expert_TK, slot_TK, shown, experts, mailbox, due, limit, *given, router=router)


@triton.jit
def _wait_for_copies(state, trouble, arrived, wanted, stop, now, began, limit, ON_GPU: tl.constexpr):
    """The latest request whose copies have arrived, and when that was seen."""
    looks = wanted * 0  # a number of the device, as a mask has to be
    while (arrived - wanted < 0) & (stop == 0) & (now - began < limit):
        stop = tl.load(trouble, mask=looks % LOOKS == 0, other=0, volatile=True)  # far away: on the host
        arrived = tl.load(state + 1, volatile=True)
        now = microseconds(now, ON_GPU)
        looks += 1
    return fenced(arrived, ON_GPU), now


@triton.jit
def _copy_x(x_TH, buffer_x, NUMBERS):
    for first in range(0, NUMBERS, X_TILE):
        index = first + tl.arange(0, X_TILE)
        x = tl.load(x_TH + index, mask=index < NUMBERS, other=0)
        tl.store(buffer_x + index, x.to(tl.float32), mask=index < NUMBERS)


@triton.jit
def _copy_routing(expert_N, weight_N, buffer_expert, buffer_weight, N, PIECE: tl.constexpr):
    for first in range(0, N, PIECE):
        index = first + tl.arange(0, PIECE)
        expert = tl.load(expert_N + index, mask=index < N, other=-1)
        weight = tl.load(weight_N + index, mask=index < N, other=0)
        tl.store(buffer_expert + index, expert.to(tl.int64), mask=index < N)
        tl.store(buffer_weight + index, weight.to(tl.float32), mask=index < N)


@quick
@triton.jit(do_not_specialize=["limit", "N", "NUMBERS"])
def _request(
    logits_TE,
    bias_E,
    chosen_weight_N,
    num_tokens,
    expert_N,
    slot_N,
    shown,
    state,
    due,
    requests,
    answers,
    trouble,
    times,
    x_TH,
    weight_N,
    buffer_x,
    buffer_expert,
    buffer_weight,
    buffer_arrived,
    limit,
    N,
    NUMBERS,
    REQUEST: tl.constexpr,
    ROUTER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    if ROUTER is not None:
        choose_experts(logits_TE, bias_E, expert_N, chosen_weight_N, None, num_tokens, ROUTER, TILE_ROWS)
        tl.debug_barrier()  # ids and weights are there for every thread
    serial = tl.load(state) + 1
    wanted = tl.load(due)
    arrived = tl.load(state + 1, volatile=True)
    place = serial & (REQUEST.RING - 1)
    row = requests + place * REQUEST.ROW
    began = microseconds(tl.zeros((), tl.int64), REQUEST.ON_GPU)
    if REQUEST.ON_GPU:
        tl.store(times + 2 * place, began.to(tl.int32))
    misses = write_row(expert_N, shown, slot_N, row, N, REQUEST.EXPERTS, REQUEST.BINS, REQUEST.PIECE)
    if REQUEST.HOST_COMPUTES:  # noqa: SIM102  it is of compiling
        if misses > 0:
            tl.store(buffer_arrived, arrived)
            _copy_x(x_TH, buffer_x, NUMBERS)
            _copy_routing(expert_N, weight_N, buffer_expert, buffer_weight, N, REQUEST.PIECE)
    tl.debug_barrier()  # every thread has written its part of the row, and read the serial
    tl.store(row + 2, fenced(serial, REQUEST.ON_GPU))
    tl.store(state, serial)
    now = began
    stop = serial * 0  # a number of the device, as a mask has to be
    about = stop
    if misses > 0:
        answer = answers + place * (2 * REQUEST.MOST + 3)
        told = tl.load(answer, volatile=True)
        while (told != serial) & (stop == 0) & (now - began < limit):
            stop = tl.load(trouble, volatile=True)
            told = tl.load(answer, volatile=True)
            now = microseconds(now, REQUEST.ON_GPU)
        fenced(told, REQUEST.ON_GPU)
        tl.debug_barrier()
        is_mine = told == serial
        n = tl.arange(0, REQUEST.ENTRIES)
        count = tl.load(answer + 1, volatile=True)
        about = tl.where(is_mine, tl.load(answer + 2, volatile=True), 0)
        expert = tl.load(answer + 3 + n, mask=n < REQUEST.MOST, other=0, volatile=True)
        slot = tl.load(answer + 3 + REQUEST.MOST + n, mask=n < REQUEST.MOST, other=-1, volatile=True)
        wanted = tl.where((about & _MOVED) != 0, serial, wanted)
        arrived, now = _wait_for_copies(state, trouble, arrived, wanted, stop, now, began, limit, REQUEST.ON_GPU)
        tl.debug_barrier()
        is_served = is_mine & (arrived - wanted >= 0)
        mask = n < tl.where(is_served, count, 0)
        is_later = slot >= _LATER
        tl.store(shown + expert, tl.where(is_later, _COMPUTED, slot), mask=mask)
        tl.store(shown + REQUEST.EXPERTS + slot, expert, mask=mask & (slot >= 0) & (slot < _LATER))
        tl.debug_barrier()  # the map is whole for every thread
        lacking = tl.zeros((REQUEST.PIECE,), tl.int32)
        for first in range(0, N, REQUEST.PIECE):
            index = first + tl.arange(0, REQUEST.PIECE)
            wants = tl.load(expert_N + index, mask=index < N, other=-1)
            owned = (wants >= 0) & (wants < REQUEST.EXPERTS)
            found = tl.load(shown + tl.where(owned, wants, 0).to(tl.int32), mask=owned, other=-1)
            tl.store(slot_N + index, tl.maximum(found, -1).to(slot_N.dtype.element_ty), mask=index < N)
            lacking = tl.maximum(lacking, (owned & (found == -1)).to(tl.int32))
        tl.debug_barrier()
        after = tl.where(is_later, slot - _LATER, -1)
        tl.store(shown + expert, after, mask=mask & (is_later | (slot == _COMPUTED)))
        tl.store(shown + REQUEST.EXPERTS + after, expert, mask=mask & is_later)
        in_trouble = (tl.max(lacking, axis=0) > 0) | (is_served == 0)
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=in_trouble)
        if REQUEST.ON_GPU:
            tl.store(times + 2 * place + 1, now.to(tl.int32))
    elif arrived - wanted < 0:
        # its fence is here alone: it waits for what was written to the host
        arrived, now = _wait_for_copies(state, trouble, arrived, wanted, stop, now, began, limit, REQUEST.ON_GPU)
        tl.store(trouble, tl.where(serial == 0, 1, serial), mask=arrived - wanted < 0)
    # as late as can be, so that serials that wrap stay comparable
    tl.store(due, tl.where((about & _PROMOTED) != 0, serial, arrived))
    tl.store(state + 2, about & _COMPUTES)


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
