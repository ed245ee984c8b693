"""Runs the tests that depend on the CPU once more as each older kind of CPU for which this one can stand.

    python tests/support/older_cpus.py              # what `make test` does before all tests

AMOEBA_CPU_FEATURES hides from us what such a CPU does not have; torch and oneDNN have switches of their own. Where this
CPU is itself one of the oldest, there is nothing to run.
"""

import os
import subprocess
import sys
from pathlib import Path

from amoeba.system.cpu_features import cpu_flags, levels_here

# The kind of CPU: what makes this one newer, and torch's environment there. Not among them are the oldest x86, on which
# nobody runs torch, and avx512_bf16: that is AMOEBA_CPU_PATH=avx512, which the tests of a CPU with AMX take anyway.
OLDER = {
    "avx2": ({"avx512f"}, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "avx512": (
        {"avx512_bf16", "amx_bf16"},
        {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    ),
    "neon": ({"asimddp"}, {}),
    "dotprod": ({"bf16", "svebf16"}, {}),
}
TESTS = (
    "system/test_cpu_features.py",
    "cpu/test_core.py",
    "cpu/test_core_blocks.py",
    "cpu/test_step_products.py",
    "cpu/test_products.py",
    "cpu/test_node.py",
    "cpu/test_training.py",
    "cpu/test_packed_weights.py",
    "backends/test_operator.py::TestAutocast",
    "bench/test_peers.py",
    "proof/test_conformance.py::test_bf16_agrees_with_and_without_instructions_for_it[cpu-False-few]",
    "cpu/test_packed_experts.py",
    "cpu/test_scaled_codes.py",
    "jobs/test_cpu_dtype.py::test_this_cpu_loads_bf16_in_what_it_multiplies",
)
# Those build for older instruction sets themselves, or take long and are the same on every CPU.
NOT_AGAIN = "not older_instruction and not other_instruction_sets and not InsideTorch and not memory_as_was_predicted"
NOT_AGAIN += " and not without_the_core and not doctor_shows"


def main() -> int:
    here, folder = {level.name for level in levels_here()}, Path(__file__).parents[1]
    # One process for each, all at once: half a minute, of which a second worker would take a third to get ready.
    tests = [str(folder / test) for test in TESTS]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", NOT_AGAIN, *tests]
    running = {
        name: subprocess.Popen(
            command,
            env=os.environ | environment | {"AMOEBA_CPU_FEATURES": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, (newer, environment) in OLDER.items()
        if name in here and newer & cpu_flags()
    }
    for name, process in running.items():
        said, _ = process.communicate()
        print(f"as a CPU with {name} at best (AMOEBA_CPU_FEATURES={name})\n{said}", flush=True)
    failed = [name for name, process in running.items() if process.returncode]
    if failed:
        print(f"tests fail as a CPU with {' and '.join(failed)} at best")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
