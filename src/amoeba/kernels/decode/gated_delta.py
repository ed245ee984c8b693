"""One token of gated delta networks (Qwen3-Next, Qwen3.5): all between the joined projection and that of the output.

B rows · P of a row of the projection · G heads of queries and keys, D wide · Q heads of values, V wide, Q / G to a head
of keys · C = 2·G·D + Q·V channels of the convolution · N taps of it · L tokens that it keeps

    y_BQV = gated_delta(x_BP, places, conv_CN, bias_C, decay_Q, time_Q, norm_V, conv_BCL, state_BQDV, eps=1e-6)

For each row: the convolution's state moves on by a token, queries, keys and values go through it and through silu,
queries and keys get length 1, and with g = -exp(decay)·softplus(a + time) and beta = sigmoid(b)

    state = exp(g)·state + k·(beta·(v - exp(g)·stateᵀk))ᵀ        y = norm(stateᵀq / √D)·silu(z)

`places` says where in a row of x the parts of a head lie. Both states are written in place. A program takes one head of
keys with all heads of values that share it: their channels of the convolution move on once. It asks for the first state
before it looks at x, where launches overlap, so the launch before this one must not write states. Numbers are rounded
where transformers rounds them; the state is read and added to in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.decode.configuration import can_overlap
from amoeba.kernels.launch import quick
from amoeba.kernels.launch.arguments import check_arguments

MOST_WIDTH = 256  # of a head: a program holds two states
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
        and taps - 1 <= kept <= 8
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
        overlap = can_overlap(x_BP.device)
        _gated_delta[(rows, key_heads)](
            x_BP, conv_CN, bias_C, decay_Q, time_Q, norm_V, conv_BCL, state_BQDV, y_BQV, eps,
            key_width**-0.5, P=x_BP.shape[1],
            C=channels, G=key_heads, GROUP=value_heads // key_heads, D=key_width, V=value_width, N=taps, L=kept,
            OVERLAP=overlap, num_warps=max(1, min(16, key_width * value_width // (32 * ELEMENTS))), **places._asdict(),
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return y_BQV


@triton.jit
def _convolved(x, conv, bias, states, channel, DTYPE: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """Through the convolution and silu, in fp32. x: where the channels' new numbers lie, states: their old ones."""
    total = tl.load(x).to(tl.float32) * tl.load(conv + channel * N + N - 1).to(tl.float32)
    for tap in tl.static_range(N - 1):
        old = tl.load(states + channel * L + L - N + 1 + tap).to(tl.float32)
        total += old * tl.load(conv + channel * N + tap).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel).to(tl.float32)
    total = total.to(DTYPE).to(tl.float32)
    return (total * tl.sigmoid(total)).to(DTYPE).to(tl.float32)


@triton.jit
def _older(states, channel, L: tl.constexpr):
    """What the convolution's state holds afterwards, but for the new numbers."""
    token = tl.arange(0, 8)
    return tl.load(states + tl.expand_dims(channel * L, -1) + 1 + token, mask=token < L - 1, other=0.0)


@triton.jit
def _move_on(x, states, channel, older, L: tl.constexpr):
    token = tl.arange(0, 8)
    tl.store(states + tl.expand_dims(channel * L, -1) + token, older, mask=token < L - 1)
    tl.store(states + channel * L + L - 1, tl.load(x).to(older.dtype))


@quick
@triton.jit
def _gated_delta(
    x, conv, bias, decay, time_bias, norm, conv_states, states, y, eps, scale, P: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    L: tl.constexpr, OVERLAP: tl.constexpr, query: tl.constexpr, key: tl.constexpr, value: tl.constexpr,
    gate: tl.constexpr, beta: tl.constexpr, time: tl.constexpr, query_stride: tl.constexpr, value_stride: tl.constexpr,
    beta_stride: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = y.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, v = tl.arange(0, D), tl.arange(0, V)
    first = row * (G * GROUP) + head * GROUP  # of the heads of values
    tile = states + first * (D * V) + d[:, None] * V + v[None, :]
    coming = tl.load(tile)
    weight = tl.load(norm + v).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x += row * P
    conv_states += row * (C * L)
    pair = tl.arange(0, 2)[None, :]  # queries and keys, one next to the other
    qk_x = x + query + pair * (key - query) + head * query_stride + d[:, None]
    qk_channel = pair * (G * D) + head * D + d[:, None]
    qk = _convolved(qk_x, conv, bias, conv_states, qk_channel, DTYPE, N, L)
    q, k = tl.split(qk * tl.rsqrt(tl.sum(qk * qk, axis=0) + 1e-6)[None, :])
    q *= scale
    qk_older = _older(conv_states, qk_channel, L)
    for number in tl.static_range(GROUP):
        state = coming.to(tl.float32)
        if number + 1 < GROUP:
            coming = tl.load(tile + (number + 1) * (D * V))
        own = head * GROUP + number
        v_x, v_channel = x + value + head * value_stride + number * V + v, 2 * G * D + own * V + v
        v_new = _convolved(v_x, conv, bias, conv_states, v_channel, DTYPE, N, L)
        v_older = _older(conv_states, v_channel, L)
        b = tl.load(x + beta + head * beta_stride + number).to(tl.float32)
        a = tl.load(x + time + head * beta_stride + number).to(tl.float32) + tl.load(time_bias + own).to(tl.float32)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        g = -tl.exp(tl.load(decay + own).to(tl.float32)) * softplus
        state *= tl.exp(g)
        change = (v_new - tl.sum(state * k[:, None], axis=0)) * tl.sigmoid(b).to(DTYPE).to(tl.float32)
        state += k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], axis=0).to(DTYPE).to(tl.float32)
        normed = (out * tl.rsqrt(tl.sum(out * out, axis=0) / V + eps)).to(DTYPE).to(tl.float32)
        z = tl.load(x + gate + head * value_stride + number * V + v).to(tl.float32)
        gated = (weight * normed).to(DTYPE).to(tl.float32) * (z * tl.sigmoid(z))
        tl.store(y + (first + number) * V + v, gated.to(DTYPE))
        tl.debug_barrier()  # all threads have read what is written now
        tl.store(tile + number * (D * V), state.to(states.dtype.element_ty))
        _move_on(v_x, conv_states, v_channel, v_older, L)
    _move_on(qk_x, conv_states, qk_channel, qk_older, L)
