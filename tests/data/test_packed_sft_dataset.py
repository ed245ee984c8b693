"""Conversations that share rows: none is cut, each learns what it would learn alone, and the choice never changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")

from amoeba.data.sft_dataset import PackedSftDataset, Row, SftDataset, pack, pad_rows
from amoeba.data.token_rows import NO_LABEL, document_arguments, stack
from tiny_models import build


def answers(*lengths: int) -> SftDataset:
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
    packed = PackedSftDataset(answers(4, 3, 9), length=10, padding=63)
    assert packed.members == [[0, 1], [2]] and packed.documents_per_row == 3
    assert packed.description == "2 rows of 10 tokens, 80% full" and packed.tokens_per_row == 8
    row = packed[0]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 8, 9, 10, 63, 63, 63]
    assert row["labels"].tolist() == [-100, -100, 3, 4, -100, 9, 10, -100, -100, -100]
    arguments = document_arguments(stack([row, packed[1]]), packed.documents_per_row, 10)
    assert arguments["cu_seq_lens_q"].tolist() == [0, 4, 7, 10, 19, 20, 20]


def test_a_text_of_answers_alone_has_no_label_on_its_first_token():
    found = answers(3)
    found.rows = [Row([5, 6, 7], [5, 6, 7])]
    assert PackedSftDataset(found, length=4, padding=0)[0]["labels"].tolist() == [-100, 6, 7, -100]


def test_packed_and_padded_rows_have_the_same_loss_and_gradients():
    """Over all answer tokens of the batch; here by transformers' own mask for packed rows."""
    model = build("qwen3_moe", vocab_size=64)
    rows = answers(9, 5, 12, 7, 3)
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
