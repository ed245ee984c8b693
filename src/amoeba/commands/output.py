"""How a command speaks: rich on a terminal, plain lines in a pipe; results on stdout, what is going on on stderr.

output = Output()
output.table("experts", ["backend", "error"], [["eager", "1e-7"]])
output.document({"ok": True})      # the last line of stdout, for --json
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from amoeba.files import finite

_STYLE_OF_WORD = {"ok": "green", "FAIL": "bold red", "auto": "bold green", "runs": "green", "no": "yellow"}


class Output:
    def __init__(self) -> None:
        self._out = Console(highlight=False, markup=False, soft_wrap=True)
        self._progress = Console(stderr=True, highlight=False, markup=False)
        self._status: Status | None = None

    @property
    def on_terminal(self) -> bool:
        """Whether somebody watches the progress."""
        return self._progress.is_terminal

    @property
    def progress_console(self) -> Console:
        return self._progress

    def line(self, text: str = "", style: str | None = None) -> None:
        self._out.print(text, style=style)

    def heading(self, text: str) -> None:
        self.line()
        self.line(text, style="bold")

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Aligned `name  value` lines."""
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
        if not self._out.is_terminal:
            self._plain_table(title, [columns, *rows], left)
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
        self._out.print(table, width=max(self._out.width, self._out.measure(table).maximum), crop=False)

    def _plain_table(self, title: str, lines: Sequence[Sequence[str]], left: Sequence[bool]) -> None:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.line(title)
        for line in lines:
            cells = zip(line, widths, left, strict=True)
            padded = (cell.ljust(width) if is_text else cell.rjust(width) for cell, width, is_text in cells)
            self.line(f"  {'  '.join(padded).rstrip()}")

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, `progress` shows a spinner on a terminal and a line in a pipe."""
        if not self.on_terminal:
            yield
            return
        with self._progress.status("starting") as self._status:
            yield
        self._status = None

    def progress(self, text: str) -> None:
        if self._status is not None:
            self._status.update(Text(text))
        else:
            self._progress.print(text, soft_wrap=True)

    def warning(self, text: str) -> None:
        self._progress.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def document(self, document: dict[str, Any]) -> None:
        """One line of JSON; call it last."""
        sys.stdout.flush()
        print(json.dumps(strict_json(document), allow_nan=False), flush=True)


def strict_json(value: Any) -> Any:
    """The same value with infinities and NaN, which JSON does not have, as strings."""
    return finite(value, str)


def show_log() -> None:
    """Makes the library's decisions (which backend, and why) visible on stderr."""
    logger = logging.getLogger("amoeba")
    for handler in [handler for handler in logger.handlers if handler.get_name() == "command"]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name("command")
    handler.setFormatter(logging.Formatter("amoeba: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
