"""typer, or the part of it that we use over argparse, where typer or rich is not installed."""

from amoeba.commands.bytecode import keep_bytecode

keep_bytecode()  # of typer, too

try:
    import rich  # noqa: F401  typer's own help needs it
    import typer
except ImportError:
    from amoeba.commands import plain_typer as typer  # type: ignore[no-redef]

__all__ = ["typer"]
