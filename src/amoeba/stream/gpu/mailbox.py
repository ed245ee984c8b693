"""The mailbox between a CUDA graph and the host: expert requests and answers, in memory that both sides poll.

    mailbox = Mailbox(device, experts=128, ids=512, layers=48)
    slot_TK = mailbox.request(layer, shown, experts, expert_TK)     # enqueues the kernel, captured or not
    first = mailbox.expect(48)                                  # serials of the next requests
    while not mailbox.is_there_after(first, 64): ...
    missing, there = mailbox.read(first)
    mailbox.answer(first, [expert, left], [slot, -1])           # ahead of
    mailbox.go_on(first)                                        # behind all copies that were called before

Every request has a serial, which both sides count. Rows are in a ring that holds the requests of two replays: the
device is never further ahead than the replay that is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.stream.gpu.device import Device

if TYPE_CHECKING:
    from amoeba.kernels.mailbox import HostComputeBuffer

# Seconds that the GPU waits for experts. A slow disk takes tenths of one; what takes longer than this will not come.
LONGEST_WAIT = 10.0


class Mailbox:
    """experts: the most of a layer. ids: the most of one request. layers: requests of one replay, at most."""

    def __init__(self, device: Device, experts: int, ids: int, layers: int, limit: float = LONGEST_WAIT) -> None:
        from amoeba.kernels.index_export import HEADER, row_length
        from amoeba.kernels.mailbox import ANSWER_HEADER, MOVED, MailboxWords, answer_length

        self._device, self.limit = device, limit
        self.ring = 1 << (2 * layers - 1).bit_length()
        self._row, self._most = row_length(experts, ids), answer_length(experts, ids)
        self._header, self._answer_header, self._moved = HEADER, ANSWER_HEADER, MOVED
        self._state = torch.zeros(3, dtype=torch.int32, device=device.device)
        # of each layer, the request whose copies its next pass waits for; each where a kernel may expect it
        self._due = torch.zeros(layers, 4, dtype=torch.int32, device=device.device)
        answer_words = 2 * self._most + ANSWER_HEADER
        requests, answers = device.mapped(self.ring, self._row), device.mapped(self.ring, answer_words)
        trouble, times = device.mapped(1), device.mapped(self.ring, 2)
        self._words = MailboxWords(self._state, requests, answers, trouble, times)
        self._arrived = self._state[1:2]
        self.arrived_word = self._arrived.data_ptr()
        self._addresses = requests.data_ptr(), answers.data_ptr()
        self._requests, self._answers, self._trouble, self._times = (
            _ints(each) for each in (requests, answers, trouble, times)
        )
        self.serial = 0  # of the latest request that was expected

    def request(
        self,
        layer: int,
        shown: Tensor,
        experts: int,
        expert_TK: Tensor,
        buffer: HostComputeBuffer | None = None,
        *given: Tensor,
    ) -> Tensor:
        """slot_TK, once they are there. given: x_TH and weight_TK, where the host may compute some (`buffer`)."""
        from amoeba.kernels.expert_request import request_experts

        expert_TK, slot_TK = expert_TK.contiguous(), torch.empty_like(expert_TK, memory_format=torch.contiguous_format)
        x_TH, weight_TK = given or (None, None)
        of_host, due = (buffer, x_TH, weight_TK), self._due[layer, :1]
        call = partial(request_experts, expert_TK, slot_TK, shown, experts, self._words, due, self.limit, *of_host)
        self._device.launch(call)
        return slot_TK

    def route_and_request(
        self,
        layer: int,
        shown: Tensor,
        logits_TE: Tensor,
        config: RouterConfig,
        bias_E: Tensor | None,
        buffer: HostComputeBuffer | None = None,
        x_TH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """expert_TK and weight_TK by the router, and slot_TK as `request` has it, by one kernel."""
        from amoeba.kernels.expert_request import empty_routed, route_and_request

        found = empty_routed(logits_TE.shape[0], config, logits_TE.device)
        due = self._due[layer, :1]
        of_router, of_request = (logits_TE, config, bias_E, *found), (shown, self._words, due, self.limit, buffer, x_TH)
        self._device.launch(partial(route_and_request, *of_router, *of_request))
        return found

    def add_computed(self, y_TH: Tensor, buffer: HostComputeBuffer) -> None:
        """What the host computes of the latest request, once it is there."""
        from amoeba.kernels.expert_request import add_computed

        self._device.launch(partial(add_computed, y_TH, self._words, buffer, self.limit))

    def expect(self, requests: int) -> int:
        """The serial of the first of this many."""
        first = self.serial + 1
        self.serial += requests
        return first

    def places(self, serial: int) -> tuple[int, int, int]:
        """Addresses of its request and of its answer, and how many experts an answer has room for."""
        at, request, answer = serial % self.ring, *self._addresses
        return request + 4 * at * self._row, answer + 4 * at * (2 * self._most + self._answer_header), self._most

    def is_there_after(self, serial: int, looks: int) -> bool:
        """Polls at most this many times; a poll takes a twentieth of a microsecond."""
        requests, at, wanted = self._requests, serial % self.ring * self._row + 2, self.wrapped(serial)
        return any(requests[at] == wanted for _ in range(looks))

    def read(self, serial: int) -> tuple[list[int], list[int]]:
        """Distinct experts that are missing, and that are there; once it is there. The processor may not have read the
        row ahead of its serial: on ARM that takes a barrier, which the lock is that callers take in between."""
        start = serial % self.ring * self._row
        requests, first = self._requests, start + self._header
        second, end = first + requests[start], first + requests[start + 1]
        return requests[first:second].tolist(), requests[second:end].tolist()

    def times(self, serial: int) -> tuple[int, int]:
        """Of the GPU's clock, microseconds of 32 bits: when it asked, and where experts were missing when it went on.
        Once the next request is there. Both 0 where there is no such clock."""
        at = serial % self.ring * 2
        return self._times[at], self._times[at + 1]

    def answer(self, serial: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Which experts are in which slots from now on, -1: in none."""
        words, most, start = self._answers, self._most, serial % self.ring * (2 * self._most + self._answer_header)
        at = start + self._answer_header
        for expert, slot in zip(experts, slots, strict=True):
            words[at], words[at + most] = expert, slot
            at += 1
        words[start + 1], words[start + 2] = len(experts), self._moved
        words[start] = self.wrapped(serial)

    def answered(self, serial: int) -> list[tuple[int, int]]:
        """(expert, slot), as it was answered (kernels/expert_request.py)."""
        words, most, start = self._answers, self._most, serial % self.ring * (2 * self._most + self._answer_header)
        first, count = start + self._answer_header, words[start + 1]
        return list(zip(words[first : first + count], words[first + most : first + most + count], strict=True))

    def go_on(self, serial: int) -> None:
        """The GPU need not wait for this request, nor for those before it, when copies until now have come to pass."""
        self._device.write_word(self._device.copies, self._arrived, self.wrapped(serial))

    @property
    def in_trouble(self) -> bool:
        return self._trouble[0] != 0

    def give_up(self) -> None:
        """No request waits from now on."""
        self._trouble[0] = 1

    def begin_anew(self) -> None:
        """Once nothing is under way: serials go on from what the device has counted."""
        self.serial, arrived = self._state[:2].tolist()
        self._due.fill_(arrived)
        self._trouble[0] = 0

    @staticmethod
    def wrapped(serial: int) -> int:
        """As 32 bits have it."""
        return (serial + 2**31) % 2**32 - 2**31


def _ints(mapped: Tensor) -> Any:
    """Looked at without torch, which takes a microsecond for a number."""
    return mapped.view(-1).numpy().data
