"""Runs a selection of the tests with the oldest and the newest torch and transformers that pip finds.

    python tests/support/other_versions.py          # make test-versions
    python tests/support/other_versions.py oldest   # make test-versions VERSIONS=oldest

The oldest are the lower bounds in pyproject.toml; the newest are what the package index has today. Each pair gets an
environment in build/versions, which the next run updates. On a fresh machine that takes a minute or two, and the
newest torch brings gigabytes of CUDA libraries. Where it cannot be installed, this says so and goes on.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "versions"
# What depends most on torch and transformers: their internals, operators and autograd, torch.compile, model classes,
# PEFT's files, stores of checkpoints.
TESTS = (
    "compiled/test_compiled_ahead.py::test_the_passes_of_commands_need_no_numbers",
    "compiled/test_compiled_ahead.py::test_the_key_of_a_kernel_does_not_depend_on_what_was_launched_before",
    "core/test_torch_internals.py",
    "test_layer.py",
    "backends/test_operator.py",
    "integrations/test_recognised_gates.py",
    "integrations/test_compiled_experts.py",
    "integrations/test_transformers.py",
    "lora/test_peft_files.py",
    "stream/test_packing_refusals.py",
)
# With the oldest Triton alone: one of each of Hopper's kernels, compiled without a GPU in 25 s of a core. What newer
# versions take, it may refuse.
OLDEST_TRITON = "3.6"
COMPILED = "compiled/test_hopper_compiles.py::test_matrix_instructions_shared_memory_that_fits_and_no_spills"
COMPILED += "[one of each kernel]"
NEEDED_BYTES = 12 * 2**30  # both environments and pip's cache of what it downloads: 10 GiB on ARM in November 2026
INSTALL_SECONDS = 720  # while other tests have the cores; alone two minutes


class Outcome(NamedTuple):
    text: str
    failed: bool


def main(versions: list[str]) -> int:
    if unknown := {*versions} - {"oldest", "newest"}:
        print(f"versions: expected oldest or newest; got {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    # Both at once: one waits for its downloads while the other computes.
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(_try, versions or ("oldest", "newest")))
    for outcome in outcomes:
        print(outcome.text, flush=True)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def requirements(which: str, project: dict) -> list[str]:
    """What pip is asked for; the project's own needs, with other bounds for the two that are tried."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["hf"], *extras["lora"]]
    for place, need in enumerate(wanted):
        name, _, bound = need.partition(">=")
        if name in ("torch", "transformers"):
            wanted[place] = f"{name}=={bound}.*" if which == "oldest" else need
    # The oldest Triton cannot interpret kernels with a newer numpy.
    others = (f"triton=={OLDEST_TRITON}.*", "numpy<2.4") if which == "oldest" else ("triton", "numpy")
    return [*wanted, *others, "pytest>=8", "hypothesis>=6.100"]


def _try(which: str) -> Outcome:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reason, wrong = _install(which, requirements(which, project))
    if reason is not None:
        return Outcome(f"THE {which.upper()} TORCH AND TRANSFORMERS WERE NOT TRIED: {reason}", wrong)
    python = str(FOLDER / which / "bin" / "python")
    told = (
        "import torch, triton, transformers as t; print(*(f'{m.__name__} {m.__version__}' for m in (torch, triton, t)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", told], env=environment, capture_output=True, text=True)
    runs = [TESTS] if which == "newest" else [TESTS, ("-m", "", COMPILED)]
    done = [
        subprocess.run(
            [python, "-m", "pytest", "-p", "no:cacheprovider", *tests],
            env=environment,
            cwd=ROOT / "tests",
            capture_output=True,
            text=True,
        )
        for tests in runs
    ]
    named = versions.stdout.strip() or versions.stderr.strip()
    told = "".join(each.stdout + each.stderr for each in done)
    return Outcome(f"with the {which}: {named}\n{told}", any(each.returncode for each in done))


def _install(which: str, wanted: list[str]) -> tuple[str | None, bool]:
    """Why there is no such environment, or None; and whether that is a fault of ours."""
    folder = FOLDER / which
    python = folder / "bin" / "python"
    if not python.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(FOLDER).free
        if free < NEEDED_BYTES:
            return f"{free / 2**30:.1f} GiB of disk are free, {NEEDED_BYTES / 2**30:.0f} are needed", False
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    try:
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
        subprocess.run(
            [*pip, "--quiet", "--upgrade", *wanted], check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"pip was not done after {INSTALL_SECONDS} s", False
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        return f"pip failed: {said[-1]}", "ResolutionImpossible" in error.stderr
    return None, False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
