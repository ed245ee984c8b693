"""While packages are imported nobody looks for garbage, afterwards as before; and imports next to something else."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from amoeba.system.fast_imports import importing, loading


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    looked = gc.isenabled()
    gc.unfreeze()
    yield
    gc.freeze()
    (gc.enable if looked else gc.disable)()


@pytest.mark.parametrize("looked", [True, False])
def test_garbage_is_looked_for_again_afterwards_as_it_was_before(looked: bool) -> None:
    (gc.enable if looked else gc.disable)()
    with loading():
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == looked
    assert bool(gc.get_freeze_count()) == looked  # the outer one alone, where it is not looked for at all


def test_a_package_that_is_missing_changes_nothing() -> None:
    gc.enable()
    with pytest.raises(ModuleNotFoundError), loading():
        import amoeba.not_there  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()


def test_nothing_is_frozen_when_the_process_ends() -> None:
    """What is left of them makes extension modules complain on stderr."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()));"
        "from amoeba.system.fast_imports import loading\nwith loading(): import json\nprint(gc.get_freeze_count() > 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "0"]


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "imported_slowly.py").write_text("import time\ntime.sleep(0.2)\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_slowly", raising=False)
    return "imported_slowly"


def test_a_module_is_whole_when_the_block_ends(slow: str) -> None:
    with importing([slow]):
        pass
    assert sys.modules[slow].ready


def test_what_cannot_be_imported_keeps_neither_the_next_one_nor_the_block(slow: str) -> None:
    with importing(["no_such_module_anywhere", slow]):
        done = True
    assert done and sys.modules[slow].ready


def test_a_block_that_fails_waits_too(slow: str) -> None:
    with pytest.raises(KeyError), importing([slow]):
        raise KeyError
    assert sys.modules[slow].ready
