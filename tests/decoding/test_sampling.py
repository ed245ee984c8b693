"""The distribution of the next token against transformers' own processors, and samples against the distribution."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
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
    sampler._noise = lambda key_N: torch.ones(())
    return sampler.scores(logits_BV, sampler.uses(range(len(logits_BV))))


def begun(sampling: Sampling, rows: int, prompt_BL: torch.Tensor | None = None, vocabulary: int = V) -> Sampler:
    sampler = Sampler(rows, vocabulary, CPU)
    for row in range(rows):
        sampler.begin(row, sampling, row, [] if prompt_BL is None else prompt_BL[row].tolist())
    return sampler


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_shares_are_those_of_transformers(sampling):
    prompt_BL = torch.randint(V, (3, 11), generator=torch.Generator().manual_seed(1))
    found, expected = shares(begun(sampling, 3, prompt_BL), logits()), theirs(sampling, prompt_BL, logits())
    torch.testing.assert_close(found, expected)
    assert torch.equal(found > 0, expected > 0)


def test_equal_scores_at_the_edge_are_kept_as_transformers_keeps_them():
    scores_BV = logits().round()  # many ties
    for sampling in (Sampling(True, 1.0, 7), Sampling(True, 1.0, 0, 0.6)):
        found = shares(begun(sampling, 3), scores_BV)
        torch.testing.assert_close(found, theirs(sampling, torch.zeros(3, 1, dtype=torch.int64), scores_BV))


def test_a_chosen_token_is_penalised_from_then_on():
    penalised, prompt_BL = Sampling(repetition_penalty=3.0), torch.tensor([[3]])
    sampler = begun(penalised, 1, prompt_BL, vocabulary=4)
    uses = sampler.uses([0])
    scores_BV = torch.tensor([[2.0, 1.9, 1.0, 2.5]])
    assert [int(sampler.choose(scores_BV, uses)) for _ in range(4)] == [0, 1, 2, 3]
    sampler.begin(0, penalised, 0, [3])
    assert int(sampler.choose(scores_BV, uses)) == 0, "with the next prompt the others are no longer penalised"


def test_samples_come_as_often_as_their_shares_say():
    sampling, count = Sampling(True, 1.0, 4), 20_000
    sampler = begun(sampling, count, vocabulary=8)  # every row has its own seed
    scores_V = logits()[0, :8] / 3
    share_V = theirs(sampling, torch.zeros(1, 1, dtype=torch.int64), scores_V[None])[0]
    for _ in range(2):  # and the second draws of all rows are as good as the first
        found_V = torch.bincount(sampler.choose(scores_V.expand(count, 8), sampler.uses([0])), minlength=8) / count
        assert (found_V - share_V).abs().max() < 5 * 0.5 / count**0.5  # five standard deviations of the widest
        assert (found_V[share_V == 0] == 0).all()


def test_one_row_draws_tokens_as_often_as_their_shares_say():
    """The draws of one seed, one after another."""
    sampler, count = begun(Sampling(True), 1, vocabulary=8), 2000
    scores_V = logits()[0, :8] / 3
    drawn = torch.cat([sampler.choose(scores_V[None], sampler.uses([0])) for _ in range(count)])
    assert (torch.bincount(drawn, minlength=8) / count - scores_V.softmax(0)).abs().max() < 5 * 0.5 / count**0.5


def test_a_row_draws_the_same_wherever_it_is_and_whatever_the_others_do():
    settings = [Sampling(True, 8.0, 40), Sampling(), Sampling(True, 9.0, 0, 0.9), Sampling(repetition_penalty=5.0)]
    alone = []
    for row, sampling in enumerate(settings):
        sampler = Sampler(1, V, CPU)
        sampler.begin(0, sampling, seed=row)
        alone.append([int(sampler.choose(logits(step % 2)[:1], sampler.uses([0]))) for step in range(6)])
    sampler = Sampler(5, V, CPU)
    for row, sampling in enumerate(settings):
        sampler.begin(row, sampling, seed=row)
    together = [sampler.choose(logits(step % 2)[:1].expand(4, V), sampler.uses(range(4))).tolist() for step in range(3)]
    sampler.move(2, 4)
    by_row = torch.tensor([4, 0, 1, 3])
    rest = [sampler.choose(logits(step % 2)[:1].expand(4, V), sampler.uses(range(5)), by_row) for step in range(3, 6)]
    together += [[row[place] for place in (1, 2, 0, 3)] for row in torch.stack(rest).tolist()]
    assert [list(row) for row in zip(*together, strict=True)] == alone
    assert len({tuple(row) for row in alone}) == 4


def test_min_p_keeps_what_transformers_keeps():
    sampling = Sampling(True, 0.9, 0, 0.95, min_p=0.2)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.95), MinPLogitsWarper(0.2)])
    expected = warpers(torch.zeros(3, 1, dtype=torch.int64), logits()).softmax(-1)
    found = shares(begun(sampling, 3), logits())
    torch.testing.assert_close(found, expected)
    assert torch.equal(found > 0, expected > 0)


def test_only_allowed_tokens_are_chosen():
    sampler = begun(Sampling(True, 5.0), 2)
    allowed_V = torch.zeros(V, dtype=torch.bool)
    allowed_V[[3, 5]] = True
    sampler.allow(1, allowed_V)
    drawn = torch.stack([sampler.choose(logits(step)[:2], sampler.uses([0, 1])) for step in range(30)])
    assert set(drawn[:, 1].tolist()) == {3, 5} and len(set(drawn[:, 0].tolist())) > 10


@pytest.mark.parametrize("temperature", [1e-30, 1e-44, 5e-324])
def test_a_temperature_too_small_for_fp32_is_greedy(temperature):
    sampler = begun(Sampling(True, temperature, 5), 3)
    assert torch.equal(sampler.choose(1e4 * logits(), sampler.uses(range(3))), logits().argmax(-1))
