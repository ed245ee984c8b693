"""The distribution of the next token against transformers' own processors, and samples against the distribution."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from amoeba.decoding.sampling import Sampler, Sampling

V = 97
CPU = torch.device("cpu")
SETTINGS = [
    Sampling(True, 0.7, 20, 0.8),
    Sampling(True, 1.3, 0, 0.9, 1.4),
    Sampling(True, 0.2, 5),
    Sampling(True, 1.0, 1),
    Sampling(True, 1.0, 1000, 1e-6),
    Sampling(True, 0.5, 0, 1e-12),
    Sampling(True, 1.0, 0, 1.0, 0.8),
]


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, V, generator=torch.Generator().manual_seed(seed)) * 4


def theirs(sampling: Sampling, prompt_BL: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors(prompt_BL, scores_BV).softmax(-1)


def shares(sampler: Sampler, logits_BV: torch.Tensor) -> torch.Tensor:
    """What `choose` divides by its noise."""
    noise = torch.Tensor.exponential_
    torch.Tensor.exponential_ = lambda self, **_: self.fill_(1.0)
    seen, argmax = [], torch.Tensor.argmax
    torch.Tensor.argmax = lambda self, **k: seen.append(self) or argmax(self, **k)
    try:
        sampler.choose(logits_BV)
    finally:
        torch.Tensor.exponential_, torch.Tensor.argmax = noise, argmax
    return seen[0]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_shares_are_those_of_transformers(sampling):
    prompt_BL = torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(1))
    sampler = Sampler(sampling, 3, V, CPU)
    sampler.begin(prompt_BL, seed=0)
    found, expected = shares(sampler, logits()), theirs(sampling, prompt_BL, logits())
    torch.testing.assert_close(found, expected)
    assert torch.equal(found > 0, expected > 0)


def test_equal_scores_at_the_edge_are_kept_as_transformers_keeps_them():
    scores_BV = logits().round()  # many ties
    for sampling in (Sampling(True, 1.0, 7), Sampling(True, 1.0, 0, 0.6)):
        found = shares(Sampler(sampling, 3, V, CPU), scores_BV)
        torch.testing.assert_close(found, theirs(sampling, torch.zeros(3, 1, dtype=torch.int64), scores_BV))


def test_a_chosen_token_is_penalised_from_then_on():
    sampler = Sampler(Sampling(repetition_penalty=3.0), 1, 4, CPU)
    sampler.begin(torch.tensor([[3]]), seed=0)
    scores_BV = torch.tensor([[2.0, 1.9, 1.0, 2.5]])
    assert [int(sampler.choose(scores_BV)) for _ in range(4)] == [0, 1, 2, 3]
    sampler.begin(torch.tensor([[3]]), seed=0)
    assert int(sampler.choose(scores_BV)) == 0, "with the next prompt the others are no longer penalised"


def test_samples_come_as_often_as_their_shares_say():
    sampling, count = Sampling(True, 1.0, 4), 20_000
    sampler = Sampler(sampling, count, 8, CPU)
    sampler.begin(torch.zeros(count, 1, dtype=torch.int64), seed=5)
    scores_V = logits()[0, :8] / 3
    share_V = theirs(sampling, torch.zeros(1, 1, dtype=torch.int64), scores_V[None])[0]
    found_V = torch.bincount(sampler.choose(scores_V.expand(count, 8)), minlength=8) / count
    assert (found_V - share_V).abs().max() < 5 * 0.5 / count**0.5  # five standard deviations of the widest
    assert (found_V[share_V == 0] == 0).all()
