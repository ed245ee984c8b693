"""The command line: registers the commands, which are in `commands/`.

Exit codes: 0 all is well, 1 a check failed or the reader of stdout went away, 2 the command was used wrongly,
70 a bug, 75 another rank was lost (start it again), 130 interrupted, 143 stopped by SIGTERM.
"""

from __future__ import annotations

from typing import Annotated

import typer

from amoeba._version import __version__
from amoeba.commands import exits
from amoeba.commands.bench import bench
from amoeba.commands.chat import chat
from amoeba.commands.convert import merge, pack, quantise
from amoeba.commands.doctor import doctor
from amoeba.commands.finetune import finetune
from amoeba.commands.generate import generate
from amoeba.commands.options import Verbose
from amoeba.commands.plan import plan
from amoeba.commands.report import report
from amoeba.commands.serve import serve
from amoeba.commands.start import speak_up
from amoeba.commands.trace import trace
from amoeba.commands.train import train
from amoeba.commands.tune import tune
from amoeba.commands.typer_app import Typer
from amoeba.commands.verify import verify
from amoeba.commands.warm import warm

app = Typer(
    name="amoeba",
    help="Mixture of experts for PyTorch: train, fine-tune, generate, verify, benchmark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"amoeba {__version__}")
        raise typer.Exit()


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    say_more: Verbose = False,
) -> None:
    speak_up(say_more)


for command in (  # in the order of `amoeba --help`
    doctor,
    plan,
    generate,
    chat,
    serve,
    finetune,
    train,
    report,
    quantise,
    pack,
    merge,
    verify,
    bench,
    tune,
    warm,
    trace,
):
    app.command()(command)


def main() -> None:
    exits.run(app)
