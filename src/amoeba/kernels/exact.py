"""Products, sums and attention whose results for a row depend on that row alone, on a GPU. For `amoeba.ops.exact`.

    product(a_EMK, b_EKN), row_sum(x), attention(q, k, v, sink, seen, scale, softcap)

A tensor core adds up the elements of a step of the reduction at once, and step after step. So what fixes a result are
the steps and the instruction, and these are the same for one row and for thousands: a tile that is not full is
computed as if it were.

Attention begins its blocks of keys at the first key that the query sees, so padding before a text and room behind it
do not shift them. Most queries of a tile begin at the same key; where they do not (windows, documents) the tile goes
through the keys once for each first key, and rows with another one add exact zeros. Pieces of SPLIT keys are computed
by different programs and added up in their order.

B rows of a batch · Q query heads · G key and value heads · T tokens · L keys · D, V of a head · S pieces of the keys ·
E matrices · M rows, K summed, N columns of each
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.constants import Group
from amoeba.kernels.grouped_gemm import multiply_rows
from amoeba.kernels.launch import cdiv, next_power_of_2, quick
from amoeba.kernels.tile_sizes import Product, for_any_rows

WARPS = 4
COLUMNS = 1024  # that a product is taken to have
SUM_BLOCK = 1024  # columns of a row at a time
RANGE_BLOCK = 1024  # keys at a time, to find the first and the last that a query sees
# Attention: pairs of a query and a head, keys, warps and stages of a tile, such that Triton 3.9 spills at most 48 bytes
# of a thread for sm_80, sm_86 and sm_90. Speed not measured yet.
TILES = {"half": (64, 64, 8, 2), "half, wide heads": (32, 32, 8, 1), "fp32": (32, 32, 8, 1)}
WIDE = 128
SPLIT = 512  # keys; a multiple of those of a tile
PARTS = 1 << 26  # fp32 numbers between the two launches of attention, at most


def product(a_EMK: Tensor, b_EKN: Tensor) -> Tensor:
    """a @ b in fp32; a and b have one dtype."""
    (count, rows, depth), columns = a_EMK.shape, b_EKN.shape[2]
    if depth == 1:  # exact, and no tile to compile for each number of columns
        return a_EMK.float() * b_EKN.float()
    out = torch.empty(count * rows, columns, dtype=torch.float32, device=a_EMK.device)
    if depth == 0 or out.numel() == 0:
        return out.zero_().view(count, rows, columns)
    offs_E = torch.arange(1, count + 1, dtype=torch.int32, device=out.device) * rows
    rows_NK = a_EMK.detach().reshape(count * rows, depth)
    sizes = Product(rows, 1, depth, COLUMNS, rows_NK.dtype)  # in a product of two batches, columns may be tokens
    multiply_rows(rows_NK, b_EKN.detach(), offs_E, out, configuration=for_any_rows(out.device, "product", sizes))
    return out.view(count, rows, columns)


# --- sums


def row_sum(x: Tensor) -> Tensor:
    """Over the last dimension, in fp32."""
    columns = x.shape[-1]
    out = torch.zeros(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel():
        _row_sum[(out.numel(),)](x.detach().contiguous(), out, columns, BLOCK=SUM_BLOCK, num_warps=WARPS)
    return out


@quick
@triton.jit(do_not_specialize=["columns"])
def _row_sum(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


# --- attention


def attention(
    q_BQTD: Tensor,
    k_BGLD: Tensor,
    v_BGLV: Tensor,
    sink_Q: Tensor | None,
    seen_B1TL: Tensor,
    scale: float,
    softcap: float,
) -> Tensor:
    """y_BQTV. softcap: 0 for none."""
    (batch, heads, tokens, size), (_, groups, keys, width) = q_BQTD.shape, v_BGLV.shape
    y = q_BQTD.new_empty(batch, heads, tokens, width)
    if y.numel() == 0 or keys == 0:
        return y.zero_()
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q_BQTD, k_BGLD, v_BGLV))
    k, v = k.to(q.dtype), v.to(q.dtype)
    seen = seen_B1TL.expand(batch, 1, tokens, keys)
    seen = (seen if seen.stride(-1) == 1 else seen.contiguous()).view(torch.uint8)
    splits, of_group = cdiv(keys, SPLIT), heads // groups
    at_once = max(1, PARTS // (batch * heads * splits * width))
    kind = "fp32" if q.dtype == torch.float32 else "half" if size <= WIDE else "half, wide heads"
    pairs, block, warps, stages = TILES[kind]
    tile = {"M": pairs, "N": block, "SPLIT": SPLIT, "D": size, "D_BLOCK": max(16, next_power_of_2(size))}
    of_head = {"V": width, "V_BLOCK": max(16, next_power_of_2(width)), "HEADS": of_group}
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        q_part, seen_part, y_part = (each[:, :, first : first + count] for each in (q, seen, y))
        first_BT, end_BT = torch.empty(2, batch, count, dtype=torch.int32, device=y.device)
        _range[(batch * count,)](
            seen_part, first_BT, end_BT, count, keys, seen.stride(0), seen.stride(2), BLOCK=RANGE_BLOCK, num_warps=WARPS
        )
        most_SR = torch.empty(splits, batch * heads * count, dtype=torch.float32, device=y.device)
        total_SR = torch.empty_like(most_SR)
        part_SRV = torch.empty(*most_SR.shape, width, dtype=torch.float32, device=y.device)
        _attend[(cdiv(count * of_group, pairs), batch * groups, splits)](
            q_part, k, v, seen_part, first_BT, end_BT, part_SRV, most_SR, total_SR, count, keys, scale, groups,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], seen.stride(0), seen.stride(2),
            TILE=Group(**tile, **of_head, SOFTCAP=softcap), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        _combine[(count * of_group, batch * groups)](
            part_SRV, most_SR, total_SR, None if sink_Q is None else sink_Q.contiguous(), y_part, count, splits,
            groups, *y.stride()[:3], **of_head, num_warps=1,
        )  # fmt: skip
    return y


@quick
@triton.jit(do_not_specialize=["tokens", "keys"])
def _range(seen, first_BT, end_BT, tokens, keys, stride_batch, stride_token, BLOCK: tl.constexpr):
    """The first key that each query sees, and the one behind the last; `keys` and 0 where it sees none."""
    row = tl.program_id(0)
    seen += (row // tokens).to(tl.int64) * stride_batch + (row % tokens).to(tl.int64) * stride_token
    first, end = keys, 0
    for at in range(0, keys, BLOCK):
        key = at + tl.arange(0, BLOCK)
        looks = tl.load(seen + key, mask=key < keys, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(looks, key, keys), 0))
        end = tl.maximum(end, tl.max(tl.where(looks, key + 1, 0), 0))
    tl.store(first_BT + row, first)
    tl.store(end_BT + row, end)


@triton.jit
def _rescale(most, new):
    """What sums relative to exp(most) are multiplied by when they become relative to exp(new)."""
    return tl.exp(most - tl.where(new == float("-inf"), 0.0, new))


@quick
@triton.jit(do_not_specialize=["tokens", "keys", "scale"])
def _attend(
    q, k, v, seen, first_BT, end_BT, part_SRV, most_SR, total_SR, tokens, keys, scale, groups,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, seen_batch, seen_token,
    TILE: tl.constexpr,
):  # fmt: skip
    """One piece of the keys for M pairs of a query and one of the heads that share their keys."""
    HEADS: tl.constexpr = TILE.HEADS
    SPLIT: tl.constexpr = TILE.SPLIT
    M: tl.constexpr = TILE.M
    N: tl.constexpr = TILE.N
    D: tl.constexpr = TILE.D
    V: tl.constexpr = TILE.V
    pair_M = tl.program_id(0) * M + tl.arange(0, M)
    batch, group, split = tl.program_id(1) // groups, tl.program_id(1) % groups, tl.program_id(2)
    inside_M = pair_M < tokens * HEADS
    token_M, head_M = pair_M // HEADS, group * HEADS + pair_M % HEADS
    first_M = tl.load(first_BT + batch * tokens + token_M, mask=inside_M, other=keys)
    end_M = tl.load(end_BT + batch * tokens + token_M, mask=inside_M, other=0)
    inner_D, inner_V, inner_N = tl.arange(0, TILE.D_BLOCK), tl.arange(0, TILE.V_BLOCK), tl.arange(0, N)
    q += batch.to(tl.int64) * q_batch
    q_MD = head_M.to(tl.int64)[:, None] * q_head + token_M.to(tl.int64)[:, None] * q_token + inner_D[None, :]
    q_tile = tl.load(q + q_MD, mask=inside_M[:, None] & (inner_D < D)[None, :], other=0.0)
    k += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    # Wide arithmetic on scalars, narrow offsets on tiles: pointers to whole tiles would fill the registers.
    first_token = tl.program_id(0) * M // HEADS
    seen += batch.to(tl.int64) * seen_batch + first_token.to(tl.int64) * seen_token
    seen_MN = ((token_M - first_token) * seen_token)[:, None] + inner_N[None, :]
    k_DN = (inner_N * k_token)[None, :] + inner_D[:, None]
    v_NV = (inner_N * v_token)[:, None] + inner_V[None, :]
    most_M = tl.full((M,), float("-inf"), tl.float32)
    total_M = tl.zeros((M,), tl.float32)
    part = tl.zeros((M, TILE.V_BLOCK), tl.float32)
    begin, zero = tl.min(first_M, 0), tl.zeros((), tl.int64)
    while begin < keys:  # once for each first key
        own_M = first_M == begin
        stop = tl.max(tl.where(own_M, end_M, 0), 0)
        for at in range(begin + split * SPLIT, tl.minimum(begin + (split + 1) * SPLIT, stop), N):
            there_N = at + inner_N < stop
            wide_at = zero + at
            k_at, v_at = k + wide_at * k_token, v + wide_at * v_token
            k_tile = tl.load(k_at + k_DN, mask=there_N[None, :] & (inner_D < D)[:, None], other=0.0)
            s = tl.dot(q_tile, k_tile, input_precision="ieee") * scale
            if TILE.SOFTCAP > 0.0:
                s = TILE.SOFTCAP - 2.0 * TILE.SOFTCAP / (1.0 + tl.exp(s * (2.0 / TILE.SOFTCAP)))  # of tanh
            looks = tl.load(seen + at + seen_MN, mask=own_M[:, None] & there_N[None, :], other=0) != 0
            s = tl.where(looks, s, float("-inf"))
            new_M = tl.maximum(most_M, tl.max(s, 1))
            p = _rescale(s, new_M[:, None])
            kept_M = _rescale(most_M, new_M)
            total_M = total_M * kept_M + tl.sum(p, 1)
            v_tile = tl.load(v_at + v_NV, mask=there_N[:, None] & (inner_V < V)[None, :], other=0.0)
            part = tl.dot(p.to(v_tile.dtype), v_tile, part * kept_M[:, None], input_precision="ieee")
            most_M = new_M
        begin = tl.min(tl.where(first_M > begin, first_M, keys), 0)
    row_M = (split * (tl.num_programs(1) * HEADS) + tl.program_id(1) * HEADS + pair_M % HEADS).to(tl.int64)
    row_M = row_M * tokens + token_M
    tl.store(most_SR + row_M, most_M, mask=inside_M)
    tl.store(total_SR + row_M, total_M, mask=inside_M)
    stored = (inside_M & (total_M > 0))[:, None] & (inner_V < V)[None, :]
    tl.store(part_SRV + row_M[:, None] * V + inner_V[None, :], part, mask=stored)


@quick
@triton.jit(do_not_specialize=["tokens", "splits"])
def _combine(
    part_SRV, most_SR, total_SR, sink_Q, y, tokens, splits, groups, y_batch, y_head, y_token,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
):  # fmt: skip
    """A query of a head: what the sink adds, then the pieces in their order."""
    token, within = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    batch, head = tl.program_id(1) // groups, tl.program_id(1) % groups * HEADS + within
    inner_V = tl.arange(0, V_BLOCK)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    if sink_Q is not None:
        most = tl.load(sink_Q + head).to(tl.float32)
        total = total + 1.0
    sum_V = tl.zeros((V_BLOCK,), tl.float32)
    for split in range(splits):
        row = (split * (tl.num_programs(1) * HEADS) + tl.program_id(1) * HEADS + within).to(tl.int64) * tokens + token
        of_part, most_of_part = tl.load(total_SR + row), tl.load(most_SR + row)
        new = tl.maximum(most, most_of_part)
        kept, added = _rescale(most, new), _rescale(most_of_part, new)
        stored = tl.where(of_part > 0, V, 0)
        part_V = tl.load(part_SRV + row * V + inner_V, mask=inner_V < stored, other=0.0)
        sum_V = sum_V * kept + part_V * added
        total = total * kept + of_part * added
        most = new
    found_V = sum_V / tl.where(total == 0, 1.0, total)
    y += batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head + token.to(tl.int64) * y_token
    tl.store(y + inner_V, found_V.to(y.dtype.element_ty), mask=inner_V < V)
