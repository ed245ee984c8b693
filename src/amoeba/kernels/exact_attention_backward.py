"""Gradients of `exact_attention`. They have the same bits each time, and their tiles do not care where texts begin.

    dq, dk, dv, delta = attention_backward(dy, q, k, v, y, logsumexp, seen, bounds_3BT, scale, softcap)

Each has a launch of its own: one goes through the keys of a tile of queries, the other through the queries of a tile of
keys. Tiles in which every query sees every key go through a loop without masks.

B rows of a batch · Q query heads · G key and value heads · T tokens · L keys · D, V of a head ·
M pairs of a token and one of the heads that share their keys, N keys of a tile
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from amoeba.kernels.attention.kernels import masked_block
from amoeba.kernels.exact_attention import LOG2_E, capped, mask_bytes, tile_of
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

STEP = 16  # bytes, of which the copy engine's rows and heads are multiples


def attention_backward(
    dy_BQTV: Tensor,
    q_BQTD: Tensor,
    k_BGLD: Tensor,
    v_BGLV: Tensor,
    y_BQTV: Tensor,
    logsumexp_BQT: Tensor,
    seen_B1TL: Tensor,
    bounds_3BT: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and delta_BQT = Σ y dy."""
    (batch, heads, tokens, _), (_, groups, keys, _) = q_BQTD.shape, v_BGLV.shape
    dtype = q_BQTD.dtype
    dq, dk, dv = (_token_after_token(each.shape, dtype, each.device) for each in (q_BQTD, k_BGLD, v_BGLV))
    delta_BQT, logsumexp2_BQT = torch.empty((2, *logsumexp_BQT.shape), dtype=torch.float32, device=dq.device)
    if dq.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta_BQT.zero_()
    pairs, block, tile, options = tile_of(q_BQTD, k_BGLD, v_BGLV, softcap)
    seen = mask_bytes(seen_B1TL)
    q, y, dy = (_described(each.to(dtype), pairs) for each in (q_BQTD, y_BQTV, dy_BQTV))
    k, v = (_described(each.to(dtype), block) for each in (k_BGLD, v_BGLV))
    of_masks = seen, bounds_3BT
    numbers = tokens, keys, scale, groups, bounds_3BT.stride(0), seen.stride(0), seen.stride(2)
    _query_gradient[(cdiv(tokens, pairs) * heads, batch)](
        q, k, v, y, dy, _described(dq, pairs), *of_masks, logsumexp_BQT, logsumexp2_BQT, delta_BQT, *numbers,
        TILE=tile, **options,
    )  # fmt: skip
    _key_gradient[(cdiv(keys, block) * groups, batch)](
        q, k, v, dy, _described(dk, block), _described(dv, block), *of_masks, logsumexp2_BQT, delta_BQT, *numbers,
        TILE=tile, **options,
    )  # fmt: skip
    return dq, dk.to(k_BGLD.dtype), dv.to(v_BGLV.dtype), delta_BQT


def _token_after_token(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(B, heads, T, D) that can be described: the heads of a token side by side, whole steps apart."""
    batch, heads, tokens, size = shape
    step = STEP // dtype.itemsize
    memory = torch.empty((batch, tokens, heads, cdiv(size, step) * step), dtype=dtype, device=device)
    return memory.transpose(1, 2)[..., :size]


def _described(states: Tensor, rows: int) -> TensorDescriptor:
    """Of (B, heads, T, D), to copy rows of a head; of a copy where they do not lie as the copy engine wants them."""
    step, size = STEP // states.element_size(), states.shape[3]
    strides = [step if count == 1 else stride for count, stride in zip(states.shape, states.stride(), strict=True)][:3]
    if states.stride(3) != 1 or states.data_ptr() % STEP or any(each % step or not each for each in strides):
        copy = _token_after_token(states.shape, states.dtype, states.device)
        return _described(copy.copy_(states), rows)
    block = [1, 1, rows, max(16, next_power_of_2(size))]
    return TensorDescriptor(states, list(states.shape), [*strides, 1], block)


@triton.jit
def _probabilities(dots, logsumexp, scale, SOFTCAP: tl.constexpr):
    """Of products of queries and keys, and the slope of a capped score by the score before. logsumexp: in powers of
    two."""
    if SOFTCAP > 0.0:
        s = capped(dots * scale, SOFTCAP)
        p = tl.exp2(s * LOG2_E - logsumexp)
        slope = 1.0 - (s / SOFTCAP) * (s / SOFTCAP)
    else:
        p = tl.exp2(dots * (scale * LOG2_E) - logsumexp)
        slope = 1.0
    return p, slope


@triton.jit
def _rows_of(desc, batch, head, row, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    return tl.reshape(desc.load([batch, head, row, 0]), (ROWS, BLOCK))


@triton.jit
def _add_dq(
    dq, q, dy, k_desc, v_desc, seen, batch, group, key, scale, lse_M, delta_M, first_M, end_M, seen_token, holes,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """seen: what the first of the queries sees."""
    N: tl.constexpr = TILE.N
    k = _rows_of(k_desc, batch, group, key, N, TILE.D_BLOCK)
    v = _rows_of(v_desc, batch, group, key, N, TILE.V_BLOCK)
    dots = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(dy, tl.trans(v), input_precision="ieee")
    p, slope = _probabilities(dots, lse_M[:, None], scale, TILE.SOFTCAP)
    if MASKED:
        key_N = key + tl.arange(0, N)
        looks = (key_N[None, :] >= first_M[:, None]) & (key_N[None, :] < end_M[:, None])
        p = tl.where(looks, p, 0.0)
        if holes > 0:  # a tile of truth values that comes out of this branch would not compile for fp32
            place = (tl.arange(0, TILE.M) * seen_token)[:, None] + key_N[None, :]
            p = tl.where(tl.load(seen + place, mask=looks, other=0) != 0, p, 0.0)
    ds = p * (dp - delta_M[:, None]) * slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "scale"])
def _query_gradient(
    q_desc, k_desc, v_desc, y_desc, dy_desc, dq_desc, seen, bounds, logsumexp, logsumexp2, delta, tokens, keys, scale,
    groups, bound_stride, seen_batch, seen_token, TILE: tl.constexpr,
):  # fmt: skip
    """Of M queries of a head dq, delta, and the logsumexp in powers of two. First the blocks of keys that all of them
    see, in a loop without masks."""
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    heads = groups * TILE.HEADS
    head, batch = tl.program_id(0) % heads, tl.program_id(1)
    row = (tl.num_programs(0) // heads - 1 - tl.program_id(0) // heads) * M  # of a text the last, the longest, first
    token_M = row + tl.arange(0, M)
    inside_M = token_M < tokens
    bounds += batch * tokens
    first_M = tl.load(bounds + token_M, mask=inside_M, other=keys)
    end_M = tl.load(bounds + bound_stride + token_M, mask=inside_M, other=0)
    holes = tl.max(tl.load(bounds + 2 * bound_stride + token_M, mask=inside_M, other=0), 0)
    sees_M = first_M < end_M
    begin, stop = tl.min(first_M, 0), tl.max(end_M, 0)
    before = tl.cdiv(tl.maximum(tl.max(tl.where(sees_M, first_M, 0), 0) - begin, 0), N)
    whole = tl.maximum((tl.min(tl.where(sees_M, end_M, keys), 0) - begin) // N - before, 0)
    total = tl.maximum(tl.cdiv(stop - begin, N), 0)
    whole = tl.where(holes > 0, 0, tl.minimum(whole, tl.maximum(total - before, 0)))
    of_head = (batch * heads + head).to(tl.int64) * tokens
    lse_M = tl.load(logsumexp + of_head + token_M, mask=inside_M, other=float("inf")) * LOG2_E
    dy = _rows_of(dy_desc, batch, head, row, M, TILE.V_BLOCK)
    y = _rows_of(y_desc, batch, head, row, M, TILE.V_BLOCK)
    delta_M = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(delta + of_head + token_M, delta_M, mask=inside_M)
    tl.store(logsumexp2 + of_head + token_M, lse_M, mask=inside_M)
    q = _rows_of(q_desc, batch, head, row, M, TILE.D_BLOCK)
    seen += batch.to(tl.int64) * seen_batch + row.to(tl.int64) * seen_token
    group = head // TILE.HEADS
    dq = tl.zeros((M, TILE.D_BLOCK), tl.float32)
    for block in range(before, before + whole):
        dq = _add_dq(
            dq, q, dy, k_desc, v_desc, seen, batch, group, begin + block * N, scale, lse_M, delta_M, first_M, end_M,
            seen_token, holes, False, TILE,
        )  # fmt: skip
    for index in range(total - whole):
        key = begin + masked_block(index, before, whole) * N
        dq = _add_dq(
            dq, q, dy, k_desc, v_desc, seen, batch, group, key, scale, lse_M, delta_M, first_M, end_M, seen_token,
            holes, True, TILE,
        )  # fmt: skip
    dq_desc.store([batch, head, row, 0], tl.reshape((dq * scale).to(dq_desc.dtype), (1, 1, M, TILE.D_BLOCK)))


@triton.jit
def _add_dk_and_dv(
    dk, dv, k, v, q_desc, dy_desc, seen, bounds, logsumexp2, delta, batch, head, heads, query, tokens, keys, scale,
    key_N, bound_stride, seen_token, holes, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scores are transposed: so probabilities enter products from registers."""
    M: tl.constexpr = TILE.M
    q = _rows_of(q_desc, batch, head, query, M, TILE.D_BLOCK)
    dy = _rows_of(dy_desc, batch, head, query, M, TILE.V_BLOCK)
    token_M = query + tl.arange(0, M)
    of_head = (batch * heads + head).to(tl.int64) * tokens
    if MASKED:
        inside_M = token_M < tokens
        lse_M = tl.load(logsumexp2 + of_head + token_M, mask=inside_M, other=float("inf"))
        delta_M = tl.load(delta + of_head + token_M, mask=inside_M, other=0.0)
    else:
        lse_M = tl.load(logsumexp2 + of_head + token_M)
        delta_M = tl.load(delta + of_head + token_M)
    dots = tl.dot(k, tl.trans(q), input_precision="ieee")
    dp = tl.dot(v, tl.trans(dy), input_precision="ieee")
    p, slope = _probabilities(dots, lse_M[None, :], scale, TILE.SOFTCAP)
    if MASKED:
        first_M = tl.load(bounds + token_M, mask=inside_M, other=keys)
        end_M = tl.load(bounds + bound_stride + token_M, mask=inside_M, other=0)
        looks = (key_N[:, None] >= first_M[None, :]) & (key_N[:, None] < end_M[None, :])
        p = tl.where(looks, p, 0.0)
        if holes > 0:
            place = (tl.arange(0, M) * seen_token)[None, :] + key_N[:, None]
            seen += query.to(tl.int64) * seen_token
            p = tl.where(tl.load(seen + place, mask=looks, other=0) != 0, p, 0.0)
    dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
    ds = p * (dp - delta_M[None, :]) * slope
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@quick
@triton.jit(do_not_specialize=["keys"])
def _key_gradient(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, seen, bounds, logsumexp2, delta, tokens, keys, scale, groups,
    bound_stride, seen_batch, seen_token, TILE: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys over all heads of their group, after `_query_gradient`. First the queries
    that see all of them, in a loop without masks: of several runs of such queries (documents) the last."""
    HEADS: tl.constexpr = TILE.HEADS
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    group, batch = tl.program_id(0) % groups, tl.program_id(1)
    key = tl.program_id(0) // groups * N
    key_N = key + tl.arange(0, N)
    bounds += batch * tokens
    earliest, latest, holes, last = tokens, 0, 0, 0  # queries that see any of these keys, and behind one that sees all
    for at in range(0, tokens, TILE.RANGE):
        token = at + tl.arange(0, TILE.RANGE)
        there = token < tokens
        first = tl.load(bounds + token, mask=there, other=keys)
        end = tl.load(bounds + bound_stride + token, mask=there, other=0)
        sees = (first < key + N) & (end > key) & (first < end)
        earliest = tl.minimum(earliest, tl.min(tl.where(sees, token, tokens), 0))
        latest = tl.maximum(latest, tl.max(tl.where(sees, token + 1, 0), 0))
        holes = tl.maximum(holes, tl.max(tl.load(bounds + 2 * bound_stride + token, mask=there, other=0), 0))
        last = tl.maximum(last, tl.max(tl.where((first <= key) & (end >= key + N), token + 1, 0), 0))
    since = earliest  # of the queries up to `last`, those from here on see all keys
    for at in range(earliest, last, TILE.RANGE):
        token = at + tl.arange(0, TILE.RANGE)
        there = token < last
        first = tl.load(bounds + token, mask=there, other=0)
        end = tl.load(bounds + bound_stride + token, mask=there, other=key + N)
        since = tl.maximum(since, tl.max(tl.where((first <= key) & (end >= key + N), 0, token + 1), 0))
    begin = earliest // M  # in blocks of queries, at multiples of M: numbers of a query are loaded two at a time
    before = tl.cdiv(since, M) - begin
    whole = tl.where(holes > 0, 0, tl.maximum(last // M - begin - before, 0))
    total = tl.maximum(tl.cdiv(latest, M) - begin, 0)
    k = _rows_of(k_desc, batch, group, key, N, TILE.D_BLOCK)
    v = _rows_of(v_desc, batch, group, key, N, TILE.V_BLOCK)
    seen += batch.to(tl.int64) * seen_batch
    dk = tl.zeros((N, TILE.D_BLOCK), tl.float32)
    dv = tl.zeros((N, TILE.V_BLOCK), tl.float32)
    for index in range(whole * HEADS):  # the heads of the group one after another: one long loop
        query = (begin + before + index // HEADS) * M
        dk, dv = _add_dk_and_dv(
            dk, dv, k, v, q_desc, dy_desc, seen, bounds, logsumexp2, delta, batch, group * HEADS + index % HEADS,
            groups * HEADS, query, tokens, keys, scale, key_N, bound_stride, seen_token, holes, False, TILE,
        )  # fmt: skip
    for index in range((total - whole) * HEADS):
        query = (begin + masked_block(index // HEADS, before, whole)) * M
        dk, dv = _add_dk_and_dv(
            dk, dv, k, v, q_desc, dy_desc, seen, bounds, logsumexp2, delta, batch, group * HEADS + index % HEADS,
            groups * HEADS, query, tokens, keys, scale, key_N, bound_stride, seen_token, holes, True, TILE,
        )  # fmt: skip
    dk_desc.store([batch, group, key, 0], tl.reshape((dk * scale).to(dk_desc.dtype), (1, 1, N, TILE.D_BLOCK)))
    dv_desc.store([batch, group, key, 0], tl.reshape(dv.to(dv_desc.dtype), (1, 1, N, TILE.V_BLOCK)))
