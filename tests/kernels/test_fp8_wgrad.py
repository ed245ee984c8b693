"""Weight gradients in e4m3 on Hopper against fp64 of the numbers that the codes stand for.

Widths are multiples of 64 and few of a tile's 128 and 256; outputs are filled with NaN before, and codes behind the
last block are NaN. On all multiprocessors, on three, and by many programs: the same bits.
"""

import math

import pytest
import torch
from test_hopper import ROUTINGS, E, K, assert_close, normal, poisoned, routed
from torch import Tensor

from amoeba.kernels.hopper import fp8_wgrad
from amoeba.kernels.hopper.gemm import tile_table
from amoeba.kernels.quantise import RowBlocks, Transposed, row_blocks, transpose_rows, transpose_tokens
from amoeba.kernels.weight_gradient import heaviest_first

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")]

SIZES = [(64, 64), (192, 320), (448, 256)]  # of sorted rows, of tokens


def numbers(turned: Transposed, first: int, last: int, scales_BW: Tensor) -> Tensor:
    """(rows, W) in fp64 of some blocks."""
    values = turned.codes_BWR[first:last].view(torch.float8_e4m3fn).double() * scales_BW.double()[..., None]
    return values.transpose(1, 2).flatten(0, 1)


def poison_behind(left: Transposed, right: Transposed, blocks: RowBlocks) -> None:
    end = int(blocks.end_E[-1])
    left.codes_BWR[end:], right.codes_BWR[end:] = 127, 127
    left.scales[end * left.codes_BWR.shape[1] :] = math.nan


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_are_those_of_the_codes(transposed, height, width, routing, device, monkeypatch):
    rows = routed(routing, device)
    sorted_NM = rows.sorted(height, torch.bfloat16, seed=0)
    by_token_TN = normal(rows.tokens, width, dtype=torch.bfloat16, seed=1, device=device)
    by_token_TN *= torch.logspace(-3, 3, width, device=device).bfloat16()
    blocks = row_blocks(rows.offs_E, tile_table(rows.offs_E, len(rows.order_N)))
    left, right = transpose_rows(sorted_NM, blocks), transpose_tokens(by_token_TN, rows.order_N, K, blocks)
    poison_behind(left, right, blocks)
    heaviest_E = heaviest_first(rows.offs_E)

    def compute() -> Tensor:
        shape = (E, width, height) if transposed else (E, height, width)
        stored, memory = poisoned(*shape, dtype=torch.bfloat16, device=device)
        out_EMN = stored.transpose(1, 2) if transposed else stored
        fp8_wgrad.weight_gradient(left, right, blocks, heaviest_E, out_EMN)
        assert memory[E:].isnan().all(), "written behind the last expert"
        return out_EMN

    found = compute()
    for number in (None, 3, 528):
        if number is not None:
            monkeypatch.setattr(fp8_wgrad, "programs", lambda device, number=number: number)
        assert torch.equal(compute().view(torch.int16), found.view(torch.int16)), "not the same bits"
    expected = torch.zeros(E, height, width, dtype=torch.float64, device=device)
    scales_BM, start = left.scales[: blocks.most * height].view(-1, height), 0
    for e, end in enumerate(blocks.end_E.tolist()):
        one, other = numbers(left, start, end, scales_BM[start:end]), numbers(right, start, end, right.scales[None])
        expected[e], start = one.T @ other, end
    assert_close("gradient", found, expected)
    assert all((found[e] == 0).all() for e, count in enumerate(rows.counts) if count == 0)
