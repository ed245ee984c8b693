"""Launching a kernel for the second time: without asking Triton again which of its compiled variants is meant.

    @quick
    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

    kernel[(grid,)](x, n, BLOCK=128, num_warps=4)

    chosen = kernel.bound(BLOCK=128, num_warps=4)   # kept by the caller: the constants are then not even compared
    chosen[(grid,)](x, n)

    launch = kernel.fixed((grid,), (n,), BLOCK=128, num_warps=4)        # for the same shapes again and again
    launch(x)

Triton finds the variant anew at each launch; for kernels with tensor descriptors and a few dozen arguments that takes
longer than many of our kernels run. Here the variant is looked up by what distinguishes variants and no more: dtypes,
alignment of pointers, divisibility of integers, and the constants. In the interpreter nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from amoeba.errors import bad_value

Launch = Callable[..., None]  # of tensors, all else is known


class Quick:
    """A compiled kernel behind a short look-up; launched like a Triton kernel."""

    def __init__(self, kernel: Any, constants: dict[str, Any] | None = None) -> None:
        self.kernel = kernel
        self._constants = constants or {}
        self._variants = [_same if parameter.is_constexpr else _variant for parameter in kernel.params]
        self._compiled: dict[tuple, tuple[Any, list[str]]] = {}

    def bound(self, **constants: Any) -> Quick:
        return Quick(self.kernel, constants)

    def fixed(self, grid: tuple[int, ...], numbers: tuple, **constants: Any) -> Callable[..., None]:
        return _Fixed(self, grid, numbers, constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def _launch(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> None:
        variants = [variant(argument) for variant, argument in zip(self._variants, arguments, strict=False)]
        key = (torch.cuda.current_device(), *variants, *constants.items())
        found = self._compiled.get(key)
        if self._constants:
            if constants:
                raise bad_value("constants", "none, a bound kernel has its own", list(constants), "bind them all")
            constants = self._constants
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            self._compiled[key] = compiled, self.kernel.arg_names[len(arguments) :]
            return
        compiled, names = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *[constants[name] for name in names])


class _Fixed:
    """A launch of which all is known but the tensors, the kernel's first arguments.

    Their dtypes are the same every time: the caller keeps one of these for each set of them.
    """

    def __init__(self, kernel: Quick, grid: tuple[int, ...], numbers: tuple, constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._runners: dict[int, tuple[Callable[..., None], tuple]] = {}  # by device, for aligned tensors

    def __call__(self, *tensors: Tensor) -> None:
        places = 0
        for tensor in tensors:
            places |= tensor.data_ptr()
        if places % 16:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        device = torch.cuda.current_device()
        found = self._runners.get(device)
        if found is None:
            arguments = (*tensors, *self._numbers)
            compiled = self._kernel.kernel[self._grid](*arguments, **self._constants)
            names = self._kernel.kernel.arg_names[len(arguments) :]
            rest = (*self._numbers, *(self._constants[name] for name in names))
            self._runners[device] = compiled[(*self._grid, 1, 1)[:3]], rest
            return
        runner, rest = found
        runner(*tensors, *rest)


class _Interpreted:
    """The same for a kernel that the interpreter runs."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.kernel[grid](*arguments, **self.constants)


def quick(kernel: Any) -> Any:
    if isinstance(kernel, JITFunction):
        return Quick(kernel)
    kernel.bound = lambda **constants: _Interpreted(kernel, constants)
    kernel.fixed = lambda grid, numbers, **constants: lambda *tensors: kernel[grid](*tensors, *numbers, **constants)
    return kernel


def _same(argument: Any) -> Any:
    return argument


def _variant(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    if argument is None or isinstance(argument, float):
        return type(argument)
    return argument.base.dtype, tuple(argument.block_shape)  # a tensor descriptor, whose layout is among the constants


# Triton's own are made for use inside kernels too; called from here they take 5 µs each.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
