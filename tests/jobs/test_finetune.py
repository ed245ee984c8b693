"""`amoeba finetune` end to end in miniature: the answers are learnt, the base stays, a killed run goes on as it was."""

import functools
import importlib.util
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from amoeba import lora
from amoeba.cpu import placements as cpu_placements
from amoeba.cpu import planner as planner_module
from amoeba.cpu.build import CoreUnavailable
from amoeba.data.corpus import load_corpus
from amoeba.data.sft_dataset import PLAIN_TEMPLATE, SftDataset, pad_rows
from amoeba.data.token_rows import NO_LABEL, PackedDataset
from amoeba.data.tokenizer import train_tokenizer
from amoeba.integrations.place_experts import Placed, place_experts
from amoeba.jobs import cpu_dtype
from amoeba.jobs.convert.merge import merge
from amoeba.jobs.finetune.finetune import AdapterAlone, finetune
from amoeba.jobs.settings import FinetuneSettings, load_settings
from amoeba.jobs.train.resume import settings_of
from amoeba.jobs.train.run import Run
from amoeba.jobs.train.training_loop import Rows, make_trainer
from amoeba.observe.run_log import read_run
from amoeba.stream.store import open_store
from amoeba.stream.store.packing import pack
from called import call
from selection import each_value_once, quick
from tiny_models import build, experts_inputs, experts_of, relative, token_ids
from tiny_runs import Quiet, step_losses

ROOT = Path(__file__).parents[2]
TINY = {
    "steps": 12,
    "batch_size": 4,
    "accumulation": 2,
    "r": 4,
    "alpha": 8,
    "log_every": 3,
    "eval_every": 6,
    "save_every": 4,
    "learning_rate": 2e-2,
    "warmup_steps": 2,
    "held_out": 0.125,
}
needs_engine = pytest.mark.skipif(cpu_placements._why_not() is not None, reason=str(cpu_placements._why_not()))

pytestmark = pytest.mark.filterwarnings("ignore")


def instructions() -> list[dict]:
    specification = importlib.util.spec_from_file_location("make_instructions", ROOT / "examples/make_instructions.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.rows()[:56]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in instructions()))
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    tokenizer = train_tokenizer((row["messages"][0]["content"] for row in instructions()), 320)
    torch.manual_seed(0)
    build("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(folder: Path, base: Path, data: str, **changes: Any) -> FinetuneSettings:
    told = TINY | {"model": str(base), "data": data, "out": str(folder)} | changes
    return load_settings(None, told, FinetuneSettings)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path, data: str) -> tuple[Path, Any, Quiet]:
    folder, console = tmp_path_factory.mktemp("runs") / "whole", Quiet()
    before = contents(base)
    report = finetune(settings(folder, base, data, targets=("experts", "q_proj"), train_router=True), console)
    assert contents(base) == before
    return folder, report, console


@pytest.mark.parametrize("packed", [False, True], ids=["answers of all lengths", "a padded last row"])
def test_held_out_loss_is_the_mean_over_tokens_whatever_the_batch(packed: bool, base: Path, data: str, tmp_path: Path):
    tokenizer, model = AutoTokenizer.from_pretrained(base), base_model(base, "amoeba")
    tokenizer.chat_template = PLAIN_TEMPLATE
    documents = load_corpus(data, held_out=0.125, seed=0).held_out
    if packed:
        held_out: Any = PackedDataset(documents, tokenizer, 13, keep_last=True)
        assert (held_out[len(held_out) - 1]["labels"] == NO_LABEL).any()
    else:
        held_out = SftDataset(documents, tokenizer, 512)
        assert len({int((row["labels"] != NO_LABEL).sum()) for row in held_out}) > 1

    def found(batch_size: int) -> float:
        made = settings(tmp_path, base, data, batch_size=batch_size)
        rows = Rows(held_out, held_out, functools.partial(pad_rows, padding=0), 1, 2, 512)
        run = Run("amoeba finetune", made, Quiet())
        run.folder.mkdir(exist_ok=True)
        trainer = make_trainer(run, model, tokenizer, rows, 1, torch.float32, AdapterAlone())
        loss = trainer.evaluate()["eval_loss"]
        assert trainer.run_log.last_evaluation == (0, loss)
        return loss

    total, count = 0.0, 0
    for row in held_out:
        with torch.no_grad():
            logits = model.eval()(input_ids=row["input_ids"][None]).logits[0, :-1]
        labels = row["labels"][1:]
        total += float(torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum"))
        count += int((labels != NO_LABEL).sum())
    assert [found(batch_size) for batch_size in (1, 3, 64)] == pytest.approx([total / count] * 3, rel=1e-6)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits


def base_model(base: Path, implementation: str = "eager") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, experts_implementation=implementation)


# --- what comes out


def test_the_held_out_loss_falls_and_the_run_can_be_read(finished: tuple[Path, Any, Quiet]) -> None:
    folder, report, console = finished
    assert report.final_loss < report.start_loss - 0.3
    assert report.steps == 12 and report.chat and report.experts == "resident"
    assert len(step_losses(folder)) == 12
    assert [line["step"] for line in console.lines] == [3, 6, 9, 12]
    assert any("no chat template" in said for said in console.said)
    assert read_run(folder).finished


def test_plain_peft_loads_the_adapter_with_equal_logits(finished: tuple[Path, Any, Quiet], base: Path) -> None:
    import peft

    _, report, _ = finished
    ours = base_model(base)
    lora.load(ours, report.adapter)
    theirs = peft.PeftModel.from_pretrained(base_model(base), report.adapter)
    assert relative(logits_of(theirs), logits_of(ours)) < 1e-5
    assert relative(logits_of(base_model(base)), logits_of(ours)) > 1e-2


def test_base_weights_are_bit_identical_in_the_trained_model(base, data, tmp_path, monkeypatch):
    kept = []
    from amoeba.jobs.finetune import finetune as job

    real = job.load_placed
    monkeypatch.setattr(job, "load_placed", lambda *given, **named: kept.extend(real(*given, **named)) or tuple(kept))
    finetune(settings(tmp_path / "run", base, data, targets=("all-linear",), steps=2, accumulation=1), Quiet())
    lora.detach(kept[0])
    expected = base_model(base).state_dict()
    assert kept[0].state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor.cpu(), expected[name]) for name, tensor in kept[0].state_dict().items())


def test_the_merged_folder_gives_the_adapted_logits_in_plain_transformers(finished, base, tmp_path):
    folder, *_ = finished
    report = merge(base, folder, tmp_path / "merged")  # the run's folder will do
    assert (report.experts_layers, report.linear_layers, report.dtype) == (2, 2, "float32")
    adapted = base_model(base)
    lora.load(adapted, folder / "adapter")
    assert relative(logits_of(base_model(tmp_path / "merged")), logits_of(adapted)) < 1e-5
    with pytest.raises(ValueError, match="--out: expected a folder that does not exist yet"):
        merge(base, folder, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


def test_merge_as_a_command_of_its_own(finished: tuple[Path, Any, Quiet], base: Path, tmp_path: Path) -> None:
    command = ["merge", str(base), "--adapter", str(finished[0]), "--json"]
    done = call(*command, "--out", tmp_path / "merged")
    assert done.document["model"] == str(tmp_path / "merged")
    assert "2 layers of experts and 2 linear layers changed" in done.stdout
    assert "--out: expected a folder; got none" in call(*command, code=2).output


def test_a_merge_that_is_interrupted_says_so_and_leaves_nothing(finished, base, tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("amoeba.jobs.convert.merge.note_merged", interrupt)
    words = ["merge", str(base), "--adapter", str(finished[0]), "--out", str(tmp_path / "merged")]
    done = call(*words, code=130)
    assert "interrupted: nothing was written" in done.output
    assert not list(tmp_path.iterdir())


def test_generate_takes_the_adapter_and_its_chat_template(finished, base, tmp_path):
    folder, *_ = finished
    words = ["What is 1 plus 2?", "--chat", "--max-new-tokens=8", "--temperature=0", "--json"]
    result = call("generate", base, *words, "--adapter", folder)
    merge(base, folder, tmp_path / "merged")
    same = call("generate", tmp_path / "merged", *words)
    without = call("generate", base, "What is 1 plus 2?", *words[2:])
    ids = [answer.document["generated_ids"] for answer in (result, same, without)]
    assert ids[0] == ids[1] != ids[2]


@needs_engine
def test_generate_takes_the_adapter_next_to_packed_experts(finished: tuple[Path, Any, Quiet], base: Path) -> None:
    words = ["generate", str(base), "What is 1 plus 2?", "--max-new-tokens=3", "--adapter", str(finished[0]), "--json"]
    result = call(*words, "--experts=cpu-bf16")
    document = result.document
    assert (document["placement"], document["backend"]) == ("cpu-bf16", "cpu")


def test_a_trained_router_is_in_the_adapter(finished: tuple[Path, Any, Quiet], base: Path) -> None:
    from safetensors.torch import load_file

    _, report, _ = finished
    stored = load_file(Path(report.adapter) / "adapter_model.safetensors")
    routers = {name: tensor for name, tensor in stored.items() if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    before = base_model(base).state_dict()
    assert all(not torch.equal(t, before[n.removeprefix("base_model.model.")]) for n, t in routers.items())


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"dtype": "bfloat16", "train_router": True}])
def test_other_ways_to_run_learn_too(changes: dict[str, Any], base: Path, data: str, tmp_path: Path) -> None:
    report = finetune(settings(tmp_path / "run", base, data, accumulation=1, **changes), Quiet())
    assert report.final_loss < report.start_loss - 0.3


def test_gradient_checkpointing_changes_no_loss(base: Path, data: str, tmp_path: Path) -> None:
    for name in ("kept", "computed again"):
        changes = {"gradient_checkpointing": name != "kept", "steps": 3}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*gradient_checkpointing", FutureWarning)  # renamed in transformers 5.23
            finetune(settings(tmp_path / name, base, data, **changes), Quiet())
    assert step_losses(tmp_path / "kept") == pytest.approx(step_losses(tmp_path / "computed again"), rel=1e-5)
    kept, again = (read_run(tmp_path / name).coactivation[-1]["layers"] for name in ("kept", "computed again"))
    assert kept == again  # a recompute is not counted


def test_held_out_questions_may_be_a_file_and_epochs_count_the_rows(base: Path, data: str, tmp_path: Path) -> None:
    other = tmp_path / "held.jsonl"
    other.write_text(json.dumps({"prompt": "1 plus 1? ", "completion": "2"}) + "\n")
    console = Quiet()
    # 7 batches, 4 a step: the last step of an epoch has fewer
    changes = {"held_out": str(other), "steps": None, "epochs": 1.5, "batch_size": 8, "accumulation": 4}
    report = finetune(settings(tmp_path / "run", base, data, **changes), console)
    assert report.steps == 3
    assert len(step_losses(tmp_path / "run")) == 3
    assert any("56 documents to train on" in said and "1 held out" in said for said in console.said)


# --- interruptions


def test_checkpoints_hold_the_adapter_and_not_the_model(finished: tuple[Path, Any, Quiet]) -> None:
    folder, *_ = finished
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-12", "checkpoint-8"]
    names = {path.name for path in (folder / "checkpoints" / "checkpoint-8").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names


# --- what is refused


def refused(*words: str) -> str:
    result = call("finetune", *words, code=2)
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"text": "b"'], "line 2: expected valid JSON"),
        (['{"text": "a"}', '{"question": "b", "answer": "c"}'], "line 2: expected an object with `text`"),
        (['{"question": "b", "answer": "c"}'], "the fields question, answer"),
        (['{"prompt": "a", "completion": ""}'], "line 1: answers: expected at least one, none of them empty"),
        (['{"messages": [{"role": "user", "content": "a"}]}'], "line 1: answers: expected at least one"),
    ],
)
def test_bad_rows_are_named_by_line(lines: list[str], message: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    assert message in refused(str(base), "--data", str(path), "--out", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--r", "0"], "r: expected a whole number of at least 1; got 0"),
        (["--alpha", "nan"], "alpha: expected a finite number"),
        (["--targets", "w_qkv"], "'w_qkv', which matches nothing in this model"),
        (["--experts", "gpu"], "experts: expected one of resident, cpu-bf16, cpu-int8, cpu-int8-bf16, fp8-weights"),
        (
            ["--precision", "fp8-ste"],
            "--precision: expected one of bf16, fp8, w8a8, mxfp8, mxfp4, nvfp4; got 'fp8-ste'",
        ),
        (["--precision", "fp8", "--experts", "cpu-int8"], "--precision: expected --experts resident, or no --experts"),
        (["--precision", "bf16", "--experts", "fp8-weights"], "--precision: expected --experts resident"),
        (["--epochs", "0"], "epochs: expected a number above 0"),
        (["--steps", "0"], "steps: expected an integer of at least 1"),
        (["--held-out", "2"], "held_out: expected a share above 0 and below 1"),
        (["--held-out", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_settings_are_named(flags: list[str], message: str, base: Path, data: str, tmp_path: Path) -> None:
    assert message in refused(str(base), "--data", data, "--out", str(tmp_path / "run"), *flags)


def test_missing_things_are_named(base: Path, data: str, tmp_path: Path) -> None:
    assert "MODEL: expected a folder" in refused("--data", data)
    assert "--data: expected a file" in refused(str(base), "--out", str(tmp_path / "run"))
    assert "MODEL: expected" in refused(str(tmp_path), "--data", data, "--out", str(tmp_path / "run"))
    assert "--resume: expected the folder of an earlier run" in refused("--resume", str(tmp_path))


def test_rows_longer_than_the_models_positions_are_cut_there_and_it_is_said(base, data, tmp_path):
    from hostile_folders import change_json

    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "short")
    base_model(base).save_pretrained(tmp_path / "short")
    change_json(tmp_path / "short" / "config.json", max_position_embeddings=40)
    console = Quiet()
    finetune(settings(tmp_path / "run", tmp_path / "short", data, steps=1), console)
    said = "\n".join(console.said)
    assert "rows are limited to 40 tokens instead of 1024" in said
    assert "cut at 40 tokens" in said


def test_a_model_without_experts_is_refused(base: Path, data: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=400)).save_pretrained(tmp_path / "llama")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "llama")
    said = refused(str(tmp_path / "llama"), "--data", data, "--out", str(tmp_path / "run"))
    assert "MODEL: expected a mixture-of-experts model of transformers; got llama" in said


def test_an_adapter_of_another_model_is_refused(finished: tuple[Path, Any, Quiet], base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "other")
    build("mixtral", vocab_size=320).save_pretrained(tmp_path / "other")
    for words in (["generate", "{}", "Hello"], ["merge", "{}", "--out", str(tmp_path / "merged")]):
        filled = [word.format(tmp_path / "other") for word in words]
        result = call(*filled, "--adapter", finished[0], code=2)
        assert "6 experts of hidden 32 and intermediate 48" in result.output
    result = call("generate", base, "Hello", "--adapter", tmp_path, code=2)
    assert "--adapter: expected a folder with adapter_config.json" in result.output


def test_a_run_of_train_is_not_taken_for_one_of_finetune(base: Path, tmp_path: Path) -> None:
    from amoeba.jobs.settings import TrainSettings

    (tmp_path / "config.json").write_text(json.dumps(TrainSettings().as_dict()))
    with pytest.raises(ValueError, match=r"expected a run of this command; got one with precision, vocab_size"):
        settings_of(FinetuneSettings, str(tmp_path), None, {})


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_a_missing_package_is_a_sentence(command, tmp_path, base, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    words = {"train": ["train"], "finetune": ["finetune", str(base), "--data", data]}[command]
    done = call(*words, "--out", tmp_path / "run", code=2)
    assert "tokenizers" in done.stderr and "nstall" in done.stderr


# --- placement of the experts


def test_an_unknown_placement_is_refused_and_resident_changes_nothing() -> None:
    model = build("qwen3_moe")
    names = list(model.state_dict())
    assert place_experts(model, "resident").placement == "resident"
    assert place_experts(model, "auto").placement == "resident"  # fp32, which packing would round
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="experts: expected one of resident"):
        place_experts(model, "disk")


def test_without_a_compiler_packing_is_refused_and_auto_stays_resident(monkeypatch: Any) -> None:
    def unavailable() -> None:
        raise CoreUnavailable("no C++ compiler was found")

    monkeypatch.setattr(cpu_placements, "load_packed", unavailable)
    model = build("qwen3_moe").to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"a machine that supports cpu-int8; got no C\+\+ compiler was found"):
        place_experts(model, "cpu-int8")
    monkeypatch.setattr(cpu_placements, "has_bf16_instructions", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place_experts(model, "auto") == Placed("resident", "no C++ compiler was found")


@needs_engine
def test_memory_that_will_not_do_is_foreseen_before_anything_is_packed(base, data, tmp_path, monkeypatch):
    monkeypatch.setattr(planner_module, "available_memory", lambda device: 1000)
    result = call("finetune", base, "--data", data, "--out", tmp_path / "run", "--experts", "cpu-int8", code=None)
    assert result.exit_code != 0
    text = result.said
    assert "to be free for what follows; got" in text and "Place them as cpu-int8" in text and "packed Wᵀ" in text
    assert "Traceback" not in result.output


@needs_engine
def test_the_plan_of_packed_experts_is_in_the_log(base, data, tmp_path, our_log):
    console = Quiet()
    short = {"sequence_length": 64}  # as many as the model has positions, which needs no line
    finetune(settings(tmp_path / "run", base, data, experts="cpu-bf16", steps=1, **short), console)
    assert any("packed W " in said and "total" in said for said in our_log.messages)
    of_the_gpu = ("step ", "no ", "each step uses")  # what a step has there, or has not
    assert len([said for said in console.said if not said.startswith(of_the_gpu)]) <= 5
    assert not any("\n" in said or "torch." in said for said in console.said)


@each_value_once()
@needs_engine
@pytest.mark.parametrize(("placement", "tolerance"), [("cpu-bf16", 1e-2), ("cpu-int8", 3e-2)])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_packed_experts_give_the_outputs_and_free_their_tensors(model_type, placement, tolerance):
    torch.manual_seed(0)
    model = build(model_type)
    model.set_experts_implementation("amoeba")
    inputs = experts_inputs(23, 2)
    expected = [experts(*inputs) for experts in experts_of(model)]  # not the logits: rounding may change a choice
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert place_experts(model, placement).placement == placement
    assert sum(parameter.numel() for parameter in model.parameters()) < numbers
    for experts, output in zip(experts_of(model), expected, strict=True):
        assert relative(experts(*inputs), output) < tolerance
    with pytest.raises(ValueError, match=r"experts as ordinary tensors.*packed for the CPU"):
        model.state_dict()


@needs_engine
@quick(lambda placement: placement == "cpu-int8")
@pytest.mark.parametrize("placement", ["cpu-bf16", "cpu-int8"])
def test_fine_tuning_with_packed_experts_learns(placement: str, base: Path, data: str, tmp_path: Path) -> None:
    report = finetune(settings(tmp_path / "run", base, data, experts=placement), Quiet())
    assert report.experts == placement
    assert report.final_loss < report.start_loss - 0.3
    resident = base_model(base)
    lora.load(resident, report.adapter)  # the adapter is one like any other


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU --ram alone is refused")
def test_streamed_experts_give_the_adapter_of_resident_ones(base, data, tmp_path):
    """Two slots of six per layer, from a store; the steps' losses and the factors are the same, bit for bit."""
    pack(base, tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        ram = sum(entry.size for entry in store.rest.values()) + 2 * sum(entry.expert_bytes for entry in store.layers)
    told = {"steps": 4, "eval_every": 4, "targets": ("experts", "q_proj"), "train_router": True}
    console = Quiet()
    resident = finetune(settings(tmp_path / "resident", base, data, experts="resident", **told), Quiet())
    streamed = finetune(settings(tmp_path / "run", tmp_path / "store", data, ram=str(ram), **told), console)
    assert streamed.experts == "streamed"
    assert any("2 of 6 experts per layer" in line for line in console.said)
    assert any("read per token" in line for line in console.said)
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "resident")
    assert streamed.final_loss == resident.final_loss
    found, expected = (load_file(Path(report.adapter) / "adapter_model.safetensors") for report in (streamed, resident))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU --ram alone is refused")
def test_what_streaming_cannot_train_with_is_refused_before_loading(base, data, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="experts: expected none for streamed experts; got 'resident'"):
        finetune(settings(tmp_path / "run", base, data, ram="1GiB", experts="resident"), Quiet())
    with pytest.raises(ValueError, match="ram: expected at least"):
        finetune(settings(tmp_path / "run", base, data, ram="1KiB"), Quiet())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="vram: expected a budget on the GPU"):
        finetune(settings(tmp_path / "other", base, data, ram="1GiB"), Quiet())


@needs_engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the dtype of a CPU")
def test_a_bf16_checkpoint_trains_in_float32_where_bf16_is_emulated(base, data, tmp_path, monkeypatch):
    for module in (cpu_dtype, cpu_placements):
        monkeypatch.setattr(module, "has_bf16_instructions", lambda: False)
    half = Path(shutil.copytree(base, tmp_path / "half"))
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    console = Quiet()
    report = finetune(settings(tmp_path / "run", half, data, steps=2), console)
    assert report.experts == "cpu-bf16"
    words = (
        "in float32 (faster on this CPU than the checkpoint's bfloat16); experts cpu-bf16 (stored in bf16 and computed"
    )
    assert any(words in line for line in console.said)


@pytest.mark.parametrize(
    ("dtype", "train_router", "autocast"),
    [(torch.bfloat16, False, False), (torch.bfloat16, True, True), (torch.float32, False, False)],
)
def test_autocast_is_for_routers_that_train_in_fp32_next_to_a_bf16_model(
    dtype: torch.dtype, train_router: bool, autocast: bool, base: Path, data: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The experts' fp32 factors do not need it, and it would cast and copy in every layer."""
    seen = []
    monkeypatch.setattr(
        "amoeba.jobs.finetune.finetune.run_to_end", lambda trainer, *_: seen.append(trainer.args.bf16) or 1 / 0
    )
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ZeroDivisionError):
        finetune(settings(tmp_path / "run", base, data, dtype=name, train_router=train_router), Quiet())
    assert seen == [autocast]
