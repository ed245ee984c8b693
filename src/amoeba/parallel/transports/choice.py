"""The list of transports, the fastest first, and which of them is used between given ranks.

transport, refused = choose_transport("auto", ranks, device)
"""

from __future__ import annotations

import functools
import logging

import torch

from amoeba.core.errors import bad_value
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.transports import peers, shmem
from amoeba.parallel.transports import transport as collective
from amoeba.parallel.transports.transport import Transport

TRANSPORTS: tuple[Transport, ...] = (peers.TRANSPORT, shmem.TRANSPORT, collective.TRANSPORT)

logger = logging.getLogger("amoeba")


@functools.lru_cache(maxsize=256)  # what ranks share does not change, and to find out takes longer than a small layer
def choose_transport(name: str, ranks: Ranks, device: torch.device) -> tuple[Transport | None, dict[str, str]]:
    """The one asked for, or the first that has no reason against it; and the reasons against the others."""
    asked = [transport for transport in TRANSPORTS if name in ("auto", transport.name)]
    if not asked:
        names = ", ".join(("auto", *(transport.name for transport in TRANSPORTS)))
        raise bad_value("transport", f"one of {names}", repr(name), "leave it out for auto")
    refused: dict[str, str] = {}
    for transport in asked:
        reason = transport.why_not_by_itself(device) if name == "auto" else None
        reason = reason or transport.why_not(ranks, device)
        if reason is None:
            _announce(transport, ranks, device, refused)
            return transport, refused
        refused[transport.name] = reason
    return None, refused


def chosen_by_auto(ranks: Ranks) -> str:
    """For who says it before the first pass: the transport for tensors on the device of this process. On all ranks."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    transport, _ = choose_transport("auto", ranks, device)
    return "nothing" if transport is None else transport.name


def _announce(transport: Transport, ranks: Ranks, device: torch.device, refused: dict[str, str]) -> None:
    waits = transport.waits_on_gpu and device.type == "cuda"
    logger.log(
        logging.WARNING if waits else logging.INFO,
        "tokens travel between %d ranks by %s, %s%s%s",
        ranks.count,
        transport.name,
        transport.summary,
        ", each pass waits for the GPU" if waits else "",
        "".join(f"; {name} {reason}" for name, reason in refused.items()),
    )
