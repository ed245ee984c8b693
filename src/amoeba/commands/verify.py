"""`amoeba verify`: its options. `verify_run.py` checks and prints."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from amoeba.commands.exits import finish, usage
from amoeba.commands.options import DTYPES, Device, Dtypes, Json, Verbose, parse_device, parse_dtypes
from amoeba.commands.start import start
from amoeba.jobs.compile_ahead import second_process


def verify(
    device: Device = "auto",
    dtype: Dtypes = None,
    backend: Annotated[list[str] | None, Option(help="Check only this backend. Can be repeated.")] = None,
    thorough: Annotated[bool, Option("--thorough", help="Check every case, with no time limit.")] = False,
    ranks: Annotated[
        int | None, Option(min=2, help="Check expert parallelism instead, over this many CPU processes.")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check every backend on this machine: output and each gradient against an fp64 reference, in under a minute."""
    output = start(verbose)
    ahead = device != "cpu" and not thorough and ranks is None
    with second_process(
        "amoeba.proof.compiled_checks", wanted=ahead, heard=output.verbose, answers=True
    ) as process:  # before torch is imported
        from amoeba.commands import verify_run
        from amoeba.proof.compiled_checks import order_of

        with usage():
            dtypes = parse_dtypes(dtype or DTYPES, [])
            if ranks is not None:
                verify_run.check_ranks(ranks, device, backend or [], thorough)
        if ranks is not None:
            finish(output, *verify_run.run_over_ranks(ranks, dtypes, output), json)
            return
        with usage():
            place = parse_device(device)
            backends = verify_run.check_backends(backend or [], place)
        order = None if process is None or place.type == "cpu" else order_of(process, dtypes, backends)
        document, ok = verify_run.run(place, dtypes, backends, thorough, output, order)
    finish(output, document, ok, json)
