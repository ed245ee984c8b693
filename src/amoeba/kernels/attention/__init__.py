"""Causal attention in which packed documents do not see each other: our own kernels, and what they ask for.

T tokens of all documents · Q query heads · G key and value heads · D of a head · N documents

    y_TQD, logsumexp_QT = forward(q_TQD, k_TGD, v_TGD, ends_N1, scale=0.125, window=-1)
    dq_TQD, dk_TGD, dv_TGD = backward(dy_TQD, q_TQD, k_TGD, v_TGD, y_TQD, logsumexp_QT, ends_N1, scale=0.125, window=-1)

The logsumexp is that of scores in powers of two.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from amoeba.kernels.attention.kernels import bounds, forward_kernel, key_gradient_kernel, query_gradient_kernel
from amoeba.kernels.attention.tile import HEAD_SIZES, Tile, tile_of
from amoeba.kernels.launch import cdiv
from amoeba.kernels.launch.arguments import check_arguments


def why_not(q: Tensor, scale: float) -> str | None:
    """Why queries (T, Q, D) are not for the kernels, or None."""
    if q.shape[-1] not in HEAD_SIZES:
        return f"support heads of size {' and '.join(map(str, HEAD_SIZES))}; these have {q.shape[-1]}"
    if q.shape[0] == 0:
        return "need at least one token"
    if not scale > 0:
        return f"need a positive scale; this one is {scale}"
    return None


def forward(
    q_TQD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    ends_N1: Tensor,
    scale: float,
    window: int,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, size = q_TQD.shape
    tile = tile or tile_of(q_TQD.device, "forward", size, q_TQD.dtype)
    y_TQD = torch.empty_like(q_TQD, memory_format=torch.contiguous_format)
    logsumexp_QT = torch.empty((heads, tokens), dtype=torch.float32, device=q_TQD.device)
    scalars = logsumexp_QT, bounds(ends_N1, tokens, window), tokens, scale * math.log2(math.e)
    constants = {"Q": heads, "GROUP": heads // k_TGD.shape[1], "D": size}
    grid = cdiv(tokens, tile.BLOCK_M) * heads
    _launch(forward_kernel, tile, grid, constants, (q_TQD, k_TGD, v_TGD, y_TQD), "qkkq", scalars)
    return y_TQD, logsumexp_QT


def backward(
    dy_TQD: Tensor,
    q_TQD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    y_TQD: Tensor,
    logsumexp_QT: Tensor,
    ends_N1: Tensor,
    scale: float,
    window: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out: where dq, dk and dv are to be written, tokens a multiple of 16 bytes apart."""
    if out is None:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_TQD, k_TGD, v_TGD))
    else:
        check_arguments(
            all(_has_rows(x) for x in out), "the heads of a token side by side", dq=out[0], dk=out[1], dv=out[2]
        )
        dq, dk, dv = out
    delta_QT = torch.empty_like(logsumexp_QT)
    tokens = q_TQD.shape[0]
    scalars = scalars_of(logsumexp_QT, delta_QT, ends_N1, tokens, scale, window)
    query_gradient(q_TQD, k_TGD, v_TGD, y_TQD, dy_TQD, dq, scalars)
    key_gradient(q_TQD, k_TGD, v_TGD, dy_TQD, dk, dv, scalars)
    return dq, dk, dv


def scalars_of(
    logsumexp_QT: Tensor, delta_QT: Tensor, ends_N1: Tensor, tokens: int, scale: float, window: int
) -> tuple:
    """What both kernels of backward take after their tensors of rows."""
    return logsumexp_QT, delta_QT, bounds(ends_N1, tokens, window), tokens, scale * math.log2(math.e)


def query_gradient(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, dq: Tensor, scalars: tuple, *, tile: Tile | None = None
) -> None:
    """Writes dq and delta, the second of the scalars."""
    tokens, heads, size = q.shape
    tile = tile or tile_of(q.device, "query_gradient", size, q.dtype)
    constants = {"Q": heads, "GROUP": heads // k.shape[1], "D": size}
    grid = cdiv(tokens, tile.BLOCK_M) * heads
    _launch(query_gradient_kernel, tile, grid, constants, (q, k, v, y, dy, dq), "qkkqqq", scalars)


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, dk: Tensor, dv: Tensor, scalars: tuple, *, tile: Tile | None = None
) -> None:
    """Writes dk and dv, after `query_gradient` has written delta."""
    tokens, heads, size = k.shape
    tile = tile or tile_of(q.device, "key_gradient", size, q.dtype)
    constants = {"G": heads, "GROUP": q.shape[1] // heads, "D": size}
    grid = cdiv(tokens, tile.BLOCK_N) * heads
    _launch(key_gradient_kernel, tile, grid, constants, (q, k, v, dy, dk, dv), "qkkqkk", scalars)


def _launch(
    kernel: Any, tile: Tile, grid: int, constants: dict[str, int], states: tuple, blocks: str, scalars: tuple
) -> None:
    """blocks: for each of the states "q" or "k", whether a program takes as much of it as of queries or of keys."""
    rows = {"q": (tile.BLOCK_M, constants["D"]), "k": (tile.BLOCK_N, constants["D"])}
    given = (_rows(each, rows[block]) for each, block in zip(states, blocks, strict=True))
    _bound(kernel, tile, **constants)[(grid,)](*given, *scalars)


@cache
def _bound(kernel: Any, tile: Tile, **others: int) -> Any:
    return kernel.bound(**tile.constants(**others))


def _rows(states: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Copies of this many tokens of one head. A token's heads are contiguous; tokens need not be."""
    tokens, heads, size = states.shape
    if not _has_rows(states):
        states = states.contiguous()
    return TensorDescriptor(states, [tokens, heads * size], [states.stride(0), 1], list(block))


def _has_rows(states: Tensor) -> bool:
    return states.stride()[1:] == (states.shape[2], 1) and states.stride(0) % 8 == 0
