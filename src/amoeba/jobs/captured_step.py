"""Forward and backward of one batch as a CUDA graph: the host starts a step with one call instead of thousands.

    step = CapturedStep(run, inputs, predicted, parameters)     # run(inputs, predicted) -> loss, backward included
    if step.fits(inputs):
        loss = step(inputs, predicted)                          # parameters have their gradients

Everything has the address it had in the capture: a batch is copied to where the graph reads it, and gradients are where
it writes them. Small models, whose kernels take less time than Python needs to launch them, gain most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class CapturedStep:
    def __init__(
        self,
        run: Callable[[dict[str, Any], Tensor], Tensor],
        inputs: dict[str, Any],
        predicted: Tensor,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        """Parameters have no gradients now. What `run` compiles or allocates once, it did in a call before."""
        self._inputs = {name: _copy(value) for name, value in inputs.items()}
        self._predicted = predicted.clone()
        torch.cuda.empty_cache()  # the graph has memory of its own
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = run(self._inputs, self._predicted)
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
