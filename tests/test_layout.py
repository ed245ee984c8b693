"""The row mapping: sorted by expert, stable in row_id, exactly invertible, on 1 to 4 ranks.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W ranks
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.layout import Layout, build_layout, build_layout_from_rows, split_row_id
from amoeba.proof.reference.experts import experts_backward, experts_forward
from amoeba.weights import ExpertWeights

properties = settings(max_examples=60)


@dataclass
class Routed:
    """What the ranks of a job routed: ids_WTK in [-2, E + 2], so that some belong to nobody."""

    ids_WTK: torch.Tensor
    num_experts: int

    @property
    def sizes(self):
        return self.ids_WTK.shape


@st.composite
def routed(draw, max_ranks=4, min_tokens=0):
    shape = draw(st.integers(1, max_ranks)), draw(st.integers(min_tokens, 7)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 6))
    count = shape[0] * shape[1] * shape[2]
    ids = draw(st.lists(st.integers(-2, num_experts + 2), min_size=count, max_size=count))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return Routed(torch.tensor(ids, dtype=dtype).view(shape), num_experts)


def gathered(job, seed):
    """All rows of all ranks in some order, as an exchange may deliver them: (expert_N, row_id_N)."""
    expert_N = job.ids_WTK.reshape(-1)
    arrival_N = torch.randperm(expert_N.shape[0], generator=torch.Generator().manual_seed(seed))
    return expert_N[arrival_N], arrival_N


def check_sorted(layout: Layout, expert_of_row_id, num_experts):
    """Rows ascend by expert, then by row_id; offs_E are the counts summed up; nobody's rows come last."""
    rows = layout.row_id_N.shape[0]
    owned = [e if 0 <= e < num_experts else num_experts for e in expert_of_row_id[layout.row_id_N].tolist()]
    keys = list(zip(owned, layout.row_id_N.tolist(), strict=True))
    assert keys == sorted(keys)
    assert len(set(layout.row_id_N.tolist())) == rows
    counts = [owned.count(e) for e in range(num_experts)]
    assert layout.offs_E.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert layout.offs_E.dtype == torch.int32
    assert owned[int(layout.offs_E[-1]) :] == [num_experts] * (rows - sum(counts))


def check_inverse(layout: Layout, expert_N, num_experts):
    """slot_row undoes order where the row has an owner, and is N where it has none."""
    rows = expert_N.shape[0]
    assert sorted(layout.order_N.tolist()) == list(range(rows))
    for position, sorted_row in enumerate(layout.slot_row_N.tolist()):
        if 0 <= int(expert_N[position]) < num_experts:
            assert int(layout.order_N[sorted_row]) == position
        else:
            assert sorted_row == rows


@properties
@given(routed(max_ranks=1), st.integers(0, 3))
def test_one_rank(job, rank):
    _, tokens, top_k = job.sizes
    layout = build_layout(job.ids_WTK[0], job.num_experts, rank=rank)
    first = rank * tokens * top_k
    whole_job = torch.full((first + tokens * top_k,), -1)
    whole_job[first:] = job.ids_WTK[0].reshape(-1)
    check_sorted(layout, whole_job, job.num_experts)
    check_inverse(layout, job.ids_WTK[0].reshape(-1), job.num_experts)
    assert torch.equal(layout.row_id_N, layout.order_N + first)
    assert torch.equal(layout.token_N, layout.row_id_N // top_k)


@properties
@given(routed(), st.integers(0, 2**16))
def test_rows_of_several_ranks_in_any_order(job, seed):
    top_k = job.sizes[2]
    expert_N, row_id_N = gathered(job, seed)
    layout = build_layout_from_rows(expert_N, row_id_N, job.num_experts, top_k=top_k)
    check_sorted(layout, job.ids_WTK.reshape(-1), job.num_experts)
    check_inverse(layout, expert_N, job.num_experts)
    assert torch.equal(row_id_N[layout.order_N], layout.row_id_N)
    # the order of arrival leaves no trace in the order of computation
    in_order = build_layout(job.ids_WTK.flatten(0, 1), job.num_experts)
    assert torch.equal(layout.row_id_N, in_order.row_id_N)
    assert torch.equal(layout.offs_E, in_order.offs_E)


def test_many_rows_keep_their_order_within_an_expert():
    """Sorts of a few rows are stable by accident."""
    job = Routed(torch.randint(-1, 4, (3, 700, 2), generator=torch.Generator().manual_seed(0)), 3)
    check_sorted(build_layout(job.ids_WTK.flatten(0, 1), 3), job.ids_WTK.reshape(-1), 3)
    layout = build_layout_from_rows(*gathered(job, seed=1), 3, top_k=2)
    check_sorted(layout, job.ids_WTK.reshape(-1), 3)


@properties
@given(routed(min_tokens=1))
def test_splitting_a_row_id_undoes_naming_it(job):
    ranks, tokens, top_k = job.sizes
    rank, token, slot = (
        grid.reshape(-1)
        for grid in torch.meshgrid(torch.arange(ranks), torch.arange(tokens), torch.arange(top_k), indexing="ij")
    )
    row_id_N = (rank * tokens + token) * top_k + slot
    for found, expected in zip(split_row_id(row_id_N, tokens, top_k), (rank, token, slot), strict=True):
        assert torch.equal(found, expected)


def test_row_ids_of_a_large_job_do_not_wrap():
    rank, tokens, top_k = 100, 2**22, 8
    layout = build_layout(torch.zeros(1, top_k, dtype=torch.int32), 1, rank=rank)
    assert layout.row_id_N.dtype == torch.int64
    row_id = (rank * tokens + 17) * top_k + 3
    assert row_id > 2**31
    assert [int(part) for part in split_row_id(torch.tensor([row_id]), tokens, top_k)] == [rank, 17, 3]


@pytest.mark.parametrize("top_k", [1, 4])
def test_no_tokens(top_k):
    layout = build_layout(torch.empty(0, top_k, dtype=torch.int64), 3)
    assert layout.offs_E.tolist() == [0, 0, 0]
    assert layout.order_N.shape == layout.slot_row_N.shape == layout.token_N.shape == (0,)


def test_sentinels_alone():
    layout = build_layout(torch.tensor([[-1, 9], [2, 5]]), 2)
    assert layout.offs_E.tolist() == [0, 0]
    assert layout.slot_row_N.tolist() == [4, 4, 4, 4]


def test_nothing_of_the_layout_waits_for_the_device():
    """Built on meta tensors: reading a single value would raise."""
    expert_TK = torch.empty(7, 2, dtype=torch.int64, device="meta")
    assert build_layout(expert_TK, 3, rank=1).slot_row_N.shape == (14,)
    row_N = torch.empty(5, dtype=torch.int64, device="meta")
    assert build_layout_from_rows(row_N, row_N, 3, top_k=2).slot_row_N.shape == (5,)


def test_errors_say_what_to_do():
    with pytest.raises(
        ValueError, match=r"row_id_N: expected one id per row, shape \(3,\); got \(2,\)\. Send the row_id"
    ):
        build_layout_from_rows(torch.zeros(3).long(), torch.arange(2), 1, top_k=1)
    with pytest.raises(ValueError, match=r"row_id_N: expected one id per row, shape \(1, 3\)"):
        build_layout_from_rows(torch.zeros(1, 3).long(), torch.zeros(1, 3).long(), 1, top_k=1)


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_sender_s_x_is_found_by_row_id(top_k):
    """Rows of three ranks meet at the experts; the weight gradient needs x of the rank that sent the row.

    Every rank's own results come back from the gathered rows, and the weight gradient is the sum over the ranks. Taking
    x by the row's position, or by its token without the rank, would mix the ranks up.
    """
    ranks, tokens, hidden, inner, num_experts = 3, 5, 4, 6, 4
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x_WTH, dy_WTH = normal(ranks, tokens, hidden), normal(ranks, tokens, hidden)
    weight_WTK = torch.rand(ranks, tokens, top_k, generator=generator, dtype=torch.float64)
    ids_WTK = torch.randint(-1, num_experts + 1, (ranks, tokens, top_k), generator=generator)
    weights = ExpertWeights(normal(num_experts, 2 * inner, hidden), normal(num_experts, hidden, inner))
    per_rank = [(ids_WTK[rank], weight_WTK[rank], weights, x_WTH[rank], dy_WTH[rank]) for rank in range(ranks)]
    y_WTH = torch.stack([experts_forward(x, ids, s, w) for ids, s, w, x, _ in per_rank])
    grads = [experts_backward(dy, x, ids, s, w) for ids, s, w, x, dy in per_rank]

    # one row of the exchange is one token with one expert: K = 1 for the reference, whatever K was
    expert_N, row_id_N = gathered(Routed(ids_WTK, num_experts), seed=1)
    layout = build_layout_from_rows(expert_N, row_id_N, num_experts, top_k=top_k)
    sender_N = layout.row_id_N // top_k
    assert torch.equal(sender_N, layout.token_N)
    rank_N, token_N, slot_N = split_row_id(layout.row_id_N, tokens, top_k)
    x_NH, dy_NH = x_WTH.flatten(0, 1)[sender_N], dy_WTH.flatten(0, 1)[sender_N]
    assert torch.equal(x_NH, x_WTH[rank_N, token_N])
    sorted_expert_N1 = expert_N[layout.order_N][:, None]
    weight_N1 = weight_WTK[rank_N, token_N, slot_N][:, None]
    y_NH = experts_forward(x_NH, sorted_expert_N1, weight_N1, weights)
    found = experts_backward(dy_NH, x_NH, sorted_expert_N1, weight_N1, weights)

    back = torch.zeros(ranks * tokens, hidden, dtype=torch.float64).index_add(0, sender_N, y_NH)
    torch.testing.assert_close(back.view_as(y_WTH), y_WTH)
    dx = torch.zeros_like(back).index_add(0, sender_N, found["x"])
    torch.testing.assert_close(dx.view_as(x_WTH), torch.stack([g["x"] for g in grads]))
    for name in ("gate_up", "down"):
        torch.testing.assert_close(found[name], sum(g[name] for g in grads), msg=lambda m, n=name: f"{n}: {m}")
    ds_WTK = torch.zeros_like(weight_WTK)
    ds_WTK[rank_N, token_N, slot_N] = found["weight"][:, 0]
    torch.testing.assert_close(ds_WTK, torch.stack([g["weight"] for g in grads]))
