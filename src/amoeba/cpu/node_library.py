"""The compiled passes of one node (csrc/node.cpp) and the structures that they read.

The fields stand in the order of csrc/node.h. node_experts.py and node_passes.py fill them in, and check the
tensors first.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path as FilePath

from amoeba.core.config import unknown_kind
from amoeba.cpu.build import load, with_library
from amoeba.cpu.weights import CCoding

# `enum ActivationKind` in csrc/activation.h
_ACTIVATION_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


def activation_number(kind: str) -> int:
    """Of a kind of activation, in compiled code."""
    if kind not in _ACTIVATION_KINDS:
        raise unknown_kind(kind, "the C++ core (cpu/csrc/activation.h)")
    return _ACTIVATION_KINDS[kind]


class CActivation(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "gated", "interleaved")),
        *((name, c_float) for name in ("alpha", "limit", "up_shift")),
    ]


class CMatrix(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "column_scale", "sum", "depth_scale")),
        *((name, c_int64) for name in ("columns", "depth")),
        ("stored", c_int32),
        *((name, c_int64) for name in ("stride_e", "stride_column", "stride_k")),
        ("turned", c_int32),
        ("coding", CCoding),
    ]


FACTOR_MATRICES = (
    "up_a", "up_b", "up_b_transposed", "up_a_transposed",
    "down_a", "down_b", "down_b_transposed", "down_a_transposed",
)  # fmt: skip


class CNode(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("path", "int8")),
        *((name, c_int64) for name in ("experts", "hidden", "intermediate", "width")),
        ("activation", CActivation),
        *((name, CMatrix) for name in ("gate_up", "down", "gate_up_transposed", "down_transposed")),
        *((name, c_void_p) for name in ("gate_up_bias", "down_bias")),
        *((name, CMatrix) for name in FACTOR_MATRICES),
        *((name, c_int64) for name in ("gate_rank", "up_rank", "down_rank")),
        ("scaling", c_float),
    ]


class CBatch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("tokens", "top_k")),
        ("x", c_void_p),
        ("x_stride", c_int64),
        *((name, c_void_p) for name in ("expert", "weight", "map", "h", "low", "down_low")),
    ]


class CWeightTarget(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("stride_e", "stride_out", "stride_in"))]


class CGradients(Structure):
    _fields_ = [
        ("dy", c_void_p),
        ("dy_stride", c_int64),
        *((name, c_void_p) for name in ("x", "weight", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")),
        *((name, CWeightTarget) for name in ("gate_up", "down")),
        *((name, c_void_p) for name in ("gate_up_bias", "down_bias")),
    ]


class CFactor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("is_float", c_int32),
        *((name, c_int64) for name in ("stride_e", "stride_row", "stride_column")),
    ]


class CFactors(Structure):
    _fields_ = [(name, CFactor) for name in ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")]


_SIGNATURES = {
    "amoeba_prefer_memory_of": (c_int, (c_int,)),
    "amoeba_move_memory_to": (c_int, (c_int, c_void_p, c_int64)),
    "amoeba_pool_new": (c_void_p, (c_int, c_void_p, c_int)),
    "amoeba_pool_borrow": (c_void_p, (c_void_p, c_int)),
    "amoeba_pool_borrow_as_many": (None, (c_void_p, c_int)),
    "amoeba_pool_delete": (None, (c_void_p,)),
    "amoeba_node_forward": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "amoeba_node_combine": (None, (c_void_p,) * 6),
    "amoeba_node_backward": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "amoeba_node_workspace": (c_int64, (c_void_p, c_void_p, c_int)),
    "amoeba_factor_checksums": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
    "amoeba_factors_have": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)),
    "amoeba_node_thread_bytes": (c_int64, (c_void_p, c_int64, c_int)),
    "amoeba_node_pack_factors": (None, (c_void_p, c_void_p, c_void_p)),
}


def open_node(file: FilePath) -> ctypes.CDLL:
    return load(file, _SIGNATURES)


@functools.cache
def load_node() -> ctypes.CDLL:
    return with_library("node", open_node)
