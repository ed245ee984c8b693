"""Rows to fine-tune on: a document as tokens, with a label on the answers and none on what they answer.

S tokens of a row

    rows = SftDataset(corpus.train, tokenizer, most_tokens=1024)
    rows[0]["input_ids"], rows[0]["labels"]      # [S], int64, of any length; NO_LABEL on what is not an answer
    pad_rows([rows[0], rows[1]], padding=0)      # a batch, with its attention_mask

Answers are the assistant's turns, the completion of a prompt, or all of a text, each with the token that ends it. The
text is tokenised as a whole, or, where a token would lie across the border of an answer, in pieces. Rows of a
conversation with images have the images' inputs too, read again for each batch.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from amoeba.core.errors import bad_value, counted
from amoeba.data.documents import (
    IMAGE,
    Completion,
    Conversation,
    Document,
    IllustratedConversation,
    Text,
    by_template,
    messages_of,
)
from amoeba.data.token_rows import NO_LABEL, begin_tokens
from amoeba.integrations.images import ImageReader, is_of_tokens, joined

# For a tokenizer without a chat template. The space after the colon is the answer's, as byte-level tokens have it.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ eos_token if message.role == 'assistant' else '' }}\n{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)


OF_TOKENS = ("input_ids", "labels", "position_ids")  # of a row; the rest is of its images


class Piece(NamedTuple):
    text: str
    is_answer: bool


class Row(NamedTuple):
    ids: list[int]
    labels: list[int]
    text: str = ""  # of a row with images, with a placeholder for each
    images: tuple[str | bytes, ...] = ()


class SftDataset(Dataset[dict[str, Tensor]]):
    """Rows longer than `most_tokens` are cut at their end; one that has no answer before the cut, or that has images,
    is left out. All are counted in `description`."""

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: PreTrainedTokenizerBase,
        most_tokens: int,
        reader: ImageReader | None = None,
    ) -> None:
        if most_tokens < 2:
            raise bad_value("sequence_length", "at least 2", most_tokens, "1024 is a usual length")
        self.reader = reader
        found = [row for document in documents for row in rows_of(document, tokenizer, reader)]
        rows = [row for row in found if not row.images or len(row.ids) <= most_tokens]
        cut = [row._replace(ids=row.ids[:most_tokens], labels=row.labels[:most_tokens]) for row in rows]
        self.rows = [row for row in cut if any(label != NO_LABEL for label in row.labels[1:])]
        if not self.rows:
            expected = f"an answer within the first {most_tokens} tokens of a row"
            raise bad_value("data", expected, f"none in {counted(len(found), 'row')}", "raise sequence_length")
        labels = chain.from_iterable(row.labels for row in self.rows)
        tokens, answers = sum(len(row.ids) for row in self.rows), sum(label != NO_LABEL for label in labels)
        self.tokens_per_row = tokens / len(self.rows)
        self.description = f"{counted(len(self.rows), 'row')} of {self.tokens_per_row:.0f} tokens on average, "
        self.description += f"{answers / tokens:.0%} of them answers"
        shortened = sum(len(row.ids) > most_tokens for row in rows)
        if shortened:
            self.description += f"; {shortened} cut at {most_tokens} tokens"
        if len(self.rows) < len(rows):
            self.description += f"; skipped {len(rows) - len(self.rows)} whose answer starts after the cut"
        if len(rows) < len(found):
            self.description += f"; skipped {len(found) - len(rows)} with images and more than {most_tokens} tokens"

    @property
    def has_images(self) -> bool:
        return any(row.images for row in self.rows)

    @property
    def longest(self) -> int:
        return max(len(row.ids) for row in self.rows)

    def expected_longest(self, batch: int) -> float:
        """Of the rows of a random batch."""
        lengths = sorted(len(row.ids) for row in self.rows)
        chances = [(place / len(lengths)) ** batch for place in range(len(lengths) + 1)]
        return sum(length * (chances[at + 1] - chances[at]) for at, length in enumerate(lengths))

    def largest_id(self) -> int:
        return max(max(row.ids) for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found = self.rows[row]
        columns = {"input_ids": found.ids, "labels": found.labels}
        row_of = {name: torch.tensor(ids, dtype=torch.int64, device="cpu") for name, ids in columns.items()}
        if not found.images:
            return row_of
        assert self.reader is not None  # it has read them before
        given = self.reader.read(found.text, found.images)
        others = {name: each for name, each in given.items() if name not in ("input_ids", "attention_mask")}
        return row_of | {name: each[0] if is_of_tokens(name) else each for name, each in others.items()}


def pad_rows(
    rows: list[dict[str, Tensor]], padding: int, least: int = 0, images_in: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A batch as long as its longest row, or `least`."""
    length = max(least, *(len(row["input_ids"]) for row in rows))

    def padded(tensors: Iterator[Tensor], value: int) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.stack([pad(tensor, (0, length - len(tensor)), value=value) for tensor in tensors])

    return {
        "input_ids": padded((row["input_ids"] for row in rows), padding),
        "labels": padded((row["labels"] for row in rows), NO_LABEL),
        "attention_mask": padded((torch.ones_like(row["input_ids"]) for row in rows), 0),
    } | joined([{name: row[name] for name in row if name not in OF_TOKENS} for row in rows], length, images_in)


def check_answers(tokenizer: PreTrainedTokenizerBase) -> Callable[[Document, str], None]:
    """For load_corpus: refuses a document without an answer, and names its place."""

    def check(document: Document, place: str) -> None:
        try:
            found = answers_of(document)
            if not found or not all(answer.strip() for answer in found):
                got = f"{len(found)} of them, one empty" if found else "none"
                if isinstance(document, Conversation):
                    got += f" (roles: {', '.join(message.role for message in document.messages)})"
                raise bad_value("answers", "at least one, none of them empty", got, "correct the row or remove it")
            if isinstance(document, Conversation):
                pieces_of(document, tokenizer)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    return check


def answers_of(document: Document) -> list[str]:
    match document:
        case Text(text):
            return [text]
        case Completion(completion=completion):
            return [completion]
        case Conversation(messages, given):
            return [message.content for message in messages[given:] if message.role == "assistant"]


def pieces_of(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[list[Piece]]:
    """The text in pieces, row by row; more than one row where a template writes an earlier turn in another way."""
    match document:
        case Text(text):
            return [[Piece(text, True)]]
        case Completion(prompt, completion):
            return [[Piece(prompt, False), Piece(completion, True)]]
        case Conversation():
            return _pieces_by_template(document, tokenizer)


def _pieces_by_template(document: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[list[Piece]]:
    messages, turns = messages_of(document), _turns(document)
    spans = []
    for turn in turns:
        before = by_template(messages[:turn], tokenizer, add_generation_prompt=True) if turn else ""
        until = by_template(messages[: turn + 1], tokenizer)
        if not until.startswith(before):
            got = f"{before[-40:]!r} before an answer that is written {until[-80:]!r}"
            remedy = "use a tokenizer with another template, or rows of prompt and completion"
            raise bad_value("chat template", "one that begins an answer as it does in generation", got, remedy)
        spans.append((len(before), until.rstrip("\n")))
    whole = by_template(messages[: turns[-1] + 1], tokenizer)
    if not all(whole.startswith(until) for _, until in spans):
        return [[Piece(until[:start], False), Piece(until[start:], True)] for start, until in spans]
    pieces, at = [], 0
    for start, until in spans:
        pieces += [Piece(whole[at:start], False), Piece(until[start:], True)]
        at = len(until)
    return [pieces]


def _turns(document: Conversation) -> list[int]:
    found = enumerate(document.messages)
    return [number for number, message in found if message.role == "assistant" and number >= document.given]


def rows_of(document: Document, tokenizer: PreTrainedTokenizerBase, reader: ImageReader | None = None) -> Iterator[Row]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
    rows = pieces_of(document, tokenizer)
    for number, pieces in enumerate(rows):
        row = _tokenised([piece for piece in pieces if piece.text], tokenizer)
        if isinstance(document, IllustratedConversation):
            assert reader is not None
            last = _turns(document)[number if len(rows) > 1 else -1]
            count = sum(message.content.count(IMAGE) for message in document.messages[:last])
            text, images = "".join(piece.text for piece in pieces), document.images[:count]
            if images:
                row = _expanded(row, reader.ids(reader.read(text, images)))._replace(text=text, images=images)
        if not isinstance(document, Conversation):
            begin = begin_tokens(tokenizer)
            if row.ids[: len(begin)] != begin:
                row = Row(begin + row.ids, [NO_LABEL] * len(begin) + row.labels)
        if row.ids[-1] not in special:  # otherwise the template, or the text, has its own end
            end = tokenizer.eos_token_id
            row = row._replace(ids=[*row.ids, end], labels=[*row.labels, end])
        yield row


def _expanded(row: Row, ids: list[int]) -> Row:
    """With the tokens that the processor put in place of an image's placeholder: they repeat it, and some are around
    it. Answers have no images."""
    labels, at = [], 0
    for token in ids:
        is_there = at < len(row.ids) and token == row.ids[at]
        labels.append(row.labels[at] if is_there else NO_LABEL)
        at += is_there
    if at < len(row.ids):
        got = f"other tokens from number {at} on"
        raise bad_value("images", "a processor that repeats the placeholder of an image", got, "use another model")
    return Row(ids, labels)


def _tokenised(pieces: list[Piece], tokenizer: PreTrainedTokenizerBase) -> Row:
    options = {"add_special_tokens": False, "verbose": False}
    if tokenizer.is_fast:
        whole = tokenizer("".join(piece.text for piece in pieces), return_offsets_mapping=True, **options)
        ids, offsets, labels = whole["input_ids"], whole["offset_mapping"], []
        borders, end = [], 0
        for piece in pieces:
            borders.append((end, end + len(piece.text), piece.is_answer))
            end += len(piece.text)
        for token, (first, last) in zip(ids, offsets, strict=True):
            inside = [is_answer for start, stop, is_answer in borders if start <= first and last <= stop]
            if not inside:
                break
            labels.append(token if inside[0] else NO_LABEL)
        else:
            return Row(ids, labels)
    ids, labels = [], []
    for piece in pieces:
        tokens = tokenizer(piece.text, **options)["input_ids"]
        ids += tokens
        labels += tokens if piece.is_answer else [NO_LABEL] * len(tokens)
    return Row(ids, labels)


class PackedSftDataset(Dataset[dict[str, Tensor]]):
    def __init__(self, answers: SftDataset, length: int, padding: int) -> None:
        self.answers, self.length, self.padding = answers, length, padding
        lengths = [len(row.ids) for row in answers.rows]
        self.members = pack(lengths, length)
        self.tokens_per_row = sum(lengths) / len(self.members)
        self.documents_per_row = max(map(len, self.members)) + 1  # and the padding
        self.description = f"{len(self.members)} rows of {length} tokens, {self.tokens_per_row / length:.0%} full"

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for member in self.members[row]:
            found = self.answers.rows[member]
            ids += found.ids
            labels += [NO_LABEL, *found.labels[1:]]  # nothing before it tells its first token
            positions += range(len(found.ids))
        missing = self.length - len(ids)
        columns = {"input_ids": ids + [self.padding] * missing, "labels": labels + [NO_LABEL] * missing}
        columns |= {"position_ids": [*positions, *range(missing)]}
        return {name: torch.tensor(numbers, dtype=torch.int64, device="cpu") for name, numbers in columns.items()}


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which of them share a row of `room`, each row in the order of the data; none is longer than that."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # room left and the row, sorted
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        at = bisect.bisect_left(left, (lengths[place], -1))
        if at == len(left):
            rows.append([place])
            free, row = room, len(rows) - 1
        else:
            free, row = left.pop(at)
            rows[row].append(place)
        bisect.insort(left, (free - lengths[place], row))
    return sorted(sorted(row) for row in rows)
