"""Which tokens of a row carry the loss: the answers and what ends them, and nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amoeba.data.documents import Completion, Conversation, Message, Text
from amoeba.data.sft_dataset import (
    PLAIN_TEMPLATE,
    PackedSftDataset,
    Row,
    SftDataset,
    check_answers,
    pack,
    pad_rows,
    rows_of,
)
from amoeba.data.token_rows import NO_LABEL, document_arguments, stack
from amoeba.data.tokenizer import train_tokenizer
from tiny_models import build

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


def test_turns_that_the_template_rewrites_later_are_rows_of_their_own() -> None:
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
    assert "2 cut at 16 tokens" in rows.description
    assert "skipped 1 whose answer starts after the cut" in rows.description
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


def of_lengths(*lengths: int) -> SftDataset:
    """Rows of distinct tokens, of which the second half is the answer."""
    found: SftDataset = object.__new__(SftDataset)
    found.rows = []
    for place, length in enumerate(lengths):
        ids = [(7 * place + token) % 60 + 1 for token in range(length)]
        found.rows.append(Row(ids, [NO_LABEL] * (length // 2) + ids[length // 2 :]))
    return found


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_every_row_is_packed_once_and_whole(lengths):
    rows = pack(lengths, 50)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= 50 for row in rows)
    assert rows == pack(list(lengths), 50)
    # no two rows would fit into one
    filled = sorted(sum(lengths[place] for place in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > 50


def test_positions_begin_anew_and_nothing_predicts_a_first_token():
    packed = PackedSftDataset(of_lengths(4, 3, 9), length=10, padding=63)
    assert packed.members == [[0, 1], [2]] and packed.documents_per_row == 3
    assert packed.description == "2 rows of 10 tokens, 80% full" and packed.tokens_per_row == 8
    row = packed[0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 8, 9, 10, 63, 63, 63]
    assert row["labels"].tolist() == [-100, -100, 3, 4, -100, 9, 10, -100, -100, -100]
    arguments = document_arguments(stack([row, packed[1]]), packed.documents_per_row, 10)
    assert arguments["cu_seq_lens_q"].tolist() == [0, 4, 7, 10, 19, 20, 20]


def test_a_text_of_answers_alone_has_no_label_on_its_first_token():
    found = of_lengths(3)
    found.rows = [Row([5, 6, 7], [5, 6, 7])]
    assert PackedSftDataset(found, length=4, padding=0)[0]["labels"].tolist() == [-100, 6, 7, -100]


def test_packed_and_padded_rows_have_the_same_loss_and_gradients():
    """Over all answer tokens of the batch; here by transformers' own mask for packed rows."""
    model = build("qwen3_moe", vocab_size=64)
    rows = of_lengths(9, 5, 12, 7, 3)
    packed = PackedSftDataset(rows, length=16, padding=0)
    assert len(packed) == 3
    found = {}
    for name, batch in {
        "packed": stack([packed[row] for row in range(3)]),
        "padded": pad_rows([rows[row] for row in range(5)], padding=0),
    }.items():
        model.zero_grad()
        predicted = (batch["labels"][:, 1:] != NO_LABEL).sum()
        loss = model(**batch, use_cache=False, num_items_in_batch=predicted).loss
        loss.backward()
        found[name] = int(predicted), loss.detach(), [p.grad for p in model.parameters()]
    assert found["packed"][0] == found["padded"][0]
    torch.testing.assert_close(found["packed"][1], found["padded"][1])
    for one, other in zip(found["packed"][2], found["padded"][2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
