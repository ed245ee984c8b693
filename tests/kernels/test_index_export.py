"""Ids become slots, and the host reads what was asked for: distinct ids, the missing ones first.

N ids · E experts
"""

import pytest
import torch
from torch import Tensor

from amoeba.kernels.index_export import MOST_IDS, export_indices, row_length, to_slots
from selection import each_value_once

POISON = -77

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def drawn(ids: int, experts: int, present: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ids * 1000 + experts)
    expert_N = torch.randint(0, experts, (ids,), generator=generator, dtype=dtype)
    if ids > 2:
        expert_N[ids // 2], expert_N[-1] = -1, experts
    if ids > 5 and dtype == torch.int64:
        expert_N[3] = (1 << 32) + 1  # narrowed, it would be an expert
    slot_E = torch.randperm(experts, generator=generator).to(torch.int32)
    slot_E[torch.rand(experts, generator=generator) >= present] = -1
    return expert_N.to(device), slot_E.to(device)


def expected_slots(expert_N: Tensor, slot_E: Tensor) -> list[int]:
    slots = slot_E.tolist()
    return [slots[each] if 0 <= each < len(slots) else -1 for each in expert_N.tolist()]


def row_for(length: int, device: torch.device) -> Tensor:
    """Mapped memory on a GPU; in the interpreter plain memory stands for it."""
    return torch.full((length,), POISON, dtype=torch.int32, pin_memory=device.type == "cuda")


@each_value_once("dtype")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("present", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("ids", "experts"), [(1, 1), (8, 5), (8, 128), (63, 60), (512, 200), (199, 3)])
def test_ids_become_slots_and_the_row_has_distinct_ids(ids, experts, present, dtype, device) -> None:
    expert_N, slot_E = drawn(ids, experts, present, dtype, device)
    slot_N, row = torch.full_like(expert_N, POISON), row_for(row_length(experts, ids) + 2, device)
    export_indices(expert_N, slot_E, slot_N, row, 41)
    if device.type == "cuda":
        torch.cuda.synchronize()
    slots = slot_E.tolist()
    asked = sorted({each for each in expert_N.tolist() if 0 <= each < experts})
    missing = [each for each in asked if slots[each] < 0]
    there = [each for each in asked if slots[each] >= 0]
    assert slot_N.tolist() == expected_slots(expert_N, slot_E)
    assert row.tolist()[: 3 + len(asked)] == [len(missing), len(asked), 41, *missing, *there]
    assert set(row.tolist()[3 + len(asked) :]) == {POISON}, "written past its end"


def test_a_pass_of_sentinels_asks_for_nothing(device) -> None:
    expert_N = torch.full((6,), -1, dtype=torch.int64, device=device)
    slot_N, row = torch.full_like(expert_N, POISON), row_for(row_length(4, 6), device)
    export_indices(expert_N, torch.tensor([0, 1, -1, 2], dtype=torch.int32, device=device), slot_N, row, 1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert slot_N.tolist() == [-1] * 6 and row.tolist() == [0, 0, 1, *[POISON] * 4]


@pytest.mark.parametrize(("ids", "experts"), [(0, 3), (1, 1), (63, 60), (5000, 128)])
def test_any_number_of_ids_becomes_slots(ids, experts, device) -> None:
    expert_N, slot_E = drawn(ids, experts, 0.5, torch.int64, device)
    slot_N = torch.full_like(expert_N, POISON)
    to_slots(expert_N, slot_E, slot_N)
    assert slot_N.tolist() == expected_slots(expert_N, slot_E)


def test_what_does_not_fit_is_refused(device) -> None:
    ids = torch.zeros(MOST_IDS + 1, dtype=torch.int64, device=device)
    slot_E = torch.zeros(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="at most"):
        export_indices(ids, slot_E, torch.empty_like(ids), row_for(7, device), 1)
    with pytest.raises(ValueError, match="a row of 5"):
        export_indices(ids[:2], slot_E, torch.empty_like(ids[:2]), row_for(4, device), 1)
