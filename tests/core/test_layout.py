"""The row mapping: sorted by expert, stable within an expert, exactly invertible.

T tokens · K experts per token · N = T·K routed rows · E experts
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.core.layout import Layout, build_layout

properties = settings(max_examples=60)


@st.composite
def routed(draw):
    """(expert_TK, num_experts): ids in [-2, E + 2], so that some belong to nobody."""
    shape = draw(st.integers(0, 28)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 6))
    count = shape[0] * shape[1]
    ids = draw(st.lists(st.integers(-2, num_experts + 2), min_size=count, max_size=count))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return torch.tensor(ids, dtype=dtype).view(shape), num_experts


def check_sorted(layout: Layout, expert_N, num_experts):
    """Rows ascend by expert, then by number; offs_E are the counts summed up; nobody's rows come last."""
    owned = [e if 0 <= e < num_experts else num_experts for e in expert_N[layout.order_N].tolist()]
    keys = list(zip(owned, layout.order_N.tolist(), strict=True))
    assert keys == sorted(keys)
    counts = [owned.count(e) for e in range(num_experts)]
    assert layout.offs_E.tolist() == torch.tensor(counts).cumsum(0).tolist()
    assert layout.offs_E.dtype == torch.int32
    assert owned[int(layout.offs_E[-1]) :] == [num_experts] * (len(owned) - sum(counts))


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
@given(routed())
def test_rows_are_sorted_and_found_again(job):
    expert_TK, num_experts = job
    layout = build_layout(expert_TK, num_experts)
    check_sorted(layout, expert_TK.flatten(), num_experts)
    check_inverse(layout, expert_TK.flatten(), num_experts)
    token_N = torch.arange(expert_TK.shape[0]).repeat_interleave(expert_TK.shape[1])
    assert torch.equal(layout.token_N, token_N[layout.order_N])


@properties
@given(routed(), st.integers(0, 9))
def test_rows_of_sentinels_can_be_left_out(job, spare):
    expert_TK, num_experts = job
    whole = build_layout(expert_TK, num_experts)
    owned, rows = int(whole.offs_E[-1]), expert_TK.numel()
    most_rows = min(owned + spare, rows)
    layout = build_layout(expert_TK, num_experts, most_rows=most_rows)
    assert torch.equal(layout.order_N, whole.order_N[:most_rows])
    assert torch.equal(layout.offs_E, whole.offs_E)
    assert layout.slot_row_N.tolist() == [most_rows if row == rows else row for row in whole.slot_row_N.tolist()]


def test_a_row_of_an_expert_is_not_left_out():
    expected = r"most_rows: expected at least as many as slots with an expert, 3; got 2\. Leave it out"
    with pytest.raises(ValueError, match=expected):
        build_layout(torch.tensor([[0, 1], [-1, 1]]), 2, most_rows=2)


def test_many_rows_keep_their_order_within_an_expert():
    """Sorts of a few rows are stable by accident."""
    expert_TK = torch.randint(-1, 4, (2100, 2), generator=torch.Generator().manual_seed(0))
    check_sorted(build_layout(expert_TK, 3), expert_TK.flatten(), 3)


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
    assert build_layout(expert_TK, 3).slot_row_N.shape == (14,)
    assert build_layout(expert_TK, 3, most_rows=5).order_N.shape == (5,)
