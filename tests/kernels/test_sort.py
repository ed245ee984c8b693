"""The counting sort gives exactly the maps of `amoeba.core.layout`.

T tokens · K experts per token · N = T·K routed rows · E experts
"""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from amoeba.core.layout import build_layout
from amoeba.kernels import sort
from amoeba.kernels.sort import partition, sort_rows

ON_GPU = torch.cuda.is_available()
LARGE = (199, 760, 1023) if ON_GPU else ()
SENTINELS = (-1, 0, 7, 2**31, -(2**33))  # added to E, but for the negative ones


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What the kernels forget to write is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: empty(*size, **kwargs).fill_(-(2**30)))


def random_experts(tokens, top_k, num_experts, seed, unowned=0.0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    expert_TK = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    sentinel = torch.tensor([s if s < 0 else num_experts + s for s in SENTINELS])
    if dtype == torch.int32:
        sentinel = sentinel.clamp(-(2**31), 2**31 - 1)
    strange_TK = sentinel[torch.randint(0, len(sentinel), (tokens, top_k), generator=generator)]
    unowned_TK = torch.rand(tokens, top_k, generator=generator) < unowned
    return torch.where(unowned_TK, strange_TK, expert_TK).to(dtype)


def assert_equals_layout(expert_TK, num_experts, device):
    expert_TK = expert_TK.to(device)
    layout = build_layout(expert_TK, num_experts)
    found = sort_rows(expert_TK, num_experts)
    for name, tensor in zip(("order_N", "slot_row_N", "offs_E"), found, strict=True):
        assert tensor.dtype == torch.int32, name
        assert torch.equal(tensor.long(), getattr(layout, name).long()), name


@settings(
    max_examples=200 if ON_GPU else 12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.sampled_from([0, 1, 2, 16, 63, *LARGE]),
    top_k=st.sampled_from([1, 2]),
    num_experts=st.sampled_from([1, 2, 3, 8, 63, 128, 200, 1024]),
    seed=st.integers(0, 2**31),
    unowned=st.sampled_from([0.0, 0.2, 1.0]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@example(tokens=0, top_k=8, num_experts=128, seed=0, unowned=0.0, dtype=torch.int64)
@example(tokens=1, top_k=1, num_experts=1, seed=0, unowned=1.0, dtype=torch.int32)
def test_few_rows_equal_the_layout_in_one_launch(device, tokens, top_k, num_experts, seed, unowned, dtype):
    assert_equals_layout(random_experts(tokens, top_k, num_experts, seed, unowned, dtype), num_experts, device)


# tiles are small for the interpreter, where sorting one is slow; a GPU wants at least a warp's worth for each warp
TILE = 128 if ON_GPU else 8


@settings(
    max_examples=100 if ON_GPU else 10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.sampled_from([TILE + 1, 2 * TILE, 3 * TILE, 3 * TILE + 1, 63, *LARGE]),
    top_k=st.sampled_from([1, 2]),
    num_experts=st.sampled_from([1, 5, 8, 128]),
    seed=st.integers(0, 2**31),
    unowned=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_several_blocks_of_several_tiles_equal_the_layout(
    device, monkeypatch_partition, tokens, top_k, num_experts, seed, unowned
):
    monkeypatch_partition(tile=TILE, max_blocks=3)
    assert_equals_layout(random_experts(tokens, top_k, num_experts, seed, unowned), num_experts, device)


@pytest.fixture
def monkeypatch_partition(monkeypatch):
    def set_sizes(tile, max_blocks):
        def small_partition(rows):
            tiles = -(-rows // (tile * max_blocks))
            return tile, -(-rows // (tile * tiles)), tiles

        monkeypatch.setattr(sort, "partition", small_partition)
        monkeypatch.setitem(sort.WARPS_OF_TILE, tile, 4)

    return set_sizes


def test_every_token_on_every_expert(device):
    for num_experts in (1, 3, 16):
        expert_TK = torch.arange(num_experts).flip(0).expand(7, num_experts)  # also: not contiguous
        assert_equals_layout(expert_TK, num_experts, device)


def test_all_rows_on_one_expert(device, monkeypatch_partition):
    for owner in (0, 5, 7):
        assert_equals_layout(torch.full((63, 1), owner), 8, device)
    monkeypatch_partition(tile=TILE, max_blocks=2)
    assert_equals_layout(torch.full((3 * TILE + 1, 1), 7), 8, device)


def test_more_rows_than_one_tile_as_it_is_shipped(device):
    sizes = (2047, 2049, 65_537, 262_144, 1_000_003) if ON_GPU else (2049,)
    for rows in sizes:
        for num_experts in (128, 1000) if ON_GPU else (128,):
            assert_equals_layout(random_experts(rows, 1, num_experts, rows, 0.1), num_experts, device)


@given(rows=st.integers(1, 2**24))
def test_partition_covers_all_rows_and_no_block_is_empty(rows):
    tile, blocks, tiles = partition(rows)
    assert tile in sort.WARPS_OF_TILE
    assert 1 <= blocks <= sort.MAX_BLOCKS
    assert (blocks - 1) * tiles * tile < rows <= blocks * tiles * tile
    assert (blocks == 1) == (rows <= sort.LARGEST_TILE)


@pytest.mark.parametrize(
    ("expert_TK", "num_experts", "message"),
    [
        (torch.zeros(3, 2), 4, r"expert_TK: .*int64; got torch.float32\. Convert"),
        (torch.zeros(3, 2, dtype=torch.int64), 1025, r"num_experts: expected 1 to 1024; got 1025\. Use"),
        (torch.zeros(3, 2, dtype=torch.int64), 0, r"num_experts: expected 1 to 1024; got 0\. Use"),
    ],
)
def test_a_bad_call_says_what_to_do(expert_TK, num_experts, message):
    with pytest.raises(ValueError, match=message):
        sort_rows(expert_TK, num_experts)
