"""`python -m benchmarks exactness`: the gap of a tiny model, which exact mode closes, and the cost of both."""

import pytest
import torch

from amoeba.integrations.exact_mode import exact
from benchmarks.exactness import BATCH_OF_64, FAMILIES, SMALL, build, cost_of, gap_of, with_lora

TINY = {**SMALL, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}


def test_the_gap_is_there_and_exact_mode_closes_it() -> None:
    model = build("qwen3_moe", torch.bfloat16, TINY)
    gap = gap_of(model, [(33, 1)], new_tokens=2)
    assert gap.log_probability > 0 and gap.tokens == 12 and gap.pairs == 3 * (34 + 2)
    with exact(model):
        closed = gap_of(model, [(33, 1)], new_tokens=2)
    assert closed.log_probability == closed.choices == 0


@pytest.mark.thorough  # in batches of three: tests/integrations/test_exact_models.py
@pytest.mark.parametrize("placement", ["mxfp4-weights", "fp8-weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_experts_with_lora_in_batches_of_64(family: str, placement: str) -> None:
    model = with_lora(family, torch.bfloat16, placement, TINY | {"num_hidden_layers": 2})
    with exact(model):
        closed = gap_of(model, [BATCH_OF_64], new_tokens=1)
    assert closed.log_probability == closed.choices == 0 and closed.tokens == 3 * 64


def test_both_are_timed_in_every_round() -> None:
    for cost in cost_of(torch.float32, 1, TINY):
        assert all(len(each) == 1 for each in (cost.without, cost.exact, cost.without_cpu, cost.exact_cpu))
