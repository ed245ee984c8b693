"""Tensor descriptors for Hopper's bulk copy engine, made in a microsecond.

    layout = shared_layout((128, 64), torch.bfloat16)
    rows = descriptor(x_TH, (128, 64))

What depends on dtype and block alone is made once; a descriptor then differs in its tensor only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Of Gluon, whose names changed after Triton 3.6; the old ones raise in 3.9.
bulk_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
bulk_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int32: gl.int32,
}


@cache
def shared_layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def descriptor(matrix: Tensor, block: tuple[int, int], layout: Any = None) -> Any:
    """Copies of `block` size from and to `matrix` (rows, columns), whose rows are contiguous and start at 16 bytes."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(_template(block, matrix.dtype, layout))
    made.base, made.shape, made.strides = matrix, matrix.shape, matrix.stride()
    return made


@cache
def _template(block: tuple[int, int], dtype: torch.dtype, layout: Any) -> dict[str, Any]:
    example = torch.empty(block, dtype=dtype, device="cpu")
    layout = shared_layout(block, dtype) if layout is None else layout
    return vars(TensorDescriptor.from_tensor(example, list(block), layout))
