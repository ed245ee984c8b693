"""Our launch hands the driver the very bytes that Triton's own launcher hands it, for kernels compiled for Hopper.

There is no GPU in this: a stand-in for libcuda (fake_driver.c) notes down each launch. In a process of its own, since
Triton finds its driver once, and what stands for it here must not meet another test.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
# What Triton's modules want to find in the library, and what need not do anything here.
IDLE = (
    "cuCtxGetDevice", "cuCtxGetLimit", "cuCtxSetCurrent", "cuCtxSetLimit", "cuDeviceGet", "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuGetErrorString", "cuModuleLoadData",
    "cuModuleUnload", "cuOccupancyMaxActiveClusters", "cuPointerGetAttributes", "cuStreamIsCapturing",
    "cuTensorMapEncodeIm2col",
)  # fmt: skip


def driver_in(folder: Path) -> Path:
    """The stand-in for libcuda, compiled."""
    backend = pytest.importorskip("triton.backends.nvidia.driver")
    idle = folder / "idle.c"
    idle.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in IDLE))
    library, include = folder / "libcuda.so.1", Path(backend.__file__).parent / "include"
    sources = HERE / "fake_driver.c", idle
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1", "-o", library, *sources]
    subprocess.run(command, check=True)
    return library


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as Triton does")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own driver is in the process")
def test_the_driver_is_handed_the_same_bytes(tmp_path: Path) -> None:
    library = driver_in(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path), "AMOEBA_TUNED": "off"}
    told = subprocess.run([sys.executable, __file__, library], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    names = {"gemm_kernel", "wgrad_kernel", "_combine", "_activate_backward"}
    assert {name for name, _ in found} >= names | {"fp8_gemm_kernel", "_quantise_rows", "_quantise_weights"}
    assert {name for name, _ in found} >= {"fp8_wgrad_kernel", "_transpose_rows", "_column_sizes", "_transpose_codes"}
    assert all(same for _, same in found), found
    told_of = set(json.loads(told.stdout.splitlines()[-2]))  # of plain numbers alone, see `amoeba.kernels.launch`
    assert "_place_rows" in told_of and "gemm_kernel" not in told_of


def compare(library: str) -> list[tuple[str, bool]]:
    """(kernel, whether both ways handed over the same bytes), for each launch of a step."""
    driver = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0

    from triton import knobs

    from amoeba import with_precision
    from amoeba.backends import fp8_triton, triton_rows
    from amoeba.backends.triton import BACKEND
    from amoeba.core.problem import Needs, Problem
    from amoeba.core.weights import ExpertWeights
    from amoeba.kernels import launch, tile_sizes
    from amoeba.kernels.hopper import fp8_gemm as scaled_product
    from amoeba.kernels.hopper import fp8_wgrad as scaled_gradient
    from amoeba.kernels.hopper import gemm as product
    from amoeba.kernels.hopper import wgrad as gradient
    from amoeba.kernels.launch import plan as launch_plan

    tile_sizes.capability_of = lambda device: (9, 0)
    for module in (product, gradient, scaled_product, scaled_gradient):
        module.programs = lambda device: 132
    triton_rows.why_not_hopper = lambda problem: None
    knobs.runtime.jit_post_compile_hook = lambda **of: told_of.append(of["fn"].name.rsplit(".", 1)[-1])
    told_of: list[str] = []
    found: list[tuple[str, bool]] = []
    again, made = launch._again, launch.driver_launch

    def told_sizes(compiled: Any, grid: Any, arguments: Any) -> Any:
        sizes = parameter_sizes(compiled.asm["ptx"])
        driver.set_sizes(ctypes.c_long(compiled.function), len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        return made(compiled, grid, arguments)

    def both_ways(compiled: Any, grid: Any, arguments: tuple) -> Any:
        launched = again(compiled, grid, arguments)
        ours = launched.by_driver
        found.append((compiled.name, ours is not None and by_triton(launched) == by_us(ours, launched)))
        return launched

    def by_triton(launched: Any) -> bytes:
        noted()
        launched.start(77, [moved(value) for value in launched.arguments])
        return noted()

    def by_us(ours: Any, launched: Any) -> bytes:
        for place, value in enumerate(launched.arguments):
            if place in ours.words and value is not None:
                ours.memory[ours.words[place]] = value.data_ptr() + 4096
            if place in ours.maps:
                ours.move(ours.maps[place], value.base.data_ptr() + 4096)
        ours.start(77)
        return noted()

    def noted() -> bytes:
        buffer = ctypes.create_string_buffer(65536)
        length = driver.take_noted(buffer)
        return buffer.raw[:length]

    launch._again, launch.driver_launch = both_ways, told_sizes
    T, H, I, E, K = 130, 256, 128, 4, 2

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    weights = ExpertWeights(zeros(E, 2 * I, H), zeros(E, H, I))
    problem = Problem(zeros(T, H), torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K), weights)
    in_fp8, all_in_fp8 = (problem._replace(weights=with_precision(weights, name)) for name in ("fp8", "fp8-all"))
    for backend, given in ((BACKEND, problem), (fp8_triton.BACKEND, in_fp8), (fp8_triton.BACKEND, all_in_fp8)):
        for _ in range(2):  # the second one is recorded
            _, saved = backend.forward(given, "h")
            backend.backward(given, saved, zeros(T, H), Needs(x=True, weight=True, gate_up=True, down=True))
    assert not any(plan is None for plan in launch_plan._plans.values()), "all are plans"
    print(json.dumps(told_of))
    return found


def moved(value: Any) -> Any:
    """Another address than it was compiled and recorded with."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() + 4096
    if not isinstance(getattr(value, "base", None), torch.Tensor):
        return value
    address = value.base.data_ptr() + 4096
    other = object.__new__(type(value))
    other.__dict__.update(vars(value))
    other.base = type("Base", (), {"data_ptr": lambda self: address})()
    return other


def parameter_sizes(ptx: str) -> list[int]:
    entry = ptx[ptx.index(".visible .entry") :]
    sizes = []
    for line in re.findall(r"\.param ([^\n]*)", entry[: entry.index(")\n")]):
        array = re.search(r"\.b8 \S+\[(\d+)\]", line)
        plain = re.search(r"\.[usbf](\d+)", line)
        assert array is not None or plain is not None
        sizes.append(int(array.group(1)) if array else int(plain.group(1)) // 8)  # type: ignore[union-attr]
    return sizes


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1])))
