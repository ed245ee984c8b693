"""What the device gives at best: the rate of a large dense product and of a large copy, timed as everything else is.

    ceilings = measure_ceilings(torch.device("cuda"), [torch.bfloat16])
    ceilings.matmul_flops_per_second(torch.bfloat16)
    ceilings.copy_bytes_per_second          # bytes read and bytes written

No limit of physics: what torch reaches on this machine, today, on a problem without any routing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from amoeba.bench.timing import step_of, time_in_turns
from amoeba.system.cpu_features import compute_dtype
from amoeba.system.machine import available_memory


@dataclass(frozen=True)
class Size:
    """matmul: side of the square matrices; copy_bytes: of the source; rounds: at least."""

    matmul: int
    copy_bytes: int
    rounds: int


SIZES = {"cuda": Size(8192, 4 << 30, rounds=10), "cpu": Size(2048, 512 << 20, rounds=3)}
# Share of the free memory that the source of the copy may take; the destination takes as much again.
_SHARE_OF_MEMORY = 0.25
# A dtype in which one product would take longer, as one that is emulated, is measured on smaller matrices.
_MOST_SECONDS = 0.5
_SMALLEST = 256


@dataclass(frozen=True)
class Product:
    """A dense product of two square matrices with this side."""

    size: int
    flops_per_second: float


@dataclass(frozen=True)
class Ceilings:
    device: str
    matmul: dict[str, Product]  # by dtype
    copied_bytes: int
    copy_bytes_per_second: float

    def matmul_flops_per_second(self, dtype: torch.dtype) -> float:
        """Of a problem stored in dtype: a CPU computes some dtypes in fp32 (see cpu_features)."""
        return self.matmul[dtype_name(compute_dtype(dtype, torch.device(self.device)))].flops_per_second

    def line(self) -> str:
        products = (
            f"matmul {_rate(product.flops_per_second)} in {name} ({product.size}³)"
            for name, product in self.matmul.items()
        )
        copied = f"copy {self.copy_bytes_per_second / 1e9:.0f} GB/s read and written"
        return f"ceilings of this {self.device}: {', '.join(products)}, {copied}"


def measure_ceilings(device: torch.device, dtypes: Sequence[torch.dtype]) -> Ceilings:
    """Products in the dtypes that these are computed in (on a CPU in fp32, too) and a copy, timed alternately."""
    at_most = SIZES[device.type]
    always = [torch.float32] if device.type == "cpu" else []
    computed = dict.fromkeys([*always, *(compute_dtype(dtype, device) for dtype in dtypes)])
    sizes = {dtype_name(dtype): _affordable(at_most.matmul, device, dtype) for dtype in computed}
    steps = {dtype_name(dtype): step_of(_product(sizes[dtype_name(dtype)], device, dtype)) for dtype in computed}
    copied_bytes = _copied_bytes(at_most.copy_bytes, device)
    steps["copy"] = step_of(_copy(copied_bytes, device))
    for step in steps.values():
        step(lambda: None)  # warm
    timings = time_in_turns(steps, device, at_most.rounds)
    del steps
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes that no shape could use in one piece
    seconds = {name: timing.median_ms / 1e3 for name, timing in timings.items()}
    products = {name: Product(size, 2 * size**3 / seconds[name]) for name, size in sizes.items()}
    return Ceilings(device.type, products, copied_bytes, 2 * copied_bytes / seconds["copy"])


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    # random: products of zeros take less power and are faster than any real ones
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size // 4, device=device, dtype=torch.float32)
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)


def _affordable(size: int, device: torch.device, dtype: torch.dtype) -> int:
    """The largest of size, size / 2, ... whose product will not take too long, judged by that of half its side. From
    the smallest up: small ones may be far slower than their operations tell, and say little about much larger ones."""
    smaller = [size >> halvings for halvings in range(1, 32) if size >> halvings >= _SMALLEST]
    for side in reversed(smaller):
        if 2**3 * _seconds(_product(side, device, dtype), device) > _MOST_SECONDS:
            return side
    return size


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the second run: the first one may load libraries."""
    for _ in range(2):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _copied_bytes(size: int, device: torch.device) -> int:
    free = available_memory(device)
    affordable = size if free is None else min(size, int(_SHARE_OF_MEMORY * free))
    return affordable // 4 * 4


def _rate(flops_per_second: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops_per_second >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_second / scale:.0f} {unit}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
