"""`amoeba doctor`: its options. `doctor_run.py` finds out and prints."""

from __future__ import annotations

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import Json, Verbose
from amoeba.commands.start import start


def doctor(json: Json = False, verbose: Verbose = False) -> None:
    """Show this machine, the installed versions, and which backends can run (and why others cannot)."""
    output = start(verbose, passive_waiting=False)  # it tells what the environment is
    with usage():
        from amoeba.commands import doctor_run

        document = doctor_run.run(output)
    finish(output, document, True, json)
