"""`amoeba train` end to end in miniature: it learns, it can be killed and resumed, and plain transformers loads it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from amoeba.jobs.presets import find_preset
from amoeba.jobs.settings import TrainSettings, load_settings
from amoeba.jobs.train.train import round_to, train
from amoeba.observe.run_log import read_run
from hostile_folders import change_json
from selection import quick
from tiny_models import build
from tiny_runs import Quiet, make_inputs, step_losses, tiny_run, tiny_settings

TINY = {
    "steps": 12,
    "batch_size": 2,
    "sequence_length": 64,
    "vocab_size": 512,
    "log_every": 3,
    "eval_every": 6,
    "save_every": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
}


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    documents = sorted(topics.values(), key=len)
    path.write_text("\n\n".join(documents[:40]))
    path.with_name("held_out.txt").write_text(documents[40][:300])  # two rows: each run evaluates them often
    return str(path)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's model with one layer of its four: a folder with a config alone."""
    folder = tmp_path_factory.mktemp("models") / "one_layer"
    config = find_preset("demo").build(vocab_size=512, sequence_length=64)
    config.num_hidden_layers = 1
    config.save_pretrained(folder)
    return str(folder)


def settings(folder: Path, corpus_file: str, **changes: Any) -> TrainSettings:
    held_out = str(Path(corpus_file).with_name("held_out.txt"))
    return load_settings(None, TINY | {"data": corpus_file, "held_out": held_out, "out": str(folder)} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus_file: str) -> tuple[Path, Any, Quiet]:
    folder, console = tmp_path_factory.mktemp("runs") / "whole", Quiet()
    return folder, train(settings(folder, corpus_file), console), console


def test_the_held_out_loss_falls(finished: tuple[Path, Any, Quiet]) -> None:
    _, report, _ = finished
    assert report.final_loss < report.start_loss - 0.3
    assert report.steps == 12


def test_the_run_folder_holds_what_the_report_reads(finished: tuple[Path, Any, Quiet]) -> None:
    folder, _, console = finished
    kinds = [json.loads(text)["kind"] for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert set(kinds) == {"train", "eval", "router", "coactivation", "final"}
    assert len(step_losses(folder)) == 12
    assert [line["step"] for line in console.lines] == [3, 6, 9, 12]
    assert json.loads((folder / "config.json").read_text())["model_config"]["model_type"] == "qwen3_moe"
    assert "versions" in json.loads((folder / "environment.json").read_text())
    assert any((folder / "tensorboard").iterdir())


def test_loads_count_every_routed_token_once(finished: tuple[Path, Any, Quiet]) -> None:
    folder, *_ = finished
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in (line for line in lines if line["kind"] == "router"):
        assert [sum(layer["load"]) for layer in line["layers"]] == [3 * 2 * 64 * 2] * 4


def test_plain_transformers_loads_the_model_with_equal_logits(finished: tuple[Path, Any, Quiet]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, *_ = finished
    tokens = AutoTokenizer.from_pretrained(folder / "model")("The with statement", return_tensors="pt")
    logits = []
    for implementation in ("eager", "amoeba"):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", experts_implementation=implementation)
        with torch.no_grad():
            logits.append(model(input_ids=tokens["input_ids"]).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_model_that_is_rounded_to_train_computes_as_if_loaded_in_that_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = build("qwen3_moe").eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    round_to(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids, far = torch.arange(3, 20)[None], torch.arange(2000, 2017)[None]
    with torch.no_grad():
        found, expected = (each(input_ids=ids, position_ids=far, use_cache=False).logits for each in (model, loaded))
    assert torch.equal(found, expected)


@pytest.mark.thorough
def test_a_resumed_run_has_the_tokenizer_of_its_checkpoint(finished, tmp_path, corpus_file, monkeypatch):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    monkeypatch.setattr("amoeba.data.tokenizer.train_tokenizer", lambda *_: pytest.fail("trained once more"))
    report = train(settings(folder, corpus_file), Quiet(), resume=True, start_from="checkpoint-8")
    assert report.final_loss == finished[1].final_loss
    assert step_losses(folder)[-4:] == step_losses(finished[0])[-4:]


def test_a_model_without_experts_is_refused(tmp_path: Path, corpus_file: str) -> None:
    from transformers import LlamaConfig

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaConfig(**small, vocab_size=512).save_pretrained(tmp_path / "llama")
    from amoeba.data.corpus import load_corpus
    from amoeba.data.tokenizer import load_or_train_tokenizer

    load_or_train_tokenizer(None, load_corpus(corpus_file), 512).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"--model: expected a mixture-of-experts.*llama, which has no experts"):
        train(settings(tmp_path / "run", corpus_file, model=str(tmp_path / "llama")), Quiet())


def test_biases_of_deepseek_move_and_balance(tmp_path: Path, corpus_file: str) -> None:
    from transformers import AutoModelForCausalLM

    changes = {"model": "deepseek_v3", "steps": 3, "bias_rate": 0.01}
    report = train(settings(tmp_path / "deepseek", corpus_file, **changes), Quiet())
    model = AutoModelForCausalLM.from_pretrained(report.model)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(bias.abs().max() > 0 for bias in biases)


def test_the_balance_loss_takes_part_in_training(tmp_path: Path, corpus_file: str, one_layer: str) -> None:
    for balance in ("none", "aux"):
        train(settings(tmp_path / balance, corpus_file, model=one_layer, balance=balance, steps=3), Quiet())
    without, with_loss = step_losses(tmp_path / "none"), step_losses(tmp_path / "aux")
    assert with_loss[0] == without[0]  # logged is the language model's loss alone
    assert with_loss[2] != without[2]


@quick(lambda command: command == "train")
@pytest.mark.parametrize("command", ["train", "finetune"])
def test_the_router_loss_that_a_checkpoint_asks_of_transformers_is_left_out(command: str, tmp_path: Path) -> None:
    inputs, losses = make_inputs(tmp_path), []
    for asks in (False, True):
        change_json(inputs / "base/config.json", output_router_logits=asks, router_aux_loss_coef=0.5)
        tiny_run(tiny_settings(command, tmp_path / str(asks), inputs, steps=2, balance="none"), Quiet())
        losses.append(step_losses(tmp_path / str(asks)))
    assert losses[0] == losses[1]


def test_accumulation_gives_the_losses_of_the_larger_batch(tmp_path: Path, corpus_file: str, one_layer: str) -> None:
    for name, changes in {"whole": {"batch_size": 4}, "parts": {"batch_size": 2, "accumulation": 2}}.items():
        changes |= {"model": one_layer, "steps": 3, "balance": "none"}
        train(settings(tmp_path / name, corpus_file, **changes), Quiet())
    rtol = 1e-3 if torch.cuda.is_available() else 1e-5  # a GPU computes in bf16
    torch.testing.assert_close(
        torch.tensor(step_losses(tmp_path / "parts")), torch.tensor(step_losses(tmp_path / "whole")), rtol=rtol, atol=0
    )


@pytest.mark.thorough
def test_the_z_loss_keeps_router_logits_smaller(tmp_path: Path, corpus_file: str) -> None:
    from transformers import AutoModelForCausalLM

    norms = []
    for coefficient in (0.0, 5.0):
        folder = tmp_path / str(coefficient)
        changes = {"z_loss_coefficient": coefficient, "steps": 6, "save_every": 6, "eval_every": 6}
        report = train(settings(folder, corpus_file, **changes), Quiet())
        model = AutoModelForCausalLM.from_pretrained(report.model)
        inputs = torch.arange(256).view(1, -1)
        with torch.no_grad():
            logits = model(input_ids=inputs, output_router_logits=True).router_logits
        norms.append(sum(torch.logsumexp(part, -1).square().mean().item() for part in logits))
    assert norms[1] < 0.9 * norms[0]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["mixtral", "olmoe", "gpt_oss"])
def test_other_architectures_train(model: str, tmp_path: Path, corpus_file: str) -> None:
    report = train(settings(tmp_path / model, corpus_file, model=model, steps=4), Quiet())
    assert report.final_loss < report.start_loss


@pytest.mark.parametrize("model_type", ["qwen3_moe", pytest.param("olmoe", marks=pytest.mark.thorough)])
def test_a_folder_with_a_config_alone_gets_a_tokenizer_of_the_data(model_type, tmp_path, corpus_file):
    """An empty tokenizer gave 3 rows and a loss that stayed at ln V, with exit code 0."""
    from transformers import AutoTokenizer

    preset = {"qwen3_moe": "demo", "olmoe": "olmoe"}[model_type]
    config = find_preset(preset).build(vocab_size=600, sequence_length=64)
    config.num_hidden_layers = 1
    config.save_pretrained(tmp_path / "model")
    console = Quiet()
    told = {name: value for name, value in TINY.items() if name != "vocab_size"}
    told |= {"model": str(tmp_path / "model"), "data": corpus_file, "out": str(tmp_path / "run"), "steps": 4}
    given = load_settings(None, told)
    assert given.vocab_size == 600
    report = train(given, console)
    assert report.final_loss < report.start_loss
    assert "tokenizer with 600 tokens" in " ".join(console.said)
    config = json.loads((Path(report.model) / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(report.model)
    assert len(tokenizer) == config["vocab_size"] == 600
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == getattr(tokenizer, name) == 0
    assert tokenizer.decode(tokenizer("a , b\n")["input_ids"]) == "a , b\n"


def test_a_folder_with_a_run_is_not_overwritten(finished: tuple[Path, Any, Quiet], corpus_file: str) -> None:
    with pytest.raises(ValueError, match=r"a folder without a run.*--resume"):
        train(settings(finished[0], corpus_file), Quiet())


def test_an_unwritable_folder_is_named(tmp_path: Path, corpus_file: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out: expected a writable folder"):
        train(settings(tmp_path / "file" / "run", corpus_file), Quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: expected an integer of at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a finite number"),
        ({"balance": "much"}, "balance: expected one of aux, bias, none"),
        ({"vocab_size": 10}, "vocab_size: expected at least 300"),
        ({"held_out": 1.5}, "held_out: expected a share"),
        ({"dtype": "int8"}, "dtype: expected auto"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**changes)


def test_an_unknown_model_lists_the_presets(tmp_path: Path, corpus_file: str) -> None:
    with pytest.raises(ValueError, match="--model: expected one of demo"):
        train(settings(tmp_path / "x", corpus_file, model="no-such"), Quiet())


def test_a_run_that_is_refused_before_it_begins_leaves_no_folder(tmp_path: Path, corpus_file: str) -> None:
    for folder in (tmp_path / "new", tmp_path / "mine"):
        if folder.name == "mine":
            folder.mkdir()
        with pytest.raises(FileNotFoundError, match="expected an existing file or folder"):
            train(settings(folder, corpus_file, data=str(tmp_path / "nowhere.txt")), Quiet())
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "mine").exists()  # it was there before


def test_a_corpus_of_several_kinds_leaves_a_line_about_their_experts(tmp_path: Path) -> None:
    kinds = {"letters": "x", "sums": "+"}
    rows = [{"kind": kind, "text": f"{sign * 9} {number} " * 9} for kind, sign in kinds.items() for number in range(40)]
    (tmp_path / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = settings(tmp_path / "run", str(tmp_path / "kinds.jsonl"), held_out=0.2, steps=3)
    train(asked, Quiet())
    run = read_run(tmp_path / "run")
    (found,) = run.text_kinds
    assert found["kinds"] == ["letters", "sums"] and found["step"] == 3
    for layer, counted in zip(found["layers"], run.router[-1]["layers"], strict=True):
        assert [len(load) for load in layer["loads"]] == [len(counted["load"])] * 2
        assert all(sum(load) > 0 and sum(load) % 2 == 0 for load in layer["loads"]), "two experts for each token"
