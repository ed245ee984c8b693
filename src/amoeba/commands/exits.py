"""How a command ends: its exit code, its JSON line, and a sentence for what the user can mend.

with usage():
    settings = ...            # a ValueError, a missing file or package, memory foreseen: one message, exit code 2
finish(output, document, ok=True, json=json)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amoeba.commands.front import typer
from amoeba.commands.output import Output
from amoeba.errors import bad_value

CHECK_FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130


@contextmanager
def usage() -> Iterator[None]:
    """What is raised inside is the user's to mend."""
    try:
        yield
    except (ValueError, FileExistsError, FileNotFoundError, MemoryError) as error:
        said: object = error
    except ImportError as error:
        if (error.name or "").split(".")[0] == "amoeba":
            raise
        said = _missing(error)
    else:
        return
    typer.echo(f"amoeba: {said}", err=True)
    raise typer.Exit(BAD_USAGE) from None


def need(*packages: str) -> None:
    """Inside `usage`: says which package is missing, before another one trips over it in its own way."""
    for name in packages:
        importlib.import_module(name)


def _missing(error: ImportError) -> object:
    if not isinstance(error, ModuleNotFoundError):
        return error  # a package's own words, of a version or of an extra of its
    remedy = "install what this command needs: pip install 'amoeba-moe[hf,lora]'"
    return bad_value(error.name or "package", "an installed package", "none", remedy)


def finish(output: Output, document: dict[str, Any], ok: bool, json: bool) -> None:
    if json:
        output.document(document)
    if not ok:
        raise typer.Exit(CHECK_FAILED)
