"""Sums that go straight into another rank's heap: of three ranks in one process, one after the other."""

import itertools

import pytest
import torch

from amoeba.kernels.combine import combine
from amoeba.kernels.peer_context import SUMS, PeerContext, Plan, heap_layout
from amoeba.kernels.peer_sums import add_kept, add_sums, own_sums, send_sums
from selection import each_value_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")
TOKENS, H = (3, 0, 5), 24


@each_value_once()
@pytest.mark.parametrize(
    ("dtype", "weighted", "K"),  # the interpreter cuts bf16 off
    [(torch.float16, True, 2), (torch.float16, False, 2), (torch.float32, True, 13), (torch.float32, False, 13)],
)
def test_each_rank_rounds_its_sums_and_they_are_added_in_rank_order(dtype, weighted, K):
    """Of 13 experts per token not all are under way at once. Without weights also in two steps."""
    ranks, rows = len(TOKENS), sum(TOKENS)
    generator = torch.Generator().manual_seed(0)
    at, sizes, nbytes = heap_layout(ranks, max(TOKENS), K, H * dtype.itemsize)
    heaps = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(ranks)]  # NaN where nobody writes
    for heap in heaps:
        heap[: at[0]] = 0
    addresses = torch.tensor([heap.data_ptr() for heap in heaps])
    first = [sum(TOKENS[:rank]) for rank in range(ranks)]
    places = tuple(slice(start, start + count) for start, count in zip(first, TOKENS, strict=True))
    back = torch.tensor([first, first, TOKENS])
    contexts, given, partial = [], [], []
    for rank in range(ranks):
        numbers = [torch.zeros(size, dtype=torch.int64) for size in (4, 1, 7)]
        contexts.append(PeerContext(addresses, *numbers, at, sizes, 16, rank, ranks, 1.0, tuple(heaps)))
        rows_NH = torch.randn(rows * K, H, generator=generator).to(dtype)
        slot_row_RK = torch.randperm(rows * K, generator=generator).int().view(rows, K)
        slot_row_RK[torch.rand(rows, K, generator=generator) < 0.5] = rows * K  # sentinels: of other ranks' experts
        weight_RK = torch.rand(rows, K, generator=generator) if weighted else None
        given.append((rows_NH, slot_row_RK, weight_RK))
        partial.append(combine(rows_NH, slot_row_RK, weight_RK, torch.empty(rows, H, dtype=dtype)))
    comes = [(slots < rows * K).any(1).to(torch.uint8) for _, slots, _ in given]
    plans = [Plan(back, back, TOKENS[rank], rows, places) for rank in range(ranks)]
    for _ in range(2):  # the second time in the same cells
        for rank in range(ranks):
            send_sums(contexts[rank], plans[rank], *given[rank], comes[rank])
        for rank in range(ranks):
            goes_WT = torch.stack([comes[other][places[rank]] for other in range(ranks)])
            found = add_sums(contexts[rank], plans[rank], *given[rank], goes_WT)
            total = torch.zeros(TOKENS[rank], H)
            for other in range(ranks):
                total += partial[other][places[rank]].float()
            assert torch.equal(found, total.to(dtype))
    if not weighted:
        for rank in range(ranks):
            send_sums(contexts[rank], plans[rank], *given[rank], comes[rank])
        for rank in range(ranks):
            goes_WT = torch.stack([comes[other][places[rank]] for other in range(ranks)])
            own_TH = torch.full((TOKENS[rank], H), float("nan"), dtype=dtype)
            own_sums(contexts[rank], plans[rank], *given[rank][:2], own_TH)
            assert torch.equal(own_TH, partial[rank][places[rank]])
            total = sum((partial[other][places[rank]].float() for other in range(ranks)), torch.zeros_like(own_TH))
            own_TH[goes_WT[rank] == 0] = float("nan")  # nobody reads it
            assert torch.equal(add_kept(contexts[rank], own_TH, goes_WT), total.to(dtype))
    for rank, other in itertools.permutations(range(ranks), 2):  # nothing travels that nobody reads
        cell = heaps[other][at[SUMS] + rank * sizes[SUMS] :][: TOKENS[other] * H * dtype.itemsize]
        rows_of_cell = cell.view(TOKENS[other], H * dtype.itemsize)
        assert (rows_of_cell[comes[rank][places[other]] == 0] == 255).all()


def test_after_a_wait_in_vain_sums_are_nan() -> None:
    numbers = [torch.zeros(size, dtype=torch.int64) for size in (4, 1, 7)]
    at, sizes, nbytes = heap_layout(1, 3, 1, 8)
    heap, places = torch.zeros(nbytes, dtype=torch.uint8), torch.tensor([[0], [0], [3]])
    peers = PeerContext(torch.tensor([heap.data_ptr()]), *numbers, at, sizes, 16, 0, 1, 1.0, (heap,))
    rows, slots = torch.rand(3, 2), torch.arange(3, dtype=torch.int32).view(3, 1)
    plan, goes = Plan(places, places, 3, 3, (slice(0, 3),)), torch.ones(1, 3, dtype=torch.uint8)
    assert torch.equal(add_sums(peers, plan, rows, slots, None, goes), rows)
    assert torch.equal(add_kept(peers, torch.cat([rows, rows]), goes), rows)
    peers.trouble.fill_(1)
    assert add_sums(peers, plan, rows, slots, None, goes).isnan().all()
    assert add_kept(peers, rows, goes).isnan().all()
