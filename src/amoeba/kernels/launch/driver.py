"""A compiled kernel launched by the driver itself, with arguments that stay where they are in memory.

    launch = driver_launch(compiled, (132, 1, 1), arguments)         # None where Triton's own launcher has to do it
    launch.memory[launch.words[place]] = address                     # of the tensor at that place
    launch.move(launch.maps[place], address)                         # of the descriptor at that place
    launch.start(stream)

Triton's launcher takes its arguments from Python one by one, and makes each descriptor anew: 3 to 20 µs a launch, where
this is a call with four addresses. The kernel itself is asked what parameters it has: where their sizes are not those
that we would hand over, where it wants scratch memory, or where the driver cannot tell, it is left to Triton.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

_WORD, _MAP, _MAP_ALIGNMENT = 8, 128, 64
_INTEGERS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
# How Triton numbers dtypes in what it says of a descriptor, where the driver numbers them otherwise.
_DTYPE_OF_DRIVER = {8: 10, 9: 8, 10: 9}
_PROMOTE_128_BYTES, _NO_INTERLEAVE, _FILL_ZEROS = 2, 0, 0


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class _Driver(NamedTuple):
    """The library twice: a launch waits where the GPU's queue is full, and must not keep Python's lock meanwhile."""

    launching: Any
    quick: Any


class DriverLaunch:
    """words, maps: where the pointer or the descriptor is kept that an argument stands for, by its place."""

    def __init__(self, driver: _Driver, function: int, config: _Config, parameters: list[_Parameter]) -> None:
        self._driver, self._function, self._config = driver, ctypes.c_void_p(function), config
        self.move, self._launch = driver.quick.cuTensorMapReplaceAddress, driver.launching.cuLaunchKernelEx
        words = sum(parameter.words for parameter in parameters) + _MAP_ALIGNMENT // _WORD
        self.memory = (ctypes.c_uint64 * words)()
        start = ctypes.addressof(self.memory)
        # the maps first, where they are aligned
        word = -start % _MAP_ALIGNMENT // _WORD
        self.words: dict[int, int] = {}
        self.maps: dict[int, ctypes.c_void_p] = {}
        addresses: dict[int, int] = {}
        for index, parameter in sorted(enumerate(parameters), key=lambda each: -each[1].size):
            addresses[index] = start + word * _WORD
            if isinstance(parameter, _Map):
                self.maps[parameter.place] = ctypes.c_void_p(addresses[index])
                parameter.encode(driver.quick, addresses[index])
            elif parameter.pointer:
                self.words[parameter.place] = word
            else:
                self.memory[word] = parameter.value
            word += parameter.words
        self._parameters = (ctypes.c_void_p * len(parameters))(*(addresses[i] for i in range(len(parameters))))
        self._arguments = ctypes.byref(config), self._function, self._parameters, None

    def start(self, stream: int) -> None:
        self._config.stream = stream
        failed = self._launch(*self._arguments)
        if failed:
            text = ctypes.c_char_p()
            self._driver.quick.cuGetErrorString(failed, ctypes.byref(text))
            raise RuntimeError(f"launching a kernel failed: {(text.value or b'').decode()} (CUDA error {failed})")


class _Parameter:
    """place: among the arguments, -1 for what Triton adds."""

    def __init__(self, place: int, size: int, value: int = 0, *, pointer: bool = False) -> None:
        self.place, self.size, self.value, self.pointer = place, size, value, pointer

    @property
    def words(self) -> int:
        return -(-self.size // _WORD)


class _Map(_Parameter):
    """A descriptor's first part, which the copy engine reads."""

    def __init__(self, place: int, descriptor: Any, meta: dict[str, Any]) -> None:
        super().__init__(place, _MAP)
        self._descriptor, self._meta = descriptor, meta

    def encode(self, driver: Any, at: int) -> None:
        descriptor, meta = self._descriptor, self._meta
        (rows, columns), stride = descriptor.shape, descriptor.strides[0] * meta["elem_size"]
        failed = driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(at),
            _DTYPE_OF_DRIVER.get(meta["elem_type"], meta["elem_type"]),
            2,
            ctypes.c_void_p(descriptor.base.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 2)(stride, stride * rows),
            (ctypes.c_uint32 * 2)(*reversed(meta["block_size"])),
            (ctypes.c_uint32 * 2)(1, 1),
            _NO_INTERLEAVE,
            meta["swizzle"],
            _PROMOTE_128_BYTES,
            _FILL_ZEROS,
        )
        self._descriptor = None  # and with it its tensor
        if failed:
            raise _LeftToTritonError


class _LeftToTritonError(Exception):
    pass


def driver_launch(compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> DriverLaunch | None:
    driver = _driver()
    if driver is None:
        return None
    try:
        warps, ctas, shared = compiled.packed_metadata
        about = compiled.metadata
        special = (about.global_scratch_size, about.profile_scratch_size, about.launch_cooperative_grid)
        if ctas != 1 or any(special) or about.launch_pdl or 0 in grid:
            return None
        parameters = list(_parameters(compiled.src.signature, getattr(about, "tensordesc_meta", None), arguments))
        if [parameter.size for parameter in parameters] != list(_sizes(driver.quick, compiled.function)):
            return None
        config = _Config(*grid, 32 * warps, 1, 1, shared, None, None, 0)
        return DriverLaunch(driver, compiled.function, config, parameters)
    except (_LeftToTritonError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None  # another version of Triton


def _parameters(signature: dict[Any, Any], metas: Any, arguments: Sequence[Any]) -> Iterator[_Parameter]:
    """As Triton orders them: a descriptor is followed by its shape and strides, two pointers to scratch come last."""
    left = list(metas or ())
    for place, (kind, value) in enumerate(zip(signature.values(), arguments, strict=True)):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            yield _Parameter(place, _WORD, pointer=True)
        elif kind.startswith("tensordesc"):
            meta = left.pop(0)
            if meta["fp4_padded"] or meta.get("is_im2col") or value.padding != "zero" or len(value.shape) != 2:
                raise _LeftToTritonError
            if getattr(value, "round_f32_to_tf32", False):
                raise _LeftToTritonError
            yield _Map(place, value, meta)
            yield from (_Parameter(-1, 4, size) for size in value.shape)
            yield from (_Parameter(-1, _WORD, stride) for stride in value.strides)
        elif kind in _INTEGERS:
            size = _INTEGERS[kind]
            yield _Parameter(-1, size, int(value) & ((1 << 8 * size) - 1))
        elif kind == "fp32":
            yield _Parameter(-1, 4, int.from_bytes(struct.pack("<f", value), "little"))
        else:
            raise _LeftToTritonError
    yield from (_Parameter(-1, _WORD) for _ in range(2))


def _sizes(driver: Any, function: int) -> Iterator[int]:
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    index = 0
    while not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)
    ):
        yield size.value
        index += 1


class _Thread(threading.local):
    ready = False


_thread = _Thread()


def can_launch() -> bool:
    """Whether this thread can: one that has not touched the GPU before has no context."""
    if not _thread.ready:
        driver, context = _driver(), ctypes.c_void_p()
        failed = driver is None or driver.quick.cuCtxGetCurrent(ctypes.byref(context))
        _thread.ready = not failed and bool(context.value)
    return _thread.ready


@cache
def _driver() -> _Driver | None:
    """None where it is absent or older than what is asked of it."""
    try:
        found = _Driver(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1"))
        found.quick.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        for name in ("cuFuncGetParamInfo", "cuTensorMapEncodeTiled", "cuCtxGetCurrent"):
            getattr(found.quick, name)
        found.launching.cuLaunchKernelEx.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return found
