"""A hook of mkdocs: fills docs/api/command-line.md from the commands themselves, so that the page cannot fall behind.

Needs typer and amoeba, but not torch: a command imports it when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

from amoeba.cli import app

PLACE = "<!-- every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(PLACE, "\n".join(_commands())) if PLACE in markdown else markdown


def _commands() -> Iterator[str]:
    found = [("amoeba", command) for command in app.registered_commands]
    for group in app.registered_groups:
        found += [
            (f"amoeba {group.typer_instance.info.name}", command)
            for command in group.typer_instance.registered_commands
        ]
    for before, command in found:
        function = command.callback
        assert function is not None
        rows = list(_parameters(function))
        arguments = [name for name, _, is_argument in rows if is_argument]
        yield f"## {before} {command.name or function.__name__}\n\n{inspect.getdoc(function)}\n"
        yield f"    {' '.join((before, function.__name__, *arguments, '[options]'))}\n"
        yield "| option | |\n|---|---|"
        for name, about, _ in rows:
            yield f"| `{name}` | {about} |"
        yield ""


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, str, bool]]:
    """(name as it is typed, what it is for, whether it is an argument) of everything a command takes."""
    hints = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        _, *extras = get_args(hints[parameter.name])
        found = extras[0]
        is_argument = type(found).__name__ == "ArgumentInfo"
        # in Annotated[..., typer.Option("-v", "--verbose")] the first name stands where a default would
        names = [each for each in (found.default, *(found.param_decls or ())) if isinstance(each, str)]
        name = parameter.name.upper() if is_argument else ", ".join(names) or f"--{parameter.name.replace('_', '-')}"
        default = parameter.default
        shown = "" if is_argument or default in (None, False, inspect.Parameter.empty) else f" Default: {default}."
        yield name, (found.help or "").replace("|", "\\|") + shown, is_argument
