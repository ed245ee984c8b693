from __future__ import annotations

import pytest

from amoeba.core.errors import counted


@pytest.mark.parametrize(("number", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_thing_is_not_told_in_the_plural(number, words):
    assert counted(number, "row") == words
