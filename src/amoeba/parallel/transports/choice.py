"""Which transports there are, the fastest first, and which of them serves.

transport, refused = choose_transport("auto", ranks, device)
"""

from __future__ import annotations

import torch

from amoeba.errors import bad_value
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.transports import collective
from amoeba.parallel.transports.transport import Transport

TRANSPORTS: tuple[Transport, ...] = (collective.TRANSPORT,)


def choose_transport(name: str, ranks: Ranks, device: torch.device) -> tuple[Transport | None, dict[str, str]]:
    """The one asked for, or the first that has no reason against it; and the reasons against the others."""
    asked = [transport for transport in TRANSPORTS if name in ("auto", transport.name)]
    if not asked:
        names = ", ".join(("auto", *(transport.name for transport in TRANSPORTS)))
        raise bad_value("transport", f"one of {names}", repr(name), "leave it out for auto")
    refused: dict[str, str] = {}
    for transport in asked:
        reason = transport.why_not(ranks, device)
        if reason is None:
            return transport, refused
        refused[transport.name] = reason
    return None, refused
