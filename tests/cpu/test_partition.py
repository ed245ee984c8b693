"""The partition table: blocks of I, and what of each tensor a node has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_layer import INTERLEAVED, PLAIN

from amoeba import Activation
from amoeba.cpu.partition import TABLE, Partition, Split

GATED = Activation()


@given(st.integers(1, 3000), st.integers(1, 9))
def test_blocks_cover_i_without_a_gap_and_none_is_empty(intermediate, nodes):
    if nodes > intermediate:
        with pytest.raises(ValueError, match=rf"nodes: expected 1 to {intermediate}"):
            Partition.of(intermediate, nodes, GATED)
        return
    partition = Partition.of(intermediate, nodes, GATED)
    assert partition.bounds[0] == 0
    assert partition.bounds[-1] == intermediate
    assert min(partition.sizes) >= 1
    assert sum(partition.sizes) == intermediate
    assert max(partition.sizes) <= -(-intermediate // nodes) + 31


def test_blocks_need_not_be_equal_and_are_whole_tiles_where_they_can_be():
    assert Partition.of(199, 3, GATED).sizes == [96, 64, 39]
    assert Partition.of(768, 2, GATED).sizes == [384, 384]
    assert Partition.of(48, 3, GATED).sizes == [16, 16, 16]


@pytest.mark.parametrize("activation", [GATED, INTERLEAVED, PLAIN], ids=["gated", "interleaved", "plain"])
def test_parts_of_h_are_the_rows_of_the_block(activation):
    intermediate, experts, hidden = 7, 2, 3
    partition = Partition.of(intermediate, 3, activation)
    width = activation.width(intermediate)
    gate_up_EJH = torch.arange(experts * width * hidden).view(experts, width, hidden)
    for node, (start, size) in enumerate(zip(partition.bounds, partition.sizes, strict=False)):
        block = list(range(start, start + size))
        if activation.interleaved:
            rows = [row for i in block for row in (2 * i, 2 * i + 1)]
        else:
            rows = block + ([intermediate + i for i in block] if activation.gated else [])
        assert torch.equal(partition.take("gate_up", gate_up_EJH, node), gate_up_EJH[:, rows])
        assert torch.equal(partition.take("gate_up_bias", gate_up_EJH[..., 0], node), gate_up_EJH[:, rows, 0])


def test_what_all_nodes_read_is_shared_without_a_copy_and_blocks_are_views():
    partition = Partition.of(199, 3, GATED)
    shapes = {"a": (2, 4, 199), "b": (2, 199, 4)}
    for name, (split, dim) in TABLE.items():
        if name in ("gate_up", "gate_up_bias", "down_bias"):
            continue
        tensor = torch.zeros((2, 16, 199) if dim == 2 else shapes["b"])
        for node in range(3):
            part = partition.take(name, tensor, node)
            assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), name
            assert (part is tensor) == (split is Split.SHARED), name


def test_the_bias_of_down_is_on_the_first_node_alone():
    bias_EH = torch.zeros(2, 3)
    parts = [Partition.of(9, 3, GATED).take("down_bias", bias_EH, node) for node in range(3)]
    assert parts[0] is bias_EH
    assert parts[1:] == [None, None]


@pytest.mark.parametrize("name", [name for name in TABLE if "lora" in name])
def test_gradients_of_blocks_are_joined_and_of_shared_factors_added(name):
    partition = Partition.of(199, 3, GATED)
    split, dim = TABLE[name]
    like = torch.randn((2, 4, 199) if dim == 2 else (2, 199, 4)).bfloat16()
    whole = like.float()
    parts = [partition.take(name, whole, node).clone() for node in range(3)]
    merged = partition.merge(name, parts, like)
    assert merged.dtype == like.dtype
    assert torch.equal(merged, like * 3 if split is Split.SHARED else like)
