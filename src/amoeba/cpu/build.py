"""Compiles a C++ source on first use with the machine's own compiler for its own instruction set, and keeps the result.

    path = compiled_core()              # csrc/core.cpp; raises CoreUnavailable with a reason and a remedy
    path = compiled_library("packed")   # csrc/packed.cpp

The library is cached under $AMOEBA_CACHE, else $XDG_CACHE_HOME/amoeba, else ~/.cache/amoeba, named by a hash of
source, included headers, compiler, flags and CPU, and put there by an atomic rename: two processes that start together
both end with a whole file.
$CXX names another compiler; AMOEBA_CPU_CORE=0 turns the core off; AMOEBA_CPU_SANITIZE=1 builds it with AddressSanitizer
and UndefinedBehaviorSanitizer, whose runtime must then be preloaded (see tests/test_sanitizers.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from amoeba.cpu_features import cpu_flags

logger = logging.getLogger("amoeba")

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread")
# Without the checks of every pointer that AddressSanitizer makes anyway, which take the compiler minutes.
_SANITIZERS = (
    "-O1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,pointer-overflow,object-size,vptr",
    "-fno-sanitize-recover=undefined",
)
# -march=native is what GCC and Clang understand on x86; on 64-bit ARM the portable spelling is -mcpu=native.
_NATIVE = {"aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_TIMEOUT_SECONDS = 300


class CoreUnavailable(RuntimeError):
    """The core cannot be had here; the message says why and what to do."""


def compiled_core() -> Path:
    return compiled_library("core")


def compiled_library(name: str, architecture: str | None = None) -> Path:
    """The shared library of csrc/<name>.cpp; `architecture` is the compiler's flag for another instruction set."""
    if os.environ.get("AMOEBA_CPU_CORE") == "0":
        raise CoreUnavailable("the C++ core is switched off by AMOEBA_CPU_CORE=0")
    if platform.system() not in ("Linux", "Darwin"):
        raise CoreUnavailable(f"the C++ core is built on Linux and macOS, this is {platform.system()}")
    compiler = _compiler()
    source = _SOURCES / f"{name}.cpp"
    target_flag = architecture or _NATIVE.get(platform.machine(), "-march=native")
    key = hashlib.sha256(
        "\n".join(
            (
                *_texts(source),
                _version(compiler),
                " ".join((*_FLAGS, *_sanitizers(), target_flag)),
                *sorted(cpu_flags()),
                openmp_runtime() or "",
            )
        ).encode()
    ).hexdigest()[:16]
    target = _cache_folder() / f"{name}-{key}.so"
    if not target.exists():
        _compile(compiler, source, target_flag, target)
    return target


def load(file: Path, signatures: Mapping[str, tuple]) -> ctypes.CDLL:
    """The library, the results and arguments of its functions declared; CoreUnavailable where it does not load."""
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise CoreUnavailable(
            f"the compiled library does not load: {error}; delete the cache folder and try again"
        ) from error
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _sanitizers() -> tuple[str, ...]:
    return _SANITIZERS if os.environ.get("AMOEBA_CPU_SANITIZE") == "1" else ()


def _texts(source: Path) -> list[str]:
    """Of a source and of all headers of ours that it includes, directly or not."""
    found: dict[Path, str] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = file.read_text()
            waiting += [_SOURCES / name for name in _INCLUDE.findall(found[file])]
    return [found[file] for file in sorted(found)]


def _compiler() -> str:
    named = os.environ.get("CXX")
    for candidate in (named,) if named else ("g++", "c++", "clang++"):
        found = shutil.which(candidate.split()[0]) if candidate else None
        if found:
            return found
    raise CoreUnavailable(
        f"no C++ compiler ({named or 'g++, c++ or clang++'}) was found; install g++ or name one in CXX"
    )


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _cache_folder() -> Path:
    named = os.environ.get("AMOEBA_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amoeba"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoreUnavailable(
            f"cannot write the cache folder {base} ({error}); name another in AMOEBA_CACHE"
        ) from error
    return base


@functools.cache
def openmp_runtime() -> str | None:
    """The OpenMP runtime that torch itself uses: with the same one, its threads and ours are the same threads."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            return str(library)
    return None


def _compile(compiler: str, source: Path, target_flag: str, target: Path) -> None:
    logger.info("compiling the CPU core (%s) with %s for this machine (once, some seconds)", source.name, compiler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        unit, library = Path(folder) / "core.o", Path(folder) / "core.so"
        openmp = openmp_runtime()
        threads = ["-fopenmp"] if openmp else []
        _run([compiler, *_FLAGS, *_sanitizers(), target_flag, *threads, "-c", str(source), "-o", str(unit)])
        linked = [str(unit), "-o", str(library), *([openmp] if openmp else [])]
        _run([compiler, "-shared", "-pthread", *_sanitizers(), *linked])
        os.replace(library, target)
    if not openmp:
        logger.warning("no OpenMP runtime beside torch: the CPU core runs on one thread")
    logger.info("compiled in %.1f s: %s", time.monotonic() - began, target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CoreUnavailable(f"the compiler did not run: {error}; set CXX to a working C++17 compiler") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CoreUnavailable(
            f"the core did not compile: {(lines or ['no message'])[0].strip()}; set CXX to GCC or Clang with C++17"
        )
