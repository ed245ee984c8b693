"""Attention whose result for a query depends on that query and the keys that it sees alone, on a GPU.

    bounds_3BT = seen_bounds(seen_B1TL)
    y_BQTV, logsumexp_BQT = attention(q, k, v, sink, seen, bounds_3BT, scale, softcap)

Blocks of keys begin at the first key that the query sees, so padding before a text and room behind it do not shift
them. Most queries of a tile begin at the same key; where they do not (windows, documents) the tile goes through the
keys once for each first key, and rows with another one add exact zeros. Pieces of SPLIT keys are computed by different
programs and added up in their order. Masks are read only where a query of the tile does not see all keys between its
first and its last. Gradients are in `exact_attention_backward`.

B rows of a batch · Q query heads · G key and value heads · T tokens · L keys · D, V of a head · S pieces of the keys ·
M pairs of a token and one of the heads that share their keys, N keys of a tile
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.attention.kernels import LN_2
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
# A score with a mask is rounded before the largest is subtracted; one without would be part of the subtraction.
UNFUSED = {"enable_fp_fusion": False}
PROGRAMS = 264  # where there are as many without pieces, each computes its pieces one after another


def seen_bounds(seen_B1TL: Tensor) -> Tensor:
    """(3, B, T) in int32: the first key that each query sees, the one behind the last, and whether there are others
    between that it does not see. L and 0 where it sees none."""
    batch, _, tokens, keys = seen_B1TL.shape
    seen = mask_bytes(seen_B1TL)
    bounds_3BT = torch.empty((3, batch, tokens), dtype=torch.int32, device=seen.device)
    if tokens * batch:
        _bounds[(batch * tokens,)](
            seen, bounds_3BT, batch * tokens, tokens, keys, seen.stride(0), seen.stride(2), BLOCK=RANGE_BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return bounds_3BT


def mask_bytes(seen: Tensor) -> Tensor:
    return (seen if seen.stride(-1) == 1 else seen.contiguous()).view(torch.uint8)


def _heads(*given: Tensor) -> list[Tensor]:
    return [each if each.stride(-1) == 1 else each.contiguous() for each in given]


def tile_of(q_BQTD: Tensor, k_BGLD: Tensor, v_BGLV: Tensor, softcap: float) -> tuple[int, int, Group, dict[str, int]]:
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
    """y_BQTV, the heads of a token side by side, and logsumexp_BQT, inf where a query sees nothing. softcap: 0 for
    none."""
    (batch, heads, tokens, _), (_, groups, keys, width) = q_BQTD.shape, v_BGLV.shape
    y = q_BQTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
    logsumexp_BQT = torch.empty((batch, heads, tokens), dtype=torch.float32, device=y.device)
    if y.numel() == 0 or keys == 0:
        return y.zero_(), logsumexp_BQT.fill_(torch.inf)
    q, k, v = _heads(q_BQTD, k_BGLD.to(q_BQTD.dtype), v_BGLV.to(q_BQTD.dtype))
    seen, sink = mask_bytes(seen_B1TL), None if sink_Q is None else sink_Q.contiguous()
    pairs, _, tile, options = tile_of(q, k, v, softcap)
    splits, of_group = cdiv(keys, SPLIT), heads // groups
    apart = splits > 1 and cdiv(tokens * of_group, pairs) * batch * groups < PROGRAMS
    at_once = max(1, PARTS // (batch * heads * splits * width)) if apart else tokens
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        q_part, seen_part, y_part, lse_part = (
            each[:, :, first : first + count] for each in (q, seen, y, logsumexp_BQT)
        )
        most_SR = total_SR = part_SRV = None
        if apart:
            most_SR, total_SR = torch.empty(
                (2, splits, batch * heads * count), dtype=torch.float32, device=y.device
            ).unbind()
            part_SRV = torch.empty((*most_SR.shape, width), dtype=torch.float32, device=y.device)
        _attend[(cdiv(count * of_group, pairs), batch * groups, splits if apart else 1)](
            q_part, k, v, seen_part, bounds_3BT[:, :, first:], sink, y_part, lse_part, part_SRV, most_SR, total_SR,
            count, keys, splits, scale, groups, bounds_3BT.stride(0), tokens,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], seen.stride(0), seen.stride(2), TILE=tile, **UNFUSED,
            **options,
        )  # fmt: skip
        if apart:
            _combine[(count * of_group, batch * groups)](
                part_SRV, most_SR, total_SR, sink, y_part, lse_part, count, splits, groups, tokens,
                HEADS=of_group, V=width, V_BLOCK=max(16, next_power_of_2(width)), num_warps=1, **UNFUSED,
            )  # fmt: skip
    return y, logsumexp_BQT


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

# Scores are in powers of two.
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rescale(most, new):
    """What sums relative to 2^most are multiplied by when they become relative to 2^new."""
    return tl.exp2(most - tl.where(new == float("-inf"), 0.0, new))


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
    return sums / some[:, None], tl.where(sees, (most + tl.log2(some)) * LN_2, float("inf"))


@triton.jit
def capped(s, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0.0:  # of tanh
        return SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp(s * (2.0 / SOFTCAP)))
    else:
        return s


@triton.jit
def _scores(dots, scale, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0.0:
        return capped(dots * scale, SOFTCAP) * LOG2_E
    else:
        return dots * (scale * LOG2_E)


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
    sums, q_tile, k, v, seen, begin, stop, first_M, end_M, own_M, place_M, holes, k_token, v_token, scale,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The keys from `begin` to `stop` for the pairs of own_M. Without masks all pairs see all of these."""
    part, total_M, most_M = sums
    inner_N = tl.arange(0, TILE.N)
    inner_D, inner_V = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK)
    inside_D, inside_V = _inside(inner_D, TILE.D, TILE.D_BLOCK), _inside(inner_V, TILE.V, TILE.V_BLOCK)
    # Wide arithmetic on scalars, narrow offsets on tiles: pointers to whole tiles would fill the registers.
    k_DN = (inner_N * k_token)[None, :] + inner_D[:, None]
    v_NV = (inner_N * v_token)[:, None] + inner_V[None, :]
    zero = tl.zeros((), tl.int64)
    for at in range(begin, stop, TILE.N):
        there_N = at + inner_N < stop if MASKED else inner_N < TILE.N
        wide_at = zero + at
        k_tile = tl.load(k + wide_at * k_token + k_DN, mask=there_N[None, :] & inside_D[:, None], other=0.0)
        s = _scores(tl.dot(q_tile, k_tile, input_precision="ieee"), scale, TILE.SOFTCAP)
        if MASKED:
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


@triton.jit
def _attend_piece(q_tile, of_keys, split, TILE: tl.constexpr):
    """Sums of values, of exponentials, and the largest score, of the split-th SPLIT keys from each first one on."""
    k, v, seen, first_M, end_M, place_M, holes, k_token, v_token, keys, scale = of_keys
    sums = (
        tl.zeros((TILE.M, TILE.V_BLOCK), tl.float32),
        tl.zeros((TILE.M,), tl.float32),
        tl.full((TILE.M,), float("-inf"), tl.float32),
    )
    begin = tl.min(first_M, 0)
    seen_by_all = tl.where(holes > 0, 0, tl.min(tl.where(first_M == begin, end_M, 0), 0))
    while begin < keys:  # once for each first key
        own_M = first_M == begin
        start = begin + split * TILE.SPLIT
        stop = tl.minimum(start + TILE.SPLIT, tl.max(tl.where(own_M, end_M, 0), 0))
        masked = start + tl.maximum(tl.minimum(seen_by_all, stop) - start, 0) // TILE.N * TILE.N
        sums = _attend_keys(
            sums, q_tile, k, v, seen, start, masked, first_M, end_M, own_M, place_M, holes, k_token, v_token, scale,
            False, TILE,
        )  # fmt: skip
        sums = _attend_keys(
            sums, q_tile, k, v, seen, masked, stop, first_M, end_M, own_M, place_M, holes, k_token, v_token, scale,
            True, TILE,
        )  # fmt: skip
        begin = tl.min(tl.where(first_M > begin, first_M, keys), 0)
    return sums


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "splits", "scale", "all_tokens", "bound_stride"])
def _attend(
    q, k, v, seen, bounds, sink_Q, y, logsumexp, part_SRV, most_SR, total_SR, tokens, keys, splits, scale, groups,
    bound_stride, all_tokens, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    seen_batch, seen_token, TILE: tl.constexpr,
):  # fmt: skip
    """One piece of the keys for M pairs of a query and one of the heads that share their keys, or all of them one after
    another, and the result. y (B, T, Q, V) and logsumexp (B, Q, T) are contiguous, and begin at the first of `tokens`
    of all_tokens."""
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
    of_keys = (k, v, seen, first_M, end_M, place_M, holes, k_token, v_token, keys, scale)
    if part_SRV is None:
        most_M = tl.full((M,), float("-inf"), tl.float32)
        total_M = tl.zeros((M,), tl.float32)
        if sink_Q is not None:
            most_M = tl.load(sink_Q + head_M, mask=inside_M, other=0.0).to(tl.float32) * LOG2_E
            total_M = total_M + 1.0
        sums = tl.zeros((M, TILE.V_BLOCK), tl.float32)
        for each in range(tl.minimum(splits, tl.cdiv(tl.max(end_M - first_M, 0), TILE.SPLIT))):  # others add zeros
            part, of_part_M, most_of_part_M = _attend_piece(q_tile, of_keys, each, TILE)
            sums, total_M, most_M = _merged(sums, total_M, most_M, part, of_part_M, most_of_part_M)
        found, found_M = _finished(sums, total_M, most_M)
        of_y_M = (batch.to(tl.int64) * all_tokens + token_M) * (groups * HEADS) + head_M
        place = of_y_M[:, None] * TILE.V + inner_V[None, :]
        tl.store(y + place, found.to(y.dtype.element_ty), mask=inside_M[:, None] & inside_V[None, :])
        row_M = (batch * (groups * HEADS) + head_M).to(tl.int64) * all_tokens + token_M
        tl.store(logsumexp + row_M, found_M, mask=inside_M)
    else:
        part, total_M, most_M = _attend_piece(q_tile, of_keys, split, TILE)
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
        most = tl.load(sink_Q + head + one).to(tl.float32) * LOG2_E
        total = total + 1.0
    sums = tl.zeros((1, V_BLOCK), tl.float32)
    for split in range(splits):
        row = (split * (tl.num_programs(1) * HEADS) + tl.program_id(1) * HEADS + within).to(tl.int64) * tokens + token
        of_part, most_of_part = tl.load(total_SR + row + one), tl.load(most_SR + row + one)
        stored = (of_part > 0)[:, None] & (inner_V < V)[None, :]
        part = tl.load(part_SRV + row * V + inner_V[None, :], mask=stored, other=0.0)
        sums, total, most = _merged(sums, total, most, part, of_part, most_of_part)
    found, found_lse = _finished(sums, total, most)
    of_y = (batch.to(tl.int64) * all_tokens + token) * (groups * HEADS) + head
    tl.store(y + of_y * V + inner_V[None, :], found.to(y.dtype.element_ty), mask=(inner_V < V)[None, :])
    tl.store(logsumexp + (batch * (groups * HEADS) + head).to(tl.int64) * all_tokens + token + one, found_lse)
