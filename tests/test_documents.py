"""What the documents refer to is there: files they link to, and source files they name. `make docs` checks the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATED = {"log.md"}  # a record of its day, which may name what has moved since
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in DATED)
# A page on one subject names its files without the folders above.
FOLDERS = ("", "src", "src/amoeba", "src/amoeba/backends", "src/amoeba/cpu", "src/amoeba/kernels", "tests/fuzz")
LINK = re.compile(r"\]\(([^)#\s]+)")
FILE = re.compile(r"`([\w./*-]+\.(?:py|h|cpp|yaml))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_refers_to_files_that_exist(page: Path) -> None:
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    missing += [name for name in FILE.findall(text) if not any(list((ROOT / folder).glob(name)) for folder in FOLDERS)]
    assert not missing
