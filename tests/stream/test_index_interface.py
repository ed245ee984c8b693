"""The C interface to exported expert ids: compiled, run, and compared with what our kernel writes. On a CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amoeba.kernels.index_export import export_indices, row_length
from selection import quick

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/amoeba/stream/gpu/csrc"
CC = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
STRICT = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic")
BAD, LATE = -1, -2
EXPERTS = 12

pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("index") / "libamoeba_index_export.so"
    subprocess.run([CC, *STRICT, "-fPIC", "-shared", SOURCE / "index_export.c", "-o", file], check=True)
    return file


@pytest.fixture(scope="module")
def calls(library: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library))
    words = POINTER(c_int32)
    for name, result, arguments in (
        ("bytes", c_size_t, (c_int, c_int, c_int)),
        ("init", c_void_p, (c_void_p, c_int, c_int, c_int)),
        ("free", None, (c_void_p,)),
        ("launch", words, (c_void_p, c_int, words)),
        ("ready", c_int, (c_void_p, c_int)),
        ("wait", c_int, (c_void_p, c_int, c_double)),
        ("read", c_int, (c_void_p, c_int, words, c_int, POINTER(c_int))),
        ("write", c_int, (words, c_int32, c_int, POINTER(c_int64), c_int, words, c_int)),
    ):
        function = getattr(found, f"amoeba_index_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found


class Index:
    def __init__(self, calls: ctypes.CDLL, layers: int, ids: int) -> None:
        self.calls, self.ids = calls, ids
        self.memory = torch.full((calls.bytes(layers, EXPERTS, ids) // 4,), 77, dtype=torch.int32)
        self.handle = calls.init(self.memory.data_ptr(), layers, EXPERTS, ids)

    def launch(self, layer: int) -> tuple[Tensor, int]:
        """The row, as a tensor, and its serial."""
        serial = c_int32()
        row = ctypes.cast(self.calls.launch(self.handle, layer, byref(serial)), c_void_p).value
        first = (row - self.memory.data_ptr()) // 4
        return self.memory[first : first + row_length(EXPERTS, self.ids)], serial.value

    def read(self, layer: int, capacity: int = EXPERTS) -> tuple[list[int], list[int]] | int:
        ids, missing = (c_int32 * max(capacity, 1))(), c_int(-5)
        asked = self.calls.read(self.handle, layer, ids, capacity, byref(missing))
        return asked if asked < 0 else (ids[: missing.value], ids[missing.value : asked])


@quick(lambda flags: not flags)
@pytest.mark.parametrize("flags", [(), ("-fsanitize=address,undefined", "-fno-sanitize-recover")], ids=str)
def test_the_example_compiles_and_runs(library: Path, flags: tuple[str, ...]) -> None:
    program = library.with_name("example")
    sources = [ROOT / "examples/index_export.c", *([SOURCE / "index_export.c"] if flags else [])]
    linked = [] if flags else [f"-L{library.parent}", "-lamoeba_index_export", f"-Wl,-rpath,{library.parent}"]
    command = [CC, *STRICT, *flags, "-I", SOURCE, *sources, *linked, "-lpthread", "-o", program]
    built = subprocess.run(command, capture_output=True, text=True)
    if flags and built.returncode:
        pytest.skip("this compiler has no sanitizers")
    assert not built.returncode, built.stderr
    said = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (0, "435 experts asked for, 341 loaded\n"), said.stderr


def test_it_compiles_as_a_header_of_cpp_too(tmp_path: Path) -> None:
    file = tmp_path / "header.cpp"
    file.write_text("#include <index_export.h>\nint main() { return amoeba_index_bytes(0, 1, 1) != 0; }\n")
    if (compiler := shutil.which("c++") or shutil.which("g++")) is None:
        pytest.skip("needs a C++ compiler")
    subprocess.run([compiler, "-Wall", "-Werror", "-fsyntax-only", "-I", SOURCE, file], check=True)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(-2, EXPERTS + 1), min_size=1, max_size=8)), max_size=6)
)
def test_the_host_reads_what_the_kernel_writes_and_a_cpu_writes_the_same(
    calls: ctypes.CDLL, passes: list[tuple[int, list[int]]]
) -> None:
    """Several passes over two layers, each by our kernel, and by `amoeba_index_write`."""
    slot_E = torch.tensor([e if e % 3 else -1 for e in range(EXPERTS)], dtype=torch.int32)
    by_kernel, by_host = (Index(calls, 2, 8) for _ in range(2))
    try:
        for layer, chosen in passes:
            expert_N = torch.tensor(chosen)
            row, serial = by_kernel.launch(layer)
            export_indices(expert_N, slot_E, torch.empty_like(expert_N), row, serial)
            other, same = by_host.launch(layer)
            pointers = (c_int64 * len(chosen))(*chosen), (c_int32 * EXPERTS)(*slot_E.tolist())
            place = ctypes.cast(other.data_ptr(), POINTER(c_int32))
            assert calls.write(place, same, 8, pointers[0], len(chosen), pointers[1], EXPERTS) == 0
            owned = sorted({each for each in chosen if 0 <= each < EXPERTS})
            expected = [e for e in owned if e % 3 == 0], [e for e in owned if e % 3]
            assert by_kernel.read(layer) == by_host.read(layer) == expected and serial == same
    finally:
        calls.free(by_kernel.handle)
        calls.free(by_host.handle)


def test_a_row_that_is_not_there_is_late_and_a_wrong_call_is_refused(calls: ctypes.CDLL) -> None:
    index = Index(calls, 2, 4)
    assert not index.memory.any()
    assert index.read(0) == calls.ready(index.handle, 0) == calls.wait(index.handle, 0, 0.0) == BAD  # no launch
    assert index.read(2) == index.read(-1) == BAD
    row, serial = index.launch(0)
    assert calls.ready(index.handle, 0) == 0 and index.read(0) == LATE and calls.wait(index.handle, 0, 0.01) == LATE
    row[:5] = torch.tensor([1, 2, serial, 7, 3])
    assert calls.wait(index.handle, 0, 0.0) == 0 and index.read(0) == ([7], [3])
    assert index.read(0, capacity=1) == BAD
    for wrong in ((3, 2), (-1, 2), (0, 5), (0, -1)):  # what a kernel wrote is not trusted
        row[:2] = torch.tensor(wrong)
        assert index.read(0) == BAD
    again, other = index.launch(0)
    assert index.read(0) == LATE and other == serial + 1 and again.data_ptr() != row.data_ptr()
    full = (c_int64 * 5)(*range(5)), (c_int32 * EXPERTS)()
    place = ctypes.cast(again.data_ptr(), POINTER(c_int32))
    assert calls.write(place, other, 4, full[0], 5, full[1], EXPERTS) == BAD and index.read(0) == LATE
    calls.free(index.handle)
    assert [calls.bytes(*sizes) for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 5, 3))] == [0, 0, 0, 2 * 2 * 6 * 4]
    assert not calls.init(None, 1, 1, 1) and not calls.init(index.memory.data_ptr(), 0, 1, 1)
