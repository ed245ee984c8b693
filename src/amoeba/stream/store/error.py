"""What goes wrong with a store's files."""

from __future__ import annotations

from pathlib import Path

from amoeba.core.errors import bad_value


class StoreError(OSError):
    """A file of a store is missing, damaged or cannot be read. Nothing that was read of it may be used.

    file:   the file.
    layer, expert: the layer's name and the expert's number, where one was being read.
    """

    def __init__(
        self,
        file: str | Path,
        expected: str,
        got: object,
        remedy: str,
        *,
        layer: str | None = None,
        expert: int | None = None,
    ) -> None:
        whose = "" if layer is None else f" ({layer}, expert {expert})"
        super().__init__(str(bad_value(f"{file}{whose}", expected, got, remedy)))
        self.file, self.layer, self.expert = Path(file), layer, expert
        self._told = expected, got, remedy

    def while_reading(self, layer: str, expert: int) -> StoreError:
        """The same error, of this expert."""
        return StoreError(self.file, *self._told, layer=layer, expert=expert)


class DamagedIndex(StoreError):
    """Of a store whose index says nothing that can be relied on: only packing it again helps."""
