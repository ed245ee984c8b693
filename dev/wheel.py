"""Builds the wheel that needs no compiler: the package with its C++ libraries for each kind of CPU.

    python dev/wheel.py dist            # make wheel
    python dev/wheel.py FOLDER avx2     # with libraries for this kind alone, for a quick test

It serves the architecture on which it is built. Libraries are compiled into the cache folder, once, as for
AMOEBA_CPU_FEATURES. The platform is manylinux_2_28, like that of PyTorch's own wheels, if the libraries need nothing
newer. Otherwise it is linux, for machines like this one, and what is newer is named.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from amoeba.cpu import build
from amoeba.system.cpu_features import Level, all_levels
from amoeba.system.machine import usable_cores

ROOT = Path(__file__).parents[1]
TREE = ROOT / "build" / "wheel"
# What manylinux_2_28 has: glibc 2.28 and the libraries of GCC 8.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8,)}
_SYMBOL = re.compile(rf"\*UND\*.*?\b({'|'.join(NEWEST)})_([\d.]+)\)?\s+(\S+)")


def main(folder: str, *kinds: str) -> int:
    levels = [level for level in all_levels() if level.name != "generic" and level.name in (kinds or level.name)]
    if platform.system() != "Linux" or not levels:
        print(f"no libraries for {platform.system()} on {platform.machine()} {' '.join(kinds)}", file=sys.stderr)
        return 2
    shutil.rmtree(TREE, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "amoeba", TREE / "src" / "amoeba", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, TREE)
    with ThreadPoolExecutor(usable_cores()) as pool:
        wanted = [(level, name) for level in levels for name in build.LIBRARIES]
        libraries = list(pool.map(lambda each: carry(*each), wanted))
    newer = {symbol for library in libraries for symbol in newer_symbols(library)}
    if newer:
        print(f"newer than manylinux_2_28: {', '.join(sorted(newer))}", file=sys.stderr)
    wheel = pack(Path(folder), "linux" if newer else "manylinux_2_28")
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, for {', '.join(level.name for level in levels)}")
    return 0


def carry(level: Level, name: str) -> Path:
    """The library, in the tree that becomes the wheel."""
    folder = TREE / "src" / build.CARRIED.relative_to(Path(build.__file__).parents[2]) / level.name
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(build.compiled_library(name, level.compiler_flag), folder))


def newer_symbols(library: Path) -> list[str]:
    """What it needs of glibc and of GCC's libraries that manylinux_2_28 has not."""
    table = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    return [
        f"{symbol}@{owner}_{version}"
        for owner, version, symbol in _SYMBOL.findall(table)
        if tuple(map(int, version.split("."))) > NEWEST[owner]
    ]


def pack(folder: Path, system: str) -> Path:
    """The wheel of the tree, alone in the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    option = f"--config-settings=--build-option=--plat-name={system}_{platform.machine()}"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", folder, option, TREE], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
