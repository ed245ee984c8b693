"""A model of transformers with its experts over ranks trains as it does in one process."""

from __future__ import annotations

import pytest
import torch

import rank_jobs
from amoeba.parallel.processes import LocalRanks

pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")


@pytest.mark.parametrize("count", [2, 4])
def test_twenty_steps_have_the_losses_and_norms_of_one_process_with_the_same_batch(
    processes: LocalRanks, count: int
) -> None:
    ((alone, expected),) = processes.run(rank_jobs.train_a_model, [(0, 1, 20)])
    (first, shared), *others = processes.run(rank_jobs.train_a_model, [(rank, count, 20) for rank in range(count)])
    for history, parameters in others:  # what all have does not drift apart
        assert history == first
        assert all(torch.equal(parameters[name], shared[name]) for name in shared)
    assert set(shared) == set(expected)
    assert alone[-1][0] < alone[0][0]
    torch.testing.assert_close(torch.tensor(first), torch.tensor(alone), rtol=1e-5, atol=0)
