"""No version is refused; one that was never tested is named, once."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from amoeba.system import machine
from amoeba.system.machine import TRIED, untried
from called import call
from other_versions import requirements

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEVER_TRIED = "import torch, sys; torch.__version__ = {version!r}; import amoeba; amoeba.experts; amoeba.explain"


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.10.0", None),
        ("2.13.0+cpu", None),
        ("2.15.9", None),
        ("2.16.0a0+git1234", "2.16.0a0+git1234 is newer than 2.15, "),
        ("2.100.0", "2.100.0 is newer than 2.15, "),
        ("3.0.0", "3.0.0 is newer than 2.15, "),
        ("2.9.1", "2.9.1 is older than 2.10, "),
        ("unknown", None),
        (None, None),
    ],
)
def test_versions_are_compared_as_numbers(version, told, monkeypatch):
    monkeypatch.setitem(TRIED, "torch", ("2.10", "2.15"))
    found = untried("torch", version)
    assert found is None if told is None else found is not None and found.startswith(told)


@pytest.mark.thorough
@pytest.mark.parametrize(("version", "lines"), [("2.10.0", 0), ("99.0.0", 1)])
def test_a_torch_that_was_never_tried_is_named_once(version, lines):
    done = subprocess.run([sys.executable, "-c", NEVER_TRIED.format(version=version)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the newest version that aMoEba was tested with") == lines == len(done.stderr.splitlines())


def test_a_warning_names_it(monkeypatch, our_log):
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    machine.warn_about_torch()
    (told,) = our_log.messages
    assert "99.0.0 is newer than " in told and "the newest version that aMoEba was tested with" in told


def test_doctor_names_versions_that_were_never_tried(monkeypatch):
    monkeypatch.setitem(machine.TRIED, "torch", ("1.0", "1.1"))
    result = call("doctor", "--json")
    assert list(result.document["untried_versions"]) == ["torch"]
    assert "newer than 1.1, the newest version that aMoEba was tested with" in result.said


def test_pip_refuses_no_newer_version():
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]]
    bounds = {need.partition(">=")[0]: need.partition(">=")[2] for need in wanted}
    for name in ("torch", "transformers"):
        assert bounds[name] == TRIED[name][0], "only a lower bound, the oldest version that was tried"
    assert PROJECT["requires-python"] == f">={TRIED['python'][0]}"
    assert not any("<" in need or "==" in need for need in wanted)


def test_classifiers_and_readme_name_the_versions():
    first, last = (int(version.split(".")[1]) for version in TRIED["python"])
    expected = [f"Programming Language :: Python :: 3.{minor}" for minor in range(first, last + 1)]
    assert [name for name in PROJECT["classifiers"] if "Python :: 3." in name] == expected
    text = " ".join((ROOT / "README.md").read_text().split())
    told = {"python": "Python", "torch": "PyTorch", "triton": "Triton", "transformers": "transformers"}
    for name, (oldest, newest) in TRIED.items():
        assert f"{told[name]} {oldest} to {newest}" in text


def test_the_oldest_are_the_lower_bounds_and_the_newest_have_no_upper_one():
    oldest, newest = (requirements(which, PROJECT) for which in ("oldest", "newest"))
    for name in ("torch", "transformers"):
        assert {need for need in oldest if need.startswith(name)} == {f"{name}=={TRIED[name][0]}.*"}
        assert {need for need in newest if need.startswith(name)} == {f"{name}>={TRIED[name][0]}"}
    assert f"triton=={TRIED['triton'][0]}.*" in oldest and "triton" in newest
