"""A plugin of pytest: this CPU stands for one with AMX, AVX512-BF16 and AVX512-VBMI, which newer_cpu.h emulates.

    PYTHONPATH=tests/support python -m pytest -p newer_cpu -m amx

In this process the C++ core is compiled with that file, under names of its own in the cache. torch, and processes that
tests start, see the CPU that is here.
"""

import hashlib
from pathlib import Path

from amoeba.cpu import build
from amoeba.system import cpu_features

EMULATED = frozenset({"avx512_bf16", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"})
HEADER = Path(__file__).with_suffix(".h")


def why_not() -> str | None:
    """Why this machine cannot stand for a newer one, or need not."""
    if "amx_bf16" in cpu_features.cpu_flags():
        return "it is one: pytest -m amx"
    if "avx512" not in {level.name for level in cpu_features.fitting_levels()}:
        return "the emulation needs AVX-512 with VNNI"
    return None


def pytest_configure() -> None:
    if reason := why_not():
        raise RuntimeError(f"this machine does not stand for a CPU with AMX: {reason}")
    flags = cpu_features.cpu_flags() | EMULATED
    cpu_features._flags_of_cpu = lambda: flags
    cpu_features.cpu_flags.cache_clear()
    # -O1 compiles in half the time
    version = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:16]
    build._FLAGS = *build._FLAGS, "-O1", "-include", str(HEADER), f"-DNEWER_CPU=0x{version}"
