"""AdamW over many tensors in one launch, with bf16 parameters whose fp32 master is kept in two halves.

    rows, chunks = table.place(...)              # COLUMNS of a row: see below; kernels/tensor_table.py
    update(rows, chunks, scale, coefficients, split=True, gradient_bf16=True, states_bf16=False)

optim/batch.py has the formula. Every tensor is read once, and all but the gradients are written once. bf16 is read
and written as its bits: see optim/split_master.py for masters and optim/rounding.py for averages in bf16, which are
rounded by chance. Each operation rounds by itself (no fused multiply-add), as those of torch on a CPU do that
optim/torch_step.py takes. Of 1.1M numbers after five steps about a hundred differed between an H200 and its Xeon when
that one's square roots were MKL's; not counted since.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from amoeba.kernels.launch import quick
from amoeba.kernels.tensor_table import CHUNK, load_as_fp32, pointers_to

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
    """scale: of the gradients, one fp32 number. coefficients: optim.batch.Coefficients. split: bf16 with remainders."""
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
