"""What ranks compare before they start: every setting, files, versions, environment, and the model in memory."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.fake_ranks import compare

from amoeba.jobs import same_on_ranks
from amoeba.jobs.generate.options import GenerationOptions
from amoeba.jobs.same_on_ranks import BY_CONTENT, OF_ONE_RANK, VARIABLES, job_facts, model_facts
from amoeba.jobs.settings import FinetuneSettings, TrainSettings
from selection import each_value_once
from tiny_models import build

SETTINGS: dict[str, Any] = {
    "train": TrainSettings(),
    "finetune": FinetuneSettings(model="owner/name", data="chat.jsonl"),
    "generate": GenerationOptions(),
}
FIELDS = [(command, each.name) for command, settings in SETTINGS.items() for each in dataclasses.fields(settings)]


def with_another(settings: Any, name: str) -> Any:
    """The settings with another value of one field, whether or not that makes sense: a rank may be told anything."""
    found, value = copy.copy(settings), getattr(settings, name)
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, tuple):
        other = (*value, "more")
    else:
        other = "another" if value is None else f"another {value}"
    object.__setattr__(found, name, other)
    return found


def facts(command: str, settings: Any, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"options": {"--resume": False}, "model": "owner/name"} | changes
    return job_facts(f"amoeba {command}", settings, **given)


@each_value_once()
@pytest.mark.parametrize(("command", "name"), FIELDS)
def test_every_setting_that_differs_on_any_rank_is_named_with_both_values(command: str, name: str) -> None:
    mine = facts(command, SETTINGS[command])
    theirs = facts(command, with_another(SETTINGS[command], name))
    if name in BY_CONTENT and not isinstance(getattr(SETTINGS[command], name), float):
        assert mine == theirs  # what the file or folder holds is compared in place of its name
        return
    option = f"--{name.replace('_', '-')}"
    values = [json.dumps(each[option], default=str, ensure_ascii=False) for each in (mine, theirs)]
    for count in (2, 3):
        for odd in range(count):
            said = compare([theirs if rank == odd else mine for rank in range(count)])
            assert len(set(said)) == 1  # every rank stops, with the same words
            assert said[0].startswith(f"{option}: expected the same on all ranks; got ")
            for value, ranks in zip(values, ({*range(count)} - {odd}, {odd}), strict=True):
                where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
                assert f"{value} on {where}" in said[0]


def test_ranks_with_the_same_settings_go_on() -> None:
    for command, settings in SETTINGS.items():
        assert compare([facts(command, settings) for _ in range(4)]) == [""] * 4


def test_another_command_or_option_is_named() -> None:
    settings = SETTINGS["train"]
    assert compare([facts("train", settings), facts("finetune", settings)])[1].startswith("command: expected the same")
    resumed = facts("train", settings, options={"--resume": True})
    assert (
        "--resume: expected the same on all ranks; got false on rank 0, true on rank 1"
        in compare([facts("train", settings), resumed])[0]
    )


def test_a_few_of_many_differences_are_told_and_the_rest_counted() -> None:
    mine, theirs = ({f"--option-{number}": value for number in range(9)} for value in (1, 2))
    (said,) = set(compare([mine, theirs, mine]))
    assert said.startswith("--option-0 and 8 more: expected the same on all ranks; got --option-0 1 on ranks 0, 2, 2")
    assert "--option-3" in said and "--option-4" not in said and "; and 5 more. Give every rank" in said


class TestFiles:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> list[Path]:
        """A model, and a copy of it under another name."""
        first, second = tmp_path / "first", tmp_path / "second"
        build("qwen3_moe").save_pretrained(first)
        (first / "tokenizer.json").write_text("{}")
        (first / "chat_template.jinja").write_text("{{ messages }}")
        (first / "README.md").write_text("anything")
        shutil.copytree(first, second)
        return [first, second]

    @staticmethod
    def said(folders: list[Path], **changes: Any) -> str:
        found = [facts("train", SETTINGS["train"], model=str(folder), **changes) for folder in folders]
        (said,) = set(compare(found))
        return said

    def test_a_copy_of_the_model_under_another_name_is_the_same_model(self, folders: list[Path]) -> None:
        (folders[1] / "README.md").write_text("something else")
        assert self.said(folders) == ""

    @each_value_once()
    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
    @pytest.mark.parametrize("attack", ["changed", "missing", "longer"])
    def test_a_file_that_differs_is_named(self, folders: list[Path], file: str, attack: str) -> None:
        path = folders[1] / file
        content = bytearray(path.read_bytes())
        if attack == "missing":
            path.unlink()
        else:
            content[-1] ^= 1
            path.write_bytes(content if attack == "changed" else content + b" ")
        said = self.said(folders)
        assert said.startswith(f"{file} of --model: expected the same on all ranks; got ")
        assert ("bytes, samples" in said) and ("nothing on rank 1" in said) == (attack == "missing")

    def test_a_name_is_no_folder(self, folders: list[Path]) -> None:
        assert '--model "a folder" on rank 0, "owner/name" on rank 1' in self.said([folders[0], Path("owner/name")])

    def test_an_adapter_is_compared_as_the_model_is(self, folders: list[Path]) -> None:
        model = "owner/name"
        (folders[1] / "config.json").write_text("{}")
        mine, theirs, none = (
            facts("generate", SETTINGS["generate"], model=model, adapter=adapter) for adapter in (*folders, None)
        )
        assert compare([mine, theirs])[0].startswith("config.json of --adapter: expected the same on all ranks")
        assert '--adapter "a folder" on rank 0, nothing on rank 1' in compare([mine, none])[0]

    def test_of_a_run_the_adapter_in_it_is_compared(self, tmp_path: Path) -> None:
        found = []
        for rank in ("0", "1"):
            adapter = tmp_path / rank / "adapter"
            adapter.mkdir(parents=True)
            (tmp_path / rank / "config.json").write_text("{}")
            (adapter / "adapter_config.json").write_text("{}")
            (adapter / "adapter_model.safetensors").write_text(rank)
            found.append(facts("generate", SETTINGS["generate"], adapter=tmp_path / rank))
        assert compare(found)[0].startswith("adapter_model.safetensors of --adapter: expected the same on all ranks")


class TestSurroundings:
    @staticmethod
    def said(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> str:
        mine = facts("train", SETTINGS["train"])
        monkeypatch.setenv(name, value)
        (said,) = set(compare([mine, facts("train", SETTINGS["train"])]))
        return said

    @pytest.mark.parametrize("pattern", VARIABLES)
    def test_a_variable_that_changes_numbers_is_named(self, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
        name = pattern.replace("*", "SOMETHING")
        said = self.said(monkeypatch, name, "1")
        expected = f'environment variable {name}: expected the same on all ranks; got nothing on rank 0, "1" on rank 1'
        assert said.startswith(expected)

    @pytest.mark.parametrize("name", ["AMOEBA_CPU_PATH", "AMOEBA_CPU_FEATURES", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
    def test_those_that_end_as_a_place_does_are_compared_too(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr("amoeba.jobs.same_on_ranks.torch_switches", dict)  # one of them throws such a switch
        assert name in self.said(monkeypatch, name, "other")

    @pytest.mark.parametrize("pattern", [*OF_ONE_RANK, "RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])
    def test_what_each_rank_may_have_its_own_of_is_not(self, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
        assert self.said(monkeypatch, pattern.replace("*", "SOMETHING"), "1") == ""

    def test_versions_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine, found = facts("train", SETTINGS["train"]), same_on_ranks.versions()
        for package in same_on_ranks.PACKAGES:
            monkeypatch.setattr(same_on_ranks, "versions", lambda other=package: found | {other: "0.0.1"})
            said = compare([mine, facts("train", SETTINGS["train"])])
            assert said[1].startswith(f"version of {package}: expected the same on all ranks")

    def test_source_code_of_one_version_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = facts("train", SETTINGS["train"])
        monkeypatch.setattr(same_on_ranks, "_source", lambda: "other")
        assert compare([mine, facts("train", SETTINGS["train"])])[0].startswith("source of amoeba: expected the same")

    def test_switches_of_torch_are(self) -> None:
        mine, before = facts("train", SETTINGS["train"]), torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            theirs = facts("train", SETTINGS["train"])
        finally:
            torch.set_default_dtype(before)
        assert compare([mine, theirs])[0].startswith("torch.get_default_dtype(): expected the same on all ranks")


class TestModelInMemory:
    def test_one_number_in_any_tensor_is_seen(self) -> None:
        torch.manual_seed(0)
        model = build("glm4_moe")  # with selection biases, which are buffers
        mine = model_facts(model)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            flat = tensor.data.reshape(-1)
            before = flat[-1].clone()
            flat[-1] += 1
            (said,) = set(compare([mine, model_facts(model)]))
            assert said.startswith(f"{name}: expected the same on all ranks; got ")
            flat[-1] = before
        assert compare([mine, model_facts(model)]) == ["", ""]

    def test_another_dtype_and_another_configuration_are(self) -> None:
        torch.manual_seed(0)
        model = build("qwen3_moe")
        mine = model_facts(model)
        model.config.rms_norm_eps *= 2
        assert compare([mine, model_facts(model)])[0].startswith(
            "rms_norm_eps of the model's config: expected the same"
        )
        model.config.rms_norm_eps /= 2
        assert "in float32, samples" in compare([mine, model_facts(model.to(torch.bfloat16))])[0]
