"""The sums of packed rows with packed columns, built for other instruction sets: int8 to the bit, bf16 within 1e-5. And
the numbers that codes stand for, to the bit."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from selection import quick

SOURCE = Path(__file__).parent / "sums_check.cpp"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")
COMPILER = shutil.which("g++") or shutil.which("clang++")
CROSS_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
X86_COMPILER, X86_EMULATOR = shutil.which("x86_64-linux-gnu-g++"), shutil.which("qemu-x86_64")
X86_LIBRARIES = Path("/usr/x86_64-linux-gnu")

# the instruction set -> what of it the plain way takes for int8 and bf16
X86 = {
    "x86-64": "16-bit pairs, fp32, 4 lanes",
    "sandybridge": "16-bit pairs, half a vector at a time, fp32, 8 lanes",
    "haswell": "16-bit pairs, fp32 with FMA, 8 lanes",
    "alderlake": "AVX-VNNI, fp32 with FMA, 8 lanes",
    "skylake-avx512": "16-bit pairs, fp32 with FMA, 16 lanes",
    "icelake-server": "AVX-512 VNNI, fp32 with FMA, 16 lanes",
    "native": "whatever this machine has",
}
IN_EVERY_RUN = ("x86-64",)  # what this CPU has, all other tests of the core use
ARM = {"armv8-a": "widened int8, fp32", "armv8.2-a+dotprod": "SDOT, fp32", "armv8.6-a+bf16+i8mm": "SDOT, BFDOT"}


def build(compiler: str | None, program: Path, *flags: str) -> None:
    done = subprocess.run(
        [str(compiler), *FLAGS, *flags, str(SOURCE), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if re.search("bad value|unknown value|unknown target CPU|invalid feature modifier", done.stderr):
        pytest.skip(f"this compiler does not know {flags[-1]}")
    assert done.returncode == 0, done.stderr


def check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip(f"this CPU does not run it (signal {-done.returncode})")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worst error of bf16" in done.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@quick(lambda architecture: architecture in IN_EVERY_RUN)
@pytest.mark.parametrize("architecture", X86, ids=lambda name: f"{name}: {X86[name]}")
def test_every_instruction_set_of_x86_has_the_same_sums(architecture: str, tmp_path: Path) -> None:
    unoptimised = ["-O0"] if architecture in IN_EVERY_RUN else []  # half of the time
    build(COMPILER, tmp_path / "check", *unoptimised, f"-march={architecture}")
    check(str(tmp_path / "check"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64"), reason="-mcpu=native is ARM's")
@quick(lambda codes: codes == "NEON")
@pytest.mark.parametrize("codes", ["NEON", "PLAIN"])
def test_this_arm_machine_has_the_same_sums(codes: str, tmp_path: Path) -> None:
    build(COMPILER, tmp_path / "check", f"-DAMOEBA_{codes}_CODES", "-mcpu=native")
    check(str(tmp_path / "check"))


@pytest.mark.skipif(
    not (CROSS_COMPILER and EMULATOR),
    reason="needs aarch64-linux-gnu-g++ and qemu-aarch64-static to emulate 64-bit ARM",
)
@pytest.mark.parametrize("architecture", ARM, ids=lambda name: f"{name}: {ARM[name]}")
def test_every_instruction_set_of_arm_has_the_same_sums(architecture: str, tmp_path: Path) -> None:
    build(CROSS_COMPILER, tmp_path / "check", "-static", f"-march={architecture}")
    check(str(EMULATOR), "-cpu", "max", str(tmp_path / "check"))


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() == "x86_64", reason="the test above needs no emulation")
@pytest.mark.skipif(
    not (X86_COMPILER and X86_EMULATOR and X86_LIBRARIES.is_dir()),
    reason="needs x86_64-linux-gnu-g++ and qemu-x86_64 to emulate x86",
)
@pytest.mark.parametrize("architecture", ["x86-64", "sandybridge", "haswell"])  # qemu 7.2 has no AVX-512
def test_x86_without_avx512_has_the_same_sums_where_it_is_emulated(architecture: str, tmp_path: Path) -> None:
    build(X86_COMPILER, tmp_path / "check", f"-march={architecture}")
    check(str(X86_EMULATOR), "-L", str(X86_LIBRARIES), "-cpu", "max", str(tmp_path / "check"))
