"""Rows of tokens: nothing lost, nothing twice, and no row without something to predict.

S tokens of a row
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amoeba.data.documents import Conversation, Message, Text
from amoeba.data.token_rows import NO_LABEL, PackedDataset, document_arguments, stack
from amoeba.data.tokenizer import END_OF_TEXT, train_tokenizer

BYTES = train_tokenizer([], 257)  # one token per byte, so sizes can be counted by eye
END = BYTES.eos_token_id


def text_of(length):
    return Text("".join(chr(97 + n % 26) for n in range(length)))


def with_start_token(tokenizer):
    """As Mixtral has it: <s> before every text, written by the tokenizer itself."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_documents_are_joined_with_the_end_of_text():
    rows = PackedDataset([Text("ab"), Text("c"), Text("de")], BYTES, 4)
    assert BYTES.decode(rows.tokens) == f"ab{END_OF_TEXT}c{END_OF_TEXT}de{END_OF_TEXT}"
    assert BYTES.decode(rows[0]["input_ids"]) == f"ab{END_OF_TEXT}c"


@settings(max_examples=40)
@given(st.lists(st.integers(0, 31), min_size=1, max_size=5), st.integers(2, 17))
def test_rows_hold_every_token_once_in_order(lengths, S):
    documents = [text_of(length) for length in lengths]
    total = sum(lengths) + len(lengths)
    stream = torch.tensor([t for d in documents for t in [*BYTES(d.text)["input_ids"], END]])
    if total >= S:
        train = PackedDataset(documents, BYTES, S)
        assert len(train) == total // S
        assert torch.equal(torch.cat([row["input_ids"] for row in train]), stream[: total // S * S])
        assert all(torch.equal(row["input_ids"], row["labels"]) for row in train)
    if total >= 2:
        held_out = PackedDataset(documents, BYTES, S, keep_last=True)
        labels = torch.cat([row["labels"] for row in held_out])
        counted = total - (total % S == 1)
        assert torch.equal(labels[labels != NO_LABEL], stream[:counted])
        assert all((row["labels"][1:] != NO_LABEL).any() for row in held_out)
        assert all(row["input_ids"].shape == row["labels"].shape == (S,) for row in held_out)


def test_the_last_row_is_padded_without_labels_on_the_padding():
    row = PackedDataset([Text("abc")], BYTES, 7, keep_last=True)[0]
    assert row["input_ids"].tolist() == [*BYTES("abc")["input_ids"], END, END, END, END]
    assert row["labels"].tolist() == [*BYTES("abc")["input_ids"], END, -100, -100, -100]


def test_items_are_int64_and_the_store_is_one_flat_int32_tensor():
    rows = PackedDataset([text_of(760)], BYTES, 63)
    assert {name: tensor.dtype for name, tensor in rows[0].items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
    }
    assert rows.tokens.dtype == torch.int32 and rows.tokens.shape == (761,)


def test_changing_an_item_does_not_change_the_dataset():
    rows = PackedDataset([text_of(63)], BYTES, 8)
    for name in ("input_ids", "labels"):
        rows[0][name].fill_(0)
    assert torch.equal(rows[0]["input_ids"], rows[0]["labels"])
    assert rows[0]["labels"].tolist() == BYTES("abcdefgh")["input_ids"]
    item = rows[0]
    item["labels"].fill_(NO_LABEL)
    assert item["input_ids"].tolist() == BYTES("abcdefgh")["input_ids"]


def test_more_documents_than_one_batch_of_the_tokenizer():
    rows = PackedDataset([Text(f"{number:04}") for number in range(600)], BYTES, 5)
    assert len(rows) == 600
    assert BYTES.decode(rows[599]["input_ids"]) == f"0599{END_OF_TEXT}"


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(row):
    with pytest.raises(IndexError, match=f"row {row} of 2"):
        PackedDataset([text_of(9)], BYTES, 5)[row]


def test_a_tokenizer_with_a_start_token_puts_it_before_each_document_once():
    tokenizer = with_start_token(train_tokenizer([], 257))
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}" + END_OF_TEXT
    documents = [Text("ab"), Conversation((Message("user", "c"), Message("assistant", "d")))]
    rows = PackedDataset(documents, tokenizer, 8)
    assert tokenizer.decode(rows.tokens) == f"<s>ab{END_OF_TEXT}<s>cd{END_OF_TEXT}"


@pytest.mark.parametrize(("documents", "tokens"), [([text_of(62)], 63), ([], 0)])
def test_a_corpus_shorter_than_one_row_is_explained(documents, tokens):
    wanted = (
        f"documents: expected at least 64 tokens, one row of sequence_length 64; "
        f"got {tokens} tokens in {len(documents)} documents. Give more text or a smaller sequence_length."
    )
    with pytest.raises(ValueError) as caught:
        PackedDataset(documents, BYTES, 64)
    assert str(caught.value) == wanted


def test_an_evaluation_with_nothing_to_predict_is_explained():
    with pytest.raises(ValueError, match=r"at least 2 tokens.*; got 1 tokens in 1 documents"):
        PackedDataset([Text("")], BYTES, 64, keep_last=True)


@pytest.mark.parametrize("length", [1, 0, -3])
def test_a_row_too_short_to_predict_anything_is_explained(length):
    with pytest.raises(ValueError, match=rf"sequence_length: expected at least 2; got {length}\. 512 is"):
        PackedDataset([text_of(9)], BYTES, length)


def test_a_tokenizer_without_end_of_text_is_explained():
    tokenizer = train_tokenizer([], 257)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"tokenizer: expected an end-of-text token.*; got none\. Set its eos_token"):
        PackedDataset([text_of(9)], tokenizer, 4)


def test_positions_begin_anew_in_every_document_and_row():
    rows = PackedDataset([text_of(3), text_of(9), text_of(2)], BYTES, 8)  # each and its end token: 4, 10 and 3
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1]]
    assert rows.documents_per_row() == 3  # two begin in the first row, and one could have begun before it


def test_documents_are_told_apart_by_where_they_begin_and_padding_is_one():
    rows = PackedDataset([text_of(3), text_of(9), text_of(2)], BYTES, 8)
    found = document_arguments(stack(list(rows)), most=3, longest=9)
    assert found["cu_seq_lens_q"].tolist() == [0, 4, 8, 14, 16, 16, 16]
    assert found["cu_seq_lens_q"].dtype == torch.int32 and found["cu_seq_lens_k"] is found["cu_seq_lens_q"]
    assert found["max_length_q"] == found["max_length_k"] == 9
    padded = {"input_ids": torch.zeros(2, 5), "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])}
    assert document_arguments(padded, most=2, longest=5)["cu_seq_lens_q"].tolist() == [0, 3, 5, 10, 10]
