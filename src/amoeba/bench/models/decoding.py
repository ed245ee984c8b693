"""Greedy decoding after prompts of equal length, by transformers' own `generate`.

decode = by_generate(Decoding("grouped_mm"), problem)
new_ids = decode(ids, 64)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba.bench.models.candidate import Decode, who_computes
from amoeba.bench.models.problem import Problem


@dataclass(frozen=True)
class Decoding:
    """static_cache: a cache of a fixed length, with which transformers compiles the step by itself (on a GPU)."""

    experts: str
    static_cache: bool = False

    @property
    def name(self) -> str:
        return f"{who_computes(self.experts)}, {'static cache, compiled' if self.static_cache else 'plain generate'}"

    def why_not(self, problem: Problem) -> str | None:
        return "is measured on a GPU" if self.static_cache and problem.device.type == "cpu" else None


def by_generate(decoding: Decoding, problem: Problem) -> Decode:
    model = problem.model(decoding.experts, problem.dtype).eval()
    cache = {"cache_implementation": "static"} if decoding.static_cache else {}

    def decode(ids: Tensor, new_tokens: int) -> Tensor:
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=None,  # random weights may say anything, also that they are done
            pad_token_id=0,
            **cache,
        )
        return made[:, ids.shape[1] :]

    return decode
