"""AdamW over many tensors in one launch, with bf16 parameters whose fp32 master is kept in two halves; the sum of
squares that the norm of all gradients is made of, added up in one order.

    table = TensorTable()                                  # kept by the caller from step to step
    rows, chunks = table.place([[address, count], ...], counts, device)
    _kernel[(len(chunks),)](rows, chunks, ...)             # a program: the tensor chunks[i, 0], its chunk chunks[i, 1]

rows: int64, as given; chunks: int32. Nothing is sent to the device while nothing changes, and nobody waits for what is.
The rows go stale with the tensors: `place` is called anew before each launch.

    update(rows, chunks, scale, coefficients, split=True, gradient_bf16=True, states_bf16=False)     # rows of COLUMNS
    sum_of_squares(rows, chunks, bf16=True)                                                          # [address, count]

optim/torch_step.py has the formula. Every tensor is read once, and all but the gradients are written once. bf16 is read
and written as its bits: see optim/rounding.py for masters and for averages in bf16, which are rounded by chance. Each
operation rounds by itself (no fused multiply-add), as those of torch on a CPU do that optim/torch_step.py takes. Of
1.1M numbers after five steps about a hundred differed between an H200 and its Xeon when that one's square roots were
MKL's; not counted since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import cdiv, quick

CHUNK = 16384  # elements; a power of two


class TensorTable:
    def __init__(self) -> None:
        self._rows: list[list[int]] | None = None
        self._counts: list[int] | None = None

    def place(self, rows: list[list[int]], counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """counts: elements of each tensor."""
        if rows != self._rows:
            self._placed_rows = _place(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            self._rows = rows
        if counts != self._counts:
            self._placed_chunks = _place(_chunks_of(counts), device)
            self._counts = counts
        return self._placed_rows, self._placed_chunks


def _chunks_of(counts: list[int]) -> Tensor:
    each = torch.tensor([cdiv(count, CHUNK) for count in counts], dtype=torch.int64, device="cpu")
    tensor = torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(each)
    part = torch.arange(len(tensor), dtype=torch.int64, device="cpu") - (each.cumsum(0) - each)[tensor]
    return torch.stack((tensor, part), 1).to(torch.int32)


def _place(tensor: Tensor, device: torch.device) -> Tensor:
    # only from pinned memory is a copy sure not to wait for the device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@triton.jit
def pointers_to(address, tile, FULL: tl.constexpr, BF16: tl.constexpr):
    """Of elements of a tensor, or of their bits where it is bf16.

    FULL: the address is a multiple of 16, which the compiler is told here: it then reads and writes 16 bytes at a time.
    """
    start = address.to(tl.pointer_type(tl.int16 if BF16 else tl.float32))
    if FULL:
        start = tl.multiple_of(start, 16)
    return start + tile


@triton.jit
def load_as_fp32(pointers, inside):
    """Undefined outside."""
    if pointers.dtype.element_ty == tl.int16:
        bits = tl.load(pointers, mask=inside).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=inside)


# 4 elements a thread: 16 bytes of fp32. With 8, as 16 bytes of bf16 would have it, what is loaded and what is stored
# would be spread over the threads differently, and pass through shared memory in between.
BLOCK, WARPS = 512, 4  # 97 % of the copy bandwidth of an H200 with fp32 averages, 86 % with bf16; 1024 and 8: 94, 78
# Addresses of parameter, remainder (0 where there is none), exp_avg, exp_avg_sq and gradient; the number of elements;
# the parameter's position in the optimizer.
COLUMNS = 7
GRADIENT, COUNT, POSITION = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


@triton.jit
def _bits(numbers):
    """Of fp32; every NaN is the same one."""
    return tl.where(numbers == numbers, numbers.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _store_average(pointers, numbers, chance, inside):
    if pointers.dtype.element_ty == tl.int16:
        tl.store(pointers, ((_bits(numbers) + chance.to(tl.int32)) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(pointers, numbers, mask=inside)


@triton.jit
def _update_tile(
    row, first, count, key, scale,
    first_rate, second_decay, second_rate, correction, epsilon, decay, step_size,
    FULL: tl.constexpr, SPLIT: tl.constexpr, GRADIENT_BF16: tl.constexpr, STATES_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, BLOCK)
    inside = None if FULL else first + tile < count
    g = load_as_fp32(pointers_to(tl.load(row + GRADIENT), first + tile, FULL, GRADIENT_BF16), inside) * scale
    exp_avg = pointers_to(tl.load(row + 2), first + tile, FULL, STATES_BF16)
    exp_avg_sq = pointers_to(tl.load(row + 3), first + tile, FULL, STATES_BF16)
    m, v = load_as_fp32(exp_avg, inside), load_as_fp32(exp_avg_sq, inside)
    parameter = pointers_to(tl.load(row), first + tile, FULL, SPLIT)
    old = tl.load(parameter, mask=inside)
    if SPLIT:
        remainder = pointers_to(tl.load(row + 1), first + tile, FULL, True)
        bits = (old.to(tl.int32) << 16) + tl.load(remainder, mask=inside).to(tl.int32)
        old = bits.to(tl.float32, bitcast=True)
    m += (g - m) * first_rate
    v = v * second_decay + (g * g) * second_rate
    new = old * decay - tl.div_rn(m, tl.sqrt_rn(v) * correction + epsilon) * step_size
    if SPLIT:
        bits = _bits(new)
        tl.store(parameter, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(remainder, bits.to(tl.int16), mask=inside)
    else:
        tl.store(parameter, new, mask=inside)
    chance = _mix((first + tile).to(tl.uint32) ^ key)
    _store_average(exp_avg, m, chance & 0xFFFF, inside)
    _store_average(exp_avg_sq, v, chance >> 16, inside)


@quick
@triton.jit(do_not_specialize=["key"])
def _update(
    rows,
    chunks,
    scale,
    first_rate,
    second_decay,
    second_rate,
    correction,
    epsilon,
    decay,
    step_size,
    key,
    SPLIT: tl.constexpr,
    GRADIENT_BF16: tl.constexpr,
    STATES_BF16: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    chunk = chunks + program // (CHUNK // BLOCK) * 2
    row = rows + tl.load(chunk).to(tl.int64) * COLUMNS
    first = tl.load(chunk + 1).to(tl.int64) * CHUNK + program % (CHUNK // BLOCK) * BLOCK
    count = tl.load(row + COUNT)
    if first < count:
        factor = 1.0 if scale is None else tl.load(scale)
        chances = _mix(key.to(tl.uint32, bitcast=True) ^ tl.load(row + POSITION).to(tl.uint32))
        addresses = tl.load(row) | tl.load(row + 1) | tl.load(row + 2) | tl.load(row + 3) | tl.load(row + GRADIENT)
        if (first + BLOCK <= count) & (addresses % 16 == 0):
            _update_tile(
                row, first, count, chances, factor,
                first_rate, second_decay, second_rate, correction, epsilon, decay, step_size,
                True, SPLIT, GRADIENT_BF16, STATES_BF16, BLOCK,
            )  # fmt: skip
        else:
            _update_tile(
                row, first, count, chances, factor,
                first_rate, second_decay, second_rate, correction, epsilon, decay, step_size,
                False, SPLIT, GRADIENT_BF16, STATES_BF16, BLOCK,
            )  # fmt: skip


def update(
    rows: Tensor,
    chunks: Tensor,
    scale: Tensor | None,
    coefficients: Sequence[float],
    *,
    split: bool,
    gradient_bf16: bool,
    states_bf16: bool,
) -> None:
    """scale: of the gradients, one fp32 number. coefficients: torch_step.Coefficients. split: bf16 with remainders."""
    if len(chunks):
        _update[(len(chunks) * (CHUNK // BLOCK),)](
            rows,
            chunks,
            scale,
            *coefficients,
            SPLIT=split,
            GRADIENT_BF16=gradient_bf16,
            STATES_BF16=states_bf16,
            COLUMNS=COLUMNS,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


SQUARES_BLOCK, SQUARES_WARPS = 2048, 4  # 1.27B numbers in 0.59 ms on an H200, 0.76 with 4096


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
        _sum_of_squares[(len(chunks),)](
            rows, chunks, partial, BF16=bf16, CHUNK=CHUNK, BLOCK=SQUARES_BLOCK, num_warps=SQUARES_WARPS
        )
    return partial.sum()
