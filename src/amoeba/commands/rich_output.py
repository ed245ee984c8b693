"""The same output with rich: colours, a spinner and wide tables on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from amoeba.commands.output import Output

_STYLE_OF_WORD = {"ok": "green", "FAIL": "bold red", "auto": "bold green", "runs": "green", "no": "yellow"}
_NO_LIMIT = 10_000  # characters


class RichOutput(Output):
    def __init__(self) -> None:
        self._out = Console(highlight=False, markup=False, soft_wrap=True)
        self.progress_console = Console(stderr=True, highlight=False, markup=False)
        self._status: Status | None = None

    @property
    def on_terminal(self) -> bool:
        return self.progress_console.is_terminal

    def line(self, text: str = "", style: str | None = None) -> None:
        self._out.print(text, style=style)

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> None:
        if not self._out.is_terminal:
            super()._table(title, columns, rows, left)
            return
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
        if not self.on_terminal:
            yield
            return
        with self.progress_console.status("starting") as self._status:
            yield
        self._status = None

    def progress(self, text: str) -> None:
        if self._status is not None:
            room = self.progress_console.width - 3  # beside the spinner, on one line
            self._status.update(Text(text if len(text) <= room else f"{text[: room - 1]}…"))
        else:
            self.progress_console.print(text, soft_wrap=True)

    def warning(self, text: str) -> None:
        self.progress_console.print(f"warning: {text}", style="yellow", soft_wrap=True)
