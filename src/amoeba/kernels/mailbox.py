"""The layout of the mailbox: the words through which `expert_request` and the host exchange requests and answers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ANSWER_HEADER = 3  # serial, count, the sum of what it is about:
MOVED, PROMOTED, COMPUTES = 1, 2, 4  # wait for copies now; those for later passes are called; the host computes
COMPUTED, LATER = -2, 1 << 24


@dataclass(frozen=True, eq=False)
class MailboxWords:
    """What host and device tell each other, int32. RING is a power of two, so that serials may wrap.

    state:     on the device: serial of the latest request; of the latest that copies have arrived for; whether the
               host computes some of the latest request's experts.
    requests:  mapped, (RING, HEADER + ids): rows as `index_export` has them.
    answers:   mapped, (RING, 3 + 2 MOST): serial, count, what it is about, experts, slots.
    trouble:   mapped, (1,): not 0 where a request got no answer.
    times:     mapped, (RING, 2): 32 bits of the GPU's clock in microseconds, of the request and, where it waited, of
               when it went on; whole when the next request is. To be drawn; the interpreter has no such clock.
    """

    state: Tensor
    requests: Tensor
    answers: Tensor
    trouble: Tensor
    times: Tensor


@dataclass(frozen=True, eq=False)
class HostComputeBuffer:
    """What the host gets to compute experts, and where it puts their sum. Mapped; of one request at a time, since the
    GPU makes no other one before it has the sum.

    x, y:    float32, tokens times H.
    expert, weight: int64 and float32, tokens times K.
    arrived: (1,) int32, the latest request whose copies have arrived.
    word:    (1,) int32, serial of y.
    """

    x: Tensor
    expert: Tensor
    weight: Tensor
    arrived: Tensor
    y: Tensor
    word: Tensor


def answer_length(experts: int, ids: int) -> int:
    """Each id may bring one expert and drive out another."""
    return min(experts, 2 * ids)
