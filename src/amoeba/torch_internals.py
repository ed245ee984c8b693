"""What torch has no public name for, asked for in one place; a test says when it has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "constant_when_traced",
    "graph_is_freed",
    "has_dispatch_mode",
    "inside_backward",
    "is_batch_of_gradients",
    "occupy_gpu",
    "transformed",
    "tree_leaves",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports torch._dynamo, and that takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced  # torch.compile enters the transforms that it traces, and guards on the others
def transformed() -> bool:
    """Whether a transform of torch.func or forward mode is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batch_of_gradients(dy: Tensor) -> bool:
    """Whether this stands for several gradients at once (is_grads_batched=True)."""
    return torch._C._functorch.is_legacy_batchedtensor(dy)


def has_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode looks on."""
    return torch._C._len_torch_dispatch_stack() != 0


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def graph_is_freed() -> bool:
    """Whether a backward is under way after which what was saved for it is gone (no retain_graph)."""
    return inside_backward() and not torch._C._autograd._get_current_graph_task_keep_graph()


def occupy_gpu(cycles: int) -> None:
    """Lets the GPU spin for so long, so that what is enqueued meanwhile starts without gaps."""
    torch.cuda._sleep(cycles)
