"""The steps of a pass that is repeated (`amoeba.kernels.launch_plan`), each with all that it needs but addresses.

    Allocation(slot, size, stride, dtype, device).run(tensors, addresses, stream)         # into tensors[slot]
    LaunchByDriver(launch, [Pointer(place, slot, offset)]).run(tensors, addresses, stream)

A slot is a place in the lists of tensors and addresses: first those of the arguments, then what the pass allocates.
`slots()` are those that a step reads or writes, but for one that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.kernels.driver_launch import DriverLaunch
from amoeba.kernels.launch import Launched


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
    """Of a tensor, or a descriptor's, at a place among the arguments: so many bytes from a slot's address on."""

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
