"""The group that a launcher started this process for: the one that it has made, or from torchrun's environment.

    with launched_ranks(deadline_seconds()) as ranks:       # None where there is no other process
        ...

Inside, the environment no longer says so: accelerate and transformers would otherwise wrap the model and share out the
batches in their own way, in which every process has all experts.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from amoeba.core.errors import TOLD, RankLost, bad_value, one_line
from amoeba.parallel.ranks import Ranks, note_hosts, spoken_ranks

DEADLINE = "AMOEBA_DEADLINE"  # seconds
DEFAULT_DEADLINE = 600.0
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # for torchrun; see `cannot_replace_hosts`
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What accelerate takes for a sign of several processes, torchrun's and those of MPI.
_SIGNS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_ELSEWHERE = "198.51.100.1"  # an address that no host has (RFC 5737): it is reached by the default route
_SIOCGIFADDR = 0x8915


def is_launched() -> bool:
    """Whether a launcher started this process, maybe as the only one."""
    in_words = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return in_words or (dist.is_available() and dist.is_initialized())


def may_restart() -> bool:
    """Whether torchrun starts the command again where one of its processes fails (--max-restarts)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def hosts() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def cannot_replace_hosts() -> bool:
    """torch 2.13 and older: where torchrun's own store serves the ranks as well, a host that comes later waits in vain
    for its address."""
    return hosts() > 1 and may_restart() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
    """The ranks that torchrun or another launcher started; None if there is only this process."""
    met = dist.is_available() and dist.is_initialized()  # the launcher's own doing
    if not met and (not is_launched() or os.environ["WORLD_SIZE"] == "1"):
        yield None
        return
    if not met:
        _meet(deadline)
    ranks = Ranks(deadline=deadline)
    ranks.leave_word("")  # of this job; a launcher's group may have had others
    if hosts() > 1:
        note_hosts(ranks.gather_texts(socket.gethostname(), "the names of the hosts"))
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
    # gloo would look up the host's name, which not every host can, and which is a loopback address on many
    if os.environ["MASTER_ADDR"] in _THIS_MACHINE or os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    elif (interface := _interface_towards(os.environ["MASTER_ADDR"])) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
        if torch.cuda.device_count() >= here:  # NCCL does not let two ranks share a GPU
            backend = "cpu:gloo,cuda:nccl"
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=deadline)
    try:
        shared, *_ = next(dist.rendezvous("env://", timeout=timeout))
        store = _own_part(shared, rank, count, deadline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise bad_value(
            "ranks",
            f"{count} processes that meet at {where} within {deadline:g} s",
            f"{one_line(error)[:300]} on rank {rank}",
            f"look at the output of the others; {DEADLINE}=SECONDS lets it wait longer",
        ) from error


def _own_part(store: dist.Store, rank: int, count: int, deadline: float) -> dist.Store:
    """A part of the launcher's store that is empty. torchrun keeps one store through all restarts, with addresses and
    notes of processes that have ended, and its count of restarts is each host's own. So rank 0 makes up a name, and
    tells it to each rank that asks: one that takes the answer is alive."""
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"amoeba asks {rank}", own)
        name = store.get(f"amoeba answers {own}").decode()  # waits, as long as the store's timeout
        store.set(f"{name} {rank}", "")
        return dist.PrefixStore(name, store)
    ends, answered, missing = time.monotonic() + deadline, dict[int, str](), list(range(1, count))
    while missing := [other for other in missing if not store.check([f"{own} {other}"])]:
        if time.monotonic() > ends:
            raise RuntimeError(f"nothing from {spoken_ranks(missing)}")
        for other in (other for other in missing if store.check([f"amoeba asks {other}"])):
            asker = store.get(f"amoeba asks {other}").decode()
            if answered.get(other) != asker:
                answered[other] = asker
                store.set(f"amoeba answers {asker}", own)
        time.sleep(0.02)
    return dist.PrefixStore(own, store)


def _interface_towards(master: str) -> str | None:
    """The network interface by which this host reaches `master`; on that host itself the one of the default route, or
    the only one there is. None where gloo has to find it."""
    addresses = {address: name for name, address in _interfaces().items() if not address.startswith("127.")}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for target in (master, _ELSEWHERE):
            with suppress(OSError):
                probe.connect((target, 9))  # chooses a route, and sends nothing
                if (own := probe.getsockname()[0]) in addresses:
                    return addresses[own]
    return next(iter(addresses.values())) if len(addresses) == 1 else None


def _interfaces() -> dict[str, str]:
    """The first IPv4 address of each network interface; none where the system is not Linux."""
    found: dict[str, str] = {}
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # one without an address
                    answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, name.encode().ljust(32, b"\0"))
                    found[name] = socket.inet_ntoa(answer[20:24])
    return found
