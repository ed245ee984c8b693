"""The next token from logits, on the device and without waiting for it: as transformers defines the distribution.

B rows · N of them in a step · V vocabulary

    sampler = Sampler(batch, vocabulary, device)
    sampler.begin(row, Sampling(do_sample=True, temperature=0.7, top_k=20, top_p=0.8), seed=1, prompt_ids)
    token_N = sampler.choose(logits_NV, uses=sampler.uses([row]))     # of the first N rows

Every row has settings, a seed and random numbers of its own: what a row draws does not depend on the rows next to it.
Greedy is argmax, after the repetition penalty. To sample, exponential noise is taken for each token and argmax(p /
noise) is the choice, which is a sample of p and needs no look at the numbers by the host. The noise is a function of
the seed, of how many tokens the row has drawn, and of the token: the same seed gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ODD, _MIX = -7046029254386353131, -4658895280553007687  # of splitmix64, as signed numbers
_NO_CUT = -1.0
_LEAST_TEMPERATURE = 1e-20  # greedy; a smaller one would be 0 in fp32, or make scores infinite


@dataclass(frozen=True)
class Sampling:
    """top_k 0, top_p 1 and min_p 0 keep every token, repetition_penalty 1 penalises none."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0


class Uses(NamedTuple):
    """What at least one row of a step needs; the rest is not computed."""

    noise: bool = False
    cut: bool = False
    penalty: bool = False
    allowed: bool = False


class Sampler:
    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self.device = device
        self._settings = [Sampling()] * batch
        self._constrained = [False] * batch
        self.key_B = torch.zeros(batch, dtype=torch.int64, device=device)  # of the noise: seed and tokens drawn
        # temperature, how many noises (0 or 1), 1 - top_p, min_p, penalty
        self._number_B5 = torch.zeros(batch, 5, dtype=torch.float32, device=device)
        self._kept_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # top_k, or all
        self._vocabulary = vocabulary
        random = torch.Generator("cpu").manual_seed(0)
        words = torch.randint(-(2**31), 2**31, (vocabulary,), generator=random, dtype=torch.int64, device="cpu")
        self._word_V = words.to(torch.int32).to(device)
        self._seen_BV: Tensor | None = None
        self._allowed_BV: Tensor | None = None
        for row in range(batch):
            self._put(row, Sampling(), 0)

    def begin(self, row: int, sampling: Sampling, seed: int, prompt_ids: Sequence[int] = ()) -> None:
        """prompt_ids: which the repetition penalty counts."""
        self._settings[row], self._constrained[row] = sampling, False
        self._put(row, sampling, seed)
        if sampling.repetition_penalty != 1:
            if self._seen_BV is None:
                size = len(self._settings), self._vocabulary
                self._seen_BV = torch.zeros(size, dtype=torch.bool, device=self.device)
            self._seen_BV[row].zero_()
            if prompt_ids:
                ids = torch.tensor(list(prompt_ids), dtype=torch.int64, device=self.device)
                self._seen_BV[row].index_fill_(0, ids, True)

    def allow(self, row: int, allowed_V: Tensor) -> None:
        """From now on the row's next token is one of these, bool on the host."""
        if self._allowed_BV is None:
            self._allowed_BV = torch.ones(len(self._settings), self._vocabulary, dtype=torch.bool, device=self.device)
        self._constrained[row] = True
        self._allowed_BV[row, : len(allowed_V)].copy_(allowed_V)
        self._allowed_BV[row, len(allowed_V) :] = False

    def move(self, source: int, target: int) -> None:
        self._settings[target], self._constrained[target] = self._settings[source], self._constrained[source]
        tables = [self.key_B, self._number_B5, self._kept_B1, self._seen_BV, self._allowed_BV]
        for table in tables:
            if table is not None:
                table[target].copy_(table[source])

    def uses(self, rows: Iterable[int]) -> Uses:
        chosen = [(self._settings[row], self._constrained[row]) for row in rows]
        return Uses(
            any(each.do_sample for each, _ in chosen),
            any(each.do_sample and (each.top_k > 0 or each.top_p < 1 or each.min_p > 0) for each, _ in chosen),
            any(each.repetition_penalty != 1 for each, _ in chosen),
            any(constrained for _, constrained in chosen),
        )

    def choose(self, logits_NV: Tensor, uses: Uses, row_N: Tensor | None = None) -> Tensor:
        """token_N, int64, of these rows, or of the first N. Remembers it for the repetition penalty."""
        scores_NV = self.scores(logits_NV, uses, row_N)
        token_N = scores_NV.argmax(dim=-1)
        if uses.penalty:
            assert self._seen_BV is not None
            if row_N is None:
                self._seen_BV[: len(token_N)].scatter_(1, token_N[:, None], True)
            else:
                self._seen_BV[row_N, token_N] = True
        return token_N

    def logprobs(self, logits_NV: Tensor, token_N: Tensor, exact: bool = False) -> Tensor:
        """logprob_N, fp32, at the temperature of each row; before top_k, top_p, min_p and the penalty."""
        return logprobs_of(logits_NV, token_N, self._number_B5[: len(logits_NV), :1], exact)

    def scores(self, logits_NV: Tensor, uses: Uses, row_N: Tensor | None = None) -> Tensor:
        """Of which the largest is the choice."""

        def of_rows(table: Tensor | None) -> Tensor:
            assert table is not None
            return table[: len(logits_NV)] if row_N is None else table[row_N]

        scores_NV = logits_NV
        if any(uses):
            scores_NV = logits_NV.float()  # of which argmax alone would choose the same
            temperature, noisy, out, least, penalty = of_rows(self._number_B5).split(1, dim=1)
        if uses.penalty:
            penalised = torch.where(scores_NV < 0, scores_NV * penalty, scores_NV / penalty)
            scores_NV = torch.where(of_rows(self._seen_BV), penalised, scores_NV)
        if uses.allowed:
            scores_NV = scores_NV.masked_fill(~of_rows(self._allowed_BV), float("-inf"))
        if uses.noise:
            scores_NV = scores_NV / temperature
            if uses.cut:
                scores_NV = _cut(scores_NV, of_rows(self._kept_B1), out, least)
            share_NV = torch.softmax(scores_NV, dim=-1)
            key_N = of_rows(self.key_B)
            scores_NV = torch.where(noisy > 0, share_NV / self._noise(key_N), scores_NV)
            if row_N is None:
                key_N.add_(_ODD)
            else:
                self.key_B.index_add_(0, row_N, torch.full_like(row_N, _ODD))
        return scores_NV

    def _noise(self, key_N: Tensor) -> Tensor:
        """Exponential, above 0: a hash of the key and the token's word, by multiplications of 32 bits."""
        key_N = (key_N ^ _logical_shift(key_N, 30)) * _MIX
        key_N = key_N ^ _logical_shift(key_N, 27)
        first, second = key_N.to(torch.int32)[:, None], (_logical_shift(key_N, 32) | 1).to(torch.int32)[:, None]
        hash_NV = (self._word_V ^ first) * second
        hash_NV = (hash_NV ^ ((hash_NV >> 16) & 0xFFFF)) * 0x7FEB352D
        hash_NV = (hash_NV ^ ((hash_NV >> 15) & 0x1FFFF)) * -2073254261
        hash_NV = hash_NV ^ ((hash_NV >> 16) & 0xFFFF)
        # -2**31 .. 2**31 - 1; the smallest shares of the interval lie near 0, where fp32 tells them apart
        share_NV = (hash_NV & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-33
        return -torch.log1p(-share_NV.clamp(max=1 - 2.0**-24))

    def _put(self, row: int, sampling: Sampling, seed: int) -> None:
        key = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
        key = ((key ^ (key >> 31)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        self.key_B[row] = key - 2**64 if key >= 2**63 else key
        numbers = [
            max(sampling.temperature, _LEAST_TEMPERATURE),
            float(sampling.do_sample),
            1 - sampling.top_p if sampling.top_p < 1 else _NO_CUT,
            sampling.min_p,
            sampling.repetition_penalty,
        ]
        if not sampling.do_sample:
            numbers[:4] = [1.0, 0.0, _NO_CUT, 0.0]
        self._number_B5[row].copy_(torch.tensor(numbers, dtype=torch.float32, device="cpu"))
        kept = sampling.top_k if sampling.do_sample and 0 < sampling.top_k < self._vocabulary else self._vocabulary
        self._kept_B1[row] = kept


def logprobs_of(logits_NV: Tensor, token_N: Tensor, temperature_N1: Tensor, exact: bool = False) -> Tensor:
    """exact: of a model in exact mode. Any number of axes may stand for N."""
    scores_NV = logits_NV.float() / temperature_N1
    if exact:
        from amoeba.integrations.exact_mode import log_probabilities

        return log_probabilities(scores_NV, token_N)
    return scores_NV.log_softmax(-1).gather(-1, token_N[..., None])[..., 0]


def _logical_shift(number: Tensor, bits: int) -> Tensor:
    return (number >> bits) & ((1 << (64 - bits)) - 1)


def _cut(scores_NV: Tensor, kept_N1: Tensor, out_N1: Tensor, least_N1: Tensor) -> Tensor:
    """-inf outside of the top k, then outside of the most likely with a share of 1 - out, then below least times the
    largest share."""
    ascending_NV, order_NV = scores_NV.sort(dim=-1)
    edge_N1 = ascending_NV.gather(1, scores_NV.shape[1] - kept_N1)
    ascending_NV = ascending_NV.masked_fill(ascending_NV < edge_N1, float("-inf"))
    share_NV = ascending_NV.softmax(dim=-1)
    outside_NV = (share_NV.cumsum(dim=-1) <= out_N1) | (share_NV < least_N1 * share_NV[:, -1:])
    outside_NV |= ascending_NV == float("-inf")
    outside_NV[:, -1] = False
    return scores_NV.masked_fill(outside_NV.scatter(1, order_NV, outside_NV), float("-inf"))
