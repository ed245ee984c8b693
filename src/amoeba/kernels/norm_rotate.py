"""Queries and keys of a joined projection, normed head by head and rotated, in one pass each way.

T tokens · Q query heads · G key and value heads · D of a head · P = Q + G · C = (Q + 2G)·D · R tokens of the rotations
B rows · L slots of a cache

    qk_TPD = norm_rotate(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads=16, eps=1e-6)
    q_TQD, k_TGD = norm_rotate_cached(qkv_TC, ..., key_BGLD, value_BGLD, slot, query_heads=16, eps=1e-6)
    dq_weight_D, dk_weight_D = norm_rotate_backward_(dqkv_TC, qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, ...)

A row of qkv_TC holds the heads of a token: queries, keys, values; token t is rotated by row t % R. The second also
writes keys and values of B rows, T / B tokens each, into a cache, from a slot on that the device knows. The third
replaces the gradient of what came out of the first, in the columns of queries and keys, by that of what went in, and
leaves the values' columns alone. Numbers are rounded where transformers rounds them. A program takes all heads of a few
tokens, so that their rotations are read once; what it has added up for the weights is summed over programs afterwards,
in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import cdiv, quick
from amoeba.kernels.launch.arguments import check_arguments, have_lines


class Tile(NamedTuple):
    elements: int  # of one half of the heads that a program has in registers at once
    heads: int  # at most: as many of one token lie side by side
    warps: int
    repeats: int = 1  # how often, where a program keeps sums


FORWARD = Tile(1024, 4, 4)
BACKWARD = Tile(512, 4, 4, repeats=4)  # of eight the best for heads of 128, within 4 % of it for 64 (H200)


def norm_rotate(
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    *,
    query_heads: int,
    eps: float,
    tile: Tile = FORWARD,
) -> Tensor:
    """qk_TPD: the query heads, then the key heads."""
    _check(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads)
    tokens, size = qkv_TC.shape[0], q_weight_D.shape[0]
    key_heads = _key_heads(qkv_TC, size, query_heads)
    qk_TPD = qkv_TC.new_empty((tokens, query_heads + key_heads, size))
    if tokens:
        constants = _constants(tile, query_heads, key_heads, size)
        _norm_rotate[(cdiv(tokens, constants["TOKENS"]),)](
            qkv_TC, qk_TPD, q_weight_D, k_weight_D, cos_RD, sin_RD, tokens, cos_RD.shape[0], eps,
            STRIDE=qkv_TC.stride(0), **constants,
        )  # fmt: skip
    return qk_TPD


def norm_rotate_cached(
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    slot: Tensor,
    *,
    query_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """What `norm_rotate` has together. slot (1,) or (B,): of each row's first token; none is kept behind the last."""
    _check(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads)
    tokens, size = qkv_TC.shape[0], q_weight_D.shape[0]
    key_heads = _key_heads(qkv_TC, size, query_heads)
    rows, groups, length, _ = key_BGLD.shape
    check_arguments(
        key_BGLD.shape == value_BGLD.shape == (rows, key_heads, length, size)
        and all(each.is_contiguous() and each.dtype == qkv_TC.dtype for each in (key_BGLD, value_BGLD))
        and tokens % rows == 0
        and slot.shape in ((1,), (rows,)),
        "a cache for the heads of whole rows, contiguous, in one dtype",
        qkv=qkv_TC,
        key=key_BGLD,
        value=value_BGLD,
    )
    q_TQD, k_TGD = (qkv_TC.new_empty((tokens, count, size)) for count in (query_heads, key_heads))
    if tokens:
        heads, overlap = _heads_at_once(FORWARD, query_heads, key_heads), can_overlap(qkv_TC.device)
        _norm_rotate_cached[(tokens, (query_heads + 2 * key_heads) // heads)](
            qkv_TC, q_TQD, k_TGD, key_BGLD, value_BGLD, q_weight_D, k_weight_D, cos_RD, sin_RD, slot, tokens // rows,
            length, cos_RD.shape[0], eps, SLOTS=slot.shape[0] > 1, STRIDE=qkv_TC.stride(0), Q=query_heads,
            G=groups, D=size, HEADS=heads, OVERLAP=overlap, num_warps=1, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return q_TQD, k_TGD


def norm_rotate_backward_(
    dqkv_TC: Tensor,
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_RD: Tensor,
    sin_RD: Tensor,
    *,
    query_heads: int,
    eps: float,
    of_weights: bool = True,
    tile: Tile = BACKWARD,
) -> tuple[Tensor, Tensor] | None:
    """of_weights: whether the gradients of the weights are wanted."""
    _check(qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, query_heads)
    fit = have_lines(dqkv_TC) and dqkv_TC.shape == qkv_TC.shape and dqkv_TC.dtype == qkv_TC.dtype
    check_arguments(fit, "gradients like their rows", dqkv_TC=dqkv_TC, qkv_TC=qkv_TC)
    tokens, size = qkv_TC.shape[0], q_weight_D.shape[0]
    constants = _constants(tile, query_heads, _key_heads(qkv_TC, size, query_heads), size)
    programs = cdiv(tokens, constants["TOKENS"] * tile.repeats)
    sums_X2D = torch.empty((programs, 2, size) if of_weights else 0, dtype=torch.float32, device=qkv_TC.device)
    if tokens:
        _norm_rotate_backward[(programs,)](
            dqkv_TC, qkv_TC, q_weight_D, k_weight_D, cos_RD, sin_RD, sums_X2D, tokens, cos_RD.shape[0], eps,
            STRIDE=qkv_TC.stride(0), D_STRIDE=dqkv_TC.stride(0), OF_WEIGHTS=of_weights, REPEATS=tile.repeats,
            **constants,
        )  # fmt: skip
    if not of_weights:
        return None
    dq_weight_D, dk_weight_D = sums_X2D.sum(0).to(q_weight_D.dtype)
    return dq_weight_D, dk_weight_D


def _check(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, query_heads: int) -> None:
    others = q_weight, k_weight, cos, sin
    size = q_weight.shape[-1]
    check_arguments(
        have_lines(qkv)
        and all(each.is_contiguous() and each.dtype == qkv.dtype for each in others)
        and q_weight.shape == k_weight.shape == (size,)
        and cos.shape == sin.shape
        and cos.dim() == 2
        and cos.shape[1] == size
        and cos.shape[0] > 0
        and size >= 2
        and size & (size - 1) == 0
        and _key_heads(qkv, size, query_heads) > 0
        and qkv.shape[1] == (query_heads + 2 * _key_heads(qkv, size, query_heads)) * size,
        "rows of all heads with lines of numbers, weights and rotations of one head, a power of two wide, in one dtype",
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        cos=cos,
        sin=sin,
    )


def _key_heads(qkv_TC: Tensor, size: int, query_heads: int) -> int:
    return (qkv_TC.shape[1] // size - query_heads) // 2


def _heads_at_once(tile: Tile, query_heads: int, key_heads: int) -> int:
    heads = tile.heads
    while query_heads % heads or key_heads % heads:
        heads //= 2
    return heads


def _constants(tile: Tile, query_heads: int, key_heads: int, size: int) -> dict[str, int]:
    heads = _heads_at_once(tile, query_heads, key_heads)
    tokens = max(1, tile.elements // (heads * size // 2))
    return {"Q": query_heads, "G": key_heads, "D": size, "HEADS": heads, "TOKENS": tokens, "num_warps": tile.warps}


@triton.jit
def _halves(pointer, place, mask, HALF: tl.constexpr):
    """The two halves of each row, between which a rotation turns, in fp32."""
    if mask is None:
        first, second = tl.load(pointer + place), tl.load(pointer + HALF + place)
    else:
        first = tl.load(pointer + place, mask=mask, other=0.0)
        second = tl.load(pointer + HALF + place, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _token_rows(token, heads, STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr):
    """(TOKENS, HEADS, HALF): where the first halves of HEADS heads lie, with `heads` before them."""
    head = heads + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    return token[:, None, None] * STRIDE + head[None, :, None] * HEAD_STRIDE + column[None, None, :]


@triton.jit
def _rotations(cos, sin, token, rotations, D: tl.constexpr, HEADS: tl.constexpr):
    """As large as the rows: each thread reads what it needs, in place of a smaller tile that is spread afterwards."""
    place = _token_rows(token.to(tl.int32) % rotations, 0, D, 0, D // 2, HEADS)
    cos_1, cos_2 = _halves(cos, place, None, D // 2)
    sin_1, sin_2 = _halves(sin, place, None, D // 2)
    return cos_1, cos_2, sin_1, sin_2


@triton.jit
def _weights(weight, token, D: tl.constexpr, HEADS: tl.constexpr):
    return _halves(weight, _token_rows(token, 0, 0, 0, D // 2, HEADS), None, D // 2)


@triton.jit
def _normed(x_1, x_2, eps, D: tl.constexpr):
    """Both halves by their root mean square, and one over that."""
    squares = tl.sum(x_1 * x_1 + x_2 * x_2, axis=2, keep_dims=True)
    scale = tl.rsqrt(squares / D + eps)
    return x_1 * scale, x_2 * scale, scale


@triton.jit
def _rotated(x_1, x_2, weight_1, weight_2, rotations, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    cos_1, cos_2, sin_1, sin_2 = rotations
    n_1, n_2, _ = _normed(x_1, x_2, eps, D)
    m_1 = _rounded(weight_1 * _rounded(n_1, DTYPE), DTYPE)
    m_2 = _rounded(weight_2 * _rounded(n_2, DTYPE), DTYPE)
    out_1 = _rounded(m_1 * cos_1, DTYPE) - _rounded(m_2 * sin_1, DTYPE)
    out_2 = _rounded(m_2 * cos_2, DTYPE) + _rounded(m_1 * sin_2, DTYPE)
    return out_1.to(DTYPE), out_2.to(DTYPE)


@triton.jit
def _rotate_heads(
    qkv, qk, weight, token, mask, rotations, eps, before, COUNT: tl.constexpr, STRIDE: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """COUNT heads with `before` before them."""
    DTYPE: tl.constexpr = qk.dtype.element_ty
    weight_1, weight_2 = _weights(weight, token, D, HEADS)
    for step in range(COUNT // HEADS):
        heads = before + step * HEADS
        x_1, x_2 = _halves(qkv, _token_rows(token, heads, STRIDE, D, D // 2, HEADS), mask, D // 2)
        out_1, out_2 = _rotated(x_1, x_2, weight_1, weight_2, rotations, eps, D, DTYPE)
        out = _token_rows(token, heads, P * D, D, D // 2, HEADS)
        tl.store(qk + out, out_1, mask=mask)
        tl.store(qk + D // 2 + out, out_2, mask=mask)


@quick
@triton.jit
def _norm_rotate(
    qkv, qk, q_weight, k_weight, cos, sin, tokens, num_rotations, eps, STRIDE: tl.constexpr, Q: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < tokens)[:, None, None]
    rotations = _rotations(cos, sin, token, num_rotations, D, HEADS)
    _rotate_heads(qkv, qk, q_weight, token, mask, rotations, eps, 0, Q, STRIDE, Q + G, D, HEADS)
    _rotate_heads(qkv, qk, k_weight, token, mask, rotations, eps, Q, G, STRIDE, Q + G, D, HEADS)


@triton.jit
def _cached(first, place, length, D: tl.constexpr, HEADS: tl.constexpr):
    """(1, HEADS, D // 2): where first halves of heads, counted over all rows, lie in the cache."""
    head = (first + tl.arange(0, HEADS)).to(tl.int64)
    return ((head * length + place) * D)[None, :, None] + tl.arange(0, D // 2)[None, None, :]


@quick
@triton.jit
def _norm_rotate_cached(
    qkv, q, k, keys, values, q_weight, k_weight, cos, sin, slot, tokens_of_row, length, num_rotations, eps,
    SLOTS: tl.constexpr, STRIDE: tl.constexpr, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A few heads of one token: with few tokens there is no other way to keep the GPU busy."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = q.dtype.element_ty
    HALF: tl.constexpr = D // 2
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    heads = tl.program_id(1) * HEADS
    row = tl.program_id(0) // tokens_of_row
    if SLOTS:
        slot += row
    place = tl.load(slot) + tl.program_id(0) % tokens_of_row + tl.arange(0, 1)
    kept = (place < length)[:, None, None]
    came = _token_rows(token, heads, STRIDE, D, HALF, HEADS)
    if heads < Q + G:
        weight = q_weight
        if heads >= Q:
            weight = k_weight
        x_1, x_2 = _halves(qkv, came, None, HALF)
        weight_1, weight_2 = _weights(weight, token, D, HEADS)
        rotations = _rotations(cos, sin, token, num_rotations, D, HEADS)
        out_1, out_2 = _rotated(x_1, x_2, weight_1, weight_2, rotations, eps, D, DTYPE)
        if heads < Q:
            out = _token_rows(token, heads, Q * D, D, HALF, HEADS)
            tl.store(q + out, out_1)
            tl.store(q + HALF + out, out_2)
        else:
            out = _token_rows(token, heads - Q, G * D, D, HALF, HEADS)
            tl.store(k + out, out_1)
            tl.store(k + HALF + out, out_2)
            cached = _cached(row * G + heads - Q, place, length, D, HEADS)
            tl.store(keys + cached, out_1, mask=kept)
            tl.store(keys + HALF + cached, out_2, mask=kept)
    else:
        cached = _cached(row * G + heads - Q - G, place, length, D, HEADS)
        tl.store(values + cached, tl.load(qkv + came), mask=kept)
        tl.store(values + HALF + cached, tl.load(qkv + HALF + came), mask=kept)


@triton.jit
def _turn_heads_back(
    dqkv, qkv, weight, cos, sin, sums, tokens, num_rotations, eps, before, COUNT: tl.constexpr, STRIDE: tl.constexpr,
    D_STRIDE: tl.constexpr, OF_WEIGHTS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    REPEATS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    column = tl.arange(0, D // 2)
    weight_1, weight_2 = _weights(weight, tl.arange(0, TOKENS), D, HEADS)
    sums_1 = tl.zeros((TOKENS, HEADS, D // 2), tl.float32)
    sums_2 = tl.zeros((TOKENS, HEADS, D // 2), tl.float32)
    for repeat in range(REPEATS):
        token = (tl.program_id(0).to(tl.int64) * REPEATS + repeat) * TOKENS + tl.arange(0, TOKENS)
        mask = (token < tokens)[:, None, None]
        cos_1, cos_2, sin_1, sin_2 = _rotations(cos, sin, token, num_rotations, D, HEADS)
        for step in range(COUNT // HEADS):
            heads = before + step * HEADS
            x_1, x_2 = _halves(qkv, _token_rows(token, heads, STRIDE, D, D // 2, HEADS), mask, D // 2)
            place = _token_rows(token, heads, D_STRIDE, D, D // 2, HEADS)
            d_1, d_2 = _halves(dqkv, place, mask, D // 2)
            n_1, n_2, scale = _normed(x_1, x_2, eps, D)
            dm_1 = d_1 * cos_1 + d_2 * sin_2
            dm_2 = d_2 * cos_2 - d_1 * sin_1
            if OF_WEIGHTS:
                sums_1 += dm_1 * _rounded(n_1, DTYPE)
                sums_2 += dm_2 * _rounded(n_2, DTYPE)
            dn_1, dn_2 = dm_1 * weight_1, dm_2 * weight_2
            along = tl.sum(dn_1 * n_1 + dn_2 * n_2, axis=2, keep_dims=True) / D
            tl.store(dqkv + place, (scale * (dn_1 - n_1 * along)).to(DTYPE), mask=mask)
            tl.store(dqkv + D // 2 + place, (scale * (dn_2 - n_2 * along)).to(DTYPE), mask=mask)
    if OF_WEIGHTS:
        tl.store(sums + column, tl.sum(tl.sum(sums_1, axis=1), axis=0))
        tl.store(sums + D // 2 + column, tl.sum(tl.sum(sums_2, axis=1), axis=0))


@quick
@triton.jit
def _norm_rotate_backward(
    dqkv, qkv, q_weight, k_weight, cos, sin, sums, tokens, num_rotations, eps, STRIDE: tl.constexpr,
    D_STRIDE: tl.constexpr, OF_WEIGHTS: tl.constexpr, Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    sums += tl.program_id(0) * (2 * D)
    _turn_heads_back(
        dqkv, qkv, q_weight, cos, sin, sums, tokens, num_rotations, eps, 0, Q, STRIDE, D_STRIDE, OF_WEIGHTS, D, HEADS,
        TOKENS, REPEATS,
    )  # fmt: skip
    _turn_heads_back(
        dqkv, qkv, k_weight, cos, sin, sums + D, tokens, num_rotations, eps, Q, G, STRIDE, D_STRIDE, OF_WEIGHTS, D,
        HEADS, TOKENS, REPEATS,
    )  # fmt: skip
