"""What is compiled is kept where the next run looks for it."""

import os
from pathlib import Path

import pytest

from amoeba.integrations.compiled_layers import keep_compiled_code

PLACES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def _nowhere_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PLACES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path))


@pytest.mark.usefixtures("_nowhere_yet")
def test_triton_keeps_its_folder_when_inductor_makes_kernels(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    before = triton.knobs.cache.dir
    keep_compiled_code()
    heuristics = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    assert heuristics.triton_cache_dir(0) == triton.knobs.cache.dir == before
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")


def test_folders_that_the_user_named_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in PLACES:
        monkeypatch.setenv(name, str(tmp_path / name))
    keep_compiled_code()
    assert [os.environ[name] for name in PLACES] == [str(tmp_path / name) for name in PLACES]
