"""The group that a launcher started this process for: the one that it has made, or from torchrun's environment.

    with launched_ranks(deadline_seconds()) as ranks:       # None where there is no other process
        ...

Inside, the environment no longer says so: accelerate and transformers would otherwise wrap the model and share out the
batches in their own way, in which every process has all experts.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from amoeba.core.errors import TOLD, RankLost, bad_value, one_line
from amoeba.parallel.ranks import Ranks

DEADLINE = "AMOEBA_DEADLINE"  # seconds
DEFAULT_DEADLINE = 600.0
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What accelerate takes for a sign of several processes, torchrun's and those of MPI.
_SIGNS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def is_launched() -> bool:
    """Whether a launcher started this process, maybe as the only one."""
    in_words = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return in_words or (dist.is_available() and dist.is_initialized())


def deadline_seconds() -> float:
    text = os.environ.get(DEADLINE, str(DEFAULT_DEADLINE))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise bad_value(DEADLINE, "seconds, more than 0", repr(text), f"leave it out for {DEFAULT_DEADLINE:g}")
    return seconds


@contextmanager
def launched_ranks(deadline: float) -> Iterator[Ranks | None]:
    """None where this process was not launched, or as the only one."""
    met = dist.is_available() and dist.is_initialized()  # the launcher's own doing
    if not met and (not is_launched() or os.environ["WORLD_SIZE"] == "1"):
        yield None
        return
    if not met:
        _meet(deadline)
    ranks = Ranks(deadline=deadline)
    ranks.leave_word("")  # of this job; a launcher's group may have had others
    hidden = {name: os.environ.pop(name) for name in _SIGNS if name in os.environ}
    try:
        yield ranks
    except BaseException as error:
        if not isinstance(error, RankLost):  # whose cause is another rank
            ranks.leave_word(one_line(error))
            if ranks.said_by_first(one_line(error)):
                error.add_note(TOLD)
        raise
    finally:
        os.environ.update(hidden)
    if not met:  # nor where something failed: another rank may be gone, and would be waited for
        dist.destroy_process_group()


def _meet(deadline: float) -> None:
    missing = [name for name in _OF_TORCHRUN if name not in os.environ]
    if missing:
        remedy = "start it with torchrun, which sets them"
        raise bad_value("environment", ", ".join(_OF_TORCHRUN), f"no {', '.join(missing)}", remedy)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if os.environ["MASTER_ADDR"] in _THIS_MACHINE and here == int(os.environ["WORLD_SIZE"]):
        # gloo would look up the machine's name, which not every machine can
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
        if torch.cuda.device_count() >= here:  # NCCL does not let two ranks share a GPU
            backend = "cpu:gloo,cuda:nccl"
    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=deadline))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise bad_value(
            "ranks",
            f"{count} processes that meet at {where} within {deadline:g} s",
            f"rank {rank} alone ({one_line(error)[:300]})",
            f"look at the output of the others; {DEADLINE}=SECONDS lets it wait longer",
        ) from error
