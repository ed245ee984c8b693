"""Documents as rows of tokens of one length: tokenised, joined with the end-of-text token, cut.

    train = PackedDataset(corpus.train, tokenizer, sequence_length=512)
    held_out = PackedDataset(corpus.held_out, tokenizer, sequence_length=512, keep_last=True)
    train[0]["input_ids"]  # [512], int64

S tokens of a row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from amoeba.data.chat_template import render
from amoeba.data.documents import Document
from amoeba.errors import bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LABEL = -100  # what the loss of transformers does not count
DOCUMENTS_AT_ONCE = 256  # the Python lists of one batch are gone before those of the next


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Items are {"input_ids": [S], "labels": [S]}, int64; labels equal the tokens, the model shifts them.

    keep_last: whether the tokens after the last full row make a padded row, with no label on the padding, as an
    evaluation wants. A rest of one token never does: there is nothing in it to predict, and its loss would be NaN.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        *,
        keep_last: bool = False,
    ) -> None:
        if sequence_length < 2:
            raise bad_value("sequence_length", "at least 2", sequence_length, "512 is a usual length")
        if tokenizer.eos_token_id is None:
            raise bad_value(
                "tokenizer", "an end-of-text token, which goes between documents", "none", "set its eos_token"
            )
        self.sequence_length = sequence_length
        self.tokens = torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *_tokenised(documents, tokenizer)])
        self.padding = tokenizer.eos_token_id
        full, rest = divmod(len(self.tokens), sequence_length)
        self.rows = full + (keep_last and rest >= 2)
        if self.rows == 0:
            needed = 2 if keep_last else sequence_length
            raise bad_value(
                "documents",
                f"at least {needed} tokens, one row of sequence_length {sequence_length}",
                f"{len(self.tokens)} tokens in {len(documents)} documents",
                "give more text or a smaller sequence_length",
            )

    def __len__(self) -> int:
        return self.rows

    def largest_id(self) -> int:
        return int(self.tokens.max())

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        labels = self.tokens[row * self.sequence_length : (row + 1) * self.sequence_length].long()
        missing = self.sequence_length - len(labels)
        return {
            "input_ids": torch.nn.functional.pad(labels, (0, missing), value=self.padding),
            "labels": torch.nn.functional.pad(labels, (0, missing), value=NO_LABEL),
        }


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows of one length."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: the token for its begin, or nothing."""
    end = tokenizer.eos_token_id
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id and token != end]


def _tokenised(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tensor]:
    """Each document between the tokens that the tokenizer puts around a text, unless a chat template wrote them."""
    end, begin = tokenizer.eos_token_id, begin_tokens(tokenizer)
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        texts = [render(document, tokenizer) for document in documents[start : start + DOCUMENTS_AT_ONCE]]
        # verbose: no warning about texts longer than the model, they are cut into rows
        rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for row in rows:
            if row[: len(begin)] != begin:
                row[:0] = begin
            if row[-1:] != [end]:
                row.append(end)
        yield torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int32, device="cpu")
