"""Dataclasses as arguments of an operator: torch's operators take tensors, numbers and strings, not objects.

    operands_of(RouterConfig)             # (Operand("num_experts", "int"), Operand("top_k", "int"), ...)
    values_of(config)                     # (64, 8, ...), in the same order
    rebuilt(RouterConfig, values)         # an equal RouterConfig

The schema follows from the fields and their types; a dataclass inside a dataclass is taken apart, too.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Kind = TypeVar("Kind")

_SCALARS = {str: "str", bool: "bool", int: "int", float: "float"}


class Operand(NamedTuple):
    """One argument: its name and its type as an operator's schema has them."""

    name: str
    type: str
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


class _Leaf(NamedTuple):
    path: str  # from the instance, as operator.attrgetter takes it
    operand: Operand


def operands_of(kind: Any) -> tuple[Operand, ...]:
    return tuple(leaf.operand for leaf in _leaves(kind, ""))


def values_of(instance: Any) -> tuple[Any, ...]:
    kind: Any = type(instance)
    return _getter(kind)(instance)


def rebuilt(kind: type[Kind], values: Sequence[Any]) -> Kind:
    """The constructor checks what it checks."""
    return _built(kind, iter(values))


@functools.cache
def _leaves(kind: Any, prefix: str) -> tuple[_Leaf, ...]:
    found: list[_Leaf] = []
    hint: Any
    for name, hint in _hints(kind):
        if dataclasses.is_dataclass(hint):
            found += _leaves(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found.append(_Leaf(prefix + name, Operand(name, _schema_type(kind, name, hint), _has_tensor(hint))))
    return tuple(found)


@functools.cache
def _getter(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return operator.attrgetter(*(leaf.path for leaf in _leaves(kind, "")))


def _built(kind: Any, values: Any) -> Any:
    return kind(*(_built(hint, values) if dataclasses.is_dataclass(hint) else next(values) for _, hint in _hints(kind)))


@functools.cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _schema_type(kind: type, name: str, hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "str"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner, *others = (part for part in typing.get_args(hint) if part is not type(None))
        if not others:
            return _schema_type(kind, name, inner) + "?"
    if hint is Tensor:
        return "Tensor"
    if hint in _SCALARS:
        return _SCALARS[hint]
    raise TypeError(f"{kind.__name__}.{name}: operators take tensors, numbers and strings, this is {hint}")


def _has_tensor(hint: Any) -> bool:
    return hint is Tensor or Tensor in typing.get_args(hint)
