"""Commands as a user calls them, in this process.

call("generate", folder, "Once", "--json").document["generated_ids"]
call("pack", folder, code=2).said  # all that it prints, in one line
"""

import functools
import json
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

from typer import main, testing
from typer.testing import CliRunner

# typer makes all commands anew for each call: 16 ms
main.get_command = testing._get_command = functools.cache(main.get_command)


class Ended(NamedTuple):
    """A call of the console script: fixture `amoeba` in tests/commands."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])

    @property
    def sentence(self) -> str:
        return self.err.strip().splitlines()[-1]


@dataclass(frozen=True)
class Called:
    exit_code: int
    stdout: str
    stderr: str
    output: str  # both, as they came

    @property
    def document(self) -> Any:
        """The last line of stdout, with --json."""
        return json.loads(self.stdout.splitlines()[-1])

    @property
    def said(self) -> str:
        return " ".join(self.output.split())


def call(*words: object, code: int | None = 0, input: str | None = None, app: Any = None) -> Called:
    """code: the exit code that is right; None: any. app: of other commands than amoeba's."""
    if app is None:
        from amoeba.cli import app
    ours = logging.getLogger("amoeba")
    before = ours.propagate, ours.level, [*ours.handlers]
    try:
        done = CliRunner().invoke(app, [str(word) for word in words], input=input)
    finally:  # a command takes our log for itself
        ours.propagate, level, ours.handlers[:] = before
        ours.setLevel(level)
    assert code is None or done.exit_code == code, done.output
    return Called(done.exit_code, done.stdout, done.stderr, done.output)
