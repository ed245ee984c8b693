"""Settings from flags and from YAML files: every one arrives, and one that cannot be meant is named."""

import json
import re
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from amoeba.cli import app
from amoeba.jobs.settings import FinetuneSettings, TrainSettings, load_settings
from amoeba.jobs.train.resume import settings_of
from called import call

KINDS = {"train": TrainSettings, "finetune": FinetuneSettings}
# What is written after flags that do not take any text or number, and what becomes of it.
WRITTEN: dict[str, tuple[str, Any]] = {
    "balance": ("none", "none"),
    "dense": ("fsdp", "fsdp"),
    "dtype": ("bfloat16", "bfloat16"),
    "experts": ("ranks", "ranks"),
    "held_out": ("0.25", 0.25),
    "optimizer_states": ("bfloat16", "bfloat16"),
    "precision": ("fp8", "fp8"),
    "targets": ("q_proj,experts", ("q_proj", "experts")),
    "vocab_size": ("4095", 4095),
}


def read(folder: Path, text: str, kind: type = TrainSettings, **given: Any) -> Any:
    (folder / "run.yaml").write_text(text)
    return load_settings(str(folder / "run.yaml"), given, kind)


@pytest.mark.parametrize("command", KINDS)
def test_every_flag_reaches_the_setting_of_its_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    ended = make_dataclass("Ended", [("exit_code", int, 0)])
    monkeypatch.setattr(
        "amoeba.commands.over_ranks.job_over_ranks",
        lambda job, settings, *_, **__: (told.append(settings) or ended(), False),
    )
    known = {field.name for field in fields(KINDS[command])}
    seen = 0
    for parameter in get_command(app).commands[command].params:
        name = parameter.name.removesuffix("_layers")
        if name not in known or parameter.param_type_name == "argument":
            continue
        word, meant = WRITTEN.get(name, ("off", "off") if name == "compile" else ("3", 3))
        if parameter.is_flag:
            words, meant = [parameter.opts[0]], True
        else:
            words = [parameter.opts[0], word]
        if name in ("dense", "expert_ranks"):
            words += ["--experts", "ranks"]
        base = ["a-model"] if command == "finetune" else []
        call(command, *base, *words)
        found = getattr(told[-1], name)
        assert found == (str(meant) if isinstance(found, str) else meant), parameter.opts
        seen += 1
    assert seen >= 20


def test_a_yaml_file_is_read_and_flags_win(tmp_path: Path) -> None:
    found = read(tmp_path, "steps: 7\nbatch_size: 3\n", steps=9)
    assert (found.steps, found.batch_size) == (9, 3)


def test_yaml_says_what_people_mean_by_it(tmp_path: Path) -> None:
    """YAML 1.1 has 1e-3 for a word, on and off for true and false."""
    found = read(tmp_path, "learning_rate: 1e-3\ncompile: on\nheld_out: 1e-1\nminutes: 2\n")
    assert (found.learning_rate, found.compile, found.held_out, found.minutes) == (1e-3, "on", 0.1, 2)
    assert read(tmp_path, "compile: off\nheld_out: rest.txt\n").compile == "off"
    text = "model: base\ntargets: {}\nsteps: null\n"
    for written in ("q_proj, experts", "[q_proj, experts]"):
        found = read(tmp_path, text.format(written), FinetuneSettings)
        assert (found.targets, found.steps) == (("q_proj", "experts"), None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepz: 7", "got 'stepz'. You may have meant steps."),
        ("qwertz: 7", "got 'qwertz'. Remove or rename unknown settings."),
        ("- steps", "got a list."),
        ("steps: many", "steps in run.yaml: expected a whole number; got 'many'."),
        ("steps: 1.5", "steps in run.yaml: expected a whole number; got 1.5."),
        ("steps: true", "steps in run.yaml: expected a whole number; got True."),
        ("out: 2026", "out in run.yaml: expected text; got 2026. Put it in quotes."),
        ("gradient_checkpointing: never", "expected true or false; got 'never'."),
        ("held_out: [a]", "held_out in run.yaml: expected a number or text; got ['a']."),
        ("held_out: null", "held_out in run.yaml: expected a number or text; got None."),
        ("learning_rate: fast", "learning_rate in run.yaml: expected a number; got 'fast'."),
        ("balance: nobody", "balance in run.yaml: expected one of aux, bias, none; got 'nobody'."),
        ("vocab_size: null", "vocab_size in run.yaml: expected a whole number; got None."),
        ("warmup_steps: -1", "warmup_steps: expected an integer of at least 0; got -1."),
        ("seed: -1", "seed: expected a whole number of at least 0 and below 2^32; got -1."),
        ("vocab_size: 299", "vocab_size: expected at least 300; got 299."),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        load_settings("run.yaml", {})


def test_a_list_of_targets_holds_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("expected a list of names; got [1]")):
        read(tmp_path, "model: base\ntargets: [1]\n", FinetuneSettings)


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1, 2.5, float("nan")])
def test_nothing_held_out_is_refused_with_what_to_write_instead(share):
    with pytest.raises(
        ValueError, match=r"held_out: expected a share above 0 .* or a file; got .*\. Every run needs held-out text"
    ):
        TrainSettings(held_out=share)


@pytest.mark.parametrize("option", ["ram", "vram"])
@pytest.mark.parametrize("experts", ["resident", "cpu-int8"])
def test_a_budget_for_a_run_that_does_not_stream_is_refused_by_name(option, experts, tmp_path):
    settings = FinetuneSettings(model="base", data="x.jsonl", experts=experts, out=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(settings.as_dict()))
    with pytest.raises(ValueError, match=rf"^--{option}: .* started with --experts {experts}.*Leave --{option} out"):
        settings_of(FinetuneSettings, str(tmp_path), None, {option: "8GiB"})
    assert settings_of(FinetuneSettings, str(tmp_path), None, {}).experts == experts
