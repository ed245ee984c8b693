"""Launches a compiled kernel directly, without asking Triton again which variant is meant.

    @quick
    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr): ...

    kernel[(grid,)](x, n, BLOCK=128, num_warps=4)

    chosen = kernel.bound(BLOCK=128, num_warps=4)   # kept by the caller: the constants are then not even compared
    chosen[(grid,)](x, n)

    launch = kernel.fixed((grid,), (n,), BLOCK=128, num_warps=4)        # for the same shapes again and again
    launch(x)

A whole pass that comes again and again goes a shorter way still: see `amoeba.kernels.launch.plan`.

Triton finds the variant anew at each launch; for kernels with tensor descriptors and a few dozen arguments that takes
longer than many of our kernels run. Here the variant is looked up by what distinguishes variants and no more: dtypes,
alignment of pointers, divisibility of integers, and the constants. In the interpreter nothing changes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver as triton_driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import DependenciesFinder, JITFunction

from amoeba.core.errors import bad_value
from amoeba.kernels.launch.driver import DriverLaunch, driver_launch


def _take_numbers_out_of_arrays() -> None:
    """`range` in an interpreted kernel needs whole numbers, and has arrays of one. Triton before 3.7 leaves it to NumPy
    to take the number out, which refuses from 2.4 on. What is replaced here the interpreter replaces again at each
    launch, by a function of its own: that one is extended."""
    from triton.runtime import interpreter

    replace = getattr(interpreter, "_patch_lang_tensor", None)
    if replace is None:
        return

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        replace(tensor, *scope)
        for each in scope:
            each.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _find_constants_of_called_functions_first() -> None:
    """Triton before 3.8 copies the constants of a called function before it has looked for them, unless an earlier
    kernel of this process called it, too. The key of a kernel would depend on what was launched before, and a process
    would not find what another one compiled."""
    update_hash = DependenciesFinder._update_hash

    def update(finder: Any, function: Any) -> None:
        _ = function.cache_key
        update_hash(finder, function)

    DependenciesFinder._update_hash = update


if knobs.runtime.interpret:
    _take_numbers_out_of_arrays()
else:
    _find_constants_of_called_functions_first()

Launch = Callable[..., None]  # of tensors, all else is known
# A product and a sum are rounded once. Triton's own default will be another one from 3.10 on, with other numbers.
OPTIONS = {"enable_fp_fusion": True}


class Launched(NamedTuple):
    """How it can be launched again, and what it was launched with.

    start:       (stream, arguments), where numbers may stand for the tensors of a compiled kernel.
    by_driver:   the same without Triton's launcher, where that is possible.
    """

    start: Callable[[Any, list[Any]], None]
    arguments: tuple
    interpreted: bool = False
    by_driver: DriverLaunch | None = None


class Recorder(Protocol):
    def launch(
        self, start: Callable[[], Launched], kernel: Any, arguments: tuple, constants: dict[str, Any], /
    ) -> None:
        """Calls `start`, and notes down what it launches: a kernel with its arguments and constants."""


class _Listening(threading.local):
    """Who writes down what this thread launches."""

    recorder: Recorder | None = None


listening = _Listening()


def current_stream() -> Any:
    """As a launch wants it."""
    return triton_driver.active.get_current_stream(torch.cuda.current_device())


def is_hooked() -> bool:
    """Whether somebody asked Triton to be told of each launch."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _again(compiled: Any, grid: tuple[int, ...], arguments: tuple) -> Launched:
    width, height, depth = (*grid, 1, 1)[:3]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(stream: Any, arguments: list[Any]) -> None:
        run(width, height, depth, stream, function, metadata, None, None, None, *arguments)

    return Launched(start, arguments, by_driver=driver_launch(compiled, (width, height, depth), arguments))


def _first(kernel: Any, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> Any:
    """The launch that compiles it, where it is seen whether it fits on the GPU."""
    try:
        return kernel[grid](*arguments, **(OPTIONS | constants))
    except OutOfResources as error:
        raise RuntimeError(
            f"{kernel.__name__.strip('_')}: expected a kernel that fits on this GPU; got one that needs "
            f"{error.required} of {error.name} where {error.limit} is the limit. Use another backend (grouped, eager) "
            "or, if amoeba tune chose its tiles, set AMOEBA_TUNED=off; and please report it: this is a bug in aMoEba."
        ) from error


class Quick:
    """A compiled kernel behind a short look-up; launched like a Triton kernel."""

    interpreted = False

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
        if listening.recorder is None:
            self._start(grid, arguments, constants)
        else:
            listening.recorder.launch(
                lambda: _again(*self._start(grid, arguments, constants)),
                self.kernel,
                arguments,
                self._constants or constants,
            )

    def _start(self, grid: tuple[int, ...], arguments: tuple, constants: dict[str, Any]) -> tuple[Any, tuple, tuple]:
        """What was launched, with its grid and with all arguments that Triton's own launcher takes."""
        variants = [variant(argument) for variant, argument in zip(self._variants, arguments, strict=False)]
        key = (torch.cuda.current_device(), *variants, *constants.items())
        found = self._compiled.get(key)
        if self._constants:
            if constants:
                raise bad_value("constants", "none, a bound kernel has its own", list(constants), "bind them all")
            constants = self._constants
        if found is None:
            compiled, names = _first(self.kernel, grid, arguments, constants), self.kernel.arg_names[len(arguments) :]
            self._compiled[key] = compiled, names
            return compiled, grid, (*arguments, *[constants[name] for name in names])
        compiled, names = found
        arguments = (*arguments, *[constants[name] for name in names])
        compiled[(*grid, 1, 1)[:3]](*arguments)
        return compiled, grid, arguments


class _Fixed:
    """A launch of which all is known but the tensors, the kernel's first arguments.

    Their dtypes are the same every time: the caller keeps one of these for each set of them.
    """

    def __init__(self, kernel: Quick, grid: tuple[int, ...], numbers: tuple, constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._runners: dict[int, tuple[Callable[..., None], tuple]] = {}  # by device, for aligned tensors

    def __call__(self, *tensors: Tensor | None) -> None:
        if listening.recorder is not None:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        places = 0
        for tensor in tensors:
            if tensor is not None:
                places |= tensor.data_ptr()
        if places % 16:
            self._kernel[self._grid](*tensors, *self._numbers, **self._constants)
            return
        device = torch.cuda.current_device()
        found = self._runners.get(device)
        if found is None:
            arguments = (*tensors, *self._numbers)
            compiled = _first(self._kernel.kernel, self._grid, arguments, self._constants)
            names = self._kernel.kernel.arg_names[len(arguments) :]
            rest = (*self._numbers, *(self._constants[name] for name in names))
            self._runners[device] = compiled[(*self._grid, 1, 1)[:3]], rest
            return
        runner, rest = found
        runner(*tensors, *rest)


class _Interpreted:
    """The same for a kernel that the interpreter runs."""

    interpreted = True

    def __init__(self, kernel: Any, constants: dict[str, Any] | None = None) -> None:
        self.kernel, self._constants = kernel, constants or {}

    def bound(self, **constants: Any) -> _Interpreted:
        return _Interpreted(self.kernel, constants)

    def fixed(self, grid: tuple[int, ...], numbers: tuple, **constants: Any) -> Callable[..., None]:
        return lambda *tensors: self[grid](*tensors, *numbers, **constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            def start(stream: Any, arguments: Any) -> None:
                self.kernel[grid](*arguments, **self._constants, **constants)

            def first() -> Launched:
                start(None, arguments)
                return Launched(start, arguments, interpreted=True)

            if listening.recorder is None:
                start(None, arguments)
            else:
                listening.recorder.launch(first, self.kernel, arguments, self._constants | constants)

        return launch


def quick(kernel: Any) -> Any:
    if not isinstance(kernel, JITFunction):
        return _Interpreted(kernel)
    kernel._call_hook = _tolerant(kernel._call_hook)
    return Quick(kernel)


def _tolerant(call_hook: Callable[..., Any]) -> Callable[..., Any]:
    """Code that hooks into Triton's compiler, as torch's NVSHMEM does for a whole process, gets a kernel's
    constants as JSON. Triton has none for layouts and plans, and would fail instead of the hook: these are not told."""

    @functools.wraps(call_hook)
    def tell(*arguments: Any, **named: Any) -> Any:
        try:
            return call_hook(*arguments, **named)
        except TypeError as error:
            if "JSON serializable" not in str(error):
                raise
            return None

    return tell


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
