"""A command's imports: what transformers need not load stays out, and everything else is as it would have been."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from amoeba.commands import head_start
from amoeba.commands import quick_transformers as quick_transformers_module
from amoeba.commands.quick_transformers import NOT_FOR_TEXT, quick_transformers
from amoeba.commands.train import _not_needed

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run_python(script: str, *paths: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *paths)))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_packages_that_no_text_needs_are_not_imported_and_everything_else_is_as_before(tmp_path: Path) -> None:
    """With packages of their names that cannot be imported: transformers would fail at the first one."""
    for name in (*NOT_FOR_TEXT, "peft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('{name} is imported')")
    run_python(
        """
        import importlib.metadata, importlib.util, pathlib, sys
        distributions, read = importlib.metadata.packages_distributions, []
        def reads_all():
            read.append(1)
            return distributions()
        importlib.metadata.packages_distributions = reads_all
        import torch
        from amoeba.commands.head_start import load_trainer
        from amoeba.commands.quick_transformers import NOT_FOR_TEXT, _Distributions

        load_trainer(without=(*NOT_FOR_TEXT, "peft"))
        assert not {*NOT_FOR_TEXT, "peft"} & sys.modules.keys()
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("amoeba")]
        assert importlib.metadata.packages_distributions is reads_all
        assert not read, "two packages were asked for"

        import transformers
        from transformers.utils import import_utils
        assert importlib.util.find_spec("sklearn") is not None, "for others it is there"
        assert not import_utils.is_sklearn_available() and not import_utils.is_peft_available()
        assert import_utils.is_torch_available() and import_utils.is_accelerate_available()
        from transformers import AutoModelForCausalLM, Trainer

        listed = import_utils.create_import_structure_from_path
        models = pathlib.Path(transformers.__file__).parent / "models"
        folders = sum(entry.is_dir() and entry.name != "__pycache__" for entry in models.iterdir())
        assert folders < listed.cache_info().misses < 1.1 * folders, "each was read once"
        at_once = import_utils.define_import_structure.__wrapped__(str(models / "__init__.py"))
        listed.cache_clear()
        assert at_once == import_utils.define_import_structure.__wrapped__(str(models / "__init__.py"))
        import_utils.fetch__all__ = import_utils.fetch__all__.__wrapped__
        listed.cache_clear()
        assert at_once == import_utils.define_import_structure.__wrapped__(str(models / "__init__.py"))

        found = _Distributions(distributions)  # as transformers got it, up to 5.22
        assert found.get("torch") == ["torch"] and found.get("a_package_that_is_not_there", 7) == 7
        assert dict.fromkeys(found) == dict.fromkeys(distributions())
        assert found["packaging"] == distributions()["packaging"]
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "x = 1\n",
        '__all__ = ["A"]',
        'x = 1\n__all__ = ["A", "B"]\ny = 2\n',
        'x = 1\n__all__ = [\n    "A",\n    "B",\n]\n',
        '__all__ = ["A"]\nx = 1\n__all__ = ["B"]\n',
        '    __all__ = ["A"]\nx = "__all__"\n',
        '__all__ = ["A"]\n\x0c__all__ = ["B"]\n',
        'x = 1\r\n__all__ = ["A"]\r\n',
    ],
)
def test_the_names_a_file_exports_are_those_transformers_finds_in_all_of_it(content: str) -> None:
    fetch = transformers.utils.import_utils.fetch__all__
    own = getattr(fetch, "__wrapped__", fetch)  # tests run with it
    module, given = SimpleNamespace(fetch__all__=lambda text: given.append(text) or own(text)), []
    quick_transformers_module._look_at_the_end(module)
    assert module.fetch__all__(content) == own(content)
    assert len(given[0].splitlines()) <= len(content.splitlines()) and content.endswith(given[0])


def test_of_a_long_file_only_the_end_is_looked_at() -> None:
    module = SimpleNamespace(fetch__all__=str.splitlines)
    quick_transformers_module._look_at_the_end(module)
    assert module.fetch__all__("x = 1\n" * 5000 + '__all__ = [\n"A",\n]\n') == ["__all__ = [", '"A",', "]"]


def test_a_version_of_transformers_without_the_functions_that_are_changed_is_imported_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "utils").mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("from .utils.import_utils import there")
    (tmp_path / "transformers" / "utils" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "utils" / "import_utils.py").write_text("there = 1")
    run_python(
        """
        from amoeba.commands.quick_transformers import quick_transformers

        with quick_transformers(without=("sklearn",)):
            import transformers
        assert transformers.there == 1
        """,
        tmp_path,
    )


def test_where_transformers_is_loaded_nothing_changes() -> None:
    before = dict(vars(transformers.utils.import_utils))
    with quick_transformers(without=NOT_FOR_TEXT):
        importlib.import_module("transformers.trainer")
    assert vars(transformers.utils.import_utils) == before


def test_code_of_a_model_finds_every_package_and_an_adapter_beside_the_weights_finds_peft(tmp_path: Path) -> None:
    assert _not_needed("demo", trust_remote_code=True) == ()
    assert "peft" in _not_needed("demo", trust_remote_code=False)
    assert "peft" in _not_needed(str(tmp_path), trust_remote_code=False)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert _not_needed(str(tmp_path), trust_remote_code=False) == NOT_FOR_TEXT


def begun(work: object) -> None:
    head_start._begin(work)  # type: ignore[arg-type]
    for thread in threading.enumerate():
        if thread.name == work.__name__:  # type: ignore[attr-defined]
            thread.join(timeout=60)


def test_the_gpu_of_this_process_is_opened_beside_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, multiplied = [], []

    class Matrix:
        def mm(self, other: object) -> None:
            multiplied.append(other is self)

    def zeros(*_: object, device: torch.device, **__: object) -> Matrix:
        opened.append(device)
        return Matrix()

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", zeros)
    begun(head_start._open_gpu)
    assert opened == [torch.device("cuda", 3)] and multiplied == [True]


def test_what_goes_wrong_beside_the_imports_is_left_to_whoever_meets_it_next(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails() -> bool:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    begun(head_start._open_gpu)
    begun(head_start._hash_triton)
    assert capfd.readouterr() == ("", "")
