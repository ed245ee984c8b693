"""What the driver is handed is what the kernel says it takes; any other kernel is left to Triton's own launcher."""

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from amoeba.kernels.launch import driver as module

MAP = 128


class Driver:
    """Stands for libcuda: a kernel with parameters of these sizes, and what it was launched with."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.launched, self.code = sizes, [], 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: int, address: Any, *rest: Any) -> int:
        dims, strides, box, steps, interleave, swizzle, promotion, fill = rest
        assert at.value % 64 == 0 and list(steps) == [1, 1] and (interleave, promotion, fill) == (0, 2, 0)
        words = (address.value, dtype, rank, *dims, *strides, *box, swizzle)
        ctypes.memmove(at.value, struct.pack(f"<{len(words)}Q", *words), 8 * len(words))
        return 0

    def cuTensorMapReplaceAddress(self, at: Any, address: int) -> int:
        ctypes.memmove(at.value, struct.pack("<Q", address), 8)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        seen = [ctypes.string_at(parameters[index], size) for index, size in enumerate(self.sizes)]
        fields = [getattr(config._obj, name) for name, _ in config._obj._fields_]
        self.launched.append((fields, function.value, seen))
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"no such stream"
        return 0


SIZES = [MAP, 4, 4, 8, 8, 8, 4, 8, 4, 8, 8]
SIGNATURE = {"rows": "tensordesc<bf16[128,64],layout>", "x": "*bf16", "n": "i32", "one": "constexpr", "big": "i64",
             "scale": "fp32", "BLOCK": "constexpr"}  # fmt: skip
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False}


def compiled(**changes: Any) -> Any:
    about = {
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "tensordesc_meta": [META],
    }
    return SimpleNamespace(
        packed_metadata=(12, changes.pop("ctas", 1), 1000),
        src=SimpleNamespace(signature=changes.pop("signature", SIGNATURE)),
        function=77,
        metadata=SimpleNamespace(**about | changes),
    )


def arguments() -> tuple:
    base = torch.zeros(256, 96, dtype=torch.bfloat16)
    rows = SimpleNamespace(base=base, shape=base.shape, strides=base.stride(), padding="zero")
    return rows, torch.zeros(3, dtype=torch.bfloat16), -7, 1, 1 << 40, 1.5, 128


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(SIZES)
    monkeypatch.setattr(module, "_driver", lambda: module._Driver(found, found))
    return found


def test_each_parameter_comes_in_its_place_and_size(driver: Driver) -> None:
    launch = module.driver_launch(compiled(), (5, 2, 1), arguments())
    assert launch is not None
    for turn in range(2):
        launch.move(launch.maps[0], 4096 + turn)
        launch.memory[launch.words[1]] = 8192 + turn
        launch.start(9 + turn)
        config, function, (tensor_map, *rest) = driver.launched[-1]
        assert function == 77 and config == [5, 2, 1, 32 * 12, 1, 1, 1000, 9 + turn, None, 0]
        words = struct.unpack("<11Q", tensor_map[:88])
        assert words == (4096 + turn, 9, 2, 96, 256, 192, 192 * 256, 64, 128, 3, 0)
        kinds = "<i", "<i", "<q", "<q", "<Q", "<i", "<q", "<f", "<Q", "<Q"
        values = [struct.unpack(kind, value)[0] for kind, value in zip(kinds, rest, strict=True)]
        assert values == [256, 96, 96, 1, 8192 + turn, -7, 1 << 40, 1.5, 0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"ctas": 2},
        {"tensordesc_meta": None},
        {"tensordesc_meta": [META | {"fp4_padded": True}]},
        {"signature": SIGNATURE | {"scale": "fp16"}},
        {"signature": SIGNATURE | {"n": "i64"}},
        {"signature": {name: kind for name, kind in SIGNATURE.items() if name != "BLOCK"}},
    ],
    ids=str,
)
def test_a_kernel_that_wants_something_else_is_left_to_triton(driver: Driver, changes: dict[str, Any]) -> None:
    assert module.driver_launch(compiled(**changes), (1, 1, 1), arguments()) is None


@pytest.mark.parametrize(
    "sizes", [SIZES[:-1], [*SIZES, 8], [64, *SIZES[1:]], []], ids=["fewer", "more", "size", "none"]
)
def test_a_kernel_with_other_parameters_than_we_know_of_is_left_to_triton(driver: Driver, sizes: list[int]) -> None:
    driver.sizes = sizes
    assert module.driver_launch(compiled(), (1, 1, 1), arguments()) is None


def test_a_grid_of_no_programs_is_left_to_triton(driver: Driver) -> None:
    assert module.driver_launch(compiled(), (0, 1, 1), arguments()) is None


def test_without_the_library_everything_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_driver", lambda: None)
    monkeypatch.setattr(module, "_thread", module._Thread())
    assert module.driver_launch(compiled(), (1, 1, 1), arguments()) is None and not module.can_launch()


def test_a_failed_launch_raises_what_the_driver_says(driver: Driver) -> None:
    launch = module.driver_launch(compiled(), (1, 1, 1), arguments())
    driver.code = 400
    with pytest.raises(RuntimeError, match=r"no such stream \(CUDA error 400\)"):
        launch.start(3)


def test_no_tensor_is_kept(driver: Driver) -> None:
    import weakref

    given = arguments()
    seen = [weakref.ref(given[0].base), weakref.ref(given[1])]
    launch = module.driver_launch(compiled(), (1, 1, 1), given)
    del given
    assert launch is not None and all(ref() is None for ref in seen)
