"""The C++ core: right on every vector width, cached whole, and replaced by torch with a reason where there is none."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from amoeba import ExpertWeights, Routing, experts
from amoeba.cpu import build, core

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
ARCHITECTURES = ["-march=x86-64", "-march=haswell"] if platform.machine() == "x86_64" else ["-O3"]


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_core_agrees_with_plain_loops_on_other_instruction_sets(architecture: str, tmp_path: Path) -> None:
    program = tmp_path / "check"
    source = ROOT / "tests" / "cpu" / "core_check.cpp"
    subprocess.run(
        [str(COMPILER), "-std=c++17", "-O2", "-ffp-contract=fast", architecture, str(source), "-o", str(program)],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip(f"this CPU does not run {architecture}")
    assert done.returncode == 0, done.stdout
    assert "worst relative error" in done.stdout


@pytest.mark.thorough
@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 CPUs")
def test_a_sum_has_the_same_bits_in_every_form_whatever_the_compiler_tunes(tmp_path: Path) -> None:
    """What exact mode and decoding with any number of threads rest on."""
    program = tmp_path / "check"
    source = ROOT / "tests" / "cpu" / "same_bits_check.cpp"
    flags = *build._FLAGS, "-Wno-psabi", "-march=haswell", "-mtune=znver2"
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        pytest.skip("this CPU does not run -march=haswell")
    assert done.returncode == 0, done.stdout


@pytest.mark.thorough  # without a compiler: test_library_cache.py
def test_without_the_core_the_layer_runs_on_torch_and_says_so() -> None:
    program = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from amoeba import ExpertWeights, Routing, experts
weights = ExpertWeights(torch.randn(4, 16, 8), torch.randn(4, 8, 8))
print(experts(torch.randn(3, 8), Routing(torch.tensor([[0], [1], [3]]), torch.ones(3, 1)), weights).shape)
"""
    environment = {**os.environ, "AMOEBA_CPU_CORE": "0", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "torch.Size([3, 8])" in done.stdout
    assert "backend eager (cpu the C++ core is switched off by AMOEBA_CPU_CORE=0)" in done.stderr


def test_asking_for_the_core_by_name_without_it_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amoeba.backends.cpu.why_no_core", lambda: "no C++ compiler was found")
    weights = ExpertWeights(torch.randn(4, 16, 8), torch.randn(4, 8, 8))
    with pytest.raises(ValueError, match=r"no C\+\+ compiler was found"):
        experts(torch.randn(1, 8), Routing(torch.tensor([[0]]), torch.ones(1, 1)), weights, backend="cpu")


@needs_compiler
def test_tensors_the_core_does_not_take_are_refused_up_front() -> None:
    loaded = core.load_core()
    offs, matrix = torch.tensor([2], dtype=torch.int32), torch.randn(1, 8, 4)
    good, out = torch.randn(2, 8), torch.empty(2, 4)
    loaded.multiply_rows(offs, good, matrix, out=out)
    torch.testing.assert_close(out, good @ matrix[0])
    for rows in (good.double(), good.bfloat16(), torch.randn(2, 7), torch.randn(8, 2).t(), torch.randn(1, 8)):
        with pytest.raises(ValueError, match=r"expected .*; got "):
            loaded.multiply_rows(offs, rows, matrix, out=out)
    with pytest.raises(ValueError, match=r"expected .*; got "):
        loaded.multiply_rows(offs.long(), good, matrix, out=out)
    with pytest.raises(ValueError, match=r"expected .*; got "):
        loaded.multiply_rows(offs, good, matrix[:, ::2, ::2], out=out)
