"""Decodes in the benchmark: the steps of `amoeba generate`, an adapter, and what the plain loop says to the tokens."""

import pytest
import torch

from amoeba.decoding import Decoder
from amoeba.jobs.generate.token_steps import Steps
from benchmarks.models import decoding
from benchmarks.models.candidates import CANDIDATES
from benchmarks.models.decoding import Agreement, compare
from benchmarks.models.measure import measure
from benchmarks.models.problem import SIZES, Problem, Stage
from selection import quick

PROBLEM = Problem(SIZES["tiny"], "decode", torch.device("cpu"))


@quick(lambda name: name.endswith("adapter"))
@pytest.mark.parametrize("name", ["amoeba generate, steps captured", "amoeba generate, steps captured, adapter"])
def test_the_steps_of_generate_are_compared_with_the_plain_loop(name, monkeypatch):
    asked, candidate = [], next(each for each in CANDIDATES if each.name == name)

    def plain_steps(model, sampling, *, batch, prompt_tokens, new_tokens, compile):
        asked.append((batch, prompt_tokens, new_tokens, compile))
        decoder = Decoder(model, batch=batch, length=prompt_tokens + new_tokens)
        return Steps("captured", "for a test", decoder, 0.0)

    monkeypatch.setattr(decoding, "choose_steps", plain_steps)
    found = measure(candidate, PROBLEM, 1, 0.0)
    assert asked == [(1, 8, 8, False), (8, 8, 8, False)], "once for each number of rows"
    assert [each.greedy for each in found.decodes] == [Agreement(True, 8, []), Agreement(True, 64, [])]

    def refused(*arguments, **options):
        return Steps("plain", "no graph today", None, 0.0)

    monkeypatch.setattr(decoding, "choose_steps", refused)
    with pytest.raises(RuntimeError, match="steps are plain: no graph today"):
        measure(candidate, PROBLEM, 1, 0.0)


def test_an_adapter_changes_the_tokens_and_leaves_the_model_as_it_was():
    ids = PROBLEM.ids(8)
    made = []
    for adapter in (False, True, False):
        with Stage() as stage:
            made.append(decoding.by_generate("amoeba", False, adapter, PROBLEM, stage)(ids, 8))
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], made[1])
    assert all(len(set(row)) > 2 for row in made[0].tolist()), "layers matter: no token is just repeated"


def test_where_tokens_part_from_the_plain_loop_the_margin_is_told():
    ids = PROBLEM.ids(2)
    with Stage() as stage:
        plain = decoding.by_generate("amoeba", False, False, PROBLEM, stage)(ids, 8)
    model = PROBLEM.model("amoeba", torch.float32).eval()
    made = plain.clone()
    made[1, 3:] = (made[1, 3:] + 1) % 256
    found = compare(model, ids, made, plain)
    with torch.no_grad():
        logits = model(input_ids=torch.cat((ids, plain[:, :3]), 1)).logits[1, -1]
    best, second = logits.topk(2).values.tolist()
    assert (found.same, found.tokens) == (False, 16)
    assert [(each.row, each.token) for each in found.first_differences] == [(1, 3)]
    assert found.first_differences[0].margin == pytest.approx(best - second, rel=1e-3, abs=1e-5)
    assert found.median_margin > 0
