"""Attention of packed documents from a joined projection: queries and keys are normed head by head and rotated on the
way.

T tokens of all documents · Q query heads · G key and value heads · D of a head · P = Q + G · C = (Q + 2G)·D ·
R tokens of the rotations · N documents

    if why_not(x_TH, query_heads, key_heads, size, scale) is None:
        y_TQD = rotary_attention(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, ends_N1, query_heads=16, eps=1e-6, ...)

One differentiable operator, so that values are read from the projection where they lie and the gradients of all three
are written where the projection's backward reads them: nothing is copied, split or joined. Kept for backward: the
projection and the result. Backward norms and rotates queries and keys once more: in a training step of 107 ms that is
half a millisecond, for 0.9 GiB of 27 (1.27B parameters, H200). A token t is rotated by row t % R of cos and sin.
Importing this file does not import Triton: the first call does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core import operators
from amoeba.core.operators import Operand

HEAD_SIZES = 64, 128  # of amoeba.kernels.attention, which may not be imported here
DTYPES = torch.bfloat16, torch.float16

_TRITON = importlib.util.find_spec("triton") is not None


def why_not(x: Tensor, query_heads: int, key_heads: int, size: int, scale: float) -> str | None:
    """Why tokens with the device and the dtype of x are not for the kernels, or None."""
    if not _TRITON:
        return "needs Triton, which is not installed"
    if x.device.type != "cuda":
        return f"computes on CUDA devices; these are on {x.device}"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "needs compute capability 8.0"
    if x.dtype not in DTYPES:
        return f"supports bf16 and fp16; these are {str(x.dtype).removeprefix('torch.')}"
    return why_not_shape(x, query_heads, key_heads, size, scale)


def why_not_shape(x: Tensor, query_heads: int, key_heads: int, size: int, scale: float) -> str | None:
    """The part of `why_not` that asks neither for a device nor for Triton."""
    if size not in HEAD_SIZES:
        return f"supports heads of size {' and '.join(map(str, HEAD_SIZES))}; these have {size}"
    if query_heads % key_heads:
        return f"needs as many query heads for each key head; {query_heads} cannot be divided by {key_heads}"
    if x.numel() == 0:
        return "needs at least one token"
    if not scale > 0:
        return f"needs a positive scale; this one is {scale}"
    return None


def rotary_attention(
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    ends_N1: Tensor,
    *,
    query_heads: int,
    eps: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """ends_N1, scale and window: as in `amoeba.ops.attention`."""
    window = -1 if window is None else window
    tensors = qkv_TC, q_weight_D, k_weight_D, cos_RD.detach(), sin_RD.detach(), ends_N1
    return _operator(*tensors, query_heads, eps, scale, window)[0]


def _split(qkv_TC: Tensor, qk_TPD: Tensor, query_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views: q_TQD and k_TGD of the second, v_TGD of the first."""
    tokens, heads, size = qk_TPD.shape
    v_TGD = qkv_TC[:, heads * size :].view(tokens, heads - query_heads, size)
    return qk_TPD[:, :query_heads], qk_TPD[:, query_heads:], v_TGD


def _forward(
    qkv_TC: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, cos_RD: Tensor, sin_RD: Tensor, ends_N1: Tensor,
    query_heads: int, eps: float, scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from amoeba.kernels import attention
    from amoeba.kernels.norm_rotate import norm_rotate

    qk_TPD = norm_rotate(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads=query_heads, eps=eps)
    return attention.forward(*_split(qkv_TC, qk_TPD, query_heads), ends_N1, scale, window)


def _fake(
    qkv_TC: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, cos_RD: Tensor, sin_RD: Tensor, ends_N1: Tensor,
    query_heads: int, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, size = qkv_TC.shape[0], q_weight_D.shape[0]
    return (
        qkv_TC.new_empty((tokens, query_heads, size)),
        qkv_TC.new_empty((query_heads, tokens), dtype=torch.float32),
    )


def _backward(arguments: tuple, saved: tuple, gradients: Sequence[Any], needs: Sequence[bool]) -> list[Tensor | None]:
    from amoeba.kernels import attention
    from amoeba.kernels.norm_rotate import norm_rotate, norm_rotate_backward_

    qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, ends_N1, query_heads, eps, scale, window = arguments
    y_TQD, logsumexp_QT = saved
    qk_TPD = norm_rotate(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads=query_heads, eps=eps)
    dqkv_TC = torch.empty_like(qkv_TC, memory_format=torch.contiguous_format)
    dqk_TPD = dqkv_TC[:, : qk_TPD.shape[1] * qk_TPD.shape[2]].view(qk_TPD.shape)
    dy_TQD = gradients[0].contiguous()
    attention.backward(
        dy_TQD, *_split(qkv_TC, qk_TPD, query_heads), y_TQD, logsumexp_QT, ends_N1, scale, window,
        out=_split(dqkv_TC, dqk_TPD, query_heads),
    )  # fmt: skip
    of_weights = norm_rotate_backward_(
        dqkv_TC, qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads=query_heads, eps=eps,
        of_weights=needs[1] or needs[2],
    )  # fmt: skip
    found = dqkv_TC, *(of_weights or (None, None))
    return [gradient if need else None for gradient, need in zip(found, needs, strict=True)]


_operator = operators.define(
    "rotary_attention",
    (
        Operand("qkv", "Tensor", True),
        Operand("q_weight", "Tensor", True),
        Operand("k_weight", "Tensor", True),
        Operand("cos", "Tensor"),
        Operand("sin", "Tensor"),
        Operand("ends", "Tensor"),
        Operand("query_heads", "int"),
        Operand("eps", "float"),
        Operand("scale", "float"),
        Operand("window", "int"),
    ),
    results=("y", "logsumexp"),
    forward=_forward,
    backward=_backward,
    fake=_fake,
    saved=(0, 1),
)
