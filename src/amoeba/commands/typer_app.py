"""A Typer with two additions: groups of options, and no option with an empty value.

    @dataclass(frozen=True)
    class Sampling:
        top_k: Annotated[int, typer.Option(help="...")] = 0

    @app.command()
    def generate(sampling: Sampling, json: Json = False) -> None: ...     # amoeba generate --top-k 4

A parameter whose type is a dataclass stands for its fields, each of which is an option. `--ram "$BUDGET"` with a
variable that is not set is refused: treated as an option that was left out, it would run something else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import typer
from typer.models import OptionInfo

from amoeba.commands.exits import usage
from amoeba.core.errors import bad_value

Command = Callable[..., None]


class Typer(typer.Typer):
    def command(self) -> Callable[[Command], Command]:  # type: ignore[override]
        register = super().command()

        def register_checked(function: Command) -> Command:
            register(_with_single_options(function))
            return function

        return register_checked


def _with_single_options(function: Command) -> Command:
    """The function as typer reads it: one parameter for each option, none of them in a group."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    options: dict[str, Parameter] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            options |= {option.name: option for option in _options_of(groups[parameter.name])}
        else:
            one = parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            options[parameter.name] = one

    @functools.wraps(function)
    def checked(**given: Any) -> None:
        with usage():
            for name, value in given.items():
                empty = value == "" or (isinstance(value, list) and "" in value)
                if empty and (option := _name_of(options[name])) is not None:
                    raise bad_value(option, "a value", "an empty one", "write one after it, or leave the option out")
        given = {name: _at_home(value) for name, value in given.items()}
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        function(**given)

    checked.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]
    checked.__annotations__ = {name: option.annotation for name, option in options.items()}
    return checked


def _at_home(value: Any) -> Any:
    """A shell leaves the ~ of `--out=~/answers.jsonl` to us."""
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _options_of(group: Any) -> list[Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    found = []
    for field in dataclasses.fields(group):
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]))
    return found


def _name_of(option: Parameter) -> str | None:
    """`--option`; None where it is told by its place."""
    about = typing.get_args(option.annotation)[1]
    if not isinstance(about, OptionInfo):
        return None
    names = (about.default, *(about.param_decls or ()), f"--{option.name.replace('_', '-')}")
    return next(name for name in names if isinstance(name, str) and name.startswith("--"))
