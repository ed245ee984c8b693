"""Which tiles a program has: each tile is one program's, however many programs there are and however shares halve."""

import pytest
import torch

from amoeba.kernels.hopper.gemm import multiply, tile_table
from amoeba.kernels.hopper.gemm_kernel import share_of_tiles
from amoeba.kernels.launch.persistent_grid import share_the_gpu
from selection import each_value_once

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@each_value_once()
@pytest.mark.parametrize("halvings", [0, 1, 2, 5])
@pytest.mark.parametrize("tiles", [0, 1, 7, 63, 64, 3071])
@pytest.mark.parametrize("multiprocessors", [1, 3, 66])
def test_each_tile_is_one_programs(halvings: int, tiles: int, multiprocessors: int) -> None:
    programs = multiprocessors * (halvings + 1)
    shares = [list(range(*share_of_tiles.fn(each, programs, tiles, halvings))) for each in range(programs)]
    assert sorted(tile for share in shares for tile in share) == list(range(tiles))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize("halvings", [1, 5])
def test_shares_that_halve_give_the_same_bits(halvings: int) -> None:
    generator, experts = torch.Generator("cuda").manual_seed(0), 7
    counts = torch.tensor([256, 64, 65, 1, 0, 1291, 63], device="cuda")
    rows = int(counts.sum())
    rows_NW = torch.randn(rows, 448, generator=generator, device="cuda").bfloat16()
    matrix_EOW = torch.randn(experts, 640, 448, generator=generator, device="cuda").bfloat16()
    table, found = tile_table(counts.cumsum(0).int(), rows), []
    for number in (0, halvings):
        out_NO = torch.full((rows, 640), float("nan"), dtype=torch.bfloat16, device="cuda")
        share_the_gpu(number > 0, number)
        try:
            multiply(rows_NW, matrix_EOW, table, out_NO)
        finally:
            share_the_gpu(False)
        found.append(out_NO)
    assert found[0].isfinite().all() and torch.equal(*found)
