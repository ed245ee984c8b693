"""What a command would have printed, for tests to look at."""

from typing import NamedTuple

from amoeba.commands.output import Output


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]


class NotedOutput(Output):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.lines: list[str] = []

    def table(self, title, columns, rows, text=None) -> None:
        self.tables.append(Table(title, columns, rows))

    def titled(self, part: str) -> Table:
        """The one table with that in its title."""
        (found,) = [table for table in self.tables if part in table.title]
        return found

    def line(self, text="", style=None) -> None:
        self.lines.append(text)

    def warning(self, text) -> None:
        pass
