"""What torch.compile has to know about a function of ours, said without loading the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports torch._dynamo, and that takes as long as torch itself.

    A test compares the two.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
