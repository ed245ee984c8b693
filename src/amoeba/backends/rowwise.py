"""Activations in plain torch and other row operations between the matrix products: backward, gather-and-sum.

T tokens · K experts per token · N = T·K routed rows · H hidden · I intermediate · J = 2I or I

Plain torch on chunks of rows, so that the working set stays small; half-precision rows are computed in fp32 and
rounded once on the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.core.config import Activation, unknown_kind
from amoeba.core.layout import Layout

# Elements of h per chunk. On a CPU a chunk and its few temporaries stay in the last-level cache; on a GPU a chunk only
# bounds the memory that the temporaries take.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


def activate_rows(h_NJ: Tensor, scale_N: Tensor, activation: Activation, out_NI: Tensor) -> Tensor:
    """out = scale · act(h), row by row."""
    for h, scale, out in in_chunks(h_NJ, scale_N, out_NI):
        h = _wide(h)
        out.copy_(activate(h, activation).mul_(scale[:, None].to(h.dtype)))
    return out_NI


def activate_rows_backward(
    da_NI: Tensor,
    h_NJ: Tensor,
    scale_N: Tensor,
    activation: Activation,
    dh_NJ: Tensor,
    scaled_a_NI: Tensor | None,
) -> Tensor:
    """From dA' (no scale in it yet): writes dh and scale·a, returns ds_N = <dA', a> in the compute dtype."""
    ds_N = torch.empty(h_NJ.shape[0], dtype=_wide_dtype(h_NJ.dtype), device=h_NJ.device)
    differentiate = _gated_backward if activation.gated else _plain_backward
    for h, da, scale, ds, dh, scaled_a in in_chunks(h_NJ, da_NI, scale_N, ds_N, dh_NJ, scaled_a_NI):
        h, da, scale = _wide(h), _wide(da), scale[:, None].to(ds_N.dtype)
        a = differentiate(da, h, scale, activation, dh)
        torch.sum(da * a, dim=-1, out=ds)
        if scaled_a is not None:
            scaled_a.copy_(a.mul_(scale))
    return ds_N


def sum_rows(rows_NH: Tensor, slot_row_TK: Tensor) -> Tensor:
    """Gather-and-sum: out_t = Σ_k rows[slot_row[t, k]], accumulated in fp32 and in the order of k.

    The last row of `rows` is a spare that stands for sentinels; it is never read.
    """
    return F.embedding_bag(slot_row_TK, rows_NH, mode="sum", padding_idx=rows_NH.shape[0] - 1)


def sum_slots(rows_NH: Tensor, expert_TK: Tensor, experts: int) -> Tensor:
    """The same for rows in the order of the slots t·K + k, and a spare one."""
    slots = expert_TK.numel()
    slot_TK = torch.arange(slots, dtype=torch.int64, device=rows_NH.device).view_as(expert_TK)
    return sum_rows(rows_NH, slot_TK.masked_fill((expert_TK < 0) | (expert_TK >= experts), slots))


def slot_gradient(ds_N: Tensor, layout: Layout, weight_TK: Tensor) -> Tensor:
    """ds of the sorted rows back to (T, K), in the dtype of the weights; 0 for sentinels."""
    padded = torch.cat((ds_N, ds_N.new_zeros(1)))
    return padded.index_select(0, layout.slot_row_N).view_as(weight_TK).to(weight_TK.dtype)


def split_gate_up(h: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    if activation.interleaved:
        return h[:, 0::2], h[:, 1::2]
    gate, up = h.chunk(2, dim=1)
    return gate, up


def activate(h: Tensor, activation: Activation) -> Tensor:
    """act(h) in h's own dtype."""
    limit = activation.limit
    clamped = limit != float("inf")
    if not activation.gated:
        return _act(h.clamp(max=limit) if clamped else h, activation)
    gate, up = split_gate_up(h, activation)
    if clamped:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = _act(gate, activation)
    return value.mul_(up + activation.up_shift if activation.up_shift else up)


def _gated_backward(da: Tensor, h: Tensor, scale: Tensor, activation: Activation, dh_out: Tensor) -> Tensor:
    gate, up = split_gate_up(h, activation)
    dgate_out, dup_out = split_gate_up(dh_out, activation)
    limit = activation.limit
    clamped = limit != float("inf")
    gate_in, up_in = (gate.clamp(max=limit), up.clamp(-limit, limit)) if clamped else (gate, up)
    up_in = up_in + activation.up_shift if activation.up_shift else up_in
    value = _act(gate_in, activation)
    scaled = da * scale
    dup = scaled * value
    dgate = _act_backward(scaled.mul_(up_in), gate_in, activation)
    if clamped:
        dgate = dgate.masked_fill_(gate > limit, 0)
        dup = dup.masked_fill_(up.abs() > limit, 0)
    dgate_out.copy_(dgate)
    dup_out.copy_(dup)
    return value.mul_(up_in)


def _plain_backward(da: Tensor, h: Tensor, scale: Tensor, activation: Activation, dh_out: Tensor) -> Tensor:
    limit = activation.limit
    clamped = limit != float("inf")
    h_in = h.clamp(max=limit) if clamped else h
    dh = _act_backward(da * scale, h_in, activation)
    dh_out.copy_(dh.masked_fill_(h > limit, 0) if clamped else dh)
    return _act(h_in, activation)


def _act(z: Tensor, activation: Activation) -> Tensor:
    kind = activation.kind
    if kind == "silu":
        return F.silu(z) if activation.alpha == 1.0 else torch.sigmoid(z * activation.alpha).mul_(z)
    if kind == "gelu":
        return F.gelu(z)
    if kind == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    if kind == "relu":
        return F.relu(z)
    if kind == "relu2":
        return F.relu(z).square_()
    raise unknown_kind(kind, "plain torch (backends/rowwise.py)")


def _act_backward(grad: Tensor, z: Tensor, activation: Activation) -> Tensor:
    kind = activation.kind
    if kind == "silu" and activation.alpha == 1.0:
        return torch.ops.aten.silu_backward(grad, z)
    if kind == "silu":
        sigmoid = torch.sigmoid(z * activation.alpha)
        slope = (1 - sigmoid).mul_(z).mul_(activation.alpha).add_(1).mul_(sigmoid)
        return slope.mul_(grad)
    if kind == "gelu":
        return torch.ops.aten.gelu_backward(grad, z)
    if kind == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, z, approximate="tanh")
    if kind == "relu":
        return grad * (z > 0)
    if kind == "relu2":
        return F.relu(z).mul_(2).mul_(grad)
    raise unknown_kind(kind, "plain torch (backends/rowwise.py)")


def in_chunks(h_NJ: Tensor, *others: Tensor | None) -> Iterator[list[Any]]:
    """The same rows of each; what another tensor has beyond those of h is left out."""
    rows, width = h_NJ.shape
    step = max(1, CHUNK_ELEMENTS.get(h_NJ.device.type, 1 << 20) // width)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        yield [t if t is None or t.shape[0] == end - start else t[start:end] for t in (h_NJ, *others)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _wide(tensor: Tensor) -> Tensor:
    dtype = _wide_dtype(tensor.dtype)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
