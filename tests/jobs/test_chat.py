"""`amoeba chat` on a tiny random model: answers continue the conversation, and nothing that was read is read again."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from amoeba.jobs.generate import token_steps
from amoeba.jobs.generate.chat import Chat, TooLong, open_chat
from amoeba.jobs.generate.options import GenerationOptions
from amoeba.system.files import default_folder
from called import Called, call
from tiny_models import build, save_byte_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
GREEDY = GenerationOptions(max_new_tokens=7, temperature=0, chat=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    build("qwen3_moe", vocab_size=257, max_position_embeddings=200, eos_token_id=256).save_pretrained(folder)
    save_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(folder):
    with closing(open_chat(folder, GREEDY)) as opened:
        yield opened


def transformers_answer(folder, chat: Chat) -> str:
    """Of plain transformers to the conversation without its last answer."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [message._asdict() for message in chat.messages[:-1]]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=256)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def said(text: str) -> None:
    pass


def test_answers_are_those_of_plain_transformers_to_the_whole_conversation(folder, chat):
    pieces = []
    first = chat.answer("Once", pieces.append)
    assert first.text == "".join(pieces) == transformers_answer(folder, chat) and first.text
    second = chat.answer("and then?", said)
    assert second.text == transformers_answer(folder, chat)
    assert [message.role for message in chat.messages] == ["user", "assistant"] * 2


def test_only_the_new_part_is_read_again(chat):
    first = chat.answer("Once", said)
    second = chat.answer("and then?", said)
    assert first.read_tokens == first.prompt_tokens
    assert second.prompt_tokens - second.read_tokens >= first.prompt_tokens
    again = chat.retry(said)
    assert again.read_tokens == 1 and again.text == second.text


def test_an_undone_question_leaves_no_trace(folder, chat):
    chat.answer("Once", said)
    before, expected = list(chat.messages), chat.answer("and then?", said).text
    assert chat.undo().content == "and then?" and chat.messages == before
    assert chat.answer("and then?", said).text == expected
    chat.clear(system="Be brief.")
    assert [message.content for message in chat.messages] == ["Be brief."] and chat.undo() is None
    chat.answer("Once", said)
    assert chat.messages[-1].content == transformers_answer(folder, chat)


def test_by_the_decoder_the_answers_are_the_same(folder, monkeypatch):
    """Whose steps are captured on a GPU: one decoder serves all answers."""
    with closing(open_chat(folder, GREEDY)) as plain:
        expected = [plain.answer(text, said).text for text in ("Once", "and then?")]
    monkeypatch.setattr(token_steps, "why_plain", lambda model: None)
    with closing(open_chat(folder, GREEDY)) as captured:
        assert [captured.answer(text, said).text for text in ("Once", "and then?")] == expected
        assert captured._steps.decoder is not None


def test_an_interrupted_answer_is_kept_and_the_conversation_goes_on(folder, chat):
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    first = chat.answer("Once", stop)
    assert first.stopped == "interrupted" and chat.messages[-1].content == first.text
    second = chat.answer("and then?", said)
    assert second.read_tokens < second.prompt_tokens  # what was read as a whole is used
    assert second.text == transformers_answer(folder, chat)


def test_a_conversation_that_is_full_says_so_and_stays_as_it_was(folder):
    with closing(open_chat(folder, GREEDY, context=60)) as chat:
        chat.answer("Once", said)
        before = list(chat.messages)
        with pytest.raises(
            TooLong, match=r"message: expected at most 59 tokens with all that was said before; got \d+"
        ):
            chat.answer("x" * 60, said)
        assert chat.messages == before


def invoke(*words: object, **options: Any) -> Called:
    return call("chat", *words, **options)


def test_a_conversation_may_be_saved_in_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("AMOEBA_CACHE", str(default_folder()))
    monkeypatch.setenv("HOME", str(tmp_path))
    invoke(folder, "--max-new-tokens", 2, input="Once\n/save ~/saved.jsonl\n")
    assert (tmp_path / "saved.jsonl").exists()


def test_lines_of_a_pipe_are_messages_and_commands(folder, tmp_path):
    typed = f"Once\\\nmore\n\n/retry\n/system Be brief.\nOnce\n/save {tmp_path / 'saved.jsonl'}\n/exit\nnever read\n"
    result = invoke(folder, "--max-new-tokens", 5, "--temperature", 0, "--json", input=typed)
    document = result.document
    assert result.exit_code == 0 and len(document["answers"]) == 3
    assert [message["content"] for message in document["messages"][:2]] == ["Be brief.", "Once"]
    assert json.loads((tmp_path / "saved.jsonl").read_text()) == {"messages": document["messages"]}
    result = invoke(folder, "--system", "Be brief.", input=f"/save {tmp_path / 'empty.jsonl'}\n")
    assert "nothing to save yet" in result.output and not (tmp_path / "empty.jsonl").exists()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/retry\n", "retry: expected an answer to replace; got none"),
        ("/undo\n", "nothing was asked yet"),
        ("/save\n", "/save: expected a file name"),
        ("Once\n/save /no/such/folder/file\n", "No such file or directory"),
        ("/help\n", "Ctrl-C stops an answer"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(folder, typed, expected):
    result = invoke(folder, "--max-new-tokens", 2, input=f"{typed}Once\n")
    assert expected in result.output and "2 tokens" in result.output


def test_bad_values_are_refused(folder, tmp_path):
    assert "--context: expected 2 to 200" in invoke(folder, "--context", 201, input="", code=2).output
    build("qwen3_moe", vocab_size=257).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    assert "a tokenizer with a chat template" in invoke(tmp_path, input="", code=2).output
