"""What an import costs: `import amoeba` and the help of a command load no torch, and nothing loads its compiler."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import amoeba
from amoeba.cli import app
from amoeba.core.torch_internals import constant_when_traced
from selection import quick

SOURCE = Path(__file__).resolve().parents[1] / "src"


def run_python(script: str, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *words],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


HELPS = """
    import contextlib, io, json, sys
    from amoeba.cli import main

    for words in json.loads(sys.argv[1]):
        sys.argv = ["amoeba", *words]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            try:
                main()
            except SystemExit as left:
                assert not left.code, left.code
        assert "amoeba" in said.getvalue()
        heavy = {"torch", "transformers", "numpy"} & sys.modules.keys()
        assert not heavy, (words, heavy)
"""


def test_version_and_every_help_come_without_torch():
    commands = get_command(app).commands
    assert {"train", "finetune", "generate", "merge", "report", "verify", "bench", "doctor"} <= set(commands)
    helps = [[name, "--help"] for name in commands]
    run_python(HELPS, json.dumps([["--version"], ["--help"], *helps]))


def test_torch_is_loaded_on_first_use_and_its_compiler_never():
    run_python("""
        import sys
        import amoeba
        assert "torch" not in sys.modules
        import amoeba.experts as through_the_package
        from amoeba.experts import experts
        assert amoeba.experts is through_the_package is experts, "the function, whichever way its module was imported"
        assert callable(experts)
        assert amoeba.experts and amoeba.MoE and amoeba.lora and amoeba.pack_experts and amoeba.optim.AdamW
        import amoeba.backends.registry, amoeba.cpu.core, amoeba.proof.conformance
        assert "torch" in sys.modules
        assert "torch._dynamo" not in sys.modules, "as slow to import as torch itself"
        import amoeba.commands.doctor_run
        assert "transformers" not in sys.modules, "doctor runs without it"
    """)


def test_public_names_are_listed_and_there():
    for name in (*amoeba.__all__, "place_experts", "set_precision"):
        assert getattr(amoeba, name) is not None
        assert name in dir(amoeba)
    from amoeba.core.weights import LoraFactors
    from amoeba.cpu.packed_experts import pack_experts
    from amoeba.integrations.place_experts import place_experts

    assert (amoeba.pack_experts, amoeba.place_experts, amoeba.LoraFactors) == (pack_experts, place_experts, LoraFactors)
    assert amoeba.lora.attach
    with pytest.raises(AttributeError, match="no attribute 'expert'"):
        _ = amoeba.expert


def test_the_mark_of_a_constant_is_the_one_that_torch_sets():
    def marked(mark):
        @mark
        def function() -> int:
            return 1

        return vars(function)

    assert marked(constant_when_traced) == marked(torch.compiler.assume_constant_result)


WAITING = """
    import os, sys
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ |= dict(word.split("=") for word in sys.argv[2:])
    from amoeba.commands import exits
    from amoeba.cli import main

    class Seen(BaseException):
        pass

    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise Seen

    sys.meta_path.insert(0, Watch())
    sys.argv = ["amoeba", *sys.argv[1].split()]
    try:
        main()
    except Seen:
        print(os.environ.get("OMP_WAIT_POLICY"))
"""


@quick(lambda words, given: given or words in ("train", "-v bench"))
@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        ("verify", (), "passive"),
        ("train", (), "passive"),
        ("finetune model --data x", (), "passive"),
        ("merge a --adapter b --out c", (), "passive"),
        ("verify", ("OMP_WAIT_POLICY=active",), "active"),
        ("bench", (), "None"),
        ("-v bench", (), "None"),
        ("doctor", (), "None"),
    ],
)
def test_threads_wait_passively_except_in_bench_and_doctor(words, given, expected):
    assert run_python(WAITING, words, *given).split() == [expected]


IN_A_SCRIPT = """
    import os, sys
    os.environ.pop("OMP_WAIT_POLICY", None)
    if sys.argv[1:] == ["set"]:
        os.environ["OMP_WAIT_POLICY"] = "active"
    if sys.argv[1:] == ["torch first"]:
        sys.modules["torch"] = object()  # too late: it has read it
    import amoeba
    print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(("how", "expected"), [("plain", "passive"), ("set", "active"), ("torch first", "None")])
def test_threads_wait_passively_in_a_script_that_imports_amoeba_before_torch(how, expected):
    assert run_python(IN_A_SCRIPT, how).split() == [expected]
