"""What a kernel assumes about its arguments, checked by its launcher: with anything else, a kernel reads
or writes other memory.

    check_arguments(has_lines(out_NO), "rows that are contiguous inside", out_NO=out_NO)
"""

from __future__ import annotations

from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.cpu.pointers import has_lines


def check_arguments(fit: bool, expected: str, **tensors: Tensor | None) -> None:
    if not fit:
        given = ", ".join(
            f"{name} {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            for name, tensor in tensors.items()
            if tensor is not None
        )
        raise bad_value(" and ".join(tensors), expected, given, "copy tensors with other strides with .contiguous()")


def have_lines(*tensors: Tensor | None) -> bool:
    """Whether those that there are are contiguous along their last dimension."""
    return all(tensor is None or has_lines(tensor) for tensor in tensors)
