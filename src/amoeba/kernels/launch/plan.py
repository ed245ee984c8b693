"""Launch plans: a pass that repeats is replayed from a recorded list of launches.

    y_TH, saved = planned(("forward", "triton", save), problem.tensors(), lambda: forward(problem, save))

Checks, configurations, grids, variants and the order of arguments follow from the shapes, strides, dtypes and places of
the tensors and from what the caller names. So the first pass of a kind is computed as it is written, the second is
recorded, and from then on its allocations and launches are repeated, with the addresses of the day: the same kernels,
the same arguments, the same bits, on whatever stream is current. Nothing is kept of a pass but the list of its steps:
memory is allocated where it was, and is free as soon as its last reader has been launched.

What cannot be repeated is computed as it is written each time: tensors that share memory, and passes that touch memory
which is neither an argument nor their own. What other operations of torch a pass calls is part of the list.

A step has all that it needs but addresses. A slot is a place in the lists of tensors and addresses: first those of the
arguments, then what the pass allocates. `slots()` are those that a step reads or writes, but for one that it makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from amoeba.core.torch_internals import TorchDispatchMode, is_view, writes_to_arguments
from amoeba.kernels.launch import Launched, current_stream, is_hooked, listening
from amoeba.kernels.launch.driver import DriverLaunch, can_launch
from amoeba.kernels.launch.persistent_grid import sharing
from amoeba.kernels.tile_sizes import as_many


class View(NamedTuple):
    """A tensor in the memory of a slot; offset: in elements from that one's first. size None: that one itself. dtype
    None: of that one's dtype."""

    slot: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None

    def of(self, tensors: list[Any]) -> Tensor:
        base: Tensor = tensors[self.slot]
        if self.size is None:
            return base
        if self.dtype is not None:
            start = base.storage_offset() * base.element_size() // self.dtype.itemsize + self.offset
            view = torch.empty(0, dtype=self.dtype, device=base.device)
            return view.set_(base.untyped_storage(), start, self.size, self.stride)
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class Pointer(NamedTuple):
    """Of a tensor, or a descriptor's, at a place among the arguments: this many bytes after a slot's address."""

    place: int
    slot: int
    offset: int


class Allocation(NamedTuple):
    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        slot, size, stride, dtype, device = self
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        tensors[slot], addresses[slot] = made, made.data_ptr()

    def slots(self) -> set[int]:
        return set()


class Call(NamedTuple):
    """Another operation of torch. slot: of its result, None where it writes to one of its arguments."""

    operation: Any
    arguments: tuple  # with views
    named: dict[str, Any]
    slot: int | None

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        given = [value.of(tensors) if isinstance(value, View) else value for value in self.arguments]
        found = self.operation(*given, **self.named)
        if self.slot is not None:
            tensors[self.slot], addresses[self.slot] = found, found.data_ptr()

    def slots(self) -> set[int]:
        return {value.slot for value in self.arguments if isinstance(value, View)}


class Launch:
    """A compiled kernel by Triton's launcher: pointers are written into its list of arguments as numbers."""

    def __init__(self, launched: Launched, pointers: Sequence[Pointer]) -> None:
        self.start, self.arguments = launched.start, list(launched.arguments)
        self.pointers, self.bases = [], []
        for pointer in pointers:
            value = self.arguments[pointer.place]
            if isinstance(value, Tensor):
                self.arguments[pointer.place] = 0
                self.pointers.append(pointer)
            else:  # a descriptor
                self.arguments[pointer.place] = copy = object.__new__(type(value))
                copy.__dict__.update(vars(value))
                copy.base = _Base()
                self.bases.append((copy.base, pointer))

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        arguments = self.arguments
        for place, slot, offset in self.pointers:
            arguments[place] = addresses[slot] + offset
        for base, (_, slot, offset) in self.bases:
            base.address = addresses[slot] + offset
        self.start(stream, arguments)

    def slots(self) -> set[int]:
        return {pointer.slot for pointer in (*self.pointers, *(pointer for _, pointer in self.bases))}


class LaunchByDriver:
    """The same by the driver."""

    def __init__(self, launch: DriverLaunch, pointers: Sequence[Pointer]) -> None:
        self._launch, self._slots = launch, {pointer.slot for pointer in pointers}
        self._words = [(launch.words[place], slot, offset) for place, slot, offset in pointers if place in launch.words]
        self._maps = [(launch.maps[place], slot, offset) for place, slot, offset in pointers if place in launch.maps]

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        launch = self._launch
        memory, move = launch.memory, launch.move
        for word, slot, offset in self._words:
            memory[word] = addresses[slot] + offset
        for tensor_map, slot, offset in self._maps:
            move(tensor_map, addresses[slot] + offset)
        launch.start(stream)

    def slots(self) -> set[int]:
        return self._slots


class Interpretation(NamedTuple):
    """A kernel that the interpreter runs takes tensors."""

    start: Callable[[Any, list[Any]], None]
    arguments: list[Any]  # with views

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        self.start(stream, [value.of(tensors) if isinstance(value, View) else value for value in self.arguments])

    def slots(self) -> set[int]:
        return {value.slot for value in self.arguments if isinstance(value, View)}


class Release(NamedTuple):
    slot: int

    def run(self, tensors: list[Any], addresses: list[int], stream: Any) -> None:
        tensors[self.slot] = None


class _Base:
    """Stands for the tensor of a descriptor, of which the launcher wants the address."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


Result = TypeVar("Result")

# Each is some kilobytes. Who has more kinds of passes than this has few of each.
MOST_PLANS = 512
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_plans: dict[tuple, Any] = {}  # _SEEN, a plan, or None where there can be none
_SEEN = object()


def planned(what: tuple, tensors: Sequence[Tensor | None], compute: Callable[[], Result]) -> Result:
    """compute(): tensors in tuples, with None between them; it reads and writes no tensors but these and its own.

    what:    all that it depends on besides the tensors' dtypes, shapes, strides and places.
    tensors: on one device, the first of them not None.
    """
    if listening.recorder is not None or is_hooked():  # a part of what is recorded; a profiler sees each launch
        return compute()
    first = tensors[0]
    assert first is not None
    key: list[Any] = [what, as_many(0), sharing(), first.device, torch.cuda.current_device() if first.is_cuda else None]
    addresses: list[int] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            addresses.append(0)
            key.append(None)
        else:
            address = tensor.data_ptr()
            together |= address
            addresses.append(address)
            key += (tensor.dtype, tensor.shape, tensor.stride())
    if together % 16:
        key.append(tuple(address % 16 for address in addresses))
    kind = tuple(key)
    plan = _plans.get(kind, kind)
    if plan is None:
        return compute()
    if plan is kind:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[kind] = _SEEN
        return compute()
    if plan is _SEEN:
        result, _plans[kind] = _record(tensors, compute)
        return result
    # a thread without a context, or one while another is about to launch this very plan
    if (plan.by_driver and not can_launch()) or not plan.lock.acquire(blocking=False):
        return compute()
    try:
        return plan.repeat([*tensors], addresses)
    finally:
        plan.lock.release()


def forget_plans() -> None:
    """For who changes something that a key does not name, as a test does."""
    _plans.clear()


class _CannotBeRepeatedError(Exception):
    pass


class _Place(NamedTuple):
    """Memory from start up to end: that of the tensor in a slot, whose address is `base`."""

    start: int
    end: int
    slot: int
    base: int


class _Plan:
    def __init__(self, steps: list[Any], slots: int, inputs: int, result: Any) -> None:
        self.lock = threading.Lock()  # its lists of arguments are its own
        kept = _slots_of(result)
        last: dict[int, int] = {}
        for place, step in enumerate(steps):
            for slot in step.slots():
                last[slot] = place
        needed = kept | last.keys()
        self._steps: list[Callable[[list[Any], list[int], Any], None]] = []
        for place, step in enumerate(steps):
            if isinstance(step, Allocation) and step.slot not in needed:
                continue
            self._steps.append(step.run)
            free = [slot for slot, at in last.items() if at == place and slot >= inputs and slot not in kept]
            self._steps += [Release(slot).run for slot in free]
        self.compiled = any(isinstance(step, (Launch, LaunchByDriver)) for step in steps)
        self.by_driver = any(isinstance(step, LaunchByDriver) for step in steps)
        self._room = [None] * (slots - inputs)
        self._zeros = [0] * (slots - inputs)
        self._result = result

    def repeat(self, tensors: list[Any], addresses: list[int]) -> Any:
        tensors += self._room
        addresses += self._zeros
        stream = current_stream() if self.compiled else None
        for run in self._steps:
            run(tensors, addresses, stream)
        return _filled(self._result, tensors)


class _Recorder(TorchDispatchMode):
    """Sees what a pass allocates, calls and launches, in its order."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.slots = len(tensors)
        self.reason: str | None = None
        self._launching = False
        self._shapes: dict[int, tuple[Any, Any, torch.dtype]] = {}
        self._places: list[_Place] = []
        for slot, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel():
                start = tensor.data_ptr()
                reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                self._know(tensor, slot, start, start + (1 + reach) * tensor.element_size())
        ordered = sorted(self._places)
        if any(before.end > after.start for before, after in pairwise(ordered)):
            self.reason = "tensors share memory"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self.reason is None and not self._launching and not is_view(func):
            try:
                if func.overloadpacket.__name__ in _ALLOCATIONS:
                    slot = self._new(found)
                    self.steps.append(Allocation(slot, found.shape, found.stride(), found.dtype, found.device))
                else:
                    self._note_call(func, args, kwargs, found)
            except _CannotBeRepeatedError as error:
                self.reason = str(error)
        return found

    def launch(self, start: Callable[[], Launched], *_: Any) -> None:
        self._launching = True  # what the interpreter and the compiler do is theirs
        try:
            launched = start()
        finally:
            self._launching = False
        if self.reason is None:
            try:
                self.steps.append(self._interpretation(launched) if launched.interpreted else self._launch(launched))
            except _CannotBeRepeatedError as error:
                self.reason = str(error)

    def result(self, found: Any) -> Any:
        """The same with views, or allocations where tensors are empty, in the places of tensors."""
        if isinstance(found, Tensor):
            if not found.numel():
                return Allocation(-1, found.shape, found.stride(), found.dtype, found.device)
            return self._view(found)
        if isinstance(found, tuple):
            parts = [self.result(part) for part in found]
            return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
        if found is not None:
            raise _CannotBeRepeatedError(f"a {type(found).__name__} among its results")
        return None

    def _know(self, tensor: Tensor, slot: int, start: int, end: int) -> None:
        self._places.append(_Place(start, end, slot, tensor.data_ptr()))
        self._shapes[slot] = tensor.shape, tensor.stride(), tensor.dtype

    def _new(self, tensor: Tensor) -> int:
        slot, self.slots = self.slots, self.slots + 1
        storage = tensor.untyped_storage()
        self._know(tensor, slot, storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return slot

    def _find(self, tensor: Tensor) -> tuple[int, int]:
        """Slot, and bytes from its address on. What was allocated last lies where something freed may have lain."""
        address = tensor.data_ptr()
        for place in reversed(self._places):
            if place.start <= address < place.end:
                return place.slot, address - place.base
        raise _CannotBeRepeatedError("memory that is neither an argument nor its own")

    def _view(self, tensor: Tensor) -> View:
        slot, offset = self._find(tensor)
        size = tensor.element_size()
        if offset % size:
            raise _CannotBeRepeatedError("memory seen in another dtype")
        *shape, dtype = self._shapes[slot]
        if offset == 0 and (*shape, dtype) == (tensor.shape, tensor.stride(), tensor.dtype):
            return View(slot)
        other = None if tensor.dtype == dtype else tensor.dtype
        return View(slot, tensor.shape, tensor.stride(), offset // size, other)

    def _note_call(self, func: Any, args: tuple, kwargs: dict, found: Any) -> None:
        if not isinstance(found, Tensor) or any(isinstance(value, Tensor) for value in kwargs.values()):
            raise _CannotBeRepeatedError(f"{func} among its steps")
        if any(isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value) for value in args):
            raise _CannotBeRepeatedError(f"{func} among its steps")
        views = tuple(self._view(value) if isinstance(value, Tensor) else value for value in args)
        slot = None if writes_to_arguments(func) else self._new(found)
        self.steps.append(Call(func, views, kwargs, slot))

    def _interpretation(self, launched: Launched) -> Interpretation:
        return Interpretation(
            launched.start, [self._view(value) if isinstance(value, Tensor) else value for value in launched.arguments]
        )

    def _launch(self, launched: Launched) -> Launch | LaunchByDriver:
        pointers = []
        for place, value in enumerate(launched.arguments):
            tensor = getattr(value, "base", None) if not isinstance(value, Tensor) else value
            if isinstance(tensor, Tensor):
                pointers.append(Pointer(place, *self._find(tensor)))
        if launched.by_driver is None:
            return Launch(launched, pointers)
        return LaunchByDriver(launched.by_driver, pointers)


def _record(tensors: Sequence[Tensor | None], compute: Callable[[], Result]) -> tuple[Result, _Plan | None]:
    recorder = _Recorder(tensors)
    outer, listening.recorder = listening.recorder, recorder
    try:
        with recorder:
            found = compute()
    finally:
        listening.recorder = outer
    if recorder.reason is None:
        try:
            return found, _Plan(recorder.steps, recorder.slots, len(tensors), recorder.result(found))
        except _CannotBeRepeatedError:
            pass
    return found, None


def _slots_of(result: Any) -> set[int]:
    if isinstance(result, View):
        return {result.slot}
    if isinstance(result, tuple) and not isinstance(result, Allocation):
        return set().union(*(_slots_of(part) for part in result)) if result else set()
    return set()


def _filled(result: Any, tensors: list[Any]) -> Any:
    if result is None:
        return None
    kind = type(result)
    if kind is View:
        return result.of(tensors)
    if kind is Allocation:
        return torch.empty_strided(result.size, result.stride, dtype=result.dtype, device=result.device)
    parts = [None if part is None else _filled(part, tensors) for part in result]
    return tuple(parts) if kind is tuple else kind(*parts)
