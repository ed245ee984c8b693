"""Tests interpret kernels with short cuts of their own: each gives the numbers and types of Triton's interpreter."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import quick_interpreter as quick
from selection import each_value_once

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)
tl = pytest.importorskip("triton.language", reason="there is no Triton for this machine")
interpreter = pytest.importorskip("triton.runtime.interpreter")

THEIRS = {name: getattr(tl.tensor, name) for name in dir(tl.tensor)} | {"load": tl.load, "arange": tl.arange}
SCALARS = {name: getattr(tl, name) for name in ("int1", "int8", "int32", "int64", "uint8", "float32", "float64")}
SHAPES = [(), (4,), (4, 1), (1, 8), (4, 8)]


def block(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    numbers = np.random.default_rng(seed).integers(1, 7, shape or (1,)).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(numbers, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(function: Any, *operands: Any) -> Any:
    """Of the third call, which knows the way, unless Triton refuses these operands."""
    try:
        for _ in range(3):
            found = function(*operands)
    except Exception as error:
        return type(error)
    return str(found.type), str(found.handle.dtype), found.handle.data.dtype, found.handle.data.tolist(), found.shape


def slow(name: str) -> Any:
    return lambda *operands, **named: THEIRS[name](*operands, _semantic=interpreter.interpreter_semantic, **named)


@pytest.fixture(autouse=True)
def as_in_a_launch() -> Iterator[None]:
    scope = interpreter._patch_lang(block)
    yield
    scope.restore()


@each_value_once()
@pytest.mark.parametrize("name", quick.OPERATORS)
@pytest.mark.parametrize("swapped", [False, True])
def test_operators(name: str, swapped: bool) -> None:
    theirs = slow(f"__r{name[2:]}" if swapped else name)
    ours = quick._quick_operator(interpreter, name, swapped, theirs)
    operands = [(block(of, shape), block(to, other, 1)) for of, to, shape, other in pairs()]
    operands += [(block(of, shape), number) for of in SCALARS.values() for shape in ((), (4, 8)) for number in (3, 2.5)]
    for left, right in operands:
        if not (np.issubdtype(left.handle.data.dtype, np.bool_) and isinstance(right, float)):
            assert outcome(ours, left, right) == outcome(theirs, left, right), (str(left), str(right))


def pairs() -> Any:
    same = ((of, of, *shapes) for of in (tl.int32, tl.float32) for shapes in itertools.product(SHAPES, SHAPES))
    mixed = ((of, to, (4, 8), (4, 8)) for of, to in itertools.product(SCALARS.values(), repeat=2))
    return itertools.chain(same, mixed)


def test_pointers_and_what_is_loaded_from_them() -> None:
    memory = np.arange(64, dtype=np.float32)
    kind = tl.pointer_type(tl.float32)
    start = tl.tensor(interpreter.TensorHandle(np.array([memory.ctypes.data], dtype=np.uint64), kind), kind)
    add = quick._quick_operator(interpreter, "__add__", False, slow("__add__"))
    load = quick._quick_load(interpreter, slow("load"))
    for shape in SHAPES:
        offset = block(tl.int32, shape)
        pointers = slow("__add__")(start, offset)
        assert outcome(add, start, offset) == outcome(slow("__add__"), start, offset)
        for mask, other in itertools.product(
            (None, slow("__gt__")(block(tl.int32, shape, 1), 3)), (None, 0.0, -0.0, 5)
        ):
            assert outcome(load, pointers, mask, other) == outcome(slow("load"), pointers, mask, other)


def test_conversions() -> None:
    to = quick._quick_to(interpreter, slow("to"))
    for of, into, shape in itertools.product(SCALARS.values(), SCALARS.values(), SHAPES):
        assert outcome(to, block(of, shape), into) == outcome(slow("to"), block(of, shape), into)
    every = np.arange(2**16, dtype=np.uint16)
    halves = tl.tensor(interpreter.TensorHandle(every, tl.bfloat16), tl.block_type(tl.bfloat16, [2**16]))
    found = [to(halves, tl.float32) for _ in range(2)][1]  # Triton's own is wrong below the least normal number
    torch.testing.assert_close(
        torch.from_numpy(found.handle.data),
        torch.from_numpy(every).view(torch.bfloat16).float(),
        equal_nan=True,
        rtol=0,
        atol=0,
    )


def test_new_axes_and_ranges() -> None:
    index = quick._quick_new_axes(interpreter, slow("__getitem__"))
    for slices in ((slice(None), None), (None, slice(None)), (None, slice(None), None)):
        given = block(tl.int32, (4,))
        assert outcome(index, given, slices) == outcome(slow("__getitem__"), given, slices)
    arange = quick._quick_arange(interpreter, slow("arange"))
    for ends in ((0, 8), (4, 8), (0, 16), (0, 5)):
        assert outcome(arange, *ends) == outcome(slow("arange"), *ends)
