"""Builds the wheel, installs it without a compiler, and tests it as each kind of CPU for which this one can stand.

    python tests/support/installed_wheel.py             # make test-wheel
    python tests/support/installed_wheel.py avx2 neon   # of these kinds alone

As each kind, AMOEBA_CPU_FEATURES hides what newer CPUs have: all libraries load from the wheel, `amoeba verify` finds
the core right, and tests of packed and quantised experts and of native decoding pass. torch and everything else come
from the environment that runs this.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from amoeba.system.cpu_features import fitting_levels
from amoeba.system.machine import usable_cores
from other_cpus import OLDER

ROOT = Path(__file__).parents[2]
TESTS = ("cpu/test_packed_experts.py", "cpu/test_quantised_by_core.py", "decoding/test_cpu_step.py")
LOADS = """
import sys
from amoeba.cpu.build import CARRIED, LIBRARIES, carried_library, load
for name in LIBRARIES:
    library = carried_library(name)
    if library is None or library.parent != CARRIED / sys.argv[1]:
        sys.exit(f"{name}: expected the wheel's library for {sys.argv[1]}, got {library}")
    load(library, {})
"""


def main(*kinds: str) -> int:
    built = ROOT / "build" / "tested-wheel"
    subprocess.run([sys.executable, ROOT / "dev" / "wheel.py", built, *kinds], check=True)
    here = [level.name for level in fitting_levels() if level.name != "generic" and level.name in (kinds or level.name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(usable_cores()) as pool:
        python = install(next(built.glob("*.whl")), Path(folder))
        codes = dict(zip(here, pool.map(lambda kind: check(python, kind), here), strict=True))
    failed = [kind for kind, code in codes.items() if code]
    print(f"the wheel fails for {failed}" if failed else f"the wheel is right for {', '.join(here) or 'no CPU here'}")
    return 1 if failed or not here else 0


def install(wheel: Path, folder: Path) -> Path:
    """A Python of its own, with the wheel, and behind it the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    return folder / "bin" / "python"


def check(python: Path, kind: str) -> int:
    """The exit code of the first command that fails; what it said is printed."""
    cache = python.parents[1] / f"cache-{kind}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"AMOEBA_CPU_FEATURES": kind, **OLDER.get(kind, (set(), {}))[1], "AMOEBA_CACHE": str(cache)}
    environment |= {"PATH": str(python.parent), "CXX": "false", "OMP_NUM_THREADS": "1"}
    for command in (
        ("-c", LOADS, kind),
        ("-m", "amoeba", "verify", "--device", "cpu", "--backend", "cpu", "--dtype", "float32", "--dtype", "bfloat16"),
        ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS),
    ):
        done = subprocess.run([python, *command], cwd=ROOT / "tests", env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"as a CPU with {kind} at best, {command[:3]}\n{done.stdout}{done.stderr}", flush=True)
            return done.returncode
    if compiled := list(cache.glob("*.so")):
        print(f"as a CPU with {kind} at best, compiled instead of loaded from the wheel: {compiled}", flush=True)
    return len(compiled)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
