"""Compile-time constants of a kernel in named groups: one parameter for what would be dozens.

_kernel[(programs,)](x, N, TILE=Group(ROWS=64, COLUMNS=128))

@triton.jit
def _kernel(x, N, TILE: tl.constexpr):
    row = tl.arange(0, TILE.ROWS)           # each is a compile-time constant
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton import knobs


class Group:
    """Equal, hashed and printed by its constants: compiled kernels are kept under them."""

    __slots__ = ("_hash", "_values")

    def __init__(self, **values: Any) -> None:
        self._values, self._hash = values, hash(tuple(values.items()))

    def __getattr__(self, name: str) -> Any:
        if not name.isupper() or name not in self._values:
            raise AttributeError(name)
        value = self._values[name]
        return value if knobs.runtime.interpret else tl.constexpr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self._values == other._values

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Group({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"
