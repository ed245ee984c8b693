"""The compiled C++ libraries: what the wheel carries for this CPU, else what a compiler on this machine makes.

    library = with_library("packed", PackedLibrary)   # PackedLibrary(path of csrc/packed.cpp, compiled)
    path = compiled_library("node")                   # csrc/node.cpp and node_*.cpp, compiled at the same time

Both raise CoreUnavailable with a reason and a remedy. A wheel carries each library for several kinds of CPU
(cpu_features.py), named by a hash of its sources: what was made of other sources is not loaded. A checkout carries
none: libraries are compiled on first use, for the machine's own instruction set.

What was compiled lies in the cache folder (library_cache.py), named by a hash of sources, headers, flags and CPU and
one of the compiler: without a compiler, what another one made of the same sources serves. Where that folder cannot be
used, a private one takes its place until this process ends, and a warning says so.

$CXX names another compiler; AMOEBA_CPU_CORE=0 turns the core off.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from amoeba.cpu import library_cache
from amoeba.system.cpu_features import compiler_flag, cpu_flags, fitting_levels
from amoeba.system.files import default_folder
from amoeba.system.machine import usable_cores

logger = logging.getLogger("amoeba.cpu.build")  # a command shows it always: a minute without a word looks broken
Loaded = TypeVar("Loaded")

_SOURCES = Path(__file__).parent / "csrc"
_STREAM = Path(__file__).parents[1] / "stream"
# By name: where their sources are.
LIBRARIES = {
    **dict.fromkeys(("core", "packed", "node", "quantise", "step"), _SOURCES),
    "serve": _STREAM / "gpu" / "csrc",
    "read": _STREAM / "store" / "csrc",
}
CARRIED = Path(__file__).parent / "compiled"  # by a wheel: a folder for each kind of CPU
_PORTABLE = _SOURCES / "portable.h"

# GCC tuned for some CPUs (Zen 2 to 4; from GCC 13 on Alder Lake and Sapphire Rapids) rounds some products before they
# are added and others not, depending on the code around them: a sum would have other bits in every form of it.
_ROUND_ONCE = "-ffp-contract=fast", "--param=avoid-fma-max-bits=0"
_FLAGS = ("-std=c++17", "-O3", *_ROUND_ONCE, "-fno-math-errno", "-fPIC", "-pthread")
_OPENMP = "-fopenmp"
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_TIMEOUT_SECONDS = 300
# What compiling takes on one core (Neoverse-N1 at 3 GHz, GCC 12, 2026-11-15), and from when on it is said aloud.
_ONE_CORE_SECONDS = {"core": 9, "packed": 2, "node": 40, "serve": 4, "quantise": 2, "step": 12, "read": 2}
_SAID_ALOUD_SECONDS = 5
# Of a compiler that ran out of disk: another folder may have more.
_NO_ROOM = re.compile("|".join(re.escape(os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))


class CoreUnavailable(RuntimeError):
    """The core cannot be had here; the message says why and what to do."""


@dataclass(frozen=True)
class _Recipe:
    """Of one library: what is compiled, and how."""

    name: str
    sources: Path
    flags: tuple[str, ...]

    @functools.cached_property
    def for_this_cpu(self) -> bool:
        return any("native" in flag for flag in self.flags)

    @functools.cached_property
    def units(self) -> list[Path]:
        return [self.sources / f"{self.name}.cpp", *sorted(self.sources.glob(f"{self.name}_*.cpp"))]

    @functools.cached_property
    def stem(self) -> str:
        """Of every file that serves: whichever compiler made it."""
        cpu = sorted(cpu_flags()) if self.for_this_cpu else []
        parts = *self._texts(), *self.flags, platform.machine(), *cpu
        return f"{self.name}-{_short_hash(*parts)}-"

    def _texts(self) -> list[str]:
        """Of the units and of all headers of ours that they include, directly or not."""
        found: dict[Path, str] = {}
        waiting = list(self.units) if self.for_this_cpu else [*self.units, _PORTABLE]
        while waiting:
            file = waiting.pop()
            if file not in found:
                found[file] = file.read_text()
                waiting += [(file.parent / name).resolve() for name in _INCLUDE.findall(found[file])]
        return [found[file] for file in sorted(found)]

    def seconds(self) -> float:
        """About how long compiling takes with the cores that are here."""
        return _ONE_CORE_SECONDS.get(self.name, 1) / min(usable_cores(), len(self.units))


def with_library(name: str, make: Callable[[Path], Loaded], sources: Path | None = None) -> Loaded:
    """make(the compiled library); where it does not load or lacks a function, once more with one compiled anew."""
    _refuse_where_off()
    if carried := carried_library(name, sources):
        try:
            return make(carried)
        except CoreUnavailable as error:
            library_cache.warn_once(f"of this wheel, {error}; it is compiled here")
    file = compiled_library(name, sources=sources)
    try:
        return make(file)
    except CoreUnavailable as error:
        logger.warning("%s; compiling it again", error)
        library_cache.forget(file)
    # Under its old name the system would go on using the one that it has loaded.
    return make(_compiled_in(library_cache.private_folder(), _recipe(name, sources=sources), _compiler()))


def carried_library(name: str, sources: Path | None = None) -> Path | None:
    """What the wheel carries for this CPU, in a folder with the name of the CPU's kind."""
    for level in fitting_levels():
        folder = CARRIED / level.name
        if any(folder.glob(f"{name}-*.so")):
            for library in folder.glob(f"{_recipe(name, level.compiler_flag, sources).stem}*.so"):
                return library
            library_cache.warn_once(
                f"the library {name} in {folder} is not loaded: it was not compiled from the sources of this package "
                "with an OpenMP runtime such as torch's; install the wheel again"
            )
            break
    return None


def _refuse_where_off() -> None:
    if os.environ.get("AMOEBA_CPU_CORE") == "0":
        raise CoreUnavailable("the C++ core is switched off by AMOEBA_CPU_CORE=0")
    if platform.system() not in ("Linux", "Darwin"):
        raise CoreUnavailable(f"the C++ core is built on Linux and macOS, this is {platform.system()}")


def compiled_library(name: str, architecture: str | None = None, sources: Path | None = None) -> Path:
    """Compiled on this machine; `architecture` is the compiler's flag for another instruction set."""
    _refuse_where_off()
    recipe = _recipe(name, architecture, sources)
    troubles: list[str] = []
    for folder in _folders(troubles):
        try:
            return _found_or_compiled(folder, recipe)
        except OSError as error:
            troubles.append(str(error))
    raise CoreUnavailable(
        f"there is no folder for compiled libraries ({'; '.join(troubles)}); name one in AMOEBA_CACHE"
    )


def _folders(troubles: list[str]) -> Iterator[Path]:
    """The cache folder, then the private one, with a word on why."""
    try:
        yield library_cache.prepared(default_folder())
    except OSError as error:
        troubles.append(str(error))
    library_cache.warn_once(
        f"the cache folder cannot be used ({troubles[-1]}): what is compiled lasts until this process ends, and the "
        "next one compiles again; name another folder in AMOEBA_CACHE"
    )
    try:
        yield library_cache.private_folder()
    except OSError as error:
        troubles.append(str(error))


def _found_or_compiled(folder: Path, recipe: _Recipe) -> Path:
    """OSError where the folder is the trouble, CoreUnavailable where the compiler is."""
    try:
        compiler = _compiler()
        wanted = _stem(recipe, compiler)
    except CoreUnavailable:
        if library := library_cache.find(folder, recipe.stem):
            return library
        raise
    if library := library_cache.find(folder, wanted):
        return library
    try:
        with library_cache.one_at_a_time(folder, recipe.name, _TIMEOUT_SECONDS):
            return library_cache.find(folder, wanted) or _compiled_in(folder, recipe, compiler)
    except CoreUnavailable as error:
        if library := library_cache.find(folder, recipe.stem):
            logger.warning("%s; using the library that another compiler built", error)
            return library
        raise


def _stem(recipe: _Recipe, compiler: tuple[str, ...]) -> str:
    """What files are called that this compiler makes, with the arguments that it has."""
    return recipe.stem + _short_hash(_version(compiler), *compiler[1:])


_failed: dict[str, str] = {}  # what a compiler said, by what it should have made


def _compiled_in(folder: Path, recipe: _Recipe, compiler: tuple[str, ...]) -> Path:
    stem = _stem(recipe, compiler)
    if stem in _failed:
        raise CoreUnavailable(_failed[stem])
    _announce(recipe, compiler, folder)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        try:
            built = _compile(recipe, compiler, Path(scratch))
        except CoreUnavailable as error:
            _failed[stem] = str(error)
            raise
        library = library_cache.keep(built, folder, stem, _version(compiler).partition("\n")[0])
    if _OPENMP not in recipe.flags:
        logger.warning("torch brings no OpenMP runtime: the CPU core runs on one thread")
    logger.info("compiled in %.1f s: %s", time.monotonic() - began, library)
    return library


def _compile(recipe: _Recipe, compiler: tuple[str, ...], folder: Path) -> Path:
    first = [] if recipe.for_this_cpu else ["-include", str(_PORTABLE)]

    def compile_unit(source: Path) -> Path:
        unit = folder / f"{source.stem}.o"
        _run([*compiler, *recipe.flags, *first, "-c", str(source), "-o", str(unit)])
        return unit

    with ThreadPoolExecutor(min(usable_cores(), len(recipe.units))) as pool:
        units = list(pool.map(compile_unit, recipe.units))
    library = folder / f"{recipe.name}.so"
    # -fopenmp would add the compiler's own runtime; `load` provides torch's.
    flags = [flag for flag in recipe.flags if flag != _OPENMP]
    _run([*compiler, "-shared", *flags, *map(str, units), "-o", str(library)])
    return library


def _announce(recipe: _Recipe, compiler: tuple[str, ...], folder: Path) -> None:
    seconds, units = recipe.seconds(), len(recipe.units)
    logger.log(
        logging.WARNING if seconds >= _SAID_ALOUD_SECONDS else logging.INFO,
        "compiling the C++ core for this CPU, part %s (%d %s), with %s: about %.0f s, once; kept in %s",
        recipe.name,
        units,
        "unit" if units == 1 else f"units, {min(usable_cores(), units)} at a time",
        " ".join(compiler),
        seconds,
        folder,
    )


def load(file: Path, signatures: Mapping[str, tuple]) -> ctypes.CDLL:
    """The library, the results and arguments of its functions declared; CoreUnavailable where one is missing."""
    try:
        _open_openmp_runtime()
        library = ctypes.CDLL(str(file))
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise CoreUnavailable(f"the compiled library does not load: {error}") from error
    return library


@functools.cache
def _open_openmp_runtime() -> None:
    """Our libraries name functions of the runtime and no file: torch's has another name in each of its wheels."""
    if runtime := openmp_runtime():
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)  # as torch itself opens it, in libtorch_global_deps


@dataclass(frozen=True)
class LibraryState:
    """Of one library on disk."""

    name: str
    file: str | None
    verified: bool
    what: str
    variant: str | None = None  # of the wheel's, the kind of CPU


def library_states() -> tuple[str, list[LibraryState]]:
    """The cache folder, or why there is none, and what is there for each library; nothing is compiled."""
    carried = {name: file for name in LIBRARIES if (file := carried_library(name))}
    states = [
        LibraryState(name, file.name, True, f"from the wheel, variant {file.parent.name}", file.parent.name)
        for name, file in carried.items()
    ]
    try:
        folder = library_cache.prepared(default_folder())
    except OSError as error:
        return f"none that can be used: {error}", states
    for name in (name for name in LIBRARIES if name not in carried):
        recipe = _recipe(name)
        files = sorted(folder.glob(f"{recipe.stem}*.so"))
        reasons = {file: library_cache.why_not_verified(file) for file in files}
        good = [file for file in files if reasons[file] is None]
        if good:
            states.append(LibraryState(name, good[-1].name, True, "compiled and verified"))
        elif files:
            states.append(LibraryState(name, files[-1].name, False, f"{reasons[files[-1]]}; it will be compiled again"))
        else:
            states.append(LibraryState(name, None, False, f"not compiled yet: about {recipe.seconds():.0f} s"))
    return str(folder), states


def _recipe(name: str, architecture: str | None = None, sources: Path | None = None) -> _Recipe:
    flags = *_FLAGS, *(architecture or compiler_flag()).split(), *([_OPENMP] if openmp_runtime() else [])
    return _Recipe(name, sources or LIBRARIES[name], flags)


def _compiler() -> tuple[str, ...]:
    """The command, which in CXX may have arguments of its own."""
    named = os.environ.get("CXX")
    for candidate in (named,) if named else ("g++", "c++", "clang++"):
        command, *arguments = shlex.split(candidate)
        if found := shutil.which(command):
            return found, *arguments
    raise CoreUnavailable(
        f"no C++ compiler ({named or 'g++, c++ or clang++'}) was found; install g++ or name one in CXX"
    )


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise CoreUnavailable(f"the compiler did not run: {error}; set CXX to a working C++17 compiler") from error


@functools.cache
def openmp_runtime() -> str | None:
    """The OpenMP runtime that torch itself uses: with the same one, its threads and ours are the same threads."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for library in sorted(folder.glob("libgomp*.so*")):
            return str(library)
    return None


def _run(command: list[str]) -> None:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CoreUnavailable(f"the compiler did not run: {error}; set CXX to a working C++17 compiler") from error
    if done.returncode:
        if no_room := _NO_ROOM.search(done.stderr):
            raise OSError(errno.ENOSPC, no_room[0])
        said = done.stderr.splitlines()  # a linker's reasons do not call themselves errors
        lines = [line for line in said if re.search(r"error(?!: ld returned)|undefined|multiple def", line)] or said
        raise CoreUnavailable(
            f"the core did not compile: {(lines or ['no message'])[0].strip()}; set CXX to GCC or Clang with C++17"
        )


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
