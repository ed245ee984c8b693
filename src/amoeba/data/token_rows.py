"""Documents as rows of tokens of one length: tokenised, joined with the end-of-text token, cut.

S tokens of a row · B rows of a batch

    held_out = PackedDataset(corpus.held_out, tokenizer, sequence_length=512, keep_last=True)
    held_out[0]["input_ids"]  # [512], int64
    batch = stack([held_out[0], held_out[1]])

Positions begin at 0 in every document, by which a model knows documents apart that share a row. `document_arguments`
says the same in the way of attention that takes documents of any length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from amoeba.core.errors import bad_value
from amoeba.data.documents import Document, characters, render
from amoeba.data.tokenizer import WORTH_KEEPING, kept, key_of

NO_LABEL = -100  # what the loss of transformers does not count
DOCUMENTS_AT_ONCE = 256  # the Python lists of one batch are gone before those of the next


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Items are {"input_ids": [S], "labels": [S], "position_ids": [S]}, int64; labels equal the tokens, the model
    shifts them.

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
            remedy = "set its eos_token"
            raise bad_value("tokenizer", "an end-of-text token, which goes between documents", "none", remedy)
        self.sequence_length = sequence_length
        self.tokens, lengths = _tokens_and_lengths(documents, tokenizer)
        self.starts = lengths.cumsum(0) - lengths
        self.padding = tokenizer.eos_token_id
        full, rest = divmod(len(self.tokens), sequence_length)
        self.rows = full + (keep_last and rest >= 2)
        if self.rows == 0:
            needed = 2 if keep_last else sequence_length
            expected = f"at least {needed} tokens, one row of sequence_length {sequence_length}"
            remedy = "give more text or a smaller sequence_length"
            raise bad_value("documents", expected, f"{len(self.tokens)} tokens in {len(documents)} documents", remedy)

    def __len__(self) -> int:
        return self.rows

    def largest_id(self) -> int:
        return int(self.tokens.max())

    def digest(self) -> str:
        return hashlib.blake2b(self.tokens.numpy().tobytes(), digest_size=16).hexdigest()

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        begin = row * self.sequence_length
        labels = self.tokens[begin : begin + self.sequence_length].long()
        missing = self.sequence_length - len(labels)
        return {
            "input_ids": torch.nn.functional.pad(labels, (0, missing), value=self.padding),
            "labels": torch.nn.functional.pad(labels, (0, missing), value=NO_LABEL),
            "position_ids": self._positions(begin),
        }

    def _positions(self, begin: int) -> Tensor:
        place_S = torch.arange(self.sequence_length, dtype=torch.int64, device="cpu")
        edges = torch.tensor([begin, begin + self.sequence_length], dtype=torch.int64, device="cpu")
        first, last = torch.searchsorted(self.starts, edges)
        start_S = torch.zeros_like(place_S)
        inside = self.starts[first:last] - begin
        start_S[inside] = inside
        return place_S - start_S.cummax(0).values

    def documents_per_row(self) -> int:
        starts_in = torch.bincount(self.starts // self.sequence_length, minlength=self.rows)
        return int(starts_in.max()) + 1  # and one that began before


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def document_arguments(batch: dict[str, Tensor], most: int, longest: int) -> dict[str, Any]:
    """Where the documents of a batch begin and end, as transformers hands it to flash attention.

    A document begins at position 0 and at the beginning of a row; padding is one of its own. most, longest: documents
    of a row and tokens of a document at most, so that all batches of this many rows have the same form.
    """
    rows, length = batch["input_ids"].shape
    first_BS = torch.zeros(rows, length, dtype=torch.bool, device="cpu")
    first_BS[:, :1] = True
    if "position_ids" in batch:
        first_BS |= batch["position_ids"] == 0
    if "attention_mask" in batch:
        mask_BS = batch["attention_mask"]
        first_BS[:, 1:] |= mask_BS[:, 1:] != mask_BS[:, :-1]
    starts = first_BS.flatten().nonzero().flatten()
    ends = torch.full((rows * most + 1,), rows * length, dtype=torch.int32, device="cpu")
    ends[: len(starts)] = starts
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def begin_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: the token for its begin, or nothing."""
    end = tokenizer.eos_token_id
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id and token != end]


def _tokens_and_lengths(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Of all documents; kept for the next run where there are many and it can be told what the tokenizer does."""

    def make() -> Tensor:
        none = torch.empty(0, dtype=torch.int32, device="cpu")
        parts = list(_tokenised(documents, tokenizer))
        return torch.cat([none, *(tokens for tokens, _ in parts), *(lengths for _, lengths in parts)])

    described = _described(tokenizer)
    if described is None or characters(documents) < WORTH_KEEPING:
        numbers = make()
    else:
        key = key_of("tokens", (render(document, tokenizer) for document in documents), **described)
        content = kept(key, lambda: make().numpy().tobytes())
        numbers = torch.frombuffer(bytearray(content), dtype=torch.int32)
    tokens, lengths = numbers.split([len(numbers) - len(documents), len(documents)])
    return tokens, lengths.long()


def _described(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith("transformers."):
        return None
    return {
        "class": type(tokenizer).__qualname__,
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "told": {name: value for name, value in tokenizer.init_kwargs.items() if name != "name_or_path"},
        "around": [begin_tokens(tokenizer), tokenizer.eos_token_id],
    }


def _tokenised(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and lengths of documents; each is between the tokens that the tokenizer puts around a text, unless a chat
    template wrote them."""
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
        numbers = list(chain.from_iterable(rows)), [len(row) for row in rows]
        tokens, lengths = (torch.tensor(each, dtype=torch.int32, device="cpu") for each in numbers)
        yield tokens, lengths
