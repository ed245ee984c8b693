"""The routing of every pass into a trace file, while a model runs.

    memory.record(Recorder("routing.trace", shapes))

How many experts a token goes to is learnt from the first pass, which is kept until it is whole. A pass that was broken
off is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from amoeba.core.errors import bad_value
from amoeba.stream.trace import LayerShape, TraceWriter


class Recorder:
    def __init__(self, path: str | Path, layers: Sequence[LayerShape]) -> None:
        """layers: top_k of these is not looked at."""
        self.path = Path(path)
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            got = "a folder" if self.path.is_dir() else "a name in a folder that is not there"
            raise bad_value("--record", "the name of a file to write", f"{path}, {got}", "name a file")
        self._layers = tuple(layers)
        self._pending: list[tuple[list[int], int]] = []  # of the pass that is under way: ids and tokens
        self._writer: TraceWriter | None = None

    def add(self, layer: int, ids: list[int], tokens: int) -> None:
        if layer != len(self._pending):  # the pass before was broken off
            self.abandon()
        if not tokens or layer != len(self._pending):
            return
        self._pending.append((ids, tokens))
        if len(self._pending) < len(self._layers):
            return
        if self._writer is None:
            shapes = [
                shape._replace(top_k=len(ids) // tokens)
                for shape, (ids, tokens) in zip(self._layers, self._pending, strict=True)
            ]
            self._writer = TraceWriter(self.path, shapes)
        for number, (found, _) in enumerate(self._pending):
            self._writer.add(number, found)
        self.abandon()

    def abandon(self) -> None:
        self._pending = []

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
