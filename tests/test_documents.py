"""What the documents refer to is there: files they link to, source files they name, commands and their options. `make
docs` checks the rest."""

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))  # not dev/log: a record of its day may name what has moved since
# A page on one subject names its files without the folders above.
ROOMS = ("backends", "cpu", "kernels")
FOLDERS = ("", "src", "src/amoeba", *(f"src/amoeba/{room}" for room in ROOMS), "tests", "tests/fuzz")
LINK = re.compile(r"\]\(([^)#\s]+)")
COMMAND = re.compile(r"(?:^|[`( ])(amoeba|python -m benchmarks) ([a-z][^`#|\n]*)", re.MULTILINE)
CODE_COMMAND = re.compile(r"(?:^    |`)(amoeba|python -m benchmarks)\s([a-z][\w-]*)(?![\w.-])", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^ *from (amoeba[\w.]*) import (.+)$", re.MULTILINE)
ATTRIBUTE = re.compile(r"\bamoeba\.(\w+)\b(?! import)")
FILE = re.compile(r"`([\w./*-]+\.(?:py|h|cpp|yaml))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_refers_to_files_that_exist(page: Path) -> None:
    text = page.read_text()
    missing = [link for link in LINK.findall(text) if "://" not in link and not (page.parent / link).exists()]
    missing += [name for name in FILE.findall(text) if not any(list((ROOT / folder).glob(name)) for folder in FOLDERS)]
    assert not missing


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    typer = pytest.importorskip("typer", reason="reads the options from typer")
    from amoeba.cli import app
    from benchmarks.__main__ import app as benchmarks

    programs = {"amoeba": app, "python -m benchmarks": benchmarks}
    return {name: typer.main.get_command(each).commands for name, each in programs.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_options_that_its_commands_have(page: Path, commands: dict[str, Any]) -> None:
    unknown = []
    for program, line in COMMAND.findall(page.read_text()):
        name = line.split()[0]
        command = commands[program].get(name)
        if command is not None:  # "amoeba is": no command
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            unknown += [f"{program} {name} {option}" for option in OPTION.findall(line) if option not in known]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_commands_that_exist(page: Path, commands: dict[str, Any]) -> None:
    known = {program: {*found, "hello"} for program, found in commands.items()}  # which a page shows how to add
    found = CODE_COMMAND.findall(page.read_text())
    assert not [f"{program} {name}" for program, name in found if name not in known[program]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_names_that_python_finds(page: Path) -> None:
    code = "\n".join(CODE.findall(page.read_text()))
    names = [(module, name.strip()) for module, found in IMPORT.findall(code) for name in found.split(",")]
    names += [("amoeba", name) for name in ATTRIBUTE.findall(code)]
    if any(module == "amoeba.jobs.grpo" for module, _ in names):
        pytest.importorskip("trl", reason="looks names of amoeba.jobs.grpo up")
    unknown = [f"{module}.{name}" for module, name in names if not hasattr(importlib.import_module(module), name)]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_code_that_python_parses(page: Path) -> None:
    for code in CODE.findall(page.read_text()):
        compile(code, page.name, "exec")


def test_the_api_pages_show_names_that_python_finds() -> None:
    unknown = []
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for path in re.findall(r"^::: (amoeba[\w.]*)$", page.read_text(), re.MULTILINE):
            module, _, name = path.rpartition(".")
            if not hasattr(importlib.import_module(module), name):
                unknown.append(f"{page.name}: {path}")
    assert not unknown


def test_every_environment_variable_of_ours_is_listed() -> None:
    named = re.compile(r"\"(AMOEBA_[A-Z_]+)\"")
    used = {name for path in (ROOT / "src").rglob("*.py") for name in named.findall(path.read_text())}
    page = (ROOT / "docs" / "api" / "command-line.md").read_text()
    assert len(used) >= 9
    assert not {name for name in used if f"`{name}" not in page}


def test_every_setting_of_a_run_is_listed() -> None:
    from amoeba.jobs.settings import FinetuneSettings, TrainSettings

    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    fields = {field.name for kind in (TrainSettings, FinetuneSettings) for field in dataclasses.fields(kind)}
    assert not {name for name in fields if f"`{name}`" not in page}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_enough_to_read(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 250
