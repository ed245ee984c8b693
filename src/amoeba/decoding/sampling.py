"""The next token from logits, on the device and without waiting for it: as transformers defines the distribution.

B rows · V vocabulary

    sampler = Sampler(Sampling(do_sample=True, temperature=0.7, top_k=20, top_p=0.8), batch, vocabulary, device)
    sampler.begin(prompt_BL, seed=1)
    token_B = sampler.choose(logits_BV)

Greedy is argmax, after the repetition penalty. To sample, exponential noise is drawn for each token and
argmax(p / noise) taken, which is a sample of p and needs no look at the numbers by the host. The same seed gives the
same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """top_k 0 and top_p 1 keep every token, repetition_penalty 1 penalises none."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0


class Sampler:
    def __init__(self, sampling: Sampling, batch: int, vocabulary: int, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device) if sampling.do_sample else None
        self._seen_BV: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen_BV = torch.zeros(batch, vocabulary, dtype=torch.bool, device=device)

    def begin(self, prompt_BL: Tensor, seed: int) -> None:
        if self.generator is not None:
            self.generator.manual_seed(seed)
        if self._seen_BV is not None:
            self._seen_BV.zero_().scatter_(1, prompt_BL, True)

    def choose(self, logits_BV: Tensor) -> Tensor:
        """token_B, int64. Remembers it for the repetition penalty."""
        sampling, scores_BV = self.sampling, logits_BV
        if self._seen_BV is not None or self.generator is not None:
            scores_BV = logits_BV.float()  # of which argmax alone would choose the same
        if self._seen_BV is not None:
            penalty = sampling.repetition_penalty
            penalised = torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty)
            scores_BV = torch.where(self._seen_BV, penalised, scores_BV)
        if self.generator is not None:
            share_BV = torch.softmax(self._cut(scores_BV / sampling.temperature), dim=-1)
            scores_BV = share_BV / torch.empty_like(share_BV).exponential_(generator=self.generator)
        token_B = scores_BV.argmax(dim=-1)
        if self._seen_BV is not None:
            self._seen_BV.scatter_(1, token_B[:, None], True)
        return token_B

    def _cut(self, scores_BV: Tensor) -> Tensor:
        sampling, vocabulary = self.sampling, scores_BV.shape[-1]
        if 0 < sampling.top_k < vocabulary:
            least_B1 = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores_BV = scores_BV.masked_fill(scores_BV < least_B1, float("-inf"))
        if sampling.top_p < 1:
            ascending_BV, order_BV = scores_BV.sort(dim=-1)
            out_BV = ascending_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
            out_BV[:, -1] = False
            scores_BV = scores_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), float("-inf"))
        return scores_BV
