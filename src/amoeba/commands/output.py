"""How a command prints: results on stdout, progress and warnings on stderr.

output = Output(verbose)
output.table("experts", ["backend", "error"], [["eager", "1e-7"]])
output.document({"ok": True})      # the last line of stdout, for --json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from amoeba.system.files import finite

_STYLE_OF_WORD = {"ok": "green", "FAIL": "bold red", "auto": "bold green", "runs": "green", "no": "yellow"}
_NO_LIMIT = 10_000  # characters


class Output:
    """verbose: -v, reasons next to decisions."""

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        self._out = Console(highlight=False, markup=False, soft_wrap=True)
        self.progress_console = Console(stderr=True, highlight=False, markup=False)
        self._status: Status | None = None
        self._told = time.monotonic()

    @property
    def on_terminal(self) -> bool:
        """Whether progress can be shown in place."""
        return self.progress_console.is_terminal

    def line(self, text: str = "", style: str | None = None) -> None:
        self._out.print(text, style=style)

    def heading(self, text: str) -> None:
        self.line()
        self.line(text, style="bold")

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        found = list(pairs)
        width = max((len(name) for name, _ in found), default=0)
        for name, value in found:
            self.line(f"  {name:<{width}}  {value}")

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[str] | None = None
    ) -> None:
        """Numbers are right-aligned; `text` names the columns that are not numbers (by default the first)."""
        left = [column in text if text is not None else index == 0 for index, column in enumerate(columns)]
        self.line()
        show = self._rich_table if self._out.is_terminal else self._plain_table
        show(title, columns, rows, left)

    def _plain_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]
    ) -> None:
        lines = [columns, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.line(title)
        for line in lines:
            cells = zip(line, widths, left, strict=True)
            padded = (cell.ljust(width) if is_text else cell.rjust(width) for cell, width, is_text in cells)
            self.line(f"  {'  '.join(padded).rstrip()}")

    def _rich_table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]
    ) -> None:
        table = Table(
            title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1, 0, 0)
        )
        for column, is_text in zip(columns, left, strict=True):
            heading = column if is_text else column.replace(" ", "\n")
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=True, vertical="bottom")
        for row in rows:
            table.add_row(*(Text(cell, style=_STYLE_OF_WORD.get(cell, "")) for cell in row))
        # A table wider than the terminal is broken by the terminal, not by cutting cells
        whole = self._out.measure(table, options=self._out.options.update(max_width=_NO_LIMIT)).maximum
        self._out.width = max(self._out.width, whole)
        self._out.print(table, crop=False)

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, `progress` shows a spinner where it can, and otherwise a line."""
        if not self.on_terminal:
            yield
            return
        with self.progress_console.status("starting") as self._status:
            yield
        self._status = None

    def progress(self, text: str) -> None:
        if self._status is not None:
            room = self.progress_console.width - 3  # next to the spinner, on one line
            self._status.update(Text(text if len(text) <= room else f"{text[: room - 1]}…"))
        else:
            self.progress_console.print(text, soft_wrap=True)

    def say(self, text: str) -> None:
        """What the library tells."""
        self.progress(f"amoeba: {text}")

    def at_times(self, text: str, pause: float) -> None:
        """Frequent progress: all of it on a terminal, in a pipe a line every `pause` seconds."""
        now = time.monotonic()
        if self.on_terminal or now - self._told >= pause:
            self._told = now
            self.progress(text)

    def warning(self, text: str) -> None:
        self.progress_console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def document(self, document: dict[str, Any]) -> None:
        """One line of JSON; call it last."""
        sys.stdout.flush()
        print(json.dumps(strict_json(document), allow_nan=False), flush=True)


def strict_json(value: Any) -> Any:
    """The same value with infinities and NaN, which JSON does not have, as strings."""
    return finite(value, str)
