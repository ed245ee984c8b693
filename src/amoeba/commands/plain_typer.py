"""What our commands use of typer, over argparse: same options, same exit codes, nothing to install.

from amoeba.commands.front import typer  # typer itself, or this module where typer or rich is missing

app = typer.Typer(name="amoeba", help="...")

@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="...")] = False) -> None: ...

group = typer.Typer(name="stream", help="...")    # amoeba stream COMMAND
app.add_typer(group)

app(prog_name="amoeba")
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

_BAD_USAGE, _INTERRUPTED = 2, 130

Command = Callable[..., None]


class Exit(Exception):
    def __init__(self, code: int = 0) -> None:
        self.code = code


def echo(text: str, err: bool = False) -> None:
    print(text, file=sys.stderr if err else sys.stdout, flush=True)


class Option:
    def __init__(
        self,
        *names: str,
        help: str = "",
        min: int | None = None,
        callback: Callable[[Any], None] | None = None,
        is_eager: bool = False,  # callbacks run before all else here
    ) -> None:
        self.names, self.help, self.min, self.callback = names, help, min, callback


class Argument(Option):
    """Has no names: it is told by its place."""


class BadOptions(Exception):
    """What argparse found wrong with the words of the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        try:
            raise BadOptions(message)
        except BadOptions:  # kept as the context of the exit, as click's errors are
            super().error(message)


class Typer:
    def __init__(self, name: str, help: str, **_only_for_typer: bool) -> None:
        self._name, self._help = name, help
        self._parser = _Parser(prog=name, description=help, allow_abbrev=False)
        self._subparsers = self._parser.add_subparsers(title="commands", metavar="COMMAND")
        self._before: Command = lambda: None
        self._commands: list[Command] = []

    def callback(self) -> Callable[[Command], Command]:
        def register(function: Command) -> Command:
            self._before = function
            _add_parameters(self._parser, function)
            return function

        return register

    def command(self) -> Callable[[Command], Command]:
        def register(function: Command) -> Command:
            _add_command(self._subparsers, function)
            self._commands.append(function)
            return function

        return register

    def add_typer(self, group: Typer) -> None:
        """To be called when the group has all its commands."""
        about = group._help
        parser = self._subparsers.add_parser(group._name, help=about, description=about, allow_abbrev=False)
        parser.set_defaults(_group=parser)
        subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
        for function in group._commands:
            _add_command(subparsers, function)

    def __call__(self, prog_name: str) -> None:
        given = vars(self._parser.parse_args())
        try:
            _call(self._before, given)
            if "_command" not in given:
                given.get("_group", self._parser).print_help(sys.stderr)
                raise Exit(_BAD_USAGE)
            _call(given["_command"], given)
        except Exit as left:
            sys.exit(left.code)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)


def _add_command(subparsers: Any, function: Command) -> None:
    about = inspect.getdoc(function) or ""
    parser = subparsers.add_parser(function.__name__, help=about, description=about, allow_abbrev=False)
    _add_parameters(parser, function)
    parser.set_defaults(_command=function)


def _add_parameters(parser: argparse.ArgumentParser, function: Command) -> None:
    for name, (kind, option, default) in _parameters(function).items():
        settings: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if kind is bool:
            settings["action"] = "store_true"
        elif kind == list[str]:
            settings |= {"action": "append", "metavar": "TEXT"}
        else:
            settings |= {"type": _reader(kind, option.min), "metavar": "TEXT" if kind is str else kind.__name__.upper()}
        if option.names:
            parser.add_argument(*option.names, dest=name, default=default, **settings)
        else:
            if default is not inspect.Parameter.empty:
                settings |= {"nargs": "?", "default": default}
            parser.add_argument(name, **settings | {"metavar": name.upper()})


def _call(function: Command, given: dict[str, Any]) -> None:
    parameters = _parameters(function)
    for name, (_, option, _) in parameters.items():
        if option.callback is not None:
            option.callback(given[name])
    function(**{name: given[name] for name in parameters})


def _parameters(function: Command) -> dict[str, tuple[Any, Option, Any]]:
    """Type without its None, option and default, by name: `name: Annotated[int | None, Option(...)] = None`."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, option = typing.get_args(hints[name])
        if isinstance(kind, types.UnionType):
            (kind,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        found[name] = (kind, option, parameter.default)
    return found


def _reader(kind: Callable[[str], Any], least: int | None) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text} is not in the range x>={least}")
        return value

    read.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its errors
    return read
