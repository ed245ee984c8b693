"""A folder for caches of its own, and nothing remembered from earlier tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path))
    monkeypatch.delenv("AMOEBA_TUNED", raising=False)
    from forgetting import forget

    forget()
    yield tmp_path
    forget()
