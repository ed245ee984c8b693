"""Rows that one rank pushes into another's heap: of two ranks in one process, one after the other."""

import pytest
import torch

from amoeba.kernels.peer_context import ROWS, SLOTS, PeerContext, Plan, heap_layout
from amoeba.kernels.peer_rows import Push, push_rows, push_slots, take_rows, take_slots
from selection import each_value_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")
TOKENS, K = (37, 21), 3


def contexts_and_plans(row_bytes: int) -> tuple[list[PeerContext], list[Plan]]:
    at, sizes, nbytes = heap_layout(2, max(TOKENS), K, row_bytes)
    heaps = [torch.zeros(nbytes, dtype=torch.uint8) for _ in TOKENS]
    addresses, first = torch.tensor([heap.data_ptr() for heap in heaps]), [0, TOKENS[0]]
    places = tuple(slice(start, start + count) for start, count in zip(first, TOKENS, strict=True))
    contexts, plans = [], []
    for rank, tokens in enumerate(TOKENS):
        numbers = [torch.zeros(size, dtype=torch.int64) for size in (4, 1, 7)]
        contexts.append(PeerContext(addresses, *numbers, at, sizes, 48, rank, 2, 1.0, tuple(heaps)))
        there = torch.tensor([[0, 0], [0, tokens], [tokens, tokens]])
        plans.append(Plan(there, torch.tensor([first, first, TOKENS]), tokens, sum(TOKENS), places))
    return contexts, plans


@each_value_once()
@pytest.mark.parametrize("how", [Push(512, 4), Push(512, 4, ahead=True), Push(ahead=True)], ids=str)
@pytest.mark.parametrize(("width", "programs"), [(24, 1), (24, 2), (2056, 2)])  # the last one is two tiles wide
def test_however_rows_are_pushed_each_that_is_wanted_arrives_and_no_other(how: Push, width: int, programs: int) -> None:
    contexts, plans = contexts_and_plans(width * 4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(tokens, width, generator=generator) for tokens in TOKENS]
    goes = [(torch.rand(2, tokens, generator=generator) < 0.7).to(torch.uint8) for tokens in TOKENS]
    for _ in range(2):  # the second time in the same cells
        for rank in range(2):
            push_rows(contexts[rank], plans[rank].there, ROWS, rows[rank], goes[rank], programs, how)
        for rank in range(2):
            comes_R = torch.cat([each[rank] for each in goes])
            found = torch.full((sum(TOKENS), width), -7.0)
            take_rows(contexts[rank], plans[rank], found, comes_R)
            for other, place in enumerate(plans[rank].places):
                wanted = goes[other][rank][:, None].bool() & (other != rank)
                assert torch.equal(found[place], torch.where(wanted, rows[other], -7.0))


def test_slots_are_counted_as_they_are_taken() -> None:
    contexts, plans = contexts_and_plans(16)
    generator = torch.Generator().manual_seed(0)
    # of experts 0 and 1 each rank has one, under the name of 5; of others nobody
    tables = torch.tensor([0, 1, 2]), torch.tensor([5, 5, -1])
    owner, weights = [torch.randint(-1, 4, (tokens, K), generator=generator) for tokens in TOKENS], []
    for rank, tokens in enumerate(TOKENS):
        weights.append(torch.rand(tokens, K, generator=generator))
        goes_WT = torch.empty(2, tokens, dtype=torch.uint8)
        push_slots(contexts[rank], plans[rank], owner[rank], tables, weights[rank], goes_WT)
        assert torch.equal(goes_WT.bool(), torch.stack([(owner[rank] == each).any(1) for each in range(2)]))
    for rank in range(2):
        slots, comes_R = int(sum((each == rank).sum() for each in owner)), torch.empty(sum(TOKENS), dtype=torch.uint8)
        expert_RK, weight_RK, owned = take_slots(contexts[rank], plans[rank], weights[rank], comes_R, most_rows=slots)
        assert owned.sum() == slots == (expert_RK == 5).sum()
        assert torch.equal(weight_RK, torch.cat(weights)) and not contexts[rank].record[0]
        assert torch.equal(comes_R.bool(), torch.cat([(each == rank).any(1) for each in owner]))
    assert contexts[0].epochs[SLOTS] == 1


def test_too_many_slots_are_reported_with_their_number() -> None:
    contexts, plans = contexts_and_plans(16)
    for rank, tokens in enumerate(TOKENS):
        owner = torch.zeros(tokens, K, dtype=torch.int64)
        tables, goes_WT = (torch.tensor([0, 2]), torch.tensor([0, -1])), torch.empty(2, tokens, dtype=torch.uint8)
        push_slots(contexts[rank], plans[rank], owner, tables, owner.float(), goes_WT)
    comes_R = torch.empty(sum(TOKENS), dtype=torch.uint8)
    expert_RK, _, _ = take_slots(contexts[0], plans[0], torch.zeros(TOKENS[0], K), comes_R, most_rows=173)
    assert (expert_RK == -1).all()
    assert contexts[0].record.tolist()[4:6] == [sum(TOKENS) * K, 173]
