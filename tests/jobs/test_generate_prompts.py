"""`amoeba generate --prompts`: each prompt's own text, one JSON object per line, and going on after an interruption."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from amoeba.data.sources import Prompt
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.generate import prompt_batches, token_steps
from amoeba.jobs.generate.generate import GenerationOptions, generate
from amoeba.jobs.generate.prompt_batches import Row, batches_of
from called import Called, call
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


@pytest.mark.parametrize("size", [1, 3, None])
def test_each_prompt_gets_the_text_that_it_gets_alone(folder, prompts, alone, size):
    result = invoke(folder, "--prompts", prompts, *([] if size is None else ["--batch-size", size]))
    found = records(result.stdout)
    assert sorted(found) == LINES
    for record in found.values():
        assert record["text"] == alone[record["prompt"]]
        assert (record["prompt_tokens"], record["generated_tokens"]) == (len(record["prompt"]), TOKENS)
        assert record["stopped"] == "length"


@pytest.mark.usefixtures("by_decoder")
def test_by_the_decoder_too(folder, prompts, alone):
    result = invoke(folder, "--prompts", prompts, "--batch-size", 3, "--json")
    *lines, document = result.stdout.splitlines()
    assert {record["prompt"]: record["text"] for record in records("\n".join(lines)).values()} == alone
    document = json.loads(document)
    assert (document["steps"], document["batching"], document["prompts"]) == ("captured", "padded", 4)
    assert document["batching_reason"] == "its paged cache needs a GPU; the model is on cpu"
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
    original, calls = prompt_batches._by_decoder, []

    def interrupted(*given):
        calls.append(given[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*given)

    monkeypatch.setattr(prompt_batches, "_by_decoder", interrupted)
    result = invoke(folder, "--prompts", prompts, "--out", out, "--batch-size", 2, code=130)
    assert "2 prompts answered, 14 generated" in result.stderr
    assert sorted(records(out.read_text())) == [1, 4]  # the longest first
    with out.open("a") as file:
        file.write('{"line": 2, "mod')  # and killed while writing
    result = invoke(folder, "--prompts", prompts, "--out", out, "--batch-size", 2)
    assert "2 prompts answered, 2 already done" in result.stderr
    assert [len(batch) for batch in calls] == [2, 2, 2]
    assert {record["prompt"]: record["text"] for record in records(out.read_text()).values()} == alone
    assert result.stdout == ""
    before = out.read_text()
    assert "all prompts are already answered" in invoke(folder, "--prompts", prompts, "--out", out).stderr
    assert out.read_text() == before
    assert len(calls) == 3


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
    assert "expected auto, continuous or padded; got 'all'" in refusal(
        folder, "--prompts", prompts, "--batching", "all"
    )
    assert "batch_size: expected at least 1" in refusal(folder, "--prompts", prompts, "--batch-size", 0)
    assert "got continuous: its paged cache needs a GPU" in refusal(
        folder, "--prompts", prompts, "--batching", "continuous"
    )
    assert "nowhere.txt" in refusal(folder, "--prompts", "nowhere.txt")


# Continuous batching, with a manager that does as transformers' does: it computes pages on a GPU


class Manager:
    def __init__(self, fails: bool) -> None:
        self.fails, self.queue, self.stopped = fails, [], False

    def start(self) -> None: ...

    def add_request(self, ids, request_id, max_new_tokens) -> None:
        self.queue.append((ids, request_id, max_new_tokens))

    def is_running(self) -> bool:
        return True

    def get_result(self, timeout):
        ids, name, most = self.queue.pop()
        failed = self.fails and len(ids) > 10
        new = [] if failed else [ids[-1]] * (most + 2)
        return SimpleNamespace(
            request_id=name, is_finished=lambda: True, error="no page" if failed else None, generated_tokens=new
        )

    def stop(self, block, hard_stop) -> None:
        self.stopped = block and hard_stop


@pytest.mark.parametrize("fails", [False, True])
def test_continuous_batching_and_what_it_fails_with(folder, prompts, alone, monkeypatch, fails):
    manager = Manager(fails)
    monkeypatch.setattr(prompt_batches, "why_not_continuous", lambda model: None)
    monkeypatch.setattr("amoeba.jobs.generate.generate_prompts.why_not_continuous", lambda model: None)
    monkeypatch.setattr(Qwen3MoeForCausalLM, "init_continuous_batching", lambda self, generation_config: manager)
    result = invoke(folder, "--prompts", prompts, "--json")
    *lines, document = result.stdout.splitlines()
    found = {record["prompt"]: record["text"] for record in records("\n".join(lines)).values()}
    failed = [text for text in alone if fails and len(text) > 10]
    assert found == {text: alone[text] if text in failed else text[-1] * TOKENS for text in alone}
    assert manager.stopped
    document = json.loads(document)
    assert document["batching"] == ("padded" if fails else "continuous")
    if fails:
        assert document["batching_reason"] == "continuous batching failed with 2 prompts"
        assert "warning: transformers' continuous batching failed (no page); continuing with padded batches" in (
            result.stderr
        )


def test_which_experts_continuous_batching_takes(monkeypatch):
    monkeypatch.setattr(prompt_batches, "why_no_graphs", lambda device: None)
    model = randomise(Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, "qwen3_moe")))
    assert prompt_batches.why_not_continuous(model) is None
    place_experts(model, "nvfp4-weights")
    assert prompt_batches.why_not_continuous(model) is None
    with monkeypatch.context() as streamed:
        streamed.setattr("amoeba.decoding.step.replays_in", lambda model: object())
        assert "streamed, which transformers' graphs do not support" in prompt_batches.why_not_continuous(model)
    monkeypatch.setattr("amoeba.integrations.coverage.why_waits", lambda model: "its experts wait")
    assert prompt_batches.why_not_continuous(model) == "its experts wait"


def test_continuous_batching_that_does_not_begin(folder, prompts, alone, monkeypatch):
    def refuse(self, generation_config):
        raise ValueError("attention of another kind")

    monkeypatch.setattr("amoeba.jobs.generate.generate_prompts.why_not_continuous", lambda model: None)
    monkeypatch.setattr(Qwen3MoeForCausalLM, "init_continuous_batching", refuse)
    result = invoke(folder, "--prompts", prompts)
    assert {record["prompt"]: record["text"] for record in records(result.stdout).values()} == alone
    assert "attention of another kind" in result.stderr


def test_batches_hold_rows_of_like_length_the_longest_first():
    rows = [Row(None, [0] * length, 1) for length in (2, 5, 2, 9, 5)]
    lengths = lambda batches: [[len(row.ids) for row in batch] for batch in batches]  # noqa: E731
    assert lengths(batches_of(rows, 2, equal_lengths=False)) == [[9, 5], [5, 2], [2]]
    assert lengths(batches_of(rows, 2, equal_lengths=True)) == [[9], [5, 5], [2, 2]]


def test_batches_draw_different_numbers_and_a_run_repeats_its_own():
    seeds = []

    class Model:
        device, generation_config = torch.device("cpu"), SimpleNamespace(eos_token_id=None)

        def generate(self, input_ids, **_):
            seeds.append(torch.initial_seed())
            return torch.cat([input_ids, input_ids], dim=1)

    batches = [[Row(Prompt(line, "", "x"), [5, 6], 2)] for line in (1, 2, 4)]
    for _ in range(2):
        answers = list(prompt_batches.padded(Model(), batches, 1, token_steps.Steps("plain", "", None, 0.0), seed=3))
        assert [ids for _, ids in answers] == [[5, 6]] * 3
    assert len(set(seeds[:3])) == 3 and seeds[:3] == seeds[3:]


@pytest.mark.gpu
@pytest.mark.parametrize("batching", ["continuous", "padded"])
def test_on_a_gpu(folder, prompts, alone, batching):
    result = invoke(folder, "--prompts", prompts, "--batching", batching, device="cuda")
    assert {record["prompt"]: record["text"] for record in records(result.stdout).values()} == alone
