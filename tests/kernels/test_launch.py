"""A variant is found again by what distinguishes variants, no less. A stand-in takes the place of the compiler."""

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from amoeba.kernels.launch import Quick, quick
from selection import each_value_once


class Compiler:
    """Stands for a JIT function of (x, n, BLOCK, NAME): notes what it compiles and what it is launched with."""

    arg_names = ("x", "n", "BLOCK", "NAME")
    params = tuple(SimpleNamespace(is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self) -> None:
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((grid, arguments, constants))
            return Variant(self, len(self.compiled) - 1)

        return compile


class Variant:
    def __init__(self, compiler: Compiler, number: int) -> None:
        self.compiler, self.number = compiler, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.compiler.launched.append((self.number, grid, arguments))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Compiler()


def rows(dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    return torch.empty(64, dtype=dtype)[offset:]


def descriptor(dtype: torch.dtype = torch.float32, block: tuple[int, int] = (8, 16)) -> SimpleNamespace:
    return SimpleNamespace(base=rows(dtype), block_shape=list(block))


def test_the_second_launch_compiles_nothing_and_gets_the_new_arguments(compiler):
    kernel = Quick(compiler)
    first, second = rows(), rows()
    kernel[(3,)](first, 32, BLOCK=128, NAME="a", num_warps=4)
    kernel[(5, 2)](second, 48, BLOCK=128, NAME="a", num_warps=4)
    ((grid, arguments, constants),) = compiler.compiled
    assert grid == (3,) and arguments[0] is first and arguments[1] == 32
    assert constants == {"BLOCK": 128, "NAME": "a", "num_warps": 4, "enable_fp_fusion": True}
    ((number, grid, arguments),) = compiler.launched
    assert number == 0 and grid == (5, 2, 1) and arguments[0] is second
    assert arguments[1:] == (48, 128, "a"), "in the order of the parameters, options such as num_warps left out"


BASE = (rows(), 32, 128, "a")


@each_value_once()
@pytest.mark.parametrize(
    "other",
    [
        (rows(torch.float16), 32, 128, "a"),
        (rows(torch.int32), 32, 128, "a"),
        (rows(offset=1), 32, 128, "a"),
        (None, 32, 128, "a"),
        (descriptor(), 32, 128, "a"),
        (rows(), 33, 128, "a"),
        (rows(), 1, 128, "a"),
        (rows(), 1 << 31, 128, "a"),
        (rows(), -(1 << 31) - 16, 128, "a"),
        (rows(), 32, 64, "a"),
        (rows(), 32, 144, "a"),
        (rows(), 32, 128, "b"),
    ],
    ids=[
        "dtype",
        "dtype of the same size",
        "alignment",
        "no tensor",
        "descriptor",
        "no multiple of 16",
        "one",
        "64 bits",
        "64 bits below zero",
        "constant",
        "constant that is a multiple of 16 too",
        "text",
    ],
)
@pytest.mark.parametrize("positionally", [True, False])
def test_variants_are_told_apart(compiler: Compiler, other: tuple, positionally: bool) -> None:
    kernel = Quick(compiler)
    for arguments in (BASE, other, BASE, other):
        if positionally:
            kernel[(1,)](*arguments)
        else:
            kernel[(1,)](*arguments[:2], BLOCK=arguments[2], NAME=arguments[3])
    assert len(compiler.compiled) == 2
    assert [number for number, _, _ in compiler.launched] == [0, 1]
    assert compiler.launched[1][2][1:] == other[1:]


@pytest.mark.parametrize(
    "alike",
    [(rows(), 32, 128, "a"), (rows(offset=4), 32, 128, "a"), (rows(), 0, 128, "a"), (rows(), -160, 128, "a")],
    ids=["another tensor", "another aligned place", "zero", "another multiple of 16"],
)
def test_what_triton_compiles_once_is_compiled_once(compiler: Compiler, alike: tuple) -> None:
    kernel = Quick(compiler)
    kernel[(1,)](*BASE)
    kernel[(1,)](*alike)
    assert len(compiler.compiled) == len(compiler.launched) == 1


def test_one_is_told_from_other_numbers_that_are_no_multiple_of_16(compiler: Compiler) -> None:
    kernel = Quick(compiler)
    for n in (1, 3, 5, 1, 3):
        kernel[(1,)](rows(), n, 128, "a")
    assert len(compiler.compiled) == 2
    assert [(number, arguments[1]) for number, _, arguments in compiler.launched] == [(1, 5), (0, 1), (1, 3)]


def test_descriptors_are_told_apart_by_dtype_and_block(compiler: Compiler) -> None:
    kernel = Quick(compiler)
    for described in (
        descriptor(),
        descriptor(torch.float16),
        descriptor(block=(16, 8)),
        descriptor(),
        descriptor(block=(16, 8)),
    ):
        kernel[(1,)](described, 32, 128, "a")
    assert len(compiler.compiled) == 3
    assert [number for number, _, _ in compiler.launched] == [0, 2]


def test_each_device_has_its_own_variants(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Quick(compiler)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        kernel[(1,)](*BASE)
    assert [number for number, _, _ in compiler.launched] == [0, 1]
    assert len(compiler.compiled) == 2


def test_bound_constants_are_handed_over_and_kept_apart(compiler: Compiler) -> None:
    kernel = Quick(compiler)
    narrow, wide = (kernel.bound(BLOCK=block, NAME="a", num_warps=8) for block in (64, 128))
    for chosen in (narrow, wide, narrow, wide):
        chosen[(1,)](rows(), 32)
    assert [constants for _, _, constants in compiler.compiled] == [
        {"BLOCK": block, "NAME": "a", "num_warps": 8, "enable_fp_fusion": True} for block in (64, 128)
    ]
    assert [(number, arguments[2:]) for number, _, arguments in compiler.launched] == [(0, (64, "a")), (1, (128, "a"))]


def test_in_the_interpreter_nothing_changes_but_that_constants_can_be_bound() -> None:
    calls = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: calls.append((grid, arguments, constants))

    function = Interpreted()
    kernel = quick(function)
    assert kernel.kernel is function
    kernel[(2,)](7, BLOCK=16)
    kernel.bound(BLOCK=32)[(3,)](8)
    assert calls == [((2,), (7,), {"BLOCK": 16}), ((3,), (8,), {"BLOCK": 32})]


def test_a_hook_on_compiled_kernels_stops_no_kernel_of_ours() -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    kernel = jit.JITFunction(rows)

    def tell(hook: Any, constants: Any) -> Any:
        return hook(json.dumps(constants))

    kernel._call_hook = tell
    quick(kernel)
    told: list[str] = []
    assert kernel._call_hook(told.append, {"BLOCK": 16}) is None
    assert told == ['{"BLOCK": 16}']
    assert kernel._call_hook(told.append, {"PLAN": SimpleNamespace()}) is None
    assert len(told) == 1
    with pytest.raises(TypeError, match="no number"):
        kernel._call_hook(lambda constants: (_ for _ in ()).throw(TypeError("no number")), {})


def test_a_fixed_launch_takes_tensors_alone_and_compiles_once(compiler: Compiler) -> None:
    launch = Quick(compiler).fixed((5, 2), (48,), BLOCK=128, NAME="a", num_warps=4)
    first, second = rows(), rows()
    launch(first)
    launch(second)
    launch(first)
    ((grid, arguments, constants),) = compiler.compiled
    assert grid == (5, 2) and arguments[0] is first and arguments[1] == 48
    assert constants == {"BLOCK": 128, "NAME": "a", "num_warps": 4, "enable_fp_fusion": True}
    assert [(number, grid, found[1:]) for number, grid, found in compiler.launched] == [
        (0, (5, 2, 1), (48, 128, "a"))
    ] * 2
    assert compiler.launched[0][2][0] is second and compiler.launched[1][2][0] is first


def test_a_fixed_launch_tells_places_and_devices_apart(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Quick(compiler).fixed((1,), (48,), BLOCK=128, NAME="a")
    for offset in (0, 1, 0, 1, 4):
        launch(rows(offset=offset))
    assert len(compiler.compiled) == 2
    assert [number for number, _, _ in compiler.launched] == [0, 1, 0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(rows())
    launch(rows())
    assert len(compiler.compiled) == 3
    assert compiler.launched[-1][0] == 2


@pytest.mark.parametrize("fixed", [False, True])
def test_a_kernel_that_does_not_fit_on_the_gpu_says_what_to_do(compiler: Compiler, fixed: bool) -> None:
    class TooLarge(Compiler):
        __name__ = "_multiply"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compile(*arguments: Any, **constants: Any) -> Any:
                raise OutOfResources(131072, 101376, "shared memory")

            return compile

    kernel = Quick(TooLarge())
    launch = kernel.fixed((1,), (32,), BLOCK=8, NAME="a") if fixed else partial(kernel[(1,)], BLOCK=8, NAME="a")
    with pytest.raises(RuntimeError, match=r"multiply: expected .* 131072 of shared memory where 101376 .* Use"):
        launch(rows()) if fixed else launch(rows(), 32)
