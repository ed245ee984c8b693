"""Forward and backward of one batch as a CUDA graph: the host starts a step with one call instead of thousands.

    stream = torch.cuda.Stream()
    with on_stream(stream):
        run(inputs, predicted)                                  # compiles and loads what the capture will find
    step = CapturedStep(run, inputs, predicted, parameters, stream)     # run -> loss, backward included
    if step.fits(inputs):
        loss = step(inputs, predicted)                          # parameters have their gradients

A capture holds the work of one stream. Gradients are added up on the stream on which a parameter was first used, for as
long as anything keeps the graph of that pass: hence the same stream for the pass before it, and a collection of what
only circles of references keep. Other threads may ask CUDA for memory in the meantime.

Everything has the address it had in the capture: a batch is copied to where the graph reads it, and gradients are where
it writes them. Small models, whose kernels take less time than Python needs to launch them, gain most.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.torch_internals import end_failed_capture

_SPOILED = "previous error during capture"  # all that the end of a capture tells of an error inside


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Runs what is inside there, behind what was before and ahead of what follows."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class CapturedStep:
    def __init__(
        self,
        run: Callable[[dict[str, Any], Tensor], Tensor],
        inputs: dict[str, Any],
        predicted: Tensor,
        parameters: Iterable[nn.Parameter],
        stream: torch.cuda.Stream,
    ) -> None:
        """Parameters have no gradients now. What `run` compiles or allocates once, it did in a call before.
        What it raises is raised here, and torch is as it was before."""
        self._inputs = {name: _copy(value) for name, value in inputs.items()}
        self._predicted = predicted.clone()
        gc.collect()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self._graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            # the outer one stays the current stream also where a capture fails to end
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"),
            ):
                self._loss = run(self._inputs, self._predicted)
        except Exception as error:
            end_failed_capture(pool)
            if _SPOILED in str(error) and error.__context__ is not None:
                raise error.__context__ from None
            raise
        self._gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def fits(self, inputs: dict[str, Any]) -> bool:
        return inputs.keys() == self._inputs.keys() and all(
            _kind(value) == _kind(self._inputs[name]) for name, value in inputs.items()
        )

    def __call__(self, inputs: dict[str, Any], predicted: Tensor) -> Tensor:
        """The loss. Gradients are added to those that parameters have."""
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self._inputs[name].copy_(value, non_blocking=True)
        self._predicted.copy_(predicted, non_blocking=True)
        # in a step of several passes: the gradients of the first are where those of the second will be
        sums = [
            _copy(parameter.grad) if parameter.grad is own else parameter.grad for parameter, own in self._gradients
        ]
        self._graph.replay()
        for (parameter, gradient), earlier in zip(self._gradients, sums, strict=True):
            parameter.grad = gradient if earlier is None else earlier.add_(gradient)
        return self._loss.clone()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
