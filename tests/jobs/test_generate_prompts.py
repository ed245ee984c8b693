"""`amoeba generate --prompts`: each prompt's own text, one JSON object per line, and going on after an interruption."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from amoeba.decoding.slots import Slots
from amoeba.jobs.generate.generate import GenerationOptions, generate
from amoeba.system.files import default_folder
from called import Called, call
from selection import quick
from tiny_models import byte_tokenizer, randomise, tiny_config

TEXTS = ["Once upon a time", "x", "", "The end of it", "Ab"]  # the third line is blank
LINES = [1, 2, 4, 5]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
TOKENS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    changes = {"vocab_size": 257, "max_position_embeddings": 64, "eos_token_id": 256, "pad_token_id": 256}
    torch.manual_seed(0)
    randomise(Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, "qwen3_moe", **changes))).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> dict[str, str]:
    """What `amoeba generate` writes to each prompt alone."""
    options = GenerationOptions(max_new_tokens=TOKENS, temperature=0)
    return {text: generate(folder, text, options, lambda piece: None).text for text in filter(None, TEXTS)}


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def invoke(folder: Path, *words: object, device: str = "cpu", **options: Any) -> Called:
    fixed = ("--max-new-tokens", TOKENS, "--temperature", 0, "--device", device)
    return call("generate", folder, *words, *fixed, **options)


def records(text: str) -> dict[int, dict]:
    found = [json.loads(line) for line in text.splitlines()]
    assert len({record["line"] for record in found}) == len(found)
    return {record["line"]: record for record in found}


def refusal(*words: object) -> str:
    result = invoke(*words, code=2)
    return result.stderr.splitlines()[-1]


@quick(lambda size: size != 1)
@pytest.mark.parametrize("size", [1, 3, None])
def test_each_prompt_gets_the_text_that_it_gets_alone(folder, prompts, alone, size):
    result = invoke(folder, "--prompts", prompts, *([] if size is None else ["--batch-size", size]))
    found = records(result.stdout)
    assert sorted(found) == LINES
    for record in found.values():
        assert record["text"] == alone[record["prompt"]]
        assert (record["prompt_tokens"], record["generated_tokens"]) == (len(record["prompt"]), TOKENS)
        assert record["stopped"] == "length"


def test_the_report_counts_prompts_and_tokens(folder, prompts, alone):
    result = invoke(folder, "--prompts", prompts, "--batch-size", 3, "--json")
    *lines, document = result.stdout.splitlines()
    assert {record["prompt"]: record["text"] for record in records("\n".join(lines)).values()} == alone
    document = json.loads(document)
    assert (document["batching"], document["prompts"]) == ("continuous", 4) and document["steps"] in ("native", "plain")
    assert document["batching_reason"] == "3 at once"
    assert (document["prompt_tokens"], document["generated_tokens"]) == (16 + 1 + 13 + 2, 4 * TOKENS)


def test_json_lines_and_conversations(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    said = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": "hi", "id": 7}) + "\n\n" + json.dumps({"messages": said}) + "\n")
    found = records(invoke(folder, "--prompts", path, "--chat").stdout)
    assert (found[1]["prompt"], found[3]["prompt"]) == ("hi", said)
    assert found[1]["text"] == found[3]["text"]
    assert found[1]["prompt_tokens"] == found[3]["prompt_tokens"] == len("[user]hi[a]")


def test_a_later_run_goes_on_after_the_results_that_are_there(folder, prompts, alone, tmp_path, monkeypatch):
    out = tmp_path / "new" / "answers.jsonl"
    original, steps = Slots.step, []

    def interrupted(*given):
        steps.append(given)
        if len(steps) == TOKENS + 2:
            raise KeyboardInterrupt
        return original(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Slots, "step", interrupted)
        result = invoke(folder, "--prompts", prompts, "--out", out, "--batch-size", 2, code=130)
    assert "2 prompts answered, 14 generated" in result.stderr
    assert sorted(records(out.read_text())) == [1, 4]  # the longest first
    with out.open("a") as file:
        file.write('{"line": 2, "mod')  # and killed while writing
    result = invoke(folder, "--prompts", prompts, "--out", out, "--batch-size", 2)
    assert "2 prompts answered, 2 already done" in result.stderr
    assert {record["prompt"]: record["text"] for record in records(out.read_text()).values()} == alone
    assert result.stdout == ""
    before = out.read_text()
    assert "all prompts are already answered" in invoke(folder, "--prompts", prompts, "--out", out).stderr
    assert out.read_text() == before


def test_a_file_that_other_settings_have_begun_is_refused(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    invoke(folder, "--prompts", prompts, "--out", out, "--seed", 3)
    before = out.read_text()
    out.write_text(before[: before.index("\n") + 1])
    line = refusal(folder, "--prompts", prompts, "--out", out, "--seed", 4)
    asked = f"max_new_tokens {TOKENS}, temperature 0.0, seed"
    assert f"out.jsonl, line 1: expected an answer with {asked} 4; got {asked} 3" in line and "another --out" in line
    invoke(folder, "--prompts", prompts, "--out", out, "--seed", 3)
    assert records(out.read_text()) == records(before)


def test_files_may_be_in_the_home_folder(folder, prompts, tmp_path, monkeypatch):
    """A shell leaves the ~ of --out=~/answers.jsonl as it is."""
    monkeypatch.setenv("AMOEBA_CACHE", str(default_folder()))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    invoke(folder, f"--prompts=~/{prompts.name}", "--out=~/answers.jsonl")
    assert sorted(records((tmp_path / "answers.jsonl").read_text())) == LINES


@pytest.mark.parametrize(
    "content",
    [
        "my notes\n",
        "my notes",
        '{"line": 1, "model": "another", "prompt": "Once upon a time"}\n',
        '{"line": 1, "model": "THIS", "prompt": "x"}\n',
        '{"line": 3, "model": "THIS", "prompt": ""}\n',
        "[1]\n",
        '{"line": 1}\n',
        '{"line": [1]}\n',
    ],
)
def test_a_file_of_somebody_else_is_left_alone(folder, prompts, tmp_path, content):
    out, content = tmp_path / "out", content.replace("THIS", str(folder))
    out.write_text(content)
    line = refusal(folder, "--prompts", prompts, "--out", out)
    assert f"expected results of these prompts with {folder}" in line
    assert "name another --out" in line.lower()
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 3}', "p.jsonl, line 2: expected `prompt` to be a string; got 3"),
        ("p.jsonl", "hello", "p.jsonl, line 1: expected valid JSON"),
        ("p.jsonl", '["a"]', "line 1: expected an object with `prompt`, or `messages`"),
        ("p.jsonl", '{"text": "a"}', "line 1: expected an object with `prompt`, or `messages` (with --chat); got the"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "got `messages`. Add --chat"),
        ("p.txt", "a\n" + "x" * 65, "line 2: expected at most 64 tokens, the model's max_position_embeddings; got 65"),
        ("p.txt", "\n \n", "p.txt: expected at least one prompt; got an empty file"),
        ("p.txt", b"\xff", "p.txt: expected text in UTF-8; got the byte 0xff"),
        ("p.json", '[{"prompt": "a"}]', "--prompts: expected a text file with one prompt per line, or a .jsonl file"),
    ],
)
def test_a_bad_line_is_named_before_a_model_is_loaded(folder, tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr("amoeba.jobs.generate.loaded_model.load_placed", lambda *_, **__: pytest.fail("loaded"))
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in refusal(folder, "--prompts", path)


def test_what_does_not_go_together_is_refused(folder, prompts):
    assert "expected a prompt, or --prompts FILE; got both" in refusal(folder, "Once", "--prompts", prompts)
    assert "expected a prompt, or --prompts FILE; got neither" in refusal(folder)
    assert "--out: expected to be used with --prompts FILE" in refusal(folder, "Once", "--out", "x")
    assert "batch_size: expected at least 1" in refusal(folder, "--prompts", prompts, "--batch-size", 0)
    assert "--compile: expected no compiling with serve and --prompts" in refusal(
        folder, "--prompts", prompts, "--compile"
    )
    assert "nowhere.txt" in refusal(folder, "--prompts", "nowhere.txt")


def test_a_sampled_text_is_that_of_generate_with_the_seed_of_its_line(folder, prompts):
    options = ("--max-new-tokens", TOKENS, "--temperature", 1.5, "--seed", 20, "--device", "cpu")
    result = call("generate", folder, "--prompts", prompts, *options)
    for record in records(result.stdout).values():
        options = GenerationOptions(max_new_tokens=TOKENS, temperature=1.5, seed=20 + record["line"])
        assert record["text"] == generate(folder, record["prompt"], options, lambda piece: None).text


def test_a_config_that_asks_for_more_is_answered_one_by_one(folder, prompts, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copied / "generation_config.json").read_text())
    (copied / "generation_config.json").write_text(json.dumps(config | {"no_repeat_ngram_size": 1}))
    *lines, document = invoke(copied, "--prompts", prompts, "--json").stdout.splitlines()
    for record in records("\n".join(lines)).values():
        options = GenerationOptions(max_new_tokens=TOKENS, temperature=0)
        assert record["text"] == generate(copied, record["prompt"], options, lambda piece: None).text
    assert json.loads(document)["batching"] == "none" and "NoRepeatNGram" in json.loads(document)["batching_reason"]


def test_a_failure_of_a_step_is_told(folder, prompts, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory: 3 GiB")

    monkeypatch.setattr(Slots, "step", out_of_memory)
    assert "memory: expected enough for this command; got CUDA out of memory: 3 GiB" in refusal(
        folder, "--prompts", prompts
    )


@pytest.mark.gpu
def test_on_a_gpu(folder, prompts, alone):
    result = invoke(folder, "--prompts", prompts, device="cuda")
    assert {record["prompt"]: record["text"] for record in records(result.stdout).values()} == alone
