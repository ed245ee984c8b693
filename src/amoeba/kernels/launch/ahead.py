"""Kernels compiled before a GPU asks for them: what a pass launches is found on tensors without memory, and all cores
compile it into Triton's own cache, where the process that needs it finds it.

    with standing_in(GPUS["sm_90"]), Workers() as workers, noting(workers.submit):
        y_TH = experts(x_TH, routing, weights)      # of tensors on the device "cuda"; nothing is computed
    workers.compiled, workers.failed

Inside, a tensor on "cuda" is one on "meta" that says otherwise, so no GPU is needed and none is used. Triton itself
makes the source, the options and the key of each kernel from what it would be launched with (`JITFunction.warmup`).
The process is one for this alone: the stand-in is seen by all of it, and each kernel is compiled in a fork of it.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver
from triton.runtime.jit import MockTensor

from amoeba.core.errors import bad_value
from amoeba.core.operators import implementations
from amoeba.core.torch_internals import TorchDispatchMode
from amoeba.kernels.launch import OPTIONS, Launched, listening

_GPU, _META = torch.device("cuda", 0), torch.device("meta")
_GiB = 1 << 30


class Gpu(NamedTuple):
    """What kernels are chosen by."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    bytes: int

    @classmethod
    def here(cls) -> Gpu:
        found = torch.cuda.get_device_properties(0)
        return cls(found.name, (found.major, found.minor), found.multi_processor_count, found.total_memory)


# For machines without a GPU. Kernels depend on the number of multiprocessors and the name where something was measured.
GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * _GiB),
    "sm_89": Gpu("NVIDIA L40S", (8, 9), 142, 48 * _GiB),
    "sm_90": Gpu("NVIDIA H200", (9, 0), 132, 140 * _GiB),
    "sm_100": Gpu("NVIDIA B200", (10, 0), 148, 180 * _GiB),
    "sm_120": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * _GiB),
}


def gpu_named(name: str | None) -> Gpu:
    """The one of this machine where nothing is said."""
    if name is not None:
        if name not in GPUS:
            raise bad_value("--gpu", f"one of {', '.join(GPUS)}", repr(name), "leave it out on a machine with the GPU")
        return GPUS[name]
    if not torch.cuda.is_available():
        remedy = f"name the GPU to compile for, for example --gpu sm_90 (of {', '.join(GPUS)})"
        raise bad_value("--gpu", "a GPU on this machine, or its name", "neither", remedy)
    return Gpu.here()


class Launch(NamedTuple):
    """A kernel with what Triton needs to know of its arguments."""

    kernel: Any
    arguments: tuple
    constants: dict[str, Any]
    key: Hashable  # by which it is compiled once

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_")

    def compile(self) -> None:
        """Into Triton's cache; for the versions of Triton that compile a launcher for each signature, that as well."""
        compiled = self.kernel.warmup(*self.arguments, grid=(1,), **(OPTIONS | self.constants))
        with suppress(Exception):  # no driver here to link with, or a version of Triton without such launchers
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(compiled.src, compiled.metadata)


class DriverModule:
    """What Triton compiles for itself when it meets a GPU; to be submitted as a launch is."""

    name = key = "triton's driver"

    @staticmethod
    def compile() -> None:
        with suppress(Exception):  # no driver here to link with
            from triton.backends.nvidia.driver import CudaUtils

            CudaUtils()


@contextmanager
def noting(take: Callable[[Launch], object]) -> Iterator[None]:
    """Whatever is launched inside is handed to `take`, and not run."""
    outer, listening.recorder = listening.recorder, _Noting(take)
    try:
        yield
    finally:
        listening.recorder = outer


class _Noting:
    def __init__(self, take: Callable[[Launch], object]) -> None:
        self._take = take

    def launch(self, start: Callable[[], Launched], kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        key = id(kernel), *map(_variant, arguments), *constants.items()
        self._take(Launch(kernel, tuple(map(_without_memory, arguments)), constants, key))


class _Pointer(MockTensor):
    """Stands for a tensor whose address is, or is not, a multiple of 16."""

    def __init__(self, dtype: torch.dtype, offset: int) -> None:
        super().__init__(dtype)
        self.data_ptr = lambda: offset


def _without_memory(argument: Any) -> Any:
    return _Pointer(argument.dtype, _offset(argument)) if isinstance(argument, Tensor) else argument


def _offset(tensor: Tensor) -> int:
    """All memory is allocated at multiples of 512."""
    return int(tensor.storage_offset()) * tensor.element_size() % 16


def _variant(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, _offset(argument) == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument % 16 == 0, argument == 1, -(1 << 31) <= argument < 1 << 31
    if argument is None or isinstance(argument, float):
        return type(argument)
    base = getattr(argument, "base", None)
    if base is None:
        return argument
    return base.dtype, tuple(argument.block_shape), str(getattr(argument, "layout", None))


class _SaysGpu(TorchFunctionMode):
    """Tensors without memory say that they are on a GPU, and what is asked for on a GPU has no memory."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].device == _META:  # in here nothing of this mode is heard
            return answer(args[0])
        if "device" in kwargs:
            kwargs = kwargs | {"device": _elsewhere(kwargs["device"])}
        if func is Tensor.pin_memory:
            return args[0]
        if func in _MOVES:
            args = (args[0], *map(_elsewhere, args[1:]))
            if func is Tensor.cuda:
                return args[0].to(_META)
        return func(*args, **kwargs)


_ANSWERS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.device.__get__: lambda tensor: _GPU,
    Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
    Tensor.get_device: lambda tensor: 0,
    Tensor.data_ptr: _offset,
    # Where code looks at numbers: a condition that is checked holds, a distance from what is expected is none.
    Tensor.__bool__: lambda tensor: True,
    Tensor.__float__: lambda tensor: 0.0,
    Tensor.item: lambda tensor: 0,
}
_MOVES = (Tensor.to, Tensor.cuda, Tensor.new_empty, Tensor.new_zeros)


def _elsewhere(value: Any) -> Any:
    if isinstance(value, torch.device | str) and str(value).startswith("cuda"):
        return _META
    return value


class _RunsOperators(TorchDispatchMode):
    """Our operators launch their kernels, where torch would take their fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::addmm.dtype_out":  # torch < 2.13 takes its dtype for a factor where there is no memory
            return (kwargs or {})["out"]
        implementation = implementations.get(func.name())
        if implementation is None:
            return func(*args, **(kwargs or {}))
        with _SaysGpu(), self:
            return implementation(*args, **(kwargs or {}))


@contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Inside, this process takes itself for one with that GPU."""
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.bytes,
        uuid="none",
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: gpu.name,
        "is_bf16_supported": lambda *_, **__: gpu.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (gpu.bytes, gpu.bytes),
        "synchronize": lambda device=None: None,
    }
    target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)
    outer = triton_driver._active
    triton_driver.set_active(_Driver(target))
    try:
        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            stack.enter_context(mock.patch.object(torch.cuda, "device", _Device))
            stack.enter_context(_SaysGpu())
            stack.enter_context(_RunsOperators())
            yield
    finally:
        triton_driver._active = outer


class _Device:
    """torch.cuda.device, where there is one."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Driver:
    """What Triton asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Workers:
    """Compiles each launch once, in a fork of this process, as many at a time as it has cores. Leaving it early, by an
    exception or Ctrl-C, ends those that run."""

    def __init__(self, most: int | None = None, done: Callable[[Any, bool], object] = lambda launch, ok: None) -> None:
        self._most, self._done = most or cores(), done
        self._known, self._waiting, self._running = set[Hashable](), deque[Any](), dict[int, Any]()
        self.compiled = self.failed = 0

    def __enter__(self) -> Workers:
        return self

    def submit(self, launch: Any) -> None:
        if launch.key not in self._known:
            self._known.add(launch.key)
            self._waiting.append(launch)
        self.go_on()

    def go_on(self, wait: bool = False) -> bool:
        """Takes note of those that have ended, at least of one where it waits, and starts others. True: some run."""
        while self._running:
            process, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            if process == 0:
                break
            launch, wait = self._running.pop(process, None), False
            if launch is not None:  # else somebody else's
                self.compiled += status == 0 and isinstance(launch, Launch)
                self.failed += status != 0
                self._done(launch, status == 0)
        while self._waiting and len(self._running) < self._most:
            self._start(self._waiting.popleft())
        return bool(self._running)

    def _start(self, launch: Any) -> None:
        process = os.fork()
        if process:
            self._running[process] = launch
            return
        code = 1
        try:
            end_with_parent()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            launch.compile()
            code = 0
        except BaseException as error:
            os.write(2, f"{launch.name}: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)  # what the parent has open is the parent's to close

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            self._waiting.clear()
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        while self.go_on(wait=True):
            pass


def cores() -> int:
    """Those that this process, or its container, may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_parent() -> None:
    """Linux ends this process with the one that started it, whatever ends that."""
    import ctypes

    parent_death_signal = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
