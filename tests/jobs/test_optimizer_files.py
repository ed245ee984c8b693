"""Parts of an optimizer's state, put together for whoever asks: any experts, any rows, in any order."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from amoeba.jobs.train.optimizer_files import GROUPS, _Parts, load_optimizer, save_optimizer
from amoeba.parallel.rank_zero import ALONE

OWNED = ([0, 2, 4], [1, 3])  # experts of two ranks, as a table of one's own may have them


@pytest.fixture
def parts(tmp_path: Path) -> _Parts:
    """Of a parameter whose entry for an expert, or a row, is its number."""
    for rank, experts in enumerate(OWNED):
        rows = (0, 3) if rank == 0 else (3, 5)
        tensors = {
            "w/exp_avg": torch.tensor(experts, dtype=torch.float32)[:, None],
            "dense/exp_avg": torch.arange(*rows, dtype=torch.float32),
        }
        if rank == 0:
            tensors |= {"w/step": torch.tensor(7), "whole/exp_avg": torch.arange(5, dtype=torch.float32)}
        header = {"experts": json.dumps({"w/exp_avg": experts}), "rows": json.dumps({"dense/exp_avg": rows})}
        save_file(tensors, tmp_path / f"optimizer-{rank:05d}-of-00002.safetensors", metadata=header)
    (tmp_path / GROUPS).write_text('{"groups": []}')
    return _Parts(tmp_path)


@pytest.mark.parametrize("wanted", [[0, 1, 2, 3, 4], [0, 4], [4, 2], [1, 2, 4], [3], []])
def test_a_rank_gets_the_entries_of_its_experts(parts: _Parts, wanted: list[int]) -> None:
    found = parts.state_of("w", wanted)
    assert found["exp_avg"].flatten().tolist() == wanted
    assert found["step"] == 7  # one number for all of them


@pytest.mark.parametrize("rows", [range(5), range(2, 4), range(3, 5), range(1, 1)])
def test_a_rank_gets_its_rows_of_what_is_in_parts_and_of_what_is_whole(parts: _Parts, rows: range) -> None:
    for name in ("dense", "whole"):
        assert parts.state_of(name, rows)["exp_avg"].tolist() == list(rows)


def test_a_process_alone_gets_everything(parts: _Parts) -> None:
    assert parts.state_of("w", None)["exp_avg"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert parts.state_of("dense", None)["exp_avg"].tolist() == [0, 1, 2, 3, 4]


def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_one_process_reads_its_own_files(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save_optimizer(optimizer, model, tmp_path, ALONE)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    load_optimizer(fresh, model, tmp_path)
    expected, found = optimizer.state_dict(), fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for place, state in expected["state"].items():
        assert all(torch.equal(found["state"][place][key], value) for key, value in state.items())


def test_a_step_after_loading_is_the_same_where_memory_is_transposed(tmp_path: Path) -> None:
    """As a rank's experts of gpt-oss are, whose optimizer's numbers a checkpoint has in another order."""
    torch.manual_seed(0)
    weights = torch.nn.ParameterDict({"down": torch.nn.Parameter(torch.randn(2, 3, 5).mT)})

    def steps(count: int, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for _ in range(count):
            optimizer.zero_grad()
            (weights["down"] * torch.arange(30.0).view(2, 5, 3)).square().sum().backward()
            optimizer.step()
        return optimizer

    first = steps(2, torch.optim.AdamW(weights.parameters(), lr=0.1, fused=True))
    save_optimizer(first, weights, tmp_path, ALONE)
    before = weights["down"].detach().clone()
    steps(1, first)
    expected = weights["down"].detach().clone()
    weights["down"].data.copy_(before)
    resumed = torch.optim.AdamW(weights.parameters(), lr=0.5, fused=True)
    load_optimizer(resumed, weights, tmp_path)
    steps(1, resumed)
    assert torch.equal(weights["down"], expected)


def test_a_rank_reads_its_experts_of_what_a_process_alone_wrote(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"gate_up": torch.nn.Parameter(torch.zeros(4, 2))})
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model["gate_up"]] = {"exp_avg": torch.arange(8.0).view(4, 2), "step": torch.tensor(3.0)}
    save_optimizer(optimizer, model, tmp_path, ALONE)
    for experts in ([1, 3], [2, 3], []):
        found = _Parts(tmp_path).state_of("gate_up", experts)
        assert found["exp_avg"].tolist() == [[2.0 * each, 2.0 * each + 1] for each in experts]
        assert found["step"].item() == 3


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = stepped()
    save_optimizer(optimizer, model, tmp_path, ALONE)
    model[1] = torch.nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"got exp_avg of 1.weight in shape \(2, 5\)"):
        load_optimizer(torch.optim.AdamW(model.parameters()), model, tmp_path)
