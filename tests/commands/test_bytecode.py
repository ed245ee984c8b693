"""Bytecode is kept where Python would compile every module at every start, and only there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
# Tells where bytecode is looked for, and what had to be compiled to import a large package.
SCRIPT = """
import sys
compiled = []
sys.addaudithook(lambda event, given: compiled.append(str(given[1])) if event == "compile" else None)
from amoeba.__main__ import keep_bytecode
keep_bytecode()
import torch, typer
print(sys.pycache_prefix, sum("torch" in name for name in compiled), sum("typer" in name for name in compiled) > 0)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """With packages of these names, none of which has been compiled."""
    for name in ("torch", "transformers", "typer", "rich"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("x = 1\n")
    return tmp_path / "site"


def begin(site: Path, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(site), str(SOURCE))), "AMOEBA_CACHE": str(site.parent / "cache")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def written(folder: Path) -> list[Path]:
    return [*folder.rglob("*.pyc")]


def test_where_python_may_write_none_it_is_kept_in_our_cache(site: Path) -> None:
    where = str(site.parent / "cache" / "bytecode")
    assert begin(site, PYTHONDONTWRITEBYTECODE="1") == [where, "1", "True"]
    assert not written(site)
    assert begin(site, PYTHONDONTWRITEBYTECODE="1") == [where, "0", "False"]
    (site / "torch" / "__init__.py").write_text("x = 234\n")
    assert begin(site, PYTHONDONTWRITEBYTECODE="1") == [where, "1", "False"], "a changed source is compiled again"


def test_where_python_keeps_it_next_to_the_sources_nothing_changes(site: Path) -> None:
    assert begin(site)[0] == "None"
    assert len(written(site)) >= 2
    (site / "transformers" / "__pycache__").mkdir()
    cached = next((site / "torch").rglob("*.pyc"))
    (site / "transformers" / "__pycache__" / cached.name).write_bytes(cached.read_bytes())
    assert begin(site, PYTHONDONTWRITEBYTECODE="1")[:2] == ["None", "0"]
    assert not (site.parent / "cache").exists()


def test_what_the_user_has_said_stays(site: Path) -> None:
    mine = str(site.parent / "mine")
    assert begin(site, PYTHONPYCACHEPREFIX=mine, PYTHONDONTWRITEBYTECODE="1")[0] == mine
    assert not (site.parent / "cache").exists()


def test_without_a_folder_for_caches_it_is_compiled_each_time(site: Path) -> None:
    (site.parent / "cache").write_text("a file")
    assert begin(site, PYTHONDONTWRITEBYTECODE="1") == ["None", "1", "True"]
