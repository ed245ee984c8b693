"""How a command begins: how much it says, and how torch's threads wait. Call it before anything imports torch.

output = start(verbose)
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from amoeba.commands.make_output import make_output
from amoeba.commands.output import Output
from amoeba.waiting import wait_as_torch_does

_verbose_everywhere = False


def speak_up(wanted: bool) -> None:
    """Takes the -v that stands before the command's name."""
    global _verbose_everywhere
    _verbose_everywhere = wanted


def start(verbose: bool, *, passive_waiting: bool = True) -> Output:
    """verbose: every decision with its reason, and what torch and transformers have to say.

    passive_waiting: whether torch's threads wait as they do wherever amoeba is imported first (waiting.py).
    """
    if not passive_waiting:
        wait_as_torch_does()
    verbose = verbose or _verbose_everywhere
    _show_log(verbose)
    if not verbose:
        _quieten_others()
    return make_output(verbose)


def hide_loading_bars(model: str, output: Output) -> None:
    """transformers' bars, of a model that is here already; a download of gigabytes keeps them."""
    if not output.verbose and Path(model).exists():
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()


def _show_log(verbose: bool) -> None:
    """The library's warnings on stderr, and with -v its decisions too."""
    logger = logging.getLogger("amoeba")
    for handler in [handler for handler in logger.handlers if handler.get_name() == "command"]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name("command")
    handler.setFormatter(_Line())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
    logging.getLogger("amoeba.cpu.build").setLevel(logging.INFO)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"amoeba: {'warning: ' if record.levelno >= logging.WARNING else ''}{record.getMessage()}"


def _quieten_others() -> None:
    """Warnings of torch and transformers are for whoever calls them, which here is us. Ours still show."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"amoeba\b")
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    else:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
