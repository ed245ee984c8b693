"""Runs the tests that depend on the CPU once more as each other kind of CPU for which this one can stand.

    python tests/support/other_cpus.py              # make test-other-cpus

Older kinds: AMOEBA_CPU_FEATURES hides from us what such a CPU does not have; torch and oneDNN have switches of their
own. Where this CPU is itself one of the oldest, there are none. A newer kind: newer_cpu.py emulates AMX and bf16.
"""

import os
import subprocess
import sys
from pathlib import Path

import newer_cpu
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
NEWER_TESTS = (
    "cpu/test_step_products.py",
    "cpu/test_core_blocks.py",
    "cpu/test_products.py",
    "cpu/test_node.py",
    "cpu/test_training.py",
    "cpu/test_packed_weights.py",
    "cpu/test_scaled_codes.py::test_fused_passes_read_what_is_packed_in_bf16",
    "ops/test_exact_operators.py",
    "proof/test_conformance.py::test_bf16_agrees_with_and_without_instructions_for_it[cpu-False-few]",
)


def start(tests: tuple[str, ...], environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    files = [str(Path(__file__).parents[1] / test) for test in tests]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *options, *files]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def main() -> int:
    here = {level.name for level in levels_here()}
    # One process for each, all at once: half a minute, of which a second worker would take a third to get ready.
    running = {
        f"{name} at best (AMOEBA_CPU_FEATURES={name})": start(
            TESTS, environment | {"AMOEBA_CPU_FEATURES": name}, "-k", NOT_AGAIN
        )
        for name, (newer, environment) in OLDER.items()
        if name in here and newer & cpu_flags()
    }
    if reason := newer_cpu.why_not():
        print(f"not as a CPU with AMX and bf16, emulated: {reason}", flush=True)
    else:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        options = "-p", "newer_cpu", "-k", f"{NOT_AGAIN} and not generic and not test_compiled"
        running["AMX and bf16, emulated"] = start(NEWER_TESTS, {"PYTHONPATH": path}, *options)
    for name, process in running.items():
        said, _ = process.communicate()
        print(f"as a CPU with {name}\n{said}", flush=True)
    failed = [name for name, process in running.items() if process.returncode]
    if failed:
        print(f"tests fail as a CPU with {' and '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
