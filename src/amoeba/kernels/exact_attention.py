"""Attention whose result for a query depends on that query and the keys that it sees alone, on a GPU; and its backward.

    bounds_3BT = seen_bounds(seen_B1TL)
    y_BQTV, logsumexp_BQT = attention(q, k, v, sink, seen, bounds_3BT, scale, softcap)
    dq, dk, dv = attention_backward(dy, q, k, v, y, logsumexp, seen, bounds_3BT, scale, softcap)

Blocks of keys begin at the first key that the query sees, so padding before a text and room behind it do not shift
them. Most queries of a tile begin at the same key; where they do not (windows, documents) the tile goes through the
keys once for each first key, and rows with another one add exact zeros. Pieces of SPLIT keys are computed by different
programs and added up in their order. Masks are read only where a query of the tile does not see all keys between its
first and its last. Backward has the same bits each time, and its tiles do not care where texts begin.

B rows of a batch · Q query heads · G key and value heads · T tokens · L keys · D, V of a head · S pieces of the keys ·
M pairs of a token and one of the heads that share their keys, N keys of a tile
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.launch import cdiv, next_power_of_2, quick

WARPS = 4
RANGE_BLOCK = 1024  # keys at a time, to find the first and the last that a query sees
# Pairs of a query and a head, keys, warps and stages of a tile.
TILES = {
    "half": (64, 64, 4, 2),
    "half, wide heads": (32, 32, 8, 1),
    "fp32": (32, 32, 8, 1),
    "fp32, wide heads": (16, 32, 8, 1),  # as much as the shared memory of a GeForce holds
}
WIDE = 128
SPLIT = 512  # keys; a multiple of those of a tile
PARTS = 1 << 26  # fp32 numbers between the two launches of attention, at most


def seen_bounds(seen_B1TL: Tensor) -> Tensor:
    """(3, B, T) in int32: the first key that each query sees, the one behind the last, and whether there are others
    between that it does not see. L and 0 where it sees none."""
    batch, _, tokens, keys = seen_B1TL.shape
    seen = _bytes(seen_B1TL)
    bounds_3BT = torch.empty((3, batch, tokens), dtype=torch.int32, device=seen.device)
    if tokens * batch:
        _bounds[(batch * tokens,)](
            seen, bounds_3BT, batch * tokens, tokens, keys, seen.stride(0), seen.stride(2), BLOCK=RANGE_BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return bounds_3BT


def _bytes(seen: Tensor) -> Tensor:
    return (seen if seen.stride(-1) == 1 else seen.contiguous()).view(torch.uint8)


def _heads(*given: Tensor) -> list[Tensor]:
    return [each if each.stride(-1) == 1 else each.contiguous() for each in given]


def _tile(q_BQTD: Tensor, k_BGLD: Tensor, v_BGLV: Tensor, softcap: float) -> tuple[int, int, Group, dict[str, int]]:
    """Its pairs and keys, constants, warps and stages."""
    groups, size, width = k_BGLD.shape[1], q_BQTD.shape[3], v_BGLV.shape[3]
    kind = "fp32" if q_BQTD.dtype == torch.float32 else "half"
    kind += ", wide heads" if max(size, width) > WIDE else ""
    pairs, keys, *_ = TILES[kind]
    return pairs, keys, *_constants(*TILES[kind], size, width, q_BQTD.shape[1] // groups, softcap, SPLIT)


@cache
def _constants(
    pairs: int, keys: int, warps: int, stages: int, size: int, width: int, heads: int, softcap: float, split: int
) -> tuple[Group, dict[str, int]]:
    constants = Group(
        M=pairs,
        N=keys,
        D=size,
        D_BLOCK=max(16, next_power_of_2(size)),
        V=width,
        V_BLOCK=max(16, next_power_of_2(width)),
        HEADS=heads,
        SOFTCAP=softcap,
        SPLIT=split,
        RANGE=RANGE_BLOCK,
    )
    return constants, {"num_warps": warps, "num_stages": stages}


def attention(
    q_BQTD: Tensor,
    k_BGLD: Tensor,
    v_BGLV: Tensor,
    sink_Q: Tensor | None,
    seen_B1TL: Tensor,
    bounds_3BT: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """y_BQTV and logsumexp_BQT, inf where a query sees nothing. softcap: 0 for none."""
    (batch, heads, tokens, _), (_, groups, keys, width) = q_BQTD.shape, v_BGLV.shape
    y = q_BQTD.new_empty(batch, heads, tokens, width)
    logsumexp_BQT = torch.empty((batch, heads, tokens), dtype=torch.float32, device=y.device)
    if y.numel() == 0 or keys == 0:
        return y.zero_(), logsumexp_BQT.fill_(torch.inf)
    q, k, v = _heads(q_BQTD, k_BGLD.to(q_BQTD.dtype), v_BGLV.to(q_BQTD.dtype))
    seen, sink = _bytes(seen_B1TL), None if sink_Q is None else sink_Q.contiguous()
    pairs, _, tile, options = _tile(q, k, v, softcap)
    splits, of_group = cdiv(keys, SPLIT), heads // groups
    at_once = max(1, PARTS // (batch * heads * splits * width)) if splits > 1 else tokens
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        q_part, seen_part, y_part, lse_part = (
            each[:, :, first : first + count] for each in (q, seen, y, logsumexp_BQT)
        )
        most_SR = total_SR = part_SRV = None
        if splits > 1:
            most_SR, total_SR = torch.empty(
                (2, splits, batch * heads * count), dtype=torch.float32, device=y.device
            ).unbind()
            part_SRV = torch.empty((*most_SR.shape, width), dtype=torch.float32, device=y.device)
        _attend[(cdiv(count * of_group, pairs), batch * groups, splits)](
            q_part, k, v, seen_part, bounds_3BT[:, :, first:], sink, y_part, lse_part, part_SRV, most_SR, total_SR,
            count, keys, scale, groups, bounds_3BT.stride(0), tokens,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], seen.stride(0), seen.stride(2), TILE=tile, **options,
        )  # fmt: skip
        if splits > 1:
            _combine[(count * of_group, batch * groups)](
                part_SRV, most_SR, total_SR, sink, y_part, lse_part, count, splits, groups, tokens,
                HEADS=of_group, V=width, V_BLOCK=max(16, next_power_of_2(width)), num_warps=1,
            )  # fmt: skip
    return y, logsumexp_BQT


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
    dq, dk, dv = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q_BQTD, k_BGLD, v_BGLV))
    delta_BQT = torch.empty_like(logsumexp_BQT)
    if dq.numel() == 0 or keys == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta_BQT.zero_()
    dtype = q_BQTD.dtype
    q, k, v, dy = _heads(q_BQTD, k_BGLD.to(dtype), v_BGLV.to(dtype), dy_BQTV)
    pairs, block, tile, options = _tile(q, k, v, softcap)
    seen = _bytes(seen_B1TL)
    scalars = tokens, keys, scale, groups
    strides = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3], seen.stride(0), seen.stride(2)
    )  # fmt: skip
    _query_gradient[(cdiv(tokens * (heads // groups), pairs), batch * groups)](
        q, k, v, dy, y_BQTV, seen, bounds_3BT, logsumexp_BQT, delta_BQT, dq, *scalars, bounds_3BT.stride(0), *strides,
        TILE=tile, **options,
    )  # fmt: skip
    _key_gradient[(cdiv(keys, block), batch * groups)](
        q, k, v, dy, seen, bounds_3BT, logsumexp_BQT, delta_BQT, dk, dv, *scalars, bounds_3BT.stride(0), *strides,
        TILE=tile, **options,
    )  # fmt: skip
    return dq, dk, dv, delta_BQT


@quick
@triton.jit(do_not_specialize=["rows", "tokens", "keys"])
def _bounds(seen, bounds, rows, tokens, keys, stride_batch, stride_token, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seen += (row // tokens).to(tl.int64) * stride_batch + (row % tokens).to(tl.int64) * stride_token
    first, end, count = keys, 0, 0
    for at in range(0, keys, BLOCK):
        key = at + tl.arange(0, BLOCK)
        looks = tl.load(seen + key, mask=key < keys, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(looks, key, keys), 0))
        end = tl.maximum(end, tl.max(tl.where(looks, key + 1, 0), 0))
        count += tl.sum(looks.to(tl.int32), 0)
    tl.store(bounds + row, first)
    tl.store(bounds + rows + row, end)
    tl.store(bounds + 2 * rows + row, (count < end - first).to(tl.int32))


# --- forward


@triton.jit
def _rescale(most, new):
    """What sums relative to exp(most) are multiplied by when they become relative to exp(new)."""
    return tl.exp(most - tl.where(new == float("-inf"), 0.0, new))


@triton.jit
def _merged(sums, total, most, part, of_part, most_of_part):
    """Of what came before and of a piece: sums of values (.., V), of exponentials, and the largest score. Computed
    as written, so that the two kernels which do this have the same bits."""
    new = tl.maximum(most, most_of_part)
    kept, added = _rescale(most, new), _rescale(most_of_part, new)
    sums = tl.fma(sums, tl.broadcast_to(kept[:, None], sums.shape), part * added[:, None])
    return sums, tl.fma(total, kept, of_part * added), new


@triton.jit
def _finished(sums, total, most):
    """The values, and the logsumexp."""
    sees = total > 0
    some = tl.where(sees, total, 1.0)
    return sums / some[:, None], tl.where(sees, most + tl.log(some), float("inf"))


@triton.jit
def _capped(s, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0.0:  # of tanh
        return SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp(s * (2.0 / SOFTCAP)))
    else:
        return s


@triton.jit
def _inside(inner, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Nothing is left out where a head fills its block."""
    return inner < SIZE if SIZE < BLOCK else inner < BLOCK


@triton.jit
def _looks(seen, key_N, first_M, end_M, own_M, place_M, holes):
    """(M, N): which keys each pair of own_M sees."""
    looks = own_M[:, None] & (key_N[None, :] >= first_M[:, None]) & (key_N[None, :] < end_M[:, None])
    if holes > 0:
        looks = looks & (tl.load(seen + place_M[:, None] + key_N[None, :], mask=looks, other=0) != 0)
    return looks


@triton.jit
def _attend_keys(
    part, total_M, most_M, q_tile, k, v, seen, begin, stop, first_M, end_M, own_M, place_M, holes, k_token,
    v_token, scale, TILE: tl.constexpr,
):  # fmt: skip
    """The keys from `begin` to `stop` for the pairs of own_M."""
    inner_N = tl.arange(0, TILE.N)
    inner_D, inner_V = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK)
    inside_D, inside_V = _inside(inner_D, TILE.D, TILE.D_BLOCK), _inside(inner_V, TILE.V, TILE.V_BLOCK)
    # Wide arithmetic on scalars, narrow offsets on tiles: pointers to whole tiles would fill the registers.
    k_DN = (inner_N * k_token)[None, :] + inner_D[:, None]
    v_NV = (inner_N * v_token)[:, None] + inner_V[None, :]
    zero = tl.zeros((), tl.int64)
    for at in range(begin, stop, TILE.N):
        there_N = at + inner_N < stop
        wide_at = zero + at
        k_tile = tl.load(k + wide_at * k_token + k_DN, mask=there_N[None, :] & inside_D[:, None], other=0.0)
        s = _capped(tl.dot(q_tile, k_tile, input_precision="ieee") * scale, TILE.SOFTCAP)
        looks = _looks(seen, at + inner_N, first_M, end_M, own_M, place_M, holes)
        s = tl.where(looks, s, float("-inf"))
        new_M = tl.maximum(most_M, tl.max(s, 1))
        p = _rescale(s, new_M[:, None])
        kept_M = _rescale(most_M, new_M)
        total_M = total_M * kept_M + tl.sum(p, 1)
        v_tile = tl.load(v + wide_at * v_token + v_NV, mask=there_N[:, None] & inside_V[None, :], other=0.0)
        part = tl.dot(p.to(v_tile.dtype), v_tile, part * kept_M[:, None], input_precision="ieee")
        most_M = new_M
    return part, total_M, most_M


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "scale", "all_tokens", "bound_stride"])
def _attend(
    q, k, v, seen, bounds, sink_Q, y, logsumexp, part_SRV, most_SR, total_SR, tokens, keys, scale, groups,
    bound_stride, all_tokens, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    seen_batch, seen_token, TILE: tl.constexpr,
):  # fmt: skip
    """One piece of the keys for M pairs of a query and one of the heads that share their keys; the result where there
    is one piece. y and logsumexp are contiguous, and begin at the first of `tokens` of all_tokens."""
    HEADS: tl.constexpr = TILE.HEADS
    M: tl.constexpr = TILE.M
    pair_M = tl.program_id(0) * M + tl.arange(0, M)
    batch, group, split = tl.program_id(1) // groups, tl.program_id(1) % groups, tl.program_id(2)
    inside_M = pair_M < tokens * HEADS
    token_M, head_M = pair_M // HEADS, group * HEADS + pair_M % HEADS
    bounds += batch * all_tokens
    first_M = tl.load(bounds + token_M, mask=inside_M, other=keys)
    end_M = tl.load(bounds + bound_stride + token_M, mask=inside_M, other=0)
    holes = tl.max(tl.load(bounds + 2 * bound_stride + token_M, mask=inside_M, other=0), 0)
    inner_D, inner_V = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK)
    inside_D, inside_V = _inside(inner_D, TILE.D, TILE.D_BLOCK), _inside(inner_V, TILE.V, TILE.V_BLOCK)
    q += batch.to(tl.int64) * q_batch
    q_MD = head_M.to(tl.int64)[:, None] * q_head + token_M.to(tl.int64)[:, None] * q_token + inner_D[None, :]
    q_tile = tl.load(q + q_MD, mask=inside_M[:, None] & inside_D[None, :], other=0.0)
    k += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    first_token = tl.program_id(0) * M // HEADS
    seen += batch.to(tl.int64) * seen_batch + first_token.to(tl.int64) * seen_token
    place_M = (token_M - first_token) * seen_token
    most_M = tl.full((M,), float("-inf"), tl.float32)
    total_M = tl.zeros((M,), tl.float32)
    part = tl.zeros((M, TILE.V_BLOCK), tl.float32)
    begin = tl.min(first_M, 0)
    while begin < keys:  # once for each first key
        own_M = first_M == begin
        stop = tl.minimum(begin + (split + 1) * TILE.SPLIT, tl.max(tl.where(own_M, end_M, 0), 0))
        start = begin + split * TILE.SPLIT
        part, total_M, most_M = _attend_keys(
            part, total_M, most_M, q_tile, k, v, seen, start, stop, first_M, end_M, own_M, place_M, holes, k_token,
            v_token, scale, TILE,
        )  # fmt: skip
        begin = tl.min(tl.where(first_M > begin, first_M, keys), 0)
    if part_SRV is None:
        first_most = tl.full((M,), float("-inf"), tl.float32)
        first_total = tl.zeros((M,), tl.float32)
        if sink_Q is not None:
            first_most = tl.load(sink_Q + head_M, mask=inside_M, other=0.0).to(tl.float32)
            first_total = first_total + 1.0
        nothing = tl.zeros((M, TILE.V_BLOCK), tl.float32)
        part, total_M, most_M = _merged(nothing, first_total, first_most, part, total_M, most_M)
        found, found_M = _finished(part, total_M, most_M)
        row_M = (batch * (groups * HEADS) + head_M).to(tl.int64) * all_tokens + token_M
        place = row_M[:, None] * TILE.V + inner_V[None, :]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=inside_M[:, None] & inside_V[None, :])
        tl.store(logsumexp + row_M, found_M, mask=inside_M)
    else:
        row_M = (split * (tl.num_programs(1) * HEADS) + tl.program_id(1) * HEADS + pair_M % HEADS).to(tl.int64)
        row_M = row_M * tokens + token_M
        tl.store(most_SR + row_M, most_M, mask=inside_M)
        tl.store(total_SR + row_M, total_M, mask=inside_M)
        stored = (inside_M & (total_M > 0))[:, None] & inside_V[None, :]
        tl.store(part_SRV + row_M[:, None] * TILE.V + inner_V[None, :], part, mask=stored)


@quick
@triton.jit(do_not_specialize=["tokens", "splits", "all_tokens"])
def _combine(
    part_SRV, most_SR, total_SR, sink_Q, y, logsumexp, tokens, splits, groups, all_tokens,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """A query of a head: what the sink adds, then the pieces in their order."""
    token, within = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    batch, head = tl.program_id(1) // groups, tl.program_id(1) % groups * HEADS + within
    inner_V, one = tl.arange(0, V_BLOCK), tl.arange(0, 1)
    most = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if sink_Q is not None:
        most = tl.load(sink_Q + head + one).to(tl.float32)
        total = total + 1.0
    sums = tl.zeros((1, V_BLOCK), tl.float32)
    for split in range(splits):
        row = (split * (tl.num_programs(1) * HEADS) + tl.program_id(1) * HEADS + within).to(tl.int64) * tokens + token
        of_part, most_of_part = tl.load(total_SR + row + one), tl.load(most_SR + row + one)
        stored = (of_part > 0)[:, None] & (inner_V < V)[None, :]
        part = tl.load(part_SRV + row * V + inner_V[None, :], mask=stored, other=0.0)
        sums, total, most = _merged(sums, total, most, part, of_part, most_of_part)
    found, found_lse = _finished(sums, total, most)
    place = (batch * (groups * HEADS) + head).to(tl.int64) * all_tokens + token
    tl.store(y + place * V + inner_V[None, :], found.to(y.dtype.element_ty), mask=(inner_V < V)[None, :])
    tl.store(logsumexp + place + one, found_lse)


# --- backward


@triton.jit
def _slope(s, SOFTCAP: tl.constexpr):
    """Of a capped score s by the score before."""
    if SOFTCAP > 0.0:
        return 1.0 - (s / SOFTCAP) * (s / SOFTCAP)
    else:
        return 1.0


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "scale", "bound_stride"])
def _query_gradient(
    q, k, v, dy, y, seen, bounds, logsumexp, delta, dq, tokens, keys, scale, groups, bound_stride, q_batch, q_head,
    q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, dy_batch, dy_head, dy_token, seen_batch, seen_token,
    TILE: tl.constexpr,
):  # fmt: skip
    """dq and delta of M pairs. y, dq, logsumexp and delta are contiguous."""
    HEADS: tl.constexpr = TILE.HEADS
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    pair_M = tl.program_id(0) * M + tl.arange(0, M)
    batch, group = (tl.program_id(1) // groups).to(tl.int64), (tl.program_id(1) % groups).to(tl.int64)
    inside_M = pair_M < tokens * HEADS
    token_M, head_M = pair_M // HEADS, group * HEADS + pair_M % HEADS
    bounds += batch * tokens
    first_M = tl.load(bounds + token_M, mask=inside_M, other=keys)
    end_M = tl.load(bounds + bound_stride + token_M, mask=inside_M, other=0)
    holes = tl.max(tl.load(bounds + 2 * bound_stride + token_M, mask=inside_M, other=0), 0)
    inner_D, inner_V, inner_N = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK), tl.arange(0, N)
    inside_D, inside_V = _inside(inner_D, TILE.D, TILE.D_BLOCK), _inside(inner_V, TILE.V, TILE.V_BLOCK)
    mask_MD, mask_MV = inside_M[:, None] & inside_D[None, :], inside_M[:, None] & inside_V[None, :]
    row_M = (batch * groups * HEADS + head_M) * tokens + token_M
    q_MD = head_M[:, None] * q_head + token_M.to(tl.int64)[:, None] * q_token + inner_D[None, :]
    q_tile = tl.load(q + batch * q_batch + q_MD, mask=mask_MD, other=0.0)
    dy_MV = head_M[:, None] * dy_head + token_M.to(tl.int64)[:, None] * dy_token + inner_V[None, :]
    dy_tile = tl.load(dy + batch * dy_batch + dy_MV, mask=mask_MV, other=0.0)
    y_tile = tl.load(y + row_M[:, None] * TILE.V + inner_V[None, :], mask=mask_MV, other=0.0)
    delta_M = tl.sum(y_tile.to(tl.float32) * dy_tile.to(tl.float32), 1)
    tl.store(delta + row_M, delta_M, mask=inside_M)
    lse_M = tl.load(logsumexp + row_M, mask=inside_M, other=float("inf"))
    k += batch * k_batch + group * k_head
    v += batch * v_batch + group * v_head
    seen += batch * seen_batch
    place_M = token_M.to(tl.int64) * seen_token
    k_ND = (inner_N * k_token)[:, None] + inner_D[None, :]
    v_VN = (inner_N * v_token)[None, :] + inner_V[:, None]
    dq_tile = tl.zeros((M, TILE.D_BLOCK), tl.float32)
    begin, stop = tl.min(first_M, 0), tl.max(end_M, 0)
    zero = tl.zeros((), tl.int64)
    for at in range(begin, stop, N):
        there_N = at + inner_N < stop
        wide_at = zero + at
        k_tile = tl.load(k + wide_at * k_token + k_ND, mask=there_N[:, None] & inside_D[None, :], other=0.0)
        v_tile = tl.load(v + wide_at * v_token + v_VN, mask=there_N[None, :] & inside_V[:, None], other=0.0)
        s = _capped(tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale, TILE.SOFTCAP)
        looks = _looks(seen, at + inner_N, first_M, end_M, inside_M, place_M, holes)
        p = tl.where(looks, tl.exp(s - lse_M[:, None]), 0.0)
        dp = tl.dot(dy_tile, v_tile, input_precision="ieee")
        ds = p * (dp - delta_M[:, None]) * _slope(s, TILE.SOFTCAP)
        dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")
    tl.store(dq + row_M[:, None] * TILE.D + inner_D[None, :], (dq_tile * scale).to(dq.dtype.element_ty), mask=mask_MD)


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "scale", "bound_stride"])
def _key_gradient(
    q, k, v, dy, seen, bounds, logsumexp, delta, dk, dv, tokens, keys, scale, groups, bound_stride, q_batch, q_head,
    q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, dy_batch, dy_head, dy_token, seen_batch, seen_token,
    TILE: tl.constexpr,
):  # fmt: skip
    """dk and dv of N keys over all pairs that see one of them, transposed: probabilities enter products from
    registers. dk, dv, logsumexp and delta are contiguous."""
    HEADS: tl.constexpr = TILE.HEADS
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    key = tl.program_id(0) * N
    key_N = key + tl.arange(0, N)
    inside_N = key_N < keys
    batch, group = (tl.program_id(1) // groups).to(tl.int64), (tl.program_id(1) % groups).to(tl.int64)
    inner_D, inner_V = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK)
    inside_D, inside_V = _inside(inner_D, TILE.D, TILE.D_BLOCK), _inside(inner_V, TILE.V, TILE.V_BLOCK)
    mask_ND, mask_NV = inside_N[:, None] & inside_D[None, :], inside_N[:, None] & inside_V[None, :]
    wide_N = key_N.to(tl.int64)
    k_ND = wide_N[:, None] * k_token + inner_D[None, :]
    k_tile = tl.load(k + batch * k_batch + group * k_head + k_ND, mask=mask_ND, other=0.0)
    v_NV = wide_N[:, None] * v_token + inner_V[None, :]
    v_tile = tl.load(v + batch * v_batch + group * v_head + v_NV, mask=mask_NV, other=0.0)
    bounds += batch * tokens
    seen += batch * seen_batch
    q += batch * q_batch
    dy += batch * dy_batch
    rows = (batch * groups + group) * HEADS * tokens
    dk_tile = tl.zeros((N, TILE.D_BLOCK), tl.float32)
    dv_tile = tl.zeros((N, TILE.V_BLOCK), tl.float32)
    earliest, latest, holes = tokens, 0, 0  # tokens that see any of these keys
    for at in range(0, tokens, TILE.RANGE):
        token = at + tl.arange(0, TILE.RANGE)
        there = token < tokens
        first = tl.load(bounds + token, mask=there, other=keys)
        end = tl.load(bounds + bound_stride + token, mask=there, other=0)
        sees = (first < key + N) & (end > key) & (first < end)
        earliest = tl.minimum(earliest, tl.min(tl.where(sees, token, tokens), 0))
        latest = tl.maximum(latest, tl.max(tl.where(sees, token + 1, 0), 0))
        holes = tl.maximum(holes, tl.max(tl.load(bounds + 2 * bound_stride + token, mask=there, other=0), 0))
    for pair in range(earliest * HEADS, latest * HEADS, M):
        pair_M = pair + tl.arange(0, M)
        inside_M = pair_M < latest * HEADS
        token_M, head_M = pair_M // HEADS, pair_M % HEADS
        wide_M, of_group_M = token_M.to(tl.int64), group * HEADS + head_M
        first_M = tl.load(bounds + token_M, mask=inside_M, other=keys)
        end_M = tl.load(bounds + bound_stride + token_M, mask=inside_M, other=0)
        row_M = rows + head_M.to(tl.int64) * tokens + token_M
        lse_M = tl.load(logsumexp + row_M, mask=inside_M, other=float("inf"))
        delta_M = tl.load(delta + row_M, mask=inside_M, other=0.0)
        q_MD = of_group_M[:, None] * q_head + wide_M[:, None] * q_token + inner_D[None, :]
        q_tile = tl.load(q + q_MD, mask=inside_M[:, None] & inside_D[None, :], other=0.0)
        dy_MV = of_group_M[:, None] * dy_head + wide_M[:, None] * dy_token + inner_V[None, :]
        dy_tile = tl.load(dy + dy_MV, mask=inside_M[:, None] & inside_V[None, :], other=0.0)
        s = _capped(tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale, TILE.SOFTCAP)
        looks = (key_N[:, None] >= first_M[None, :]) & (key_N[:, None] < end_M[None, :]) & inside_M[None, :]
        p = tl.where(looks, tl.exp(s - lse_M[None, :]), 0.0)
        if holes > 0:  # a tile of truth values that comes out of this branch would not compile for fp32
            place = (wide_M * seen_token)[None, :] + key_N[:, None]
            p = tl.where(tl.load(seen + place, mask=looks, other=0) != 0, p, 0.0)
        dv_tile = tl.dot(p.to(dy_tile.dtype), dy_tile, dv_tile, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision="ieee")
        ds = p * (dp - delta_M[None, :]) * _slope(s, TILE.SOFTCAP)
        dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
    row_N = (batch * groups + group) * keys + wide_N
    tl.store(dk + row_N[:, None] * TILE.D + inner_D[None, :], (dk_tile * scale).to(dk.dtype.element_ty), mask=mask_ND)
    tl.store(dv + row_N[:, None] * TILE.V + inner_V[None, :], dv_tile.to(dv.dtype.element_ty), mask=mask_NV)
