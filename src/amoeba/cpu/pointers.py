"""Addresses of tensors for compiled code, taken only here, after dtype, device, shape and strides were checked.

    address("weight_TK", weight_TK, torch.float32, (tokens, top_k))            # contiguous
    address_of_lines("x_TH", x_TH, torch.float32, (tokens, hidden))            # contiguous along the last dimension
    address_at_strides("weight_EOI", weight_EOI, torch.bfloat16, shape)        # anyhow; the callee is told the strides
    address_to_write("gradient_EOI", gradient_EOI, torch.float32, shape)       # anyhow, each element for itself

Compiled code believes what it is told and reads or writes past the end of a tensor that is smaller, of another dtype or
on another device. So each call names what the callee takes for granted; ValueError where the tensor is something else.
A tensor that takes part is checked in about a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.core.errors import bad_value

# A device given by its name is parsed anew at every allocation, which takes longer than the allocation.
CPU = torch.device("cpu")


def address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Of a contiguous tensor."""
    if not (tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape and tensor.is_contiguous()):
        raise _refused(name, tensor, dtype, shape, "contiguous")
    return _start(name, tensor)


def optional_address(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """The same; None, which compiled code sees as a null pointer, where there is no tensor."""
    return None if tensor is None else address(name, tensor, dtype, shape)


def address_of_lines(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Of a tensor that is contiguous along its last dimension, at any strides along the others."""
    if not (tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape and has_lines(tensor)):
        raise _refused(name, tensor, dtype, shape, "contiguous along the last dimension")
    return _start(name, tensor)


def address_at_strides(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    if not (tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape):
        raise _refused(name, tensor, dtype, shape, "at any strides")
    return _start(name, tensor)


def address_to_write(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Of a tensor at any strides no two elements of which are the same memory, as those of an expanded one are."""
    if _overlaps(tensor):
        raise _refused(name, tensor, dtype, shape, "without elements that share their memory")
    return address_at_strides(name, tensor, dtype, shape)


def has_lines(tensor: Tensor) -> bool:
    """Whether it is contiguous along its last dimension.

    The stride of a dimension of one element, or of a tensor without elements, says nothing: a transposition or an
    expansion leaves anything there.
    """
    return tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0


def place_of(tensor: Tensor) -> int:
    """Where its memory begins: to be compared or measured, never to be read or written."""
    return tensor.data_ptr()


def _start(name: str, tensor: Tensor) -> int:
    if (
        tensor.is_neg()
    ):  # a view whose elements are to be read with the other sign, as the imaginary part of a conjugate
        raise bad_value(name, "memory that holds its values", "a view of their negatives", "call resolve_neg() on it")
    start = tensor.data_ptr()
    if not start and tensor.numel():
        raise bad_value(
            name,
            "a tensor with memory",
            "one whose storage was freed",
            "gather the parameter first, where it is sharded or offloaded between its uses",
        )
    return start


def _overlaps(tensor: Tensor) -> bool:
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span = stride * size
    return False


def _refused(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], lying: str) -> ValueError:
    return bad_value(
        name,
        f"{dtype} of shape {tuple(shape)} on the CPU, {lying}",
        f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}",
        "compiled code would read the wrong memory; copy the tensor with .to(...).contiguous()",
    )
