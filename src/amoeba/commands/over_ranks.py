"""Commands under torchrun: the processes, of which rank zero prints.

with over_ranks(settings.experts, output, resume=resume) as rank_zero:
    console = RunConsole(output) if rank_zero.here else Console()

report, first = job_over_ranks(train, settings, output, resume=resume)     # the same around a whole run
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from amoeba.commands.output import Output
from amoeba.commands.run_console import RunConsole
from amoeba.core.errors import bad_value
from amoeba.jobs.train.run_folder import Console, holds_a_run
from amoeba.parallel import launcher
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.parallel.ranks import Ranks
from amoeba.system.files import shell_words

Report = TypeVar("Report")


@contextmanager
def over_ranks(experts: str, output: Output, *, resume: bool = False) -> Iterator[RankZero]:
    """experts: where they are to be; "ranks" for over all of these processes, else each is to have all of them.
    resume: whether what is asked for is in a run's record, and one process may do what several began."""
    if experts != "ranks" and not launcher.is_launched():
        yield ALONE
        return
    if not launcher.is_launched() and not resume:
        remedy = f"start it as `{_with_torchrun(sys.argv[1:])}`, or leave --experts out"
        raise bad_value("--experts ranks", "several processes, started by torchrun", "a single process", remedy)
    with launcher.launched_ranks(launcher.deadline_seconds()) as ranks:
        if ranks is None or ranks.count == 1:
            if experts != "ranks":
                yield ALONE
                return
            output.progress("experts ranks: this single process has all experts; use torchrun to start several")
            ranks = ranks or Ranks()
        if ranks.rank > 0:
            logging.getLogger("amoeba").setLevel(logging.ERROR)  # what is to be said the first says
        yield RankZero(ranks)


def _with_torchrun(words: list[str]) -> str:
    """torchrun reads --r as the beginning of several options of its own, and refuses it."""
    said = [re.sub(r"^--r(?==|$)", "--lora-rank", word) for word in words]
    return shell_words("torchrun", "--nproc-per-node", 2, "-m", "amoeba", *said)


def job_over_ranks(
    job: Callable[..., Report], settings: Any, output: Output, *, resume: bool, **options: Any
) -> tuple[Report, bool]:
    """What `job` reports, and whether this process is the one that speaks.

    Where torchrun may restart the command, it goes on with the run that it began: the command line does not change."""
    if launcher.may_restart() and options.get("start_from"):
        expected = "torchrun without --max-restarts: every restart would begin from this checkpoint"
        raise bad_value("--from", expected, options["start_from"], "leave out one of the two")
    with over_ranks(settings.experts, output, resume=resume) as rank_zero, closing(RunConsole(output)) as console:
        said_by: Any = console if rank_zero.here else Console()
        if launcher.may_restart() and not resume:
            resume = rank_zero.tell(lambda: holds_a_run(Path(settings.out)), "whether the run has begun")
        if launcher.cannot_replace_hosts():
            remedy = f"set {launcher.SHARED_STORE}=1 on all hosts"
            said_by.say(f"torchrun can restart the ranks, but not replace a lost host: {remedy}")
        report = job(settings, said_by, resume=resume, rank_zero=rank_zero, **options)
    return report, rank_zero.here
