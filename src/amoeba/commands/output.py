"""How a command speaks: results on stdout, what is going on on stderr.

output = make_output()             # with rich where it is installed, which shows on a terminal
output.table("experts", ["backend", "error"], [["eager", "1e-7"]])
output.document({"ok": True})      # the last line of stdout, for --json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amoeba.system.files import finite


class Output:
    """Plain lines."""

    progress_console: Any = None  # rich's, where somebody watches the progress
    verbose = False  # -v: reasons beside decisions

    @property
    def on_terminal(self) -> bool:
        """Whether somebody watches the progress, and it can be shown in place."""
        return False

    def line(self, text: str = "", style: str | None = None) -> None:
        print(text)

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
        self._table(title, columns, rows, left)

    def _table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> None:
        lines = [columns, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.line(title)
        for line in lines:
            cells = zip(line, widths, left, strict=True)
            padded = (cell.ljust(width) if is_text else cell.rjust(width) for cell, width, is_text in cells)
            self.line(f"  {'  '.join(padded).rstrip()}")

    @contextmanager
    def working(self) -> Iterator[None]:
        """While inside, `progress` shows a spinner where it can, and otherwise a line."""
        yield

    def progress(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def warning(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def document(self, document: dict[str, Any]) -> None:
        """One line of JSON; call it last."""
        sys.stdout.flush()
        print(json.dumps(strict_json(document), allow_nan=False), flush=True)


def strict_json(value: Any) -> Any:
    """The same value with infinities and NaN, which JSON does not have, as strings."""
    return finite(value, str)
