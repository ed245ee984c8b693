from collections.abc import Iterator

import pytest

import rank_jobs
from amoeba.parallel.processes import LocalRanks


@pytest.fixture(scope="session")
def processes() -> Iterator[LocalRanks]:
    """Four processes, of which the first two and the first three are groups, too. Starting them takes seconds."""
    with rank_jobs.started(4) as found:
        yield found
