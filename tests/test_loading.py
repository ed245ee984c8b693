"""While packages are imported nobody looks for garbage; afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from amoeba.loading import loading


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    looked = gc.isenabled()
    yield
    (gc.enable if looked else gc.disable)()


@pytest.mark.parametrize("looked", [True, False])
def test_garbage_is_looked_for_again_afterwards_as_it_was_before(looked: bool) -> None:
    (gc.enable if looked else gc.disable)()
    with loading():
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == looked


def test_a_package_that_is_missing_changes_nothing() -> None:
    gc.enable()
    with pytest.raises(ModuleNotFoundError), loading():
        import amoeba.not_there  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
