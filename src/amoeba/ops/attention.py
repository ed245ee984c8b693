"""Causal attention in which packed documents do not see each other.

T tokens of all documents · Q query heads · G key and value heads · D of a head · N documents

    y_TQD = document_attention(q_TQD, k_TGD, v_TGD, ends_N1, longest=1024, scale=0.125)

ends_N1 = [0, end of the first, end of the second, ...]: it may repeat its last number, so that one length serves all
batches. Backward gives the same bits each time. On a GPU it is one differentiable operator, in which heads that our own
kernels do not serve go to torch's flash attention. On a CPU torch's attention runs over one document after the other,
those of one length that are neighbours at once: no mask is made or read, and nothing is computed that it would hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from amoeba.core import operators
from amoeba.core.operators import Operand
from amoeba.core.torch_internals import flash_attention, flash_attention_backward

HEAD_SIZES = 8, 256  # D is a multiple of the one, up to the other


def why_not(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> str | None:
    """Why the heads of these tensors, (..., heads, D), are not served, or None."""
    if q.device.type == "cpu":
        return None if window is None else "has no sliding window on a CPU"
    if q.device.type != "cuda":
        return f"computes on CUDA devices and on the CPU; these are on {q.device}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs compute capability 8.0"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"supports bf16 and fp16; these are {str(q.dtype).removeprefix('torch.')}"
    multiple, most = HEAD_SIZES
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= most or q.shape[-1] % multiple:
        sizes = f"{q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
        return f"supports heads of one size, a multiple of {multiple} up to {most}; these have {sizes}"
    return None


def document_attention(
    q_TQD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    ends_N1: Tensor,
    *,
    longest: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """longest: no document has more tokens. window: how many tokens before its own a query sees; None for all."""
    if q_TQD.device.type == "cpu":
        return _one_by_one(q_TQD, k_TGD, v_TGD, ends_N1.tolist(), scale)
    y_TQD, _ = _attention(q_TQD, k_TGD, v_TGD, ends_N1, longest, scale, -1 if window is None else window)
    return y_TQD


def _one_by_one(q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor, ends_N1: list[int], scale: float) -> Tensor:
    lengths = [end - start for start, end in pairwise(ends_N1) if end > start]
    runs = [(len(list(equal)), length) for length, equal in groupby(lengths)]
    sizes = [documents * length for documents, length in runs]

    def heads_first(states_T: Tensor) -> list[Tensor]:
        return [part.unflatten(0, run).transpose(1, 2) for part, run in zip(states_T.split(sizes), runs, strict=True)]

    grouped = q_TQD.shape[1] != k_TGD.shape[1]
    parts = zip(heads_first(q_TQD), heads_first(k_TGD), heads_first(v_TGD), strict=True)
    found = [
        scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=grouped).transpose(1, 2)
        for part in parts
    ]
    return found[0].flatten(0, 1) if len(found) == 1 else torch.cat([part.flatten(0, 1) for part in found])


def _ours(q: Tensor, scale: float) -> Any:
    """Our kernels, where they serve these queries; forward and backward ask the same."""
    from amoeba.kernels import attention  # which imports Triton

    return attention if attention.why_not(q, scale) is None else None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    if (kernels := _ours(q, scale)) is not None:
        return kernels.forward(q, k, v, ends, scale, window)
    y, logsumexp = flash_attention(q, k, v, ends, longest, scale, window)
    return y.contiguous(), logsumexp  # as our kernels write it


def _backward(
    arguments: tuple, saved: tuple[Tensor, ...], gradients: Sequence[Any], needs: Sequence[bool]
) -> Sequence[Tensor]:
    q, k, v, ends, longest, scale, window = arguments
    y, logsumexp = saved
    dy = gradients[0].contiguous()
    if (kernels := _ours(q, scale)) is not None:
        return kernels.backward(dy, q, k, v, y, logsumexp, ends, scale, window)
    return flash_attention_backward(dy, q, k, v, y, logsumexp, ends, longest, scale, window)


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(q, memory_format=torch.contiguous_format)  # however q lies, see `_forward`
    return y, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


_attention = operators.define(
    "document_attention",
    (
        Operand("q", "Tensor", True),
        Operand("k", "Tensor", True),
        Operand("v", "Tensor", True),
        Operand("ends", "Tensor"),
        Operand("longest", "int"),
        Operand("scale", "float"),
        Operand("window", "int"),
    ),
    results=("y", "logsumexp"),
    forward=_forward,
    backward=_backward,
    fake=_fake,
    saved=(0, 1),
)
