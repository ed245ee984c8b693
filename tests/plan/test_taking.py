"""Commands and `amoeba.adapt` take the plan's best: quietly where nothing changes, in one line where something does."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import amoeba
from amoeba.cli import app
from amoeba.plan import plan as plan_module
from amoeba.plan import taking
from amoeba.plan.machine import measured_machine
from amoeba.plan.memory import Work
from amoeba.plan.model import read_facts
from amoeba.plan.plan import make_plan
from tiny_runs import make_inputs

WORDS = ("Once", "--max-new-tokens", "5", "--temperature", "0", "--device", "cpu", "--json")
WORK = Work("generate", context=16, batch=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs")) / "base"


@pytest.fixture(autouse=True)
def no_rates_are_known(monkeypatch):
    """Of this machine: a test of doctor keeps some where nothing else runs, and then a summary names the plan."""
    monkeypatch.setattr("amoeba.plan.machine.kept", lambda *_: None)


@pytest.fixture
def too_small(folder, monkeypatch):
    """Of memory there is a little less than the whole model needs."""
    here = measured_machine(measure=False, gpu=False)
    needed = make_plan(read_facts(str(folder)), here, WORK).best.host_bytes
    machine = here.within(None, int(needed / 0.9) - 20_000)
    monkeypatch.setattr(taking, "measured_machine", lambda **_: machine)
    return machine


def generate(folder, *words):
    result = CliRunner().invoke(app, ["generate", str(folder), *WORDS, *words])
    assert result.exit_code == 0, result.output
    return result, json.loads(result.stdout.splitlines()[-1])


def test_a_model_that_fits_is_loaded_as_before_and_nothing_is_said(folder, monkeypatch):
    monkeypatch.setattr(plan_module, "placement_named", lambda name: pytest.fail(f"{name} may have to be compiled"))
    taken = taking.take_plan(str(folder), WORK, gpu=False)
    assert taken.options == {} and taken.words is None
    result, document = generate(folder)
    assert document["placement"] == "resident" and "plan" not in result.stderr
    compared = document["plan"]
    assert compared["measured"]["peak_memory_bytes"] == document["peak_memory_bytes"]
    assert compared["predicted"]["peak_memory_bytes"] > 0


def test_where_it_does_not_fit_its_experts_are_streamed_with_the_same_text(folder, too_small):
    result, document = generate(folder)
    assert document["placement"] == "streamed"
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("amoeba: plan: "))
    assert "experts streamed (" in line and "resident needs" in line
    _, resident = generate(folder, "--experts", "resident")
    assert resident["placement"] == "resident" and resident["plan"] is None
    assert resident["generated_ids"] == document["generated_ids"]


def test_a_plan_file_says_where_and_options_win(folder, tmp_path):
    path = tmp_path / "plan.json"
    words = ["plan", str(folder), "--machine", "4090", "--vram", "0", "--out", str(path)]
    made = CliRunner().invoke(app, words)
    assert (
        made.exit_code == 0
        and f"pass --plan {path} to generate, chat or serve\n" in " ".join(made.output.split()) + "\n"
    )
    content = json.loads(path.read_text())
    content["candidates"][content["best"]]["options"] = {"ram": "1GiB"}
    path.write_text(json.dumps(content))
    result, document = generate(folder, "--plan", str(path))
    assert document["placement"] == "streamed" and f"amoeba: plan {path}: " in result.stderr
    assert document["streaming"]["ram_bytes"] == 2**30
    result, document = generate(folder, "--plan", str(path), "--ram", "2GiB")
    assert document["streaming"]["ram_bytes"] == 2**31
    assert f"plan {path}: nothing of it, with --ram as given" in result.stderr
    for words, placement in ((("--experts", "cpu-int8"), "cpu-int8"), (("--precision", "mxfp4"), "mxfp4-weights")):
        result, document = generate(folder, "--plan", str(path), *words)
        assert document["placement"] == placement and "experts streamed" not in result.stderr
    assert generate(folder, "--plan", str(path), "--precision", "bf16")[1]["placement"] == "streamed"
    content["candidates"][content["best"]]["options"] = {"experts": "cpu-int8"}
    path.write_text(json.dumps(content))
    assert generate(folder, "--plan", str(path))[1]["placement"] == "cpu-int8"
    assert generate(folder, "--plan", str(path), "--ram", "1GiB")[1]["placement"] == "streamed"


@pytest.mark.parametrize("command", [("generate", "Once"), ("chat",), ("serve",)])
def test_a_plan_file_with_exact_mode_is_refused(folder, tmp_path, command):
    name, *prompt = command
    words = [name, str(folder), *prompt, "--plan", str(tmp_path / "plan.json"), "--exact"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "--plan: expected a command without --exact; got both" in " ".join(
        result.output.split()
    )


@pytest.fixture
def serve(folder, monkeypatch):
    """`amoeba serve`, stopped before its first request."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'amoeba-moe[serve]'")
    monkeypatch.setattr("amoeba.serve.server.run", lambda app, served, *_: served.stop())

    def invoke(*words):
        result = CliRunner().invoke(app, ["serve", str(folder), "--port", "0", "--device", "cpu", "--json", *words])
        assert result.exit_code == 0, result.output
        return result, json.loads(result.stdout.splitlines()[-1])

    return invoke


def test_a_server_streams_what_does_not_fit(serve, too_small):
    result, document = serve("--slots", "1", "--context", "8")
    assert document["placement"] == "streamed" and "amoeba: plan: experts streamed (" in result.stderr
    assert document["plan"]["measured"]["peak_memory_bytes"] == document["peak_memory_bytes"]


def test_a_server_takes_slots_and_context_of_its_plan_file(serve, folder, tmp_path):
    words = ["plan", str(folder), "--machine", "4090", "--vram", "0", "--out", str(tmp_path / "plan.json")]
    words += ["--for", "serve", "--batch", "3", "--context", "40"]
    assert CliRunner().invoke(app, words).exit_code == 0
    _, document = serve("--plan", str(tmp_path / "plan.json"))
    assert (document["slots"], document["context"]) == (3, 40)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert document["plan"]["predicted"] == {"peak_memory_bytes": plan["candidates"][plan["best"]]["host_bytes"]}
    _, document = serve("--plan", str(tmp_path / "plan.json"), "--slots", "2", "--experts", "resident")
    assert (document["slots"], document["context"], document["plan"]) == (2, 40, None)


def test_a_model_that_cannot_be_planned_runs_all_the_same(folder, monkeypatch):
    def fail(*_, **__):
        raise KeyError("an odd configuration")

    monkeypatch.setattr(taking, "read_facts", fail)
    _, document = generate(folder)
    assert document["placement"] == "resident" and document["plan"] is None


def test_predicted_speeds_stand_next_to_measured_ones(folder, monkeypatch):
    from dataclasses import replace

    here = replace(measured_machine(measure=False, gpu=False), assumed=[])
    monkeypatch.setattr(taking, "measured_machine", lambda **_: here)
    result, document = generate(folder)
    for kind in ("predicted", "measured"):
        assert document["plan"][kind]["generation_tokens_per_second"] > 0
    assert "; planned " in result.stderr


class TestAdapt:
    def test_a_folder_becomes_a_model_that_fits(self, folder, too_small):
        model = amoeba.adapt(folder, context=16)
        with model.amoeba_streamed as streamed, torch.no_grad():
            ids = torch.arange(5)[None]
            mine = model(ids).logits
            assert sum(streamed.memory.slots) < sum(each.experts for each in streamed.memory.store.layers)
        plain = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(mine, plain(ids).logits, rtol=1e-4, atol=1e-4)

    def test_a_loaded_model_is_placed(self, folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert amoeba.adapt(model, vram=0) is model

    def test_a_budget_that_is_too_small_is_refused(self, folder):
        with pytest.raises(ValueError, match="memory: expected a way that fits"):
            amoeba.adapt(folder, vram=0, ram="100MiB")


class TestRuns:
    @pytest.fixture
    def words(self, folder, tmp_path):
        sizes = {"--steps": 2, "--batch-size": 2, "--sequence-length": 32, "--held-out": 0.2, "--out": tmp_path / "run"}
        return [str(word) for pair in sizes.items() for word in pair]

    def run(self, *words):
        result = CliRunner().invoke(app, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output
        return result, json.loads(result.stdout.splitlines()[-1])

    def test_a_run_that_fits_is_as_before_and_shows_what_was_planned(self, folder, words):
        data = ("--data", folder.parent / "finetune.jsonl", "--lora-rank", 2)
        result, document = self.run("finetune", folder, *data, *words)
        assert document["experts"] == "resident" and "amoeba: plan" not in result.stderr
        assert document["plan"]["measured"]["peak_memory_bytes"] == document["peak_memory_bytes"] > 0

    def test_a_run_that_does_not_fit_takes_a_way_that_does(self, folder, words, monkeypatch):
        here = measured_machine(measure=False, gpu=False)
        work = Work("finetune", context=32, batch=2, rank=2)
        plan = make_plan(read_facts(str(folder)), here, work)
        machine = here.within(None, int(plan.best.host_bytes / 0.9) - 20_000)
        monkeypatch.setattr(taking, "measured_machine", lambda **_: machine)
        data = ("--data", folder.parent / "finetune.jsonl", "--lora-rank", 2)
        result, document = self.run("finetune", folder, *data, *words)
        assert "amoeba: plan: experts " in result.stderr
        assert "checkpointing" in document["plan"]["candidate"] or document["experts"] == "streamed"

    def test_training_from_a_preset_is_planned_too(self, folder, words):
        _, document = self.run(
            "train", "--model", "tiny", "--data", folder.parent / "train.jsonl", "--vocab-size", 300, *words
        )
        assert document["plan"]["candidate"] == "experts resident in float32"

    def test_a_resumed_run_refuses_another_plan(self, tmp_path):
        (tmp_path / "plan.json").write_text("{}")
        result = CliRunner().invoke(app, ["train", "--resume", str(tmp_path), "--plan", str(tmp_path / "plan.json")])
        assert result.exit_code == 2
