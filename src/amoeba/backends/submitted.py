"""A pass of experts that runs in another thread, so that the caller does something else meanwhile.

T tokens · H hidden

    ticket = submit(operator, problem, save, thread)         # forward begins
    shared_TH = shared_experts(x_TH)                         # on the GPU, while a CPU computes the pass
    y_TH = ticket.sync() + shared_TH                         # waits for it

Such a pass is two nodes for autograd. Backward begins at the second and ends at the first, and what autograd recorded
in between comes in between again: it goes by the order of recording, latest first. The numbers are those of the pass in
the caller's thread, of which it is the same call.

On a GPU, a pass has a stream of its own. It begins after what the caller's stream has so far, and that stream waits for
its results where it is synced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from amoeba.backends.experts_operator import ExpertsOperator, can_skip_dispatcher, keep, kept, without_tensors
from amoeba.core.errors import bad_value
from amoeba.core.operators import refuse_batched
from amoeba.core.problem import Gradients, Needs, Problem, Save
from amoeba.core.torch_internals import transformed

Result = TypeVar("Result")


class Thread(Protocol):
    """Runs jobs one after another."""

    def start(self, job: Callable[[], Result]) -> Future[Result]: ...


class Ticket:
    """Stands for a pass that was submitted. `sync` returns its y_TH, once.

    Several tickets may be open; their passes are computed in the order in which they were submitted. A ticket that is
    dropped without `sync` wastes its pass, and a warning says so.
    """

    _result: Callable[[], Tensor] | None = None  # also of one that Dynamo makes without arguments

    def __init__(self, result: Callable[[], Tensor]) -> None:
        self._result = result

    def sync(self) -> Tensor:
        """y_TH, differentiable. The host waits until it is computed, the GPU until it has arrived there. An error of
        the pass is raised here."""
        if self._result is None:
            raise bad_value("ticket", "one that is open", "one that was synced before", "keep what its sync() returned")
        result, self._result = self._result, None
        return result()

    def __del__(self) -> None:
        if self._result is not None:
            warnings.warn("a pass of experts was submitted and never synced; call ticket.sync()", stacklevel=2)


def submit(operator: ExpertsOperator, problem: Problem, save: Save, thread: Thread) -> Ticket:
    """Begins forward in that thread. What torch traces or transforms is computed at once instead."""
    factors = () if problem.lora is None else problem.lora.six()
    if not can_skip_dispatcher(problem.x_TH, *problem.weights.tensors(), *factors):
        y_TH = operator(problem, save)
        return Ticket(lambda: y_TH)
    job = _Job(thread, problem.x_TH.device, functools.partial(operator.forward, problem, save))
    if save == "nothing":
        return Ticket(lambda: job.result()[0])
    submitted = _Submitted(operator, problem, save, thread, job)
    stand_in_TH = _Submit.apply(submitted, *problem.tensors())
    return Ticket(lambda: _Sync.apply(submitted, stand_in_TH))


class _Job(Generic[Result]):
    """A function under way in another thread, and there in another stream."""

    def __init__(self, thread: Thread, device: torch.device, function: Callable[[], Result]) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        ready = None
        if device.type == "cuda":
            self._done, ready = torch.cuda.Event(), torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        self._future = thread.start(functools.partial(self._run, function, ready))

    @torch.no_grad()
    def _run(self, function: Callable[[], Result], ready: torch.cuda.Event | None) -> Result:
        if self._done is None or ready is None:
            return function()
        stream = _stream_of_passes(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = function()
            self._done.record(stream)
        return result

    def result(self) -> Result:
        result = self._future.result()
        if self._done is not None:
            current, tensors = torch.cuda.current_stream(self._device), list[Tensor]()
            current.wait_event(self._done)
            without_tensors(result, tensors)
            for tensor in tensors:
                if tensor.is_cuda:  # and else given to the next pass while this stream reads it
                    tensor.record_stream(current)
        return result


@functools.cache
def _stream_of_passes(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Submitted:
    """What the two autograd functions of a pass give to each other."""

    def __init__(self, operator: ExpertsOperator, problem: Problem, save: Save, thread: Thread, job: _Job) -> None:
        self.operator, self.thread, self.device = operator, thread, problem.x_TH.device
        self.forward: tuple[Problem, Save, _Job] | None = (problem, save, job)
        self.needs = Needs(False, False)
        self.gradients: Callable[[], Gradients] | None = None


class _Submit(torch.autograd.Function):
    """From the inputs of a pass to a tensor without memory that stands for y."""

    @staticmethod
    def forward(ctx: Any, submitted: _Submitted, x_TH: Tensor, *others: Tensor | None) -> Tensor:
        ctx.submitted, submitted.needs = submitted, submitted.operator.needs(ctx.needs_input_grad[1:])
        ctx.set_materialize_grads(False)
        return x_TH.new_empty(()).expand(x_TH.shape)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor | None) -> tuple:
        submitted = ctx.submitted
        if dy_TH is None:
            return (None,) * len(ctx.needs_input_grad)
        gradients, submitted.gradients = submitted.gradients, None
        return None, *submitted.operator.gradients(gradients(), submitted.needs)


class _Sync(torch.autograd.Function):
    """From that tensor to y."""

    @staticmethod
    def forward(ctx: Any, submitted: _Submitted, stand_in_TH: Tensor) -> Tensor:
        assert submitted.forward is not None
        (problem, save, job), submitted.forward = submitted.forward, None
        y_TH, saved = job.result()
        keep(ctx, submitted.operator, problem, save, saved)
        ctx.submitted = submitted
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor | None) -> tuple:
        if dy_TH is None:
            return None, None
        problem, saved = kept(ctx)
        submitted, operator = ctx.submitted, ctx.operator
        refuse_batched(f"amoeba::{operator.name}", dy_TH)
        if torch.is_grad_enabled() or transformed():  # second derivatives, or a transform: it says why not
            found = operator.dispatched_backward(problem, saved, dy_TH, submitted.needs)
            submitted.gradients = lambda: found
        else:
            dy_TH = dy_TH.contiguous()
            pass_back = functools.partial(operator.backward, problem, saved, dy_TH, submitted.needs)
            submitted.gradients = _Job(submitted.thread, submitted.device, pass_back).result
        return None, dy_TH
