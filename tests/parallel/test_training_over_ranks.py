"""A model of transformers with its experts over ranks trains as it does in one process."""

from __future__ import annotations

import pytest
import torch

import rank_training
from amoeba.parallel.processes import LocalRanks
from selection import quick

pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")


@pytest.mark.parametrize("count", [2, 4])
def test_twenty_steps_have_the_losses_and_norms_of_one_process_with_the_same_batch(
    processes: LocalRanks, count: int
) -> None:
    ((alone, expected),) = processes.run(rank_training.train_a_model, [(0, 1, 20)])
    (first, shared), *others = processes.run(rank_training.train_a_model, [(rank, count, 20) for rank in range(count)])
    for history, parameters in others:  # what all have does not drift apart
        assert history == first
        assert all(torch.equal(parameters[name], shared[name]) for name in shared)
    assert set(shared) == set(expected)
    assert alone[-1][0] < alone[0][0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=1e-5, atol=0)


@quick(lambda family: family == "qwen3_moe")
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "glm4_moe", "nemotron_h", "olmoe"]
)
def test_a_placed_model_under_fsdp_trains_as_in_one_process(processes: LocalRanks, family: str) -> None:
    """FSDP2 puts other tensors in the place of the experts' parameters in each pass, and hooks their output."""
    ((alone, _),) = processes.run(rank_training.train_a_model, [(0, 1, 5, family)])
    for history in processes.run(rank_training.train_fully_sharded, [(rank, 5, family) for rank in range(4)]):
        torch.testing.assert_close(torch.tensor(history), torch.tensor(alone), rtol=1e-5, atol=0)


def test_fsdp_over_two_groups_of_two_ranks_has_the_gradients_and_the_norm_of_one_process(processes: LocalRanks) -> None:
    """Others divided experts by the size of the wrong mesh, or clipped each mesh by its own norm."""
    found = processes.run(rank_training.fully_sharded, [(rank,) for rank in range(4)])
    for results in found:
        for errors, norm, alone in results:
            assert max(errors) < 1e-5 and alone > 1
            assert norm == pytest.approx(alone, rel=1e-5)
    assert len({tuple(norm for _, norm, _ in results) for results in found}) == 1
