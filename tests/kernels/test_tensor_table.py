"""Tables of tensors for one launch, and the sum of squares over them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amoeba.kernels.adamw import CHUNK, TensorTable, sum_of_squares
from selection import each_value_once

CPU = torch.device("cpu")


@given(st.lists(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK]), max_size=9))
def test_each_element_of_each_tensor_is_in_one_chunk(counts):
    _, chunks = TensorTable().place([[0, count] for count in counts], counts, CPU)
    assert chunks.dtype == torch.int32
    expected = [(tensor, part) for tensor, count in enumerate(counts) for part in range(-(-count // CHUNK))]
    assert [tuple(chunk) for chunk in chunks.tolist()] == expected


def test_nothing_is_placed_anew_while_nothing_changes(device):
    table = TensorTable()
    rows, chunks = table.place([[1, 5]], [5], device)
    again = table.place([[1, 5]], [5], device)
    assert again[0] is rows and again[1] is chunks
    moved, same_chunks = table.place([[2, 5]], [5], device)
    assert moved.tolist() == [[2, 5]] and same_chunks is chunks
    assert len(table.place([[2, CHUNK + 1]], [CHUNK + 1], device)[1]) == 2


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(), (0,), (1, 0, 5), (CHUNK, 199), (2 * CHUNK + 7,)], ids=str)
def test_squares_of_all_elements_are_added_up(device, dtype, sizes):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    tensors += [torch.randn(64, generator=generator).to(device, dtype)[1:]]  # not at a multiple of 16 bytes
    rows = [[tensor.data_ptr(), tensor.numel()] for tensor in tensors]
    placed = TensorTable().place(rows, [tensor.numel() for tensor in tensors], device)
    found = sum_of_squares(*placed, bf16=dtype == torch.bfloat16)
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    assert abs(found.double() / exact - 1) < 1e-6
