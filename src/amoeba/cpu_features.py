"""What the CPU of this machine can do, and what follows for the dtype to compute in.

compute_dtype(torch.bfloat16, device)   # bfloat16 where the CPU has bf16 dot products, float32 where it has not
"""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path

import torch

# Matrix or dot-product instructions that multiply bf16 and accumulate in fp32, as the kernel names them.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags; empty where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    if platform.system() == "Darwin":
        listing = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True, check=False).stdout
        found = {line.split(":")[0].rsplit(".", 1)[-1] for line in listing.splitlines() if line.endswith(" 1")}
        return frozenset("bf16" if name == "FEAT_BF16" else name.lower() for name in found)
    return frozenset()


@functools.cache
def has_bf16_instructions() -> bool:
    return bool(cpu_flags() & _BF16_FLAGS)


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which matrix products of `dtype` run on `device`.

    A CPU without bf16 instructions emulates bf16 products at a hundredth of its fp32 speed, and torch's fp16 products
    on a CPU accumulate in fp16: both are computed in fp32 from half-precision storage.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if dtype == torch.bfloat16 and has_bf16_instructions():
        return dtype
    return torch.float32
