"""What the CPU of this machine supports, and which dtype and compiler options follow from it.

    compute_dtype(torch.bfloat16, device)   # bfloat16 where the CPU has bf16 dot products, float32 where it has not
    cpu_flags()                             # {"avx2", "avx512f", ...}

AMOEBA_CPU_FEATURES=avx2 hides what came after AVX2, so that one machine stands for older ones. torch has switches of
its own, which are not set here.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from amoeba.core.errors import bad_value
from amoeba.core.torch_internals import constant_when_traced

# Matrix or dot-product instructions that multiply bf16 and accumulate in fp32, as the kernel names them.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
# What macOS calls them.
_APPLE_FLAGS = {"AdvSIMD": "asimd", "FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm"}


class Level(NamedTuple):
    """A kind of CPU for which a newer one can stand."""

    name: str
    adds: frozenset[str]  # to the flags of the level before
    compiler_flag: str  # or several, separated by spaces


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"})
_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16", "avx512vbmi"})
# Oldest first. A wheel carries libraries for all but "generic" (dev/wheel.py).
_X86 = (
    Level("generic", frozenset({"sse2"}), "-march=x86-64"),
    Level("avx2", frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}), "-march=haswell"),
    Level("avx512", _AVX512, "-march=cascadelake"),
    Level("avx512_bf16", frozenset({"avx512_bf16"}), "-march=cooperlake"),
    Level("amx", _AMX, "-march=cooperlake -mavx512vbmi -mamx-tile -mamx-int8 -mamx-bf16"),
)
_ARM = (
    Level("neon", frozenset({"asimd"}), "-march=armv8-a"),
    Level("dotprod", frozenset({"asimddp"}), "-march=armv8.2-a+dotprod"),
    Level("bf16", frozenset({"bf16", "i8mm"}), "-march=armv8.2-a+dotprod+i8mm+bf16"),
)
_LEVELS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}
# -march=native is what GCC and Clang understand on x86; on 64-bit ARM the portable spelling is -mcpu=native.
_NATIVE = {"aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags that are not hidden; empty where the system does not tell."""
    level = features_override()
    return _flags_of_cpu() if level is None else _flags_up_to(level)


@functools.cache
def features_override() -> Level | None:
    """The CPU for which this one stands, as AMOEBA_CPU_FEATURES names it."""
    name = os.environ.get("AMOEBA_CPU_FEATURES")
    if not name:
        return None
    here = {level.name: level for level in levels_here()}
    if name not in here:
        named = [level.name for level in all_levels()]
        expected = f"a kind of CPU that this one contains ({', '.join(here) or 'none is known here'})"
        got = f"{name!r}, which this CPU does not have" if name in named else repr(name)
        raise bad_value("AMOEBA_CPU_FEATURES", expected, got, "unset it to use all features of the CPU")
    return here[name]


def levels_here() -> list[Level]:
    """The kinds of CPU for which this one can stand, oldest first."""
    levels = all_levels()
    return [level for level in levels if level is levels[0] or _flags_up_to(level) - levels[0].adds <= _flags_of_cpu()]


def all_levels() -> tuple[Level, ...]:
    """The kinds of CPU of this architecture, oldest first."""
    return _LEVELS.get(platform.machine().lower(), ())


def fitting_levels() -> list[Level]:
    """The kinds of CPU whose features this one has, and are not hidden, newest first."""
    return [level for level in reversed(levels_here()) if level.adds <= cpu_flags()]


def compiler_flag() -> str:
    """The compiler's flag for this CPU, or for the one that it stands for."""
    level = features_override()
    return level.compiler_flag if level is not None else _NATIVE.get(platform.machine(), "-march=native")


@constant_when_traced
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


def _flags_up_to(last: Level) -> frozenset[str]:
    levels = _X86 if last in _X86 else _ARM
    return frozenset().union(*(level.adds for level in levels[: levels.index(last) + 1]))


@functools.cache
def _flags_of_cpu() -> frozenset[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    if platform.system() == "Darwin":
        listing = subprocess.run(["sysctl", "hw.optional"], capture_output=True, text=True, check=False).stdout
        found = {line.split(":")[0].rsplit(".", 1)[-1] for line in listing.splitlines() if line.endswith(" 1")}
        return frozenset(_APPLE_FLAGS.get(name, name.lower()) for name in found)
    return frozenset()
