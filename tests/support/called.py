"""Commands as a user calls them, in this process.

call("generate", folder, "Once", "--json").document["generated_ids"]
call("pack", folder, code=2).said  # all that it prints, in one line
"""

import functools
import json
from dataclasses import dataclass
from typing import Any

from typer import testing
from typer.testing import CliRunner

testing._get_command = functools.cache(testing._get_command)  # typer makes all commands anew for each call: 16 ms


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
    done = CliRunner().invoke(app, [str(word) for word in words], input=input)
    assert code is None or done.exit_code == code, done.output
    return Called(done.exit_code, done.stdout, done.stderr, done.output)
