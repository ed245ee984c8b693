"""Continuous batching: requests join the running batch when a row is free, and each has its own settings.

    engine = Engine(model, slots=8, length=4096)
    engine.submit(Request(ids, most=200, sampling=Sampling(), seed=1, ends={2}, receive=print))
    engine.run()                # in a thread: until `stop`; or
    engine.finish_all()         # here: until nothing is left

A request gets `receive(Token)` for every token and then `receive(End)`, once. Its tokens are those that it gets alone:
its random numbers are its own, and rows do not see each other. `lanes` are several versions of one model, such as its
adapters: each has rows and keys of its own, and they take turns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from amoeba.core.errors import bad_value, one_line
from amoeba.core.torch_internals import capture
from amoeba.decoding.decoder import AHEAD, PIECE, Outlet
from amoeba.decoding.sampling import Sampler, Sampling, Uses
from amoeba.decoding.slots import make_slots

logger = logging.getLogger("amoeba")

MOST_LOGPROBS = 20
# Tokens of prompts that are read between two steps, so that answers under way and short prompts do not wait for long
# ones. More on a GPU, and where each pass streams the experts once more.
CPU_PROMPT_TOKENS, GPU_PROMPT_TOKENS = 512, 2048
UNLIKE = 2.0  # times as long: prompts that are not read in one pass, which pads them, unless experts are streamed


class Token(NamedTuple):
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones, with their logprobs


class End(NamedTuple):
    reason: Literal["stop", "length", "cancelled", "error"]
    error: str = ""


class Grammar(Protocol):
    """Tokens that a text may go on with."""

    def allowed(self) -> Tensor:
        """(V,) bool on the host."""

    def accept(self, token: int) -> None: ...


@dataclass(eq=False)
class Request:
    """ends: tokens that end a text; it is received like any other. logprobs: how many of the most likely tokens are
    told, besides the chosen one; None: nothing. receive: is called in the engine's thread."""

    ids: Sequence[int]
    most: int
    receive: Callable[[Token | End], object]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    ends: Iterable[int] = ()
    lane: str = ""
    logprobs: int | None = None
    grammar: Grammar | None = None
    cancelled: bool = False
    shared: int = 0  # tokens of the prompt that need not be read
    scheduled: int = 0  # tokens that are computed or on their way
    received: int = 0
    ended: bool = False

    def cancel(self) -> None:
        """From any thread; what is on its way is dropped."""
        self.cancelled = True


class Counts:
    """Since the engine was made."""

    def __init__(self) -> None:
        self.prompt_tokens = self.shared_tokens = self.generated_tokens = self.steps = self.rows = 0
        self.prompt_seconds = self.step_seconds = 0.0


class Engine:
    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        length: int,
        lanes: dict[str, Callable[[], object]] | None = None,
        capture: bool | None = None,
        streams: bool = False,
        dense: str = "auto",
    ) -> None:
        """length: tokens of a text at most, with its prompt. lanes: what makes the model the version of that name.
        streams: whether its experts are streamed; prompts of any lengths are then read in one pass.
        dense: as of `native_steps`."""
        self.counts, self.failure = Counts(), None
        self._streams = streams
        piece = CPU_PROMPT_TOKENS if model.device.type == "cpu" else GPU_PROMPT_TOKENS
        self._piece = PIECE if streams else piece
        self._choose = lanes or {"": lambda: None}
        self._chosen: str | None = None
        self._lanes: dict[str, _Lane] = {}
        for name in self._choose:
            self._switch(name)
            self._lanes[name] = _Lane(model, self.counts, slots, length, capture, dense)
        lane = next(iter(self._lanes.values()))
        self.length, self.slots = lane.rows.length, slots
        self.kind, self.reason = lane.rows.kind, lane.rows.reason
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    failure: Exception | None

    @property
    def broken(self) -> str:
        """Why nothing can be answered any more."""
        return "" if self.failure is None else one_line(self.failure)[:300] or type(self.failure).__name__

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return sum(lane.active + (lane.reading is not None) for lane in self._lanes.values())

    def submit(self, request: Request) -> None:
        needed = len(request.ids) + request.most - 1
        if not request.ids or needed > self.length:
            raise bad_value(
                "a request", f"a prompt that fits with its answer into {self.length} tokens", needed, "shorten it"
            )
        if request.lane not in self._lanes:
            raise bad_value("an adapter", f"one of {', '.join(self._lanes)}", repr(request.lane), "load it first")
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()

    def wake(self) -> None:
        """After a request was cancelled."""
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        """`run` ends when all that was submitted is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._busy()):
                    self._changed.wait()
                if self._stopping and not self._waiting and not self._busy():
                    return
            self.advance()

    def finish_all(self) -> None:
        while self._waiting or self._busy():
            self.advance()

    def advance(self) -> None:
        """Requests join, every lane makes a step, and what has arrived is told."""
        self._drop_cancelled()
        try:
            self._admit()
            for name, lane in self._lanes.items():
                if lane.active:
                    self._switch(name)
                    began = time.perf_counter()
                    self.counts.rows += lane.step()
                    self.counts.steps += 1
                    lane.deliver(leave=lane.ahead if lane.active else 0)
                    self.counts.step_seconds += time.perf_counter() - began
                elif lane.sent:
                    lane.deliver(leave=0)
        except Exception as error:  # memory, a lost device, a bug: the requests in it cannot go on
            logger.debug("the engine failed", exc_info=True)
            self.failure = error
            self._fail(self.broken)

    def abandon(self, reason: str) -> None:
        """Everything that waits or runs ends now."""
        self._fail(reason)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._waiting) or self._busy()

    def _busy(self) -> bool:
        return any(lane.active or lane.sent or lane.reading for lane in self._lanes.values())

    def _switch(self, name: str) -> None:
        if name != self._chosen:
            self._choose[name]()
            self._chosen = name

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [request for request in self._waiting if request.cancelled]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            _end(request, End("cancelled"))
        for lane in self._lanes.values():
            lane.drop_cancelled()

    def _admit(self) -> None:
        """Reads a piece of the long prompt that each lane may have, and then short ones."""
        for name, lane in self._lanes.items():
            if lane.reading is not None:
                self._read(name, lane, [])
        tokens = 0
        with self._changed:
            waiting = list(self._waiting)  # others may submit meanwhile
        for request in waiting:
            lane, size = self._lanes[request.lane], len(request.ids)
            if not lane.room or (lane.reading is not None and size > self._piece):
                continue
            if tokens and tokens + size > self._piece:
                return
            group = [request] if tokens else self._group(request, lane, waiting)
            with self._changed:
                for each in group:
                    self._waiting.remove(each)
            self._read(request.lane, lane, group)
            tokens += sum(len(each.ids) for each in group)
            if len(group) > 1:
                return

    def _read(self, name: str, lane: _Lane, group: list[Request]) -> None:
        self._switch(name)
        began = time.perf_counter()
        lane.read(group, self._piece)
        if not lane.ahead:
            lane.deliver(leave=0)
        self.counts.prompt_seconds += time.perf_counter() - began

    def _group(self, first: Request, lane: _Lane, waiting: list[Request]) -> list[Request]:
        """Those read in one pass. What begins like an earlier text is read from there on, alone."""
        if lane.reading is None and lane.rows.known(first.ids)[0]:
            return [first]
        group, longest, unlike = [first], len(first.ids), math.inf if self._streams else UNLIKE
        for other in waiting:
            size = len(other.ids)
            like = max(size, longest) <= unlike * min(size, *(len(each.ids) for each in group))
            if other is first or other.lane != first.lane or not like or len(group) == lane.room:
                continue
            if max(size, longest) * (len(group) + 1) <= self._piece and not lane.rows.known(other.ids)[0]:
                group.append(other)
                longest = max(size, longest)
        return group

    def _fail(self, reason: str) -> None:
        with self._changed:
            failed = list(self._waiting)
            self._waiting.clear()
        for lane in self._lanes.values():
            failed += lane.clear()
        for request in failed:
            _end(request, End("error", reason))


class _Sent(NamedTuple):
    """Tokens on their way to the host: of each row, whose they are."""

    owners: list[tuple[int, Request]]
    logprobs: tuple[Tensor, ...] | None


class _Lane:
    def __init__(self, model: Any, counts: Counts, slots: int, length: int, capture: bool | None, dense: str) -> None:
        self.counts = counts
        self.rows = make_slots(model, batch=slots, length=length, capture=capture, dense=dense)
        self.ahead = AHEAD if self.rows.device.type == "cuda" else 0
        self.owners: list[Request | None] = [None] * slots
        self.reading: Request | None = None  # a long prompt, of which this many tokens are read
        self._done = 0
        self.sent: deque[_Sent] = deque()
        vocabulary = self.rows.logits_BV.shape[-1]
        self._sampler = Sampler(slots, vocabulary, self.rows.device)
        self._out = Outlet(self.rows.token_B1)
        self._graphs: dict[tuple[int, Uses], torch.cuda.CUDAGraph | None] = {}

    @property
    def active(self) -> int:
        return sum(owner is not None for owner in self.owners)

    @property
    def room(self) -> int:
        return self.owners.count(None) - (self.reading is not None)

    def read(self, group: Sequence[Request], most: int) -> None:
        """The prompts of these requests, together; of one longer than `most`, a piece. No requests: the next piece of
        the one that was begun."""
        if self.reading is None and len(group) == 1:
            self.reading = group[0]
            self.reading.shared = self._done = self.rows.begin(self.reading.ids)
            self.counts.shared_tokens += self.reading.shared
        elif group:
            free = (row for row, owner in enumerate(self.owners) if owner is None)
            rows = {row: request for request, row in zip(group, free, strict=False)}
            self.rows.read_together([*rows], [request.ids for request in group])
            self._join(rows)
            return
        assert self.reading is not None
        ids, row = self.reading.ids, self.owners.index(None)
        end = min(len(ids), self._done + most) if self.rows.reads_in_pieces else len(ids)
        self.rows.read(ids, row, self._done, end)
        self._done = end
        if end == len(ids):
            request, self.reading = self.reading, None
            self._join({row: request})

    def _join(self, rows: dict[int, Request]) -> None:
        """Their prompts are read: the first token of each is chosen."""
        for row, request in rows.items():
            self.owners[row] = request
            self.counts.prompt_tokens += len(request.ids)
            self._sampler.begin(row, request.sampling, request.seed, request.ids)
            if request.grammar is not None:
                self._sampler.allow(row, request.grammar.allowed())
        row_N = torch.tensor([*rows], dtype=torch.int64, device="cpu").to(self.rows.device, non_blocking=True)
        with torch.no_grad():
            token_N = self._sampler.choose(self.rows.logits_BV[row_N], self._sampler.uses(rows), row_N)
            self.rows.token_B1[row_N] = token_N[:, None]
        self._send([*rows.items()])

    def step(self) -> int:
        """Of all rows that have a request; returns how many these are."""
        if any(owner is not None and owner.grammar is not None for owner in self.owners):
            self.deliver(leave=0)  # what is allowed depends on what was chosen
        self._close_gaps()
        owners = [(row, owner) for row, owner in enumerate(self.owners) if owner is not None]
        if not owners:
            return 0
        for row, owner in owners:
            if owner.grammar is not None:
                self._sampler.allow(row, owner.grammar.allowed())
        seen = max(len(owner.ids) + owner.scheduled for _, owner in owners)
        count = self.rows.step(owners[-1][0] + 1, seen)
        self._choose(count, self._sampler.uses(row for row, _ in owners))
        self._send(owners)
        return len(owners)

    def deliver(self, leave: int) -> None:
        """Until this many are on their way."""
        while len(self.sent) > leave:
            sent, tokens = self.sent.popleft(), self._out.receive()
            self.rows.check()
            host = None if sent.logprobs is None else [each.tolist() for each in sent.logprobs]
            for row, request in sent.owners:
                if request.ended:
                    continue
                self.counts.generated_tokens += 1  # before it is told: who was told may look
                self._tell(row, request, tokens[row], host)

    def drop_cancelled(self) -> None:
        if self.reading is not None and self.reading.cancelled:
            gone, self.reading = self.reading, None
            _end(gone, End("cancelled"))
        for row, owner in enumerate(self.owners):
            if owner is not None and owner.cancelled:
                self._free(row)
                _end(owner, End("cancelled"))

    def clear(self) -> list[Request]:
        while len(self._out):
            self._out.receive()
        gone = {id(request): request for sent in self.sent for _, request in sent.owners}
        gone |= {id(owner): owner for owner in (*self.owners, self.reading) if owner is not None}
        self.sent.clear()
        self.reading = None
        for row in range(len(self.owners)):
            self._free(row)
        return list(gone.values())

    def _tell(self, row: int, request: Request, token: int, host: list[Any] | None) -> None:
        """row: where it was when the token was chosen; it may have moved."""
        request.received += 1
        if request in self.owners:
            self.rows.note(self.owners.index(request), token)
        if request.grammar is not None:
            request.grammar.accept(token)
        if host is None or request.logprobs is None:
            told = Token(token)
        else:
            own, values, ids = (each[row] for each in host)
            pairs = tuple(zip(ids, values, strict=True))[: request.logprobs]
            told = Token(token, own, pairs)
        _receive(request, told)
        reason: Literal["stop", "length", "cancelled"] | None = None
        if token in request.ends:
            reason = "stop"
        elif request.received == request.most:
            reason = "length"
        elif request.cancelled:
            reason = "cancelled"
        if reason is not None:
            if request in self.owners:
                self._free(self.owners.index(request))
            _end(request, End(reason))

    def _free(self, row: int) -> None:
        self.owners[row] = None
        self.rows.free(row)

    def _close_gaps(self) -> None:
        """The last rows move to free ones where a smaller step is then enough."""
        while True:
            last = max((row for row, owner in enumerate(self.owners) if owner is not None), default=-1)
            if last < 0 or self.rows.sizes(last + 1) == self.rows.sizes(self.active):
                return
            target = self.owners.index(None)
            self.rows.move(last, target)
            self._sampler.move(last, target)
            self.owners[target], self.owners[last] = self.owners[last], None

    def _send(self, owners: list[tuple[int, Request]]) -> None:
        logprobs = None
        if any(owner.logprobs is not None for _, owner in owners):
            logprobs = self._logprobs()
        self._out.send()
        self.sent.append(_Sent(owners, logprobs))
        for row, owner in owners:
            owner.scheduled += 1
            if owner.scheduled == owner.most:  # nothing more is needed of it
                self._free(row)

    @torch.no_grad()
    def _logprobs(self) -> tuple[Tensor, ...]:
        logprob_BV = self.rows.logits_BV.float().log_softmax(-1)
        top = logprob_BV.topk(min(MOST_LOGPROBS, logprob_BV.shape[-1]), dim=-1)
        own = logprob_BV.gather(1, self.rows.token_B1)[:, 0]
        return own.cpu(), top.values.cpu(), top.indices.cpu()

    @torch.no_grad()
    def _choose(self, count: int, uses: Uses) -> None:
        """The first time as it is, the second time captured."""
        key = count, uses
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs and self.rows.captured:
            graph = torch.cuda.CUDAGraph()
            with capture(graph):
                self._choose_now(count, uses)
        self._graphs[key] = graph
        if graph is None:
            self._choose_now(count, uses)
        else:
            graph.replay()

    def _choose_now(self, count: int, uses: Uses) -> None:
        token_N = self._sampler.choose(self.rows.logits_BV[:count], uses)
        self.rows.token_B1[:count].copy_(token_N[:, None])


def _receive(request: Request, told: Token | End) -> None:
    try:
        request.receive(told)
    except Exception:  # of who listens: the others go on
        logger.exception("a request's receiver failed")
        request.cancelled = True


def _end(request: Request, end: End) -> None:
    if not request.ended:
        request.ended = True
        _receive(request, end)
