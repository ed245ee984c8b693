"""One token of gated delta networks (Qwen3-Next, Qwen3.5): all between the joined projection and that of the output.

B rows · P of a row of the projection · G heads of queries and keys, D wide · Q heads of values, V wide, Q / G to a head
of keys · C = 2·G·D + Q·V channels of the convolution · N taps of it · L tokens that it keeps

    y_BQV = gated_delta(x_BP, places, conv_CN, bias_C, decay_Q, time_Q, norm_V, conv_BCL, state_BQDV, eps=1e-6)

For each row: the convolution's state moves on by a token, queries, keys and values go through it and through silu,
queries and keys get length 1, and with g = -exp(decay)·softplus(a + time) and beta = sigmoid(b)

    state = exp(g)·state + k·(beta·(v - exp(g)·stateᵀk))ᵀ        y = norm(stateᵀq / √D)·silu(z)

`places` says where in a row of x the parts of a head lie. Both states are written in place. There are two launches: one
for the convolution, a program for each head of queries, keys and values, since heads of values share those of keys; and
one for the rest, a program for each head of values. Where launches overlap they ask for states before they look at what
the launch ahead computes, which must not write them. Numbers are rounded where transformers rounds them; the state is
read and added to in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import next_power_of_2, quick
from amoeba.kernels.launch.arguments import check_arguments

MOST_WIDTH = 256  # of a head: a program holds its state
ELEMENTS = 64  # of a state that a thread holds


class Places(NamedTuple):
    """Columns of a row of the projection: where the part of the first head lies, and how far it is from one head of
    keys to the next. Heads of values of one head of keys lie side by side."""

    query: int
    key: int
    value: int
    gate: int
    beta: int
    time: int
    query_stride: int
    value_stride: int
    beta_stride: int


def why_not(key_width: int, value_width: int, key_heads: int, value_heads: int) -> str | None:
    powers = all(width & (width - 1) == 0 and 1 < width <= MOST_WIDTH for width in (key_width, value_width))
    if not powers:
        return f"takes heads of powers of two, up to {MOST_WIDTH} wide, not {key_width} and {value_width}"
    if value_heads % key_heads:
        return f"takes a multiple of the {key_heads} heads of keys, not {value_heads} of values"
    return None


def gated_delta(
    x_BP: Tensor,
    places: Places,
    conv_CN: Tensor,
    bias_C: Tensor | None,
    decay_Q: Tensor,
    time_Q: Tensor,
    norm_V: Tensor,
    conv_BCL: Tensor,
    state_BQDV: Tensor,
    *,
    eps: float,
) -> Tensor:
    rows, value_heads, key_width, value_width = state_BQDV.shape
    channels, taps = conv_CN.shape
    key_heads = (channels - value_heads * value_width) // (2 * key_width)
    kept = conv_BCL.shape[2]
    given = (x_BP, conv_CN, decay_Q, time_Q, norm_V, conv_BCL, state_BQDV)
    check_arguments(
        all(each.is_contiguous() for each in given)
        and x_BP.shape[0] == rows
        and conv_BCL.shape == (rows, channels, kept)
        and kept >= taps - 1
        and channels == 2 * key_heads * key_width + value_heads * value_width
        and decay_Q.shape == time_Q.shape == (value_heads,)
        and norm_V.shape == (value_width,)
        and (bias_C is None or (bias_C.shape == (channels,) and bias_C.is_contiguous()))
        and why_not(key_width, value_width, key_heads, value_heads) is None,
        "contiguous rows, and states of heads of powers of two",
        x_BP=x_BP,
        conv_CN=conv_CN,
        conv_BCL=conv_BCL,
        state_BQDV=state_BQDV,
    )
    y_BQV = x_BP.new_empty((rows, value_heads, value_width))
    if rows:
        mixed_BC = x_BP.new_empty((rows, channels), dtype=torch.float32)
        rates_BQ2 = x_BP.new_empty((rows, value_heads, 2), dtype=torch.float32)  # exp(g) and beta
        overlap = can_overlap(x_BP.device)
        sizes = {"P": x_BP.shape[1], "C": channels, "G": key_heads, "GROUP": value_heads // key_heads}
        sizes |= {"D": key_width, "V": value_width, "OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
        _convolve[(rows, 2 * key_heads + value_heads)](
            x_BP, conv_CN, bias_C, decay_Q, time_Q, conv_BCL, mixed_BC, rates_BQ2, key_width**-0.5, N=taps, L=kept,
            KEPT=next_power_of_2(kept), num_warps=1, **sizes, **places._asdict(),
        )  # fmt: skip
        _update[(rows, value_heads)](
            x_BP, mixed_BC, rates_BQ2, norm_V, state_BQDV, y_BQV, eps, gate=places.gate, STRIDE=places.value_stride,
            num_warps=max(1, min(16, key_width * value_width // (32 * ELEMENTS))), **sizes,
        )  # fmt: skip
    return y_BQV


@quick
@triton.jit
def _convolve(
    x, conv, bias, decay, time_bias, states, mixed, rates, scale, P: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr, L: tl.constexpr, KEPT: tl.constexpr,
    OVERLAP: tl.constexpr, query: tl.constexpr, key: tl.constexpr, value: tl.constexpr, gate: tl.constexpr,
    beta: tl.constexpr, time: tl.constexpr, query_stride: tl.constexpr, value_stride: tl.constexpr,
    beta_stride: tl.constexpr,
):  # fmt: skip
    """A head of queries, of keys or of values."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    BLOCK: tl.constexpr = D if D > V else V
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = head - 2 * G  # of the heads of values
    if own < 0:
        width, first = D, head * D
        column = head % G * query_stride + (query if head < G else key)
    else:
        width, first = V, 2 * G * D + own * V
        column = own // GROUP * value_stride + own % GROUP * V + value
    place, token = tl.arange(0, BLOCK), tl.arange(0, KEPT)
    inside, channel = place < width, first + place
    tile = states + row * (C * L) + (channel * L)[:, None] + token[None, :]
    old = tl.load(tile, mask=inside[:, None] & (token < L)[None, :], other=0.0)
    tap = token + N - 1 - L
    taps = inside[:, None] & ((tap >= 0) & (token < L))[None, :]
    weight = tl.load(conv + (channel * N)[:, None] + tap[None, :], mask=taps, other=0.0).to(tl.float32)
    last = tl.load(conv + channel * N + N - 1, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x += row * P
    new = tl.load(x + column + place, mask=inside, other=0.0)
    total = tl.sum(old.to(tl.float32) * weight, axis=1) + new.to(tl.float32) * last
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total = total.to(DTYPE).to(tl.float32)
    out = (total * tl.sigmoid(total)).to(DTYPE).to(tl.float32)
    if own < 0:
        out *= tl.rsqrt(tl.sum(out * out, axis=0) + 1e-6)
        if head < G:
            out *= scale
    else:
        at = own // GROUP * beta_stride + own % GROUP
        b, a = tl.load(x + beta + at).to(tl.float32), tl.load(x + time + at).to(tl.float32)
        a += tl.load(time_bias + own).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        rates += (row * (G * GROUP) + own) * 2
        tl.store(rates, tl.exp(-tl.exp(tl.load(decay + own).to(tl.float32)) * softplus))
        tl.store(rates + 1, tl.sigmoid(b).to(DTYPE).to(tl.float32))
    tl.store(mixed + row * C + channel, out, mask=inside)
    tl.debug_barrier()  # all threads have read what is written now
    tl.store(tile - 1, old, mask=inside[:, None] & ((token > 0) & (token < L))[None, :])
    tl.store(states + row * (C * L) + channel * L + L - 1, new.to(old.dtype), mask=inside)


@quick
@triton.jit
def _update(
    x, mixed, rates, norm, states, y, eps, P: tl.constexpr, C: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, OVERLAP: tl.constexpr, gate: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = y.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, v = tl.arange(0, D), tl.arange(0, V)
    own = row * (G * GROUP) + head
    states += own * (D * V) + d[:, None] * V + v[None, :]
    state, weight = tl.load(states).to(tl.float32), tl.load(norm + v).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mixed += row * C
    q, k = tl.load(mixed + head // GROUP * D + d), tl.load(mixed + (G + head // GROUP) * D + d)
    new = tl.load(mixed + 2 * G * D + head * V + v)
    decay, beta = tl.load(rates + own * 2), tl.load(rates + own * 2 + 1)
    z = tl.load(x + row * P + gate + head // GROUP * STRIDE + head % GROUP * V + v).to(tl.float32)
    state *= decay
    state += k[:, None] * ((new - tl.sum(state * k[:, None], axis=0)) * beta)[None, :]
    out = tl.sum(state * q[:, None], axis=0).to(DTYPE).to(tl.float32)
    normed = (out * tl.rsqrt(tl.sum(out * out, axis=0) / V + eps)).to(DTYPE).to(tl.float32)
    gated = (weight * normed).to(DTYPE).to(tl.float32) * (z * tl.sigmoid(z))
    tl.store(y + own * V + v, gated.to(DTYPE))
    tl.debug_barrier()  # all threads have read what is written now
    tl.store(states, state.to(states.dtype.element_ty))
