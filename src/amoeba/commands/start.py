"""How a command begins: how much it says, and how torch's threads wait. Call it before anything imports torch.

output = start(verbose)
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path

from amoeba.commands.exits import usage
from amoeba.commands.options import launched_processes, speaks
from amoeba.commands.output import Output
from amoeba.core.errors import TOLD, bad_value
from amoeba.system.thread_waiting import wait_as_torch_does

_BEGAN = time.monotonic()  # the command line imports this file first
_verbose_everywhere = False


def speak_up(wanted: bool) -> None:
    global _verbose_everywhere
    _verbose_everywhere = wanted


def start(verbose: bool, *, passive_waiting: bool = True, over_ranks: bool = False) -> Output:
    """verbose: every decision with its reason and its time, and what torch and transformers have to say.

    passive_waiting: whether torch's threads wait as they do wherever amoeba is imported first.
    over_ranks: whether the command runs in several processes that torchrun starts. The others would all do the same
    work and write the same files, and are refused there.
    """
    if not over_ranks:
        _check_one_process()
    if not passive_waiting:
        wait_as_torch_does()
    verbose = verbose or _verbose_everywhere
    _show_log(verbose)
    if not verbose:
        _quieten_others()
    return Output(verbose)


def _check_one_process() -> None:
    if (count := launched_processes()) == 1:
        return
    with usage():
        remedy = "start this command without torchrun"
        error = bad_value("torchrun", "train, finetune or generate", f"{count} processes of another command", remedy)
        if not speaks():
            error.add_note(TOLD)
        raise error


def with_seconds(text: str) -> str:
    """The line with the seconds since the command began, for -v: between two of them is what a stage took."""
    return f"{text}  [{time.monotonic() - _BEGAN:.1f} s]"


def hide_loading_bars(model: str, output: Output) -> None:
    """transformers' bars, of a model that is here already; a download of gigabytes keeps them."""
    if not output.verbose and Path(model).exists():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()


def _show_log(verbose: bool) -> None:
    logger = logging.getLogger("amoeba")
    for handler in [handler for handler in logger.handlers if handler.get_name() == "command"]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name("command")
    handler.setFormatter(_TimedLine() if verbose else _Line())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
    logging.getLogger("amoeba.cpu.build").setLevel(logging.INFO)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"amoeba: {'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}"


class _TimedLine(_Line):
    def format(self, record: logging.LogRecord) -> str:
        return with_seconds(super().format(record))


def _quieten_others() -> None:
    """Hides warnings of torch and transformers, which are meant for their caller: us. Ours still show."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"amoeba\b")
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    else:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
