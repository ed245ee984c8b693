"""What a list of rounds says of itself."""

from amoeba.bench.timing import Timing


def test_quartiles_lie_within_what_was_measured():
    timing = Timing([(1.0, 0.0), (1.5, 0.5), (3.0, 0.0), (2.0, 2.0)])  # in all 1, 2, 3 and 4
    assert timing.quartiles_ms == (1.75, 3.25) and timing.median_ms == 2.5
    assert timing.part_medians_ms == (1.75, 0.25)
    assert Timing([(7.0,)]).quartiles_ms == (7.0, 7.0)
