"""The tiles that a search may choose among, and that what was found earlier has to be one of.

    candidates("up", rows=N, experts=E, reduction=H, columns=J, dtype=x_TH.dtype, capability=(8, 6))

No candidate needs more shared memory than a block of that GPU may have, nor more registers than a thread has for its
share of the accumulator.
"""

from __future__ import annotations

from typing import Any

import torch

from amoeba.kernels.configuration import Configuration, Role, clipped, configuration, is_aligned

# What a block may have, by NVIDIA's table of compute capabilities; of one that is not here, the least.
_SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KB = 99
# LoRA factors are added in steps of up to this depth, whatever the steps of the product itself are.
_STEP_OF_FACTORS = 64
_MOST_ACCUMULATED = 128  # fp32 numbers of a thread, of its 255 registers
FEW_ROWS = 32  # per expert
# Rows per expert that are searched as one: up to each of these, and all above. Where our tables change is among them.
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
_ABOVE = 256

#                 block_m block_n block_k group_m warps stages
_HALF_FEW_ROWS = (
    (16, 128, 64, 1, 4, 4),
    (16, 64, 64, 1, 4, 4),
    (16, 128, 128, 1, 4, 3),
    (16, 64, 128, 1, 4, 4),
    (32, 128, 64, 1, 4, 4),
    (32, 64, 64, 1, 4, 4),
    (32, 128, 64, 1, 4, 3),
    (32, 128, 128, 1, 4, 3),
    (64, 64, 64, 1, 4, 4),
    (64, 128, 64, 1, 4, 3),
)
_HALF = (
    (128, 128, 32, 8, 4, 4),
    (128, 128, 64, 8, 8, 3),
    (128, 256, 64, 8, 8, 3),
    (64, 128, 64, 8, 4, 3),
    (128, 128, 32, 8, 8, 4),
    (128, 128, 64, 8, 4, 3),
    (64, 256, 64, 8, 4, 3),
    (128, 256, 32, 8, 8, 3),
    (128, 64, 64, 8, 4, 3),
    (64, 128, 32, 8, 4, 4),
    (64, 64, 64, 8, 4, 4),
    (128, 128, 32, 8, 4, 3),
)
_WIDE_FEW_ROWS = (
    (16, 64, 32, 1, 4, 2),
    (16, 64, 16, 1, 4, 3),
    (16, 128, 16, 1, 4, 3),
    (32, 64, 32, 1, 4, 3),
    (32, 64, 16, 1, 4, 3),
    (32, 128, 16, 1, 8, 3),
)
_WIDE = (
    (64, 64, 16, 8, 4, 3),
    (64, 128, 16, 8, 8, 3),
    (128, 128, 16, 8, 8, 2),
    (64, 64, 32, 8, 8, 3),
    (128, 64, 16, 8, 8, 3),
    (64, 64, 32, 8, 4, 2),
    (32, 64, 16, 8, 4, 3),
    (128, 128, 16, 8, 8, 3),
)


def shared_bytes(capability: tuple[int, int] | None) -> int:
    """What a block may have on a GPU of this kind. None stands for the interpreter, which has no limit of its own."""
    return 1024 * (227 if capability is None else _SHARED_KB.get(capability, _LEAST_SHARED_KB))


def bucket(rows: int, experts: int) -> int:
    """What stands for so many rows in the key of a search."""
    per_expert = -(-rows // experts)
    return next((most for most in _BUCKETS if per_expert <= most), _ABOVE)


def candidates(role: Role, *, capability: tuple[int, int] | None, **problem: Any) -> tuple[Configuration, ...]:
    """Without repetitions, our own choice first. The arguments are those of `configuration`."""
    default = configuration(role, capability=capability, **problem)
    reduction, columns, dtype = problem["reduction"], problem["columns"], problem["dtype"]
    wide = dtype == torch.float32 or not is_aligned(reduction, columns, dtype)
    few = role != "weight_gradient" and bucket(problem["rows"], problem["experts"]) <= FEW_ROWS
    listed = (_WIDE_FEW_ROWS if few else _WIDE) if wide else (_HALF_FEW_ROWS if few else _HALF)
    found = (clipped(Configuration(*sizes), role, reduction, columns) for sizes in listed)
    return tuple(dict.fromkeys((default, *(each for each in found if _fits(each, dtype, capability)))))


def _fits(chosen: Configuration, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    # Where asynchronous copies feed registers, the last stage's are in those; Hopper multiplies from shared memory.
    buffers = chosen.num_stages if capability is None or capability[0] in (9, 10) else chosen.num_stages - 1
    depth = max(chosen.block_k, _STEP_OF_FACTORS)
    needed = buffers * (chosen.block_m + chosen.block_n) * depth * dtype.itemsize
    accumulated = chosen.block_m * chosen.block_n // (32 * chosen.num_warps)
    return needed <= shared_bytes(capability) and 1 <= accumulated <= _MOST_ACCUMULATED
