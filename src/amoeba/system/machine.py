"""What this machine is, in words that may be published: no host names, no users, no paths.

machine()["cpu"]["model"]      # "Intel(R) Xeon(R) Processor"
machine_kind()                 # "intel-xeon-2-cores", fit for a file name
versions()["torch"]            # "2.13.0+cpu"
untried("torch", "2.99.0")     # "2.99.0 is newer than 2.15, the newest version that aMoEba was tested with"

Nothing refuses a newer version: most releases change nothing that matters here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amoeba._version import __version__
from amoeba.core.log import logger
from amoeba.system import tuned
from amoeba.system.cpu_features import cpu_flags, features_override

# Instruction sets that some path of ours, or of torch's products under it, makes use of.
X86_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
ARM_FLAGS = ("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2")
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "safetensors", "numpy", "tensorboard")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP = Path("/sys/fs/cgroup")  # of this process, in a container
_NOT_IN_A_NAME = re.compile(r"\((?:r|tm|c)\)|\b(?:processor|cpu)\b|@.*", re.IGNORECASE)


def machine() -> dict[str, Any]:
    flags, override = cpu_flags(), features_override()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": {
            "model": cpu_model(),
            "cores": usable_cores(),
            "threads": torch.get_num_threads(),
            "instruction_sets": [flag for flag in (*X86_FLAGS, *ARM_FLAGS) if flag in flags],
            "features_override": None if override is None else override.name,
        },
        "memory_bytes": total_memory(),
        "huge_pages": huge_pages(),
        "gpus": gpus(),
    }


def machine_kind() -> str:
    """Letters, digits and dashes: the GPU where there is one, otherwise the CPU and its cores; what it stands for."""
    found, override = gpus(), features_override()
    name = found[0]["name"] if found else f"{_NOT_IN_A_NAME.sub('', cpu_model())} {usable_cores()} cores"
    name += "" if override is None else f" as {override.name}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """Version of each package that matters here; None for one that is not installed."""
    found: dict[str, str | None] = {"amoeba": __version__, "python": platform.python_version()}
    found |= {name: _installed(name) for name in PACKAGES}
    found["torch"] = str(torch.__version__)  # with its build, as in +cu130, which some wheels' metadata leave out
    return found


@functools.cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """As the system names it; ARM kernels do not, there lscpu does."""
    sources: tuple[Callable[[], str], ...] = (
        lambda: _read(Path("/proc/cpuinfo")),
        lambda: _output("lscpu"),
        lambda: _output("sysctl", "machdep.cpu.brand_string"),
    )
    for source in sources:
        named = r"^(?:model name|machdep.cpu.brand_string)\s*:\s*(.+)$"
        match = re.search(named, source(), re.IGNORECASE | re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine()


def flags_looked_for() -> tuple[str, ...]:
    """The relevant instruction sets of this architecture."""
    return X86_FLAGS if platform.machine().lower() in ("x86_64", "amd64", "i686") else ARM_FLAGS


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def total_memory() -> int | None:
    """Bytes that this process may use at most; None where the system does not tell."""
    total = _meminfo("MemTotal")
    if total is None and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read(_CGROUP / "memory.max").strip()
    return min(total, int(limit)) if total is not None and limit.isdigit() else total


def available_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated on the device now; None if unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = _meminfo("MemAvailable")
    found = (total_memory() if available is None else available, _left_in_container())
    return min((each for each in found if each is not None), default=None)


def _left_in_container() -> int | None:
    """What its limit leaves; None where there is none. Files in memory that the kernel may drop count as left."""
    limit, used = (_read(_CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    droppable = re.search(r"^inactive_file (\d+)$", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    return max(int(limit) - int(used) + (int(droppable.group(1)) if droppable else 0), 0)


def peak_memory(device: torch.device) -> int | None:
    """The most that this process has held so far: on the GPU, or in all where there is none. None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def huge_pages() -> str | None:
    """The transparent huge pages setting (always, madvise or never); None where there is no such thing."""
    match = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    return match.group(1) if match else None


def gpus() -> list[dict[str, Any]]:
    """tuned_configurations: those that `amoeba tune` measured and that are in use, which may change the last bits."""
    found = []
    for index in range(torch.cuda.device_count()):
        each, configurations = torch.cuda.get_device_properties(index), tuned.entries(torch.device("cuda", index))
        about: dict[str, Any] = {"name": each.name, "compute_capability": f"{each.major}.{each.minor}"}
        about |= {"memory_bytes": each.total_memory, "multiprocessors": each.multi_processor_count}
        found.append(about | {"tuned_configurations": len(configurations)})
    return found


def commit() -> str | None:
    """The git commit this source tree stands at, with -dirty when it was changed; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "src" / "amoeba").is_dir():
        return None
    short = _output("git", "-C", str(root), "rev-parse", "--short=10", "HEAD").strip()
    if not short:
        return None
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip()
    return f"{short}-dirty" if changed else short


def _meminfo(field: str) -> int | None:
    match = re.search(rf"^{field}:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# The oldest and the newest minor version with which the tests have passed; pyproject.toml requires the oldest.
TRIED = {
    "python": ("3.11", "3.14"),
    "torch": ("2.10", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.8", "5.23"),
}


def untried(name: str, version: str | None) -> str | None:
    """What to tell a user whose version is older or newer than those in TRIED; None if there is nothing to tell."""
    if version is None or name not in TRIED or not (found := _minor(version)):
        return None
    oldest, newest = TRIED[name]
    if found > _minor(newest):
        return f"{version} is newer than {newest}, the newest version that aMoEba was tested with"
    if found < _minor(oldest):
        return f"{version} is older than {oldest}, the oldest version that aMoEba was tested with"
    return None


def warn_about_torch() -> None:
    """One line in the log. Only for torch: transformers releases a minor version every few weeks."""
    told = untried("torch", str(torch.__version__))
    if told is not None:
        logger.warning("torch %s; `amoeba verify` checks the results on this machine", told)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
