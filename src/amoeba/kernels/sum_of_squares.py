"""The squares of all elements of many tensors, added up in one order: what the norm of all gradients is made of.

rows, chunks = table.place([[address, count], ...], counts, device)
sum_of_squares(rows, chunks, bf16=True)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import quick
from amoeba.kernels.tensor_table import CHUNK, load_as_fp32, pointers_to

BLOCK, WARPS = 2048, 4  # 1.27B numbers in 0.59 ms on an H200, 0.76 with 4096


@triton.jit
def _of_chunk(address, first, count, FULL: tl.constexpr, BF16: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for at in tl.static_range(0, CHUNK, BLOCK):
        tile = first + at + tl.arange(0, BLOCK)
        numbers = load_as_fp32(pointers_to(address, tile, FULL, BF16), None if FULL else tile < count)
        total += numbers * numbers if FULL else tl.where(tile < count, numbers * numbers, 0.0)
    return tl.sum(total)


@quick
@triton.jit
def _sum_of_squares(rows, chunks, partial, BF16: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(chunks + program * 2).to(tl.int64) * 2
    first = tl.load(chunks + program * 2 + 1).to(tl.int64) * CHUNK
    address, count = tl.load(row), tl.load(row + 1)
    if (first + CHUNK <= count) & (address % 16 == 0):
        total = _of_chunk(address, first, count, True, BF16, CHUNK, BLOCK)
    else:
        total = _of_chunk(address, first, count, False, BF16, CHUNK, BLOCK)
    tl.store(partial + program, total)


def sum_of_squares(rows: Tensor, chunks: Tensor, *, bf16: bool) -> Tensor:
    """In fp32. The tensors are bf16 or fp32, all of them."""
    partial = torch.empty(len(chunks), dtype=torch.float32, device=chunks.device)
    if len(chunks):
        _sum_of_squares[(len(chunks),)](rows, chunks, partial, BF16=bf16, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS)
    return partial.sum()
