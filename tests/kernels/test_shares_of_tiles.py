"""Which tiles a program has: each tile is one program's, however many programs there are and however shares halve."""

from __future__ import annotations

import pytest

from amoeba.kernels.hopper.product_kernel import share_of_tiles


@pytest.mark.parametrize("halvings", [0, 1, 2, 5])
@pytest.mark.parametrize("tiles", [0, 1, 7, 63, 64, 3071])
@pytest.mark.parametrize("multiprocessors", [1, 3, 66])
def test_each_tile_is_one_programs(halvings: int, tiles: int, multiprocessors: int) -> None:
    programs = multiprocessors * (halvings + 1)
    shares = [list(range(*share_of_tiles.fn(each, programs, tiles, halvings))) for each in range(programs)]
    assert sorted(tile for share in shares for tile in share) == list(range(tiles))


def test_the_first_programs_have_half_and_the_last_ones_little() -> None:
    lengths = [len(range(*share_of_tiles.fn(program, 66 * 6, 3072, 5))) for program in range(66 * 6)]
    turns = [lengths[first : first + 66] for first in range(0, 66 * 6, 66)]
    assert [sum(turn) for turn in turns] == [1536, 768, 384, 192, 96, 96]
    assert all(max(turn) - min(turn) <= 1 for turn in turns)
