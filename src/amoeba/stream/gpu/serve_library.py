"""The compiled code that serves requests of captured steps (csrc/serve.cpp), and the structures that it reads."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p

from amoeba.cpu.build import CoreUnavailable, load, with_library

logger = logging.getLogger("amoeba")

_SIGNATURES = {
    # row, answer, most, serial, looks, layer, calls, compute
    "amoeba_serve": (c_int, (c_void_p, c_void_p, c_int64, c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    # order, wanted, those who stay, how many, found
    "amoeba_first_to_leave": (c_int64, (c_void_p, c_int64, c_void_p, c_int64, c_void_p)),
    "amoeba_computer_new": (c_void_p, (c_int,)),
    "amoeba_computer_wait": (None, (c_void_p,)),
    "amoeba_computer_seconds": (c_double, (c_void_p,)),
    "amoeba_computer_delete": (None, (c_void_p,)),
    "amoeba_moved_of": (c_int64, (c_int64, c_int64, c_double, c_double)),
}


class Blobs(ctypes.Structure):
    """As compute.h has it; all zero where the CPU does not compute the layer."""

    _fields_ = (
        *((name, c_uint64) for name in ("first", "bytes", "number_bytes", "count", "gate_up_offset", "down_offset")),
        *((name, c_int64) for name in ("hidden", "intermediate", "width", "kind")),
        *((name, c_float) for name in ("alpha", "limit", "up_shift")),
    )


class Order(ctypes.Structure):
    """As ranking.h has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("now", "uses", "last", "expert_in")),
        ("places", c_int64),
    )


class ServedLayer(ctypes.Structure):
    """As serve.cpp has it."""

    _fields_ = (
        ("may_leave", c_int64),
        ("slot_of", c_void_p),
        ("blob_of", c_void_p),
        ("parts", c_int64),
        ("stack", c_void_p),
        ("size", c_void_p),
        ("offset", c_void_p),
        ("order", Order),
        ("kept", c_void_p),
        ("blobs", Blobs),
    )


class ComputeRequest(ctypes.Structure):
    """As serve.cpp has it."""

    _fields_ = (
        ("computer", c_void_p),
        ("miss", c_int64),
        ("move_seconds", c_double),
        ("tokens", c_int64),
        ("top_k", c_int64),
        *((name, c_void_p) for name in ("x", "expert", "weight", "arrived", "y", "word")),
    )


@functools.cache
def serving_library() -> ctypes.CDLL | None:
    try:
        return with_library("serve", lambda file: load(file, _SIGNATURES))
    except CoreUnavailable as error:
        logger.info("experts that a GPU waits for come some microseconds later than with compiled code: %s", error)
        return None
