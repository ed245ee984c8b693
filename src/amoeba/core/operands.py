"""Dataclasses as arguments of an operator: torch's operators take tensors, numbers and strings, not objects.

    operands_of(Activation)               # (Operand("kind", "str"), Operand("gated", "bool"), ...)
    Activation(*(getattr(activation, operand.name) for operand in operands_of(Activation)))      # an equal one

The schema follows from the fields and their types; a dataclass inside a dataclass is taken apart, too.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, NamedTuple

from torch import Tensor

_SCALARS = {str: "str", bool: "bool", int: "int", float: "float"}


class Operand(NamedTuple):
    """One argument: its name and its type as an operator's schema has them."""

    name: str
    type: str
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.type} {self.name}"


def operands_of(kind: Any) -> tuple[Operand, ...]:
    found: list[Operand] = []
    hints: dict[str, Any] = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += operands_of(hint)
        else:
            has_tensor = hint is Tensor or Tensor in typing.get_args(hint)
            found.append(Operand(field.name, _schema_type(kind, field.name, hint), has_tensor))
    return tuple(found)


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
