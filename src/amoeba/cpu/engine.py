"""The fine-tuning engine of one layer of packed experts: forward saves a cache, backward consumes it, both may wait.

T tokens · K experts per token · E experts · H hidden · R LoRA rank

    engine = Engine(packed, lora, max_len=2048, top_k=8, max_cache_depth=2)
    y_TH = engine.forward(x_TH, expert_TK, weight_TK)
    gradients = engine.backward(dy_TH)                      # of the last forward that saved and was not yet consumed
    engine.submit_forward(x_TH, expert_TK, weight_TK)       # returns at once; a GPU may work meanwhile
    y_TH = engine.sync()

`experts(x, routing, packed, lora=lora)` does the same under autograd. The engine is for those who write the backward of
their layer themselves: caches are a stack, as activation checkpointing wants them, and its size is known beforehand.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.cpu import passes
from amoeba.cpu.factor_copies import version
from amoeba.cpu.packed_experts import PackedExperts
from amoeba.cpu.planner import Plan, check_memory, plan_of
from amoeba.cpu.transfer import deliver, stage
from amoeba.errors import bad_value
from amoeba.problem import Gradients, Needs, Save
from amoeba.weights import LORA_NAMES, LoraFactors


class _Home(NamedTuple):
    """Where a tensor came from, and where its gradient goes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> _Home:
        return _Home(tensor.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True, eq=False)
class _Saved:
    """One entry of the stack: what backward needs, and what must not have been changed until then."""

    left: passes.Left
    x: _Home
    weight: _Home
    watched: tuple[Tensor, ...]  # those on the CPU; of a GPU's there are copies
    versions: tuple[int, ...]


class Engine:
    """Forward and backward of one layer, in the order in which they are asked for.

    lora: the factors, on the CPU, in bf16 or fp32. They may be changed in any way between the passes: each forward
        computes with what they are then, and a backward with what they were in its forward.
    max_len: the most tokens of a pass; top_k: the most experts of a token. With max_cache_depth they bound the memory,
        which is planned when the engine is made: one that would not fit is refused.
    recompute: save x alone for backward, which computes the up projection again.
    """

    def __init__(
        self,
        packed: PackedExperts,
        lora: LoraFactors | None = None,
        *,
        max_len: int,
        top_k: int,
        max_cache_depth: int = 1,
        recompute: bool = False,
    ) -> None:
        for name, value in (("max_len", max_len), ("top_k", top_k), ("max_cache_depth", max_cache_depth)):
            if value < 1:
                raise bad_value(name, "at least 1", value, "it bounds the memory of the engine")
        if lora is not None:
            lora.check(packed)
        self.packed, self.lora, self.max_len, self.top_k = packed, lora, max_len, top_k
        self.max_cache_depth, self.recompute = max_cache_depth, recompute
        self.plan: Plan = plan_of(
            packed, lora, max_len=max_len, top_k=top_k, max_cache_depth=max_cache_depth, recompute=recompute
        )
        check_memory(self.plan, already=packed.nbytes())
        self._stack: list[_Saved] = []
        self._thread = _Worker()
        self._pending: deque[tuple[Future, Callable[[Any], Any], tuple]] = deque()

    @property
    def cache_depth(self) -> int:
        """Forwards that saved and were not yet consumed, of those that have been computed."""
        return len(self._stack)

    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, save: bool = True) -> Tensor:
        """y (T, H) in bf16, on the device of x. save: leave a cache for a backward."""
        self._check_nothing_pending("forward")
        self.submit_forward(x_TH, expert_TK, weight_TK, save=save)
        return self.sync()

    def backward(self, dy_TH: Tensor) -> Gradients:
        """Gradients of x, the routing weights and all factors, from the cache saved last, which is then gone."""
        self._check_nothing_pending("backward")
        self.submit_backward(dy_TH)
        return self.sync()

    def submit_forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor, *, save: bool = True) -> None:
        """As forward, in the background; `sync` gives the result. x must not be changed until then."""
        self._check_input("x_TH", x_TH)
        if expert_TK.dim() != 2 or expert_TK.shape[1] > self.top_k:
            raise bad_value(
                "expert_TK", f"shape (T, K) with K <= {self.top_k} (top_k)", tuple(expert_TK.shape), "raise top_k"
            )
        inputs = x_TH, expert_TK, weight_TK
        staged = [stage(tensor) for tensor in inputs]
        homes = _Home.of(x_TH), _Home.of(weight_TK)
        watched = tuple(tensor for tensor in inputs if tensor.device.type == "cpu")
        versions = tuple(map(version, watched))

        def job() -> Tensor:
            if save and len(self._stack) >= self.max_cache_depth:
                raise RuntimeError(
                    f"cache overflow: expected at most max_cache_depth = {self.max_cache_depth} forwards without their "
                    f"backward; got one more. Call backward first, forward with save=False, or raise max_cache_depth."
                )
            what: Save = "nothing" if not save else "inputs" if self.recompute else "h"
            rows_TH, id_TK, scale_TK = _arrived(staged)
            y_TH, left = passes.forward(self.packed, self.lora, rows_TH, id_TK, scale_TK, what)
            if left is not None:
                self._stack.append(_Saved(left, *homes, watched, versions))
            return y_TH

        self._submit(job, lambda y_TH: deliver(y_TH, homes[0].dtype, homes[0].device), inputs)

    def submit_backward(self, dy_TH: Tensor) -> None:
        """As backward, in the background; `sync` gives the result."""
        self._check_input("dy_TH", dy_TH)
        staged = [stage(dy_TH)]

        def job() -> tuple[Gradients, _Saved]:
            if not self._stack:
                raise RuntimeError(
                    "cache underflow: expected a forward with save=True before each backward; got a backward more. "
                    "A cache serves one backward: run forward again for another."
                )
            saved = self._stack[-1]
            if dy_TH.shape != saved.x.shape:
                raise bad_value(
                    "dy_TH",
                    f"shape {tuple(saved.x.shape)}, as the x of the forward saved last",
                    tuple(dy_TH.shape),
                    "backwards come in the reverse order of their forwards",
                )
            if tuple(map(version, saved.watched)) != saved.versions:
                raise RuntimeError(
                    "x_TH, expert_TK and weight_TK: expected to be as they were in forward; got one that was changed "
                    "in place since. Hand over a copy where a buffer is used again."
                )
            self._stack.pop()
            factors = {} if self.lora is None else self.lora.tensors()
            needs = Needs(True, True, **{name: name in factors for name in LORA_NAMES})
            (rows_TH,) = _arrived(staged)
            return passes.backward(self.packed, self.lora, saved.left, rows_TH, needs), saved

        def finish(found: tuple[Gradients, _Saved]) -> Gradients:
            gradients, saved = found
            assert gradients.x is not None and gradients.weight is not None
            dx_TH = deliver(gradients.x, saved.x.dtype, saved.x.device)
            dweight_TK = deliver(gradients.weight, saved.weight.dtype, saved.weight.device)
            return gradients._replace(x=dx_TH, weight=dweight_TK)

        self._submit(job, finish, (dy_TH,))

    def sync(self) -> Any:
        """The result of the oldest submission that was not yet asked for; its error, if it failed, is raised here."""
        if not self._pending:
            raise RuntimeError(
                "sync: expected a submission that was not yet asked for; got none. Call submit_forward or "
                "submit_backward first, and sync once for each."
            )
        future, finish, _handed_over = self._pending.popleft()
        return finish(future.result())

    def _submit(self, job: Callable[[], Any], finish: Callable[[Any], Any], handed_over: tuple) -> None:
        self._pending.append((self._thread.submit(job), finish, handed_over))

    def _check_nothing_pending(self, name: str) -> None:
        if self._pending:
            raise RuntimeError(
                f"{name}: expected nothing in the background; got {len(self._pending)} submissions not yet asked for. "
                f"Call sync for each of them first, or submit_{name}."
            )

    def _check_input(self, name: str, rows: Tensor) -> None:
        if rows.dim() == 2 and rows.shape[0] > self.max_len:
            raise bad_value(
                name,
                f"at most max_len = {self.max_len} tokens",
                f"{rows.shape[0]} tokens",
                "make the engine with a larger max_len, or pass the tokens in parts",
            )
        if rows.device.type != "cuda":  # a GPU's are copied, and come out contiguous
            passes.check_rows(name, rows, self.packed.hidden)
        elif rows.dtype != self.packed.dtype or rows.dim() != 2 or rows.shape[1] != self.packed.hidden:
            raise bad_value(
                name,
                f"{self.packed.dtype} of shape (T, {self.packed.hidden})",
                f"{rows.dtype} of shape {tuple(rows.shape)}",
                "cast it with .bfloat16() and flatten batch and sequence",
            )


def _arrived(staged: list[tuple[Tensor, torch.cuda.Event | None]]) -> list[Tensor]:
    for _, event in staged:
        if event is not None:
            event.synchronize()
    return [tensor for tensor, _ in staged]


class _Worker:
    """One thread that does jobs in the order they come, and ends with its engine.

    A process that ends waits for the jobs: a thread that is killed amid one takes the process down with SIGABRT.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._executor = ThreadPoolExecutor(1, "amoeba-engine")

    def submit(self, job: Callable[[], Any]) -> Future:
        if self._process != os.getpid():  # a forked process does not have the thread
            self._begin()
        return self._executor.submit(job)
