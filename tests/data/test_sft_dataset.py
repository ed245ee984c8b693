"""Which tokens of a row carry the loss: the answers and what ends them, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")

from amoeba.data.documents import Completion, Conversation, Message, Text
from amoeba.data.sft_dataset import PLAIN_TEMPLATE, Row, SftDataset, check_answers, pad_rows, rows_of
from amoeba.data.token_rows import NO_LABEL
from amoeba.data.tokenizer import train_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
# as of models that drop the thoughts of earlier turns: only the last answer has them
THINKING = (
    "{% for message in messages %}[{{ message.role }}]"
    "{{ '<think/>' if message.role == 'assistant' and loop.last else '' }}"
    "{{ message.content }}<|im_end|>{% endfor %}{{ '[assistant]' if add_generation_prompt else '' }}"
)
TURNS = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "1 plus 1?"),
        Message("assistant", "It is 2."),
        Message("user", "And 2 plus 2?"),
        Message("assistant", "It is 4."),
        Message("user", "Thanks."),
    )
)


def tokenizer_with(template: str | None) -> Any:
    texts = ["It is 2. And what is 2 plus 2? Be brief. Thanks. user assistant system naïve 日本"] * 3
    tokenizer = train_tokenizer(texts, 330)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def answers(tokenizer: Any, document: Any) -> list[list[str]]:
    """The labelled stretches of each row, decoded."""
    found = []
    for row in rows_of(document, tokenizer):
        assert len(row.ids) == len(row.labels)
        assert all(label in (NO_LABEL, token) for token, label in zip(row.ids, row.labels, strict=True))
        stretches: list[list[int]] = [[]]
        for label in row.labels:
            if label == NO_LABEL:
                stretches.append([])
            else:
                stretches[-1].append(label)
        found.append([tokenizer.decode(stretch) for stretch in stretches if stretch])
    return found


def test_every_turn_of_the_assistant_with_its_end_is_an_answer() -> None:
    tokenizer = tokenizer_with(CHATML)
    assert answers(tokenizer, TURNS) == [["It is 2.<|im_end|>", "It is 4.<|im_end|>"]]
    (row,) = rows_of(TURNS, tokenizer)
    assert tokenizer.decode(row.ids).endswith("It is 4.<|im_end|>")  # what comes after the last answer is no use


def test_the_plain_template_ends_an_answer_with_the_end_of_text() -> None:
    tokenizer = tokenizer_with(PLAIN_TEMPLATE)
    assert answers(tokenizer, TURNS) == [[" It is 2.<|endoftext|>", " It is 4.<|endoftext|>"]]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 plus 1?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "user: 1 plus 1?\nassistant:"


def test_interleaved_that_the_template_writes_in_another_way_later_become_rows_of_their_own() -> None:
    tokenizer = tokenizer_with(THINKING)
    found = answers(tokenizer, TURNS)
    assert found == [["<think/>It is 2.<|im_end|>"], ["<think/>It is 4.<|im_end|>"]]
    first, second = (tokenizer.decode(row.ids) for row in rows_of(TURNS, tokenizer))
    assert "And 2 plus 2" not in first
    assert "[assistant]It is 2.<|im_end|>" in second


def test_given_messages_carry_no_loss() -> None:
    document = Conversation(TURNS.messages, given=4)
    assert answers(tokenizer_with(CHATML), document) == [["It is 4.<|im_end|>"]]


def test_completions_and_texts_end_with_the_end_of_text() -> None:
    tokenizer = tokenizer_with(None)
    assert answers(tokenizer, Completion("1 plus 1? ", "It is 2.")) == [["It is 2.<|endoftext|>"]]
    assert answers(tokenizer, Text("It is 2.")) == [["It is 2.<|endoftext|>"]]
    assert answers(tokenizer, Text("It is 2.<|endoftext|>")) == [["It is 2.<|endoftext|>"]]


def test_a_token_across_the_border_is_cut_there() -> None:
    tokenizer = tokenizer_with(None)
    assert len(tokenizer("plus")["input_ids"]) < 4
    for prompt, completion in (("pl", "us"), ("日", "本"), ("na", "ïve"), ("", "plus")):
        (row,) = rows_of(Completion(prompt, completion), tokenizer)
        assert answers(tokenizer, Completion(prompt, completion)) == [[completion + "<|endoftext|>"]]
        ids = tokenizer(prompt)["input_ids"]
        assert row.ids[: len(ids)] == ids  # the prompt as generation tokenises it


def test_rows_are_cut_and_those_without_an_answer_left_out_with_a_word() -> None:
    tokenizer = tokenizer_with(None)
    documents = [Completion("a" * 10, "b" * 30), Completion("a" * 30, "b"), Text("It is 2.")]
    rows = SftDataset(documents, tokenizer, most_tokens=16)
    assert len(rows) == 2
    assert max(len(rows[i]["input_ids"]) for i in range(2)) <= 16
    assert "2 are cut at 16 tokens" in rows.description
    assert "left out: 1 whose answer begins after the cut" in rows.description
    with pytest.raises(ValueError, match=r"data: expected an answer within the first 16 tokens.*Raise sequence_length"):
        SftDataset(documents[1:2], tokenizer, most_tokens=16)


def test_a_batch_is_padded_without_labels_and_masked() -> None:
    rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 1)]
    batch = pad_rows(rows, padding=7)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [0, 7, 7]]
    assert batch["labels"].tolist() == [[0, 1, 2], [0, NO_LABEL, NO_LABEL]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert pad_rows(rows, padding=7, least=4)["input_ids"].tolist() == [[0, 1, 2, 7], [0, 7, 7, 7]]
    assert torch.equal(pad_rows(rows, padding=7, least=2)["input_ids"], batch["input_ids"])


def test_the_longest_row_of_a_batch_is_expected_by_the_lengths_of_all() -> None:
    rows = SftDataset.__new__(SftDataset)
    rows.rows = [Row([0] * length, []) for length in (4, 1, 3, 2)]
    assert rows.longest == 4
    assert rows.expected_longest(1) == 2.5
    assert rows.expected_longest(2) == pytest.approx(sum(max(i, j) for i in range(1, 5) for j in range(1, 5)) / 16)
    assert rows.expected_longest(100) == pytest.approx(4)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Completion("1 plus 1?", " "), "chat.jsonl, line 3: answers: expected at least one, none of them empty; got 1"),
        (Conversation((Message("user", "1?"),)), r"line 3: answers: .*got none \(roles: user\)"),
        (Conversation((Message("user", "1?"), Message("assistant", ""))), "line 3: answers: .*one empty"),
    ],
)
def test_rows_without_an_answer_are_refused_with_their_place(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_answers(tokenizer_with(CHATML))(document, "chat.jsonl, line 3")


def test_a_template_that_refuses_the_roles_is_quoted_with_the_place() -> None:
    tokenizer = tokenizer_with("{{ raise_exception('only users here') }}")
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: messages: .*only users here"):
        check_answers(tokenizer)(TURNS, "a.jsonl, line 1")
