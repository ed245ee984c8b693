"""What the CPU has, and one CPU that stands for older ones."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch

import newer_cpu
from amoeba.cpu import build
from amoeba.cpu.weights import Path, load_packed
from amoeba.system import cpu_features, machine
from called import call

_AVX2 = {"sse2", "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
XEON_WITHOUT_BF16 = frozenset(_AVX2 | _AVX512)
ZEN = XEON_WITHOUT_BF16 | {"avx512_bf16", "avx512vbmi"}
XEON = ZEN | {"avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}
GRAVITON = frozenset({"asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "svebf16"})
COMPILER = shutil.which("g++") or shutil.which("clang++")

Stand = Callable[[str, frozenset[str], str | None], None]


def forget() -> None:
    for cached in (cpu_features.cpu_flags, cpu_features.features_override):
        cached.cache_clear()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """stand(architecture, its flags, AMOEBA_CPU_FEATURES): until the end of the test this machine is such a one."""

    def stand(architecture: str, flags: frozenset[str], level: str | None) -> None:
        monkeypatch.setattr(platform, "machine", lambda: architecture)
        monkeypatch.setattr(cpu_features, "_flags_of_cpu", lambda: flags)
        if level is None:
            monkeypatch.delenv("AMOEBA_CPU_FEATURES", raising=False)
        else:
            monkeypatch.setenv("AMOEBA_CPU_FEATURES", level)
        forget()

    yield stand
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("architecture", "flags", "level", "has", "has_not", "compiler_flag"),
    [
        ("x86_64", XEON, None, "amx_bf16 avx512_bf16", "", "-march=native"),
        ("x86_64", XEON, "amx", "amx_bf16 avx512_bf16", "avx512_fp16", cpu_features._X86[-1].compiler_flag),
        ("x86_64", XEON, "avx512_bf16", "avx512_bf16 avx512_vnni", "amx_bf16 avx512_fp16", "-march=cooperlake"),
        ("x86_64", XEON, "avx512", "avx512f avx512_vnni", "avx512_bf16 amx_bf16", "-march=cascadelake"),
        ("x86_64", XEON, "avx2", "avx2 fma", "avx512f avx512_vnni avx512_bf16 amx_bf16", "-march=haswell"),
        ("x86_64", XEON, "generic", "sse2", "avx2 avx512f amx_bf16", "-march=x86-64"),
        ("x86_64", XEON_WITHOUT_BF16, "avx512", "avx512_vnni", "avx512_bf16", "-march=cascadelake"),
        ("aarch64", GRAVITON, None, "asimddp bf16 sve", "", "-mcpu=native"),
        ("aarch64", GRAVITON, "bf16", "asimddp bf16 i8mm", "sve", "-march=armv8.2-a+dotprod+i8mm+bf16"),
        ("aarch64", GRAVITON, "dotprod", "asimd asimddp", "bf16 i8mm sve", "-march=armv8.2-a+dotprod"),
        ("aarch64", GRAVITON, "neon", "asimd", "asimddp bf16 i8mm sve", "-march=armv8-a"),
        ("arm64", GRAVITON, "neon", "asimd", "asimddp bf16 i8mm sve", "-march=armv8-a"),
    ],
)
def test_a_level_hides_what_came_after_it(stand, architecture, flags, level, has, has_not, compiler_flag):
    stand(architecture, flags, level)
    found = cpu_features.cpu_flags()
    assert found >= set(has.split()) and not found & set(has_not.split())
    assert cpu_features.compiler_flag() == compiler_flag
    with_bf16 = bool({"avx512_bf16", "bf16"} & set(has.split()))
    assert cpu_features.has_bf16_instructions() == with_bf16
    expected = torch.bfloat16 if with_bf16 else torch.float32
    assert cpu_features.compute_dtype(torch.bfloat16, torch.device("cpu")) == expected
    assert machine.machine()["cpu"]["features_override"] == level
    assert set(machine.machine()["cpu"]["instruction_sets"]) <= found
    assert machine.machine_kind().endswith(f"-as-{level.replace('_', '-')}" if level else "-cores") or machine.gpus()


@pytest.mark.parametrize(
    ("architecture", "flags", "level", "here"),
    [
        ("x86_64", XEON_WITHOUT_BF16, "avx512_bf16", "generic, avx2, avx512"),
        ("x86_64", frozenset({"sse2"}), "avx2", "generic"),
        ("x86_64", frozenset(), "avx2", "generic"),
        ("x86_64", XEON, "neon", "generic, avx2, avx512, avx512_bf16, amx"),
        ("x86_64", XEON, "AVX2", "generic, avx2, avx512, avx512_bf16, amx"),
        ("aarch64", frozenset({"asimd"}), "dotprod", "neon"),
        ("riscv64", frozenset(), "generic", "none is known here"),
    ],
)
def test_a_level_that_the_cpu_does_not_contain_is_refused(stand, architecture, flags, level, here):
    stand(architecture, flags, level)
    with pytest.raises(ValueError, match=rf"AMOEBA_CPU_FEATURES: expected .*\({here}\); got '{level}'.*Unset it"):
        cpu_features.cpu_flags()
    result = call("doctor", code=2)
    assert "AMOEBA_CPU_FEATURES: expected" in result.output


@pytest.mark.parametrize(
    ("architecture", "flags", "level", "fitting"),
    [
        ("x86_64", XEON, None, "amx avx512_bf16 avx512 avx2 generic"),
        ("x86_64", XEON, "avx2", "avx2 generic"),
        ("x86_64", ZEN, None, "avx512_bf16 avx512 avx2 generic"),
        ("x86_64", frozenset(_AVX2 | {"avx512f"}), None, "avx2 generic"),
        ("aarch64", GRAVITON, None, "bf16 dotprod neon"),
        ("aarch64", GRAVITON, "neon", "neon"),
        ("aarch64", frozenset({"asimd", "asimddp", "bf16"}), None, "dotprod neon"),
        ("riscv64", frozenset(), None, ""),
    ],
)
def test_the_kinds_of_cpu_that_fit_come_newest_first(stand, architecture, flags, level, fitting):
    """A wheel's library is chosen by this order."""
    stand(architecture, flags, level)
    assert " ".join(each.name for each in cpu_features.fitting_levels()) == fitting


@pytest.mark.parametrize(
    ("architecture", "flags", "level", "reason"),
    [
        ("x86_64", XEON_WITHOUT_BF16, None, None),
        ("x86_64", ZEN, None, None),
        ("x86_64", XEON, None, "it is one"),
        ("x86_64", XEON_WITHOUT_BF16, "avx2", "needs AVX-512 with VNNI"),
        ("aarch64", GRAVITON, None, "needs AVX-512 with VNNI"),
    ],
)
def test_what_stands_for_a_cpu_with_amx(stand, architecture, flags, level, reason):
    stand(architecture, flags, level)
    why = newer_cpu.why_not()
    assert why is None if reason is None else reason in why


def test_an_empty_name_hides_nothing(stand: Stand) -> None:
    stand("x86_64", XEON, "")
    assert cpu_features.features_override() is None and cpu_features.cpu_flags() == XEON


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("level", [level.name for level in cpu_features.levels_here()])
def test_a_compiler_is_not_told_of_what_is_hidden(level: str) -> None:
    (chosen,) = (each for each in cpu_features.levels_here() if each.name == level)
    told = subprocess.run(
        [str(COMPILER), *chosen.compiler_flag.split(), "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    macros = {
        "avx2": "__AVX2__ ", "avx512f": "__AVX512F__ ", "avx512_vnni": "__AVX512VNNI__ ",
        "avx512_bf16": "__AVX512BF16__ ", "amx_tile": "__AMX_TILE__ ", "asimddp": "__ARM_FEATURE_DOTPROD ",
        "bf16": "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC ", "i8mm": "__ARM_FEATURE_MATMUL_INT8 ",
        "avx512vbmi": "__AVX512VBMI__ ", "amx_int8": "__AMX_INT8__ ", "amx_bf16": "__AMX_BF16__ ",
    }  # fmt: skip
    told_of = {flag for flag, macro in macros.items() if macro in told}
    assert told_of == cpu_features._flags_up_to(chosen) & macros.keys()


def test_the_compiled_path_is_one_that_the_flags_admit() -> None:
    """Also where features are hidden: what is compiled in is all there is."""
    try:
        best = load_packed().best_path
    except build.CoreUnavailable as reason:
        pytest.skip(str(reason))
    flags = cpu_features.cpu_flags()
    assert best < Path.AMX or {"amx_bf16", "amx_int8"} <= flags
    assert best < Path.AVX512 or {"avx512_bf16", "avx512_vnni"} <= flags
    if cpu_features.features_override() is None:
        return
    assert best == (Path.AMX if "amx_bf16" in flags else Path.AVX512 if "avx512_bf16" in flags else Path.GENERIC)


def test_doctor_shows_the_override_and_the_compiled_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    (oldest, *_) = cpu_features.levels_here() or pytest.skip("no kind of CPU is known here")
    monkeypatch.setattr(machine, "features_override", lambda: oldest)
    result = call("doctor")
    text = result.said
    assert f"stands for a CPU with {oldest.name} at best: AMOEBA_CPU_FEATURES={oldest.name}" in text
    assert "compiled libraries folder" in text
    for name in build.LIBRARIES:
        assert f"{name} compiled and verified" in text or f"{name} not compiled yet" in text
