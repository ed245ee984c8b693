"""Which rank owns which expert, and where a rank finds its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amoeba.parallel import Owners


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_even_table_divides_as_torch_chunk_does(experts: int, ranks: int) -> None:
    sizes = [len(part) for part in torch.arange(experts).chunk(ranks)] if experts else []
    owners = Owners.even(experts, ranks)
    assert [len(owners.experts_of(rank)) for rank in range(ranks)] == sizes + [0] * (ranks - len(sizes))


@given(st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, ranks - 1)))))
def test_shares_joined_again_are_the_whole_and_ids_point_into_them(drawn: tuple[int, list[int]]) -> None:
    ranks, table = drawn
    owners = Owners(tuple(table), ranks)
    whole = torch.arange(len(table)) * 10
    shares = [owners.take(whole, rank) for rank in range(ranks)]
    assert torch.equal(owners.join(shares), whole)
    rank_TK, local_TK = owners.find(torch.arange(len(table)).unsqueeze(1))
    assert [int(shares[r][i]) for r, i in zip(rank_TK[:, 0], local_TK[:, 0], strict=True)] == whole.tolist()


def test_a_sentinel_belongs_to_nobody_also_one_that_fits_when_cut_to_32_bits() -> None:
    rank_TK, local_TK = Owners.even(4, 2).find(torch.tensor([[-1, 4, 2**32 + 1, 3]]))
    assert rank_TK.tolist() == [[2, 2, 2, 1]] and local_TK.tolist() == [[-1, -1, -1, 1]]


def test_a_rank_outside_and_a_tensor_of_a_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank_of_E: expected a rank for each expert, 0 to 1; got 2"):
        Owners((0, 2), 2)
    with pytest.raises(ValueError, match=r"one entry for each of 4 experts"):
        Owners.even(4, 2).take(torch.zeros(2), 0)
