"""A sealed folder: what has changed in it since is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from amoeba.jobs.train import manifest
from amoeba.jobs.train.manifest import MANIFEST, damages, seal


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(manifest, "_PIECE_BYTES", 4)  # so that files have several pieces
    (tmp_path / "inner").mkdir()
    for name in ("first", "inner/second", "empty"):
        (tmp_path / name).write_text("" if name == "empty" else "0123456789")
    seal(tmp_path)
    return tmp_path


def test_what_is_as_it_was_has_no_damages(sealed: Path) -> None:
    assert damages(sealed) == []
    assert set(json.loads((sealed / MANIFEST).read_text())["files"]) == {"first", "inner/second", "empty"}


@pytest.mark.parametrize("name", ["first", "inner/second"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0123X56789", "holds other bytes than were written"),
        ("4567012389", "holds other bytes than were written"),  # the same pieces in another order
        ("012345678", "has 9 bytes instead of 10"),
        ("", "is empty"),
        (None, "is missing"),
    ],
)
def test_a_damaged_file_is_named_wherever_it_is(sealed: Path, name: str, text: str | None, said: str) -> None:
    if text is None:
        (sealed / name).unlink()
    else:
        (sealed / name).write_text(text)
    assert damages(sealed) == [f"{name} {said}"]


def test_a_manifest_that_was_changed_is_not_believed(sealed: Path) -> None:
    path = sealed / MANIFEST
    content = json.loads(path.read_text())
    content["files"].pop("first")
    path.write_text(json.dumps(content))
    assert damages(sealed) == ["manifest.json holds other text than was written"]
    path.write_text("{")
    assert damages(sealed) == ["manifest.json cannot be read (JSONDecodeError)"]
