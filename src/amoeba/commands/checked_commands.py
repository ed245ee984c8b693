"""A Typer whose commands refuse an option with an empty value.

app = Typer(name="amoeba", help="...")

`--ram "$BUDGET"` with a variable that is not set is a mistake: treated as an option that was left out, it would run
something other than what was asked for. An argument may be empty, since a prompt is any text.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import typer

from amoeba.commands.exits import usage
from amoeba.core.errors import bad_value

Command = Callable[..., None]


class Typer(typer.Typer):
    def command(self) -> Callable[[Command], Command]:  # type: ignore[override]
        register = super().command()

        def register_checked(function: Command) -> Command:
            register(_refusing_empty_options(function))
            return function

        return register_checked


def _refusing_empty_options(function: Command) -> Command:
    @functools.wraps(function)
    def checked(**given: Any) -> None:
        with usage():
            for name, value in given.items():
                empty = value == "" or (isinstance(value, list) and "" in value)
                if empty and (option := _option_of(function, name)) is not None:
                    raise bad_value(option, "a value", "an empty one", "write one after it, or leave the option out")
        function(**given)

    return checked


def _option_of(function: Command, parameter: str) -> str | None:
    """None where it is told by its place."""
    option = typing.get_args(typing.get_type_hints(function, include_extras=True)[parameter])[1]
    names = (option.default, *(option.param_decls or ()))
    return next((name for name in names if isinstance(name, str) and name.startswith("--")), None)
