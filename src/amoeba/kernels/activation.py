"""Activations and their slopes on tiles in registers, in fp32: what the kernels' epilogues and row passes share.

Called from Triton and from Gluon kernels alike. What an `Activation` says becomes compile-time constants:

    constants(activation)  # {"KIND": "silu", "GATED": True, "ALPHA": 1.0, "CLAMP": False, "LIMIT": 0.0, ...}
    group(activation)      # the same, and INTERLEAVED, as one parameter of a kernel

The functions take that group as A, or a plan that has the same constants.
"""

from __future__ import annotations

import math
from functools import cache

import triton
import triton.language as tl

from amoeba.core.config import Activation, unknown_kind
from amoeba.kernels.constants import Group

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")  # of `value_and_slope`


def constants(activation: Activation, fast: bool = False) -> dict[str, object]:
    """The compile-time constants that a kernel with an activation takes. fast: see `_fast_sigmoid`."""
    if activation.kind not in KINDS:
        raise unknown_kind(activation.kind, "a kernel (kernels/activation.py)")
    clamp = activation.limit != math.inf
    return {
        "KIND": fast_kind(activation.kind) if fast else activation.kind,
        "GATED": activation.gated,
        "ALPHA": activation.alpha,
        "CLAMP": clamp,
        "LIMIT": activation.limit if clamp else 0.0,
        "UP_SHIFT": activation.up_shift,
    }


def fast_kind(kind: str) -> str:
    return "fast_silu" if kind == "silu" else kind


@cache
def group(activation: Activation) -> Group:
    return Group(INTERLEAVED=activation.interleaved, **constants(activation))


@triton.jit
def _at_most(z, bound):
    """min(z, bound) that lets NaN through, as torch.clamp does: a run that diverges must show it."""
    return tl.minimum(z, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _at_least(z, bound):
    return tl.maximum(z, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fast_sigmoid(z):
    """1 / (1 + exp(-z)) in five instructions for eleven, on NVIDIA's GPUs. The bits are the same, except that what is
    below 2^-126 (z < -87.3) is zero."""
    exponential = _flushing("ex2.approx.ftz.f32 $0, $1;", z * -1.4426950408889634)
    return _flushing("rcp.approx.ftz.f32 $0, $1;", 1.0 + exponential)


@triton.jit
def _flushing(INSTRUCTION: tl.constexpr, z):
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def value_and_slope(z, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """act(z) and act'(z); an unused one is not computed."""
    if KIND == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * z))
        value = z * sigmoid
        slope = sigmoid + ALPHA * value * (1.0 - sigmoid)
    elif KIND == "fast_silu":
        sigmoid = _fast_sigmoid(ALPHA * z)
        value = z * sigmoid
        slope = sigmoid + ALPHA * value * (1.0 - sigmoid)
    elif KIND == "gelu":
        half = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        value = z * half
        slope = half + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif KIND == "gelu_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2u)
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
        value = z * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))
    elif KIND == "relu":
        value = _at_least(z, 0.0)
        slope = tl.where(z > 0, 1.0, 0.0)
    else:
        tl.static_assert(KIND == "relu2")
        positive = _at_least(z, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def _shifted(up, SHIFT: tl.constexpr):
    """A shift of zero is an addition, too: it makes 0 of -0, so the compiler may not leave it out."""
    if SHIFT == 0.0:
        return up
    else:
        return up + SHIFT


@triton.jit
def gated(gate, up, A: tl.constexpr):
    """a = act(gate) · (up + shift)."""
    return plain(gate, A) * factor(up, A)


@triton.jit
def factor(up, A: tl.constexpr):
    """What act(gate) is multiplied by."""
    if A.CLAMP:
        up = _at_most(_at_least(up, -A.LIMIT), A.LIMIT)
    return _shifted(up, A.UP_SHIFT)


@triton.jit
def gated_backward(da, gate, up, A: tl.constexpr):
    """a, dgate and dup from the gradient of a."""
    gate_in, up_in = gate, up
    if A.CLAMP:
        gate_in = _at_most(gate, A.LIMIT)
        up_in = _at_most(_at_least(up, -A.LIMIT), A.LIMIT)
    value, slope = value_and_slope(gate_in, A.KIND, A.ALPHA)
    up_in = _shifted(up_in, A.UP_SHIFT)
    dgate = da * up_in * slope
    dup = da * value
    if A.CLAMP:
        dgate = tl.where(gate > A.LIMIT, 0.0, dgate)
        dup = tl.where(tl.abs(up) > A.LIMIT, 0.0, dup)
    return value * up_in, dgate, dup


@triton.jit
def plain(h, A: tl.constexpr):
    """a = act(h)."""
    if A.CLAMP:
        h = _at_most(h, A.LIMIT)
    value, _ = value_and_slope(h, A.KIND, A.ALPHA)
    return value


@triton.jit
def plain_backward(da, h, A: tl.constexpr):
    """a and dh from the gradient of a."""
    h_in = h
    if A.CLAMP:
        h_in = _at_most(h, A.LIMIT)
    value, slope = value_and_slope(h_in, A.KIND, A.ALPHA)
    dh = da * slope
    if A.CLAMP:
        dh = tl.where(h > A.LIMIT, 0.0, dh)
    return value, dh
