"""A batch in groups whose captured steps take turns: while one waits for its experts, another one computes.

    decoder = TurnsDecoder(model, batch=8, length=700)       # as a Decoder; for experts that come while a step runs
    for tokens in decoder.generate(prompts, max_new_tokens=64): ...

Each group is a Decoder of its own, with its cache and a stream of its own. The tokens are those of the groups one after
the other. Steps are called for a few tokens at a time, so whoever stops early has computed those for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.core.replays import CannotCapture, Member
from amoeba.decoding.decoder import Decoder, Outlet
from amoeba.decoding.sampling import Sampling
from amoeba.decoding.step import replays_in

STEPS = 16  # at a time: at both ends of them nobody computes while another one waits


class TurnsDecoder:
    is_interleaved = True

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        length: int,
        sampling: Sampling | None = None,
        compiled: bool = False,
        groups: int = 2,
    ) -> None:
        if not 1 < groups <= batch:
            raise bad_value("groups", f"2 to {batch}, the rows", groups, "one group needs no turns")
        replays = replays_in(model)
        if replays is None:
            raise CannotCapture("the experts are all there: nobody waits for them")
        self._replays, self.batch = replays, batch
        self._sizes = [batch // groups + (number < batch % groups) for number in range(groups)]
        options: dict[str, Any] = {"length": length, "sampling": sampling, "compiled": compiled}
        self._groups = [Decoder(model, batch=size, **options) for size in self._sizes]
        self.cache = self._groups[0].cache  # the others are as long
        self._streams = [torch.cuda.Stream() for _ in self._groups]

    def prepare(self, prompt_tokens: int) -> None:
        for number, group in enumerate(self._groups):
            with self._replays.as_group(number, len(self._groups)):
                group.prepare(prompt_tokens)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int = 0) -> Iterator[list[int]]:
        """The new tokens of all rows, step by step; who has enough stops asking."""
        if len(prompts) != self.batch:
            raise bad_value("prompts", str(self.batch), len(prompts), "make one for as many rows as there are prompts")
        self.prepare(max(len(prompt) for prompt in prompts))
        outlets, left = [], list(prompts)
        for number, (group, size) in enumerate(zip(self._groups, self._sizes, strict=True)):
            # another group's random numbers are others
            outlets.append(group.read(left[:size], max_new_tokens, seed + number * 1_000_003))
            left = left[size:]
        return self._tokens(outlets, max_new_tokens)

    def _tokens(self, outlets: list[Outlet], count: int) -> Iterator[list[int]]:
        members: list[Member] = []
        for group, stream, out in zip(self._groups, self._streams, outlets, strict=True):
            out.reserve(STEPS)  # ahead of steps that wait: memory may not be taken then
            members.append(group.member(stream, out.send))
        yield [token for out in outlets for token in out.receive()]
        for first in range(1, count, STEPS):
            steps = min(STEPS, count - first)
            self._replays.in_turns(members, steps)
            for _ in range(steps):
                tokens = [token for out in outlets for token in out.receive()]
                self._replays.check()
                yield tokens
