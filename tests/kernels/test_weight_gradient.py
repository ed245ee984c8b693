"""Weight gradients over the rows of each expert, against torch in fp64.

T tokens · K experts per token · N = T·K routed rows · E experts · O, I the two sizes of an expert's matrix
"""

import math

import pytest
import torch
from torch import Tensor

from amoeba.kernels.tile_sizes import Configuration
from amoeba.kernels.weight_gradient import heaviest_first, weight_gradient
from selection import each_value_once

TINY = Configuration(block_m=16, block_n=32, block_k=16, group_m=2, num_warps=4, num_stages=2)
# tl.dot on bf16 is wrong in Triton's interpreter
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# name -> (O, I, rows of each expert, rows that belong to nobody)
CASES = {
    "even": (32, 64, (16, 32, 48), 0),
    "awkward": (23, 37, (1, 0, 63, 17), 5),
    "skewed": (16, 16, (3, 199, 0, 0, 4), 1),
    "one column": (1, 19, (7, 9), 0),
    "nobody": (16, 17, (0, 0), 9),
    "no rows": (16, 17, (0, 0), 0),
}


def offsets(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def rows_of(count: int, width: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def reference(left_NO: Tensor, right_NI: Tensor, counts: tuple[int, ...]) -> Tensor:
    owned = sum(counts)
    lefts, rights = (side[:owned].double().split(counts) for side in (left_NO, right_NI))
    return torch.stack([left.T @ right for left, right in zip(lefts, rights, strict=True)])


def assert_close(got: Tensor, expected: Tensor) -> None:
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    print(f"{error:.2e}")
    assert error <= TOLERANCE[got.dtype], f"relative error {error:.2e}"


def poisoned(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


@each_value_once("dtype")
@pytest.mark.parametrize("chosen", [TINY, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_sums_over_the_rows_of_each_expert(case, dtype, chosen, device):
    height, width, counts, unowned = CASES[case]
    left_NO, right_NI = (
        rows_of(sum(counts) + unowned, size, dtype, device, seed) for seed, size in enumerate((height, width))
    )
    left_NO[sum(counts) :], right_NI[sum(counts) :] = math.nan, math.inf
    out_EOI = poisoned((len(counts), height, width), dtype, device)
    weight_gradient(left_NO, right_NI, offsets(counts, device), out_EOI, configuration=chosen)
    assert_close(out_EOI, reference(left_NO, right_NI, counts))
    assert all((out_EOI[e] == 0).all() for e, count in enumerate(counts) if count == 0)


@each_value_once()
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gathered", ["left", "right", "both"])
def test_gathers_either_side_and_writes_either_storage(gathered: str, transposed: bool, device: torch.device) -> None:
    height, width, counts, top_k, dtype = 23, 37, (5, 0, 63, 17), 3, torch.float32
    rows = sum(counts) + 5  # 90 rows of 30 tokens; the last five belong to nobody
    tokens = rows // top_k
    order_N = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).to(device)
    left_gathered, right_gathered = gathered != "right", gathered != "left"
    left = rows_of(tokens if left_gathered else rows, height, dtype, device, 0)
    right = rows_of(tokens if right_gathered else rows, width, dtype, device, 1)
    for side, is_gathered in ((left, left_gathered), (right, right_gathered)):
        if not is_gathered:
            side[sum(counts) :] = math.nan
    shape = (len(counts), width, height) if transposed else (len(counts), height, width)
    stored = poisoned(shape, dtype, device)
    out_EOI = stored.transpose(1, 2) if transposed else stored
    got = weight_gradient(
        left,
        right,
        offsets(counts, device),
        out_EOI,
        left_order_N=order_N if left_gathered else None,
        right_order_N=order_N if right_gathered else None,
        top_k=top_k,
        configuration=TINY,
    )
    assert got.data_ptr() == stored.data_ptr() and got.shape == out_EOI.shape
    token_N = order_N // top_k
    expected = reference(left[token_N] if left_gathered else left, right[token_N] if right_gathered else right, counts)
    assert_close(out_EOI, expected)


def test_one_pass_writes_two_tensors_of_their_own_dtypes(device: torch.device) -> None:
    counts = (9, 0, 30)
    left, right = (rows_of(39, width, torch.float32, device, seed) for seed, width in enumerate((23, 17)))
    first, more = poisoned((3, 5, 17), torch.float32, device), poisoned((3, 18, 17), torch.float64, device)
    weight_gradient(left, right, offsets(counts, device), first, more_EOI=more, configuration=TINY)
    expected = reference(left, right, counts)
    assert_close(first, expected[:, :5])
    assert_close(more.float(), expected[:, 5:])


def test_reads_and_writes_through_any_strides(device: torch.device) -> None:
    counts = (9, 30)
    left = rows_of(23, 39, torch.float32, device, 0).T
    right = rows_of(39, 34, torch.float32, device, 1)[:, ::2]
    whole = poisoned((2, 46, 17), torch.float32, device)
    weight_gradient(left, right, offsets(counts, device), whole[:, ::2], configuration=TINY)
    assert_close(whole[:, ::2], reference(left, right, counts))
    assert whole[:, 1::2].isnan().all()


@pytest.mark.parametrize("counts", [(4,), (0, 0), (3, 9, 0, 9, 1), tuple(range(70))])
def test_experts_come_heaviest_first(counts: tuple[int, ...], device: torch.device) -> None:
    expected = sorted(range(len(counts)), key=lambda e: -counts[e])
    assert heaviest_first(offsets(counts, device)).tolist() == expected
