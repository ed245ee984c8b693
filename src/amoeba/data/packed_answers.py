"""Rows to fine-tune on that share rows of one length: every batch has one shape, and with it one captured pass.

    packed = PackedAnswers(AnswerRows(corpus.train, tokenizer, most_tokens=1024), length=1024, padding=0)
    packed[0]["input_ids"], packed[0]["labels"], packed[0]["position_ids"]      # [S], int64
    packed.description                                                          # 812 rows of 1024 tokens, 98 % full

S tokens of a row

No row of `AnswerRows` is cut: the longest are placed first, each where the least room is left that will do. Positions
begin at 0 in each, and in the padding, as in `PackedDataset`: so they do not attend to each other. What shares a row is
the same in every run and every epoch.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from amoeba.data.answers import AnswerRows
from amoeba.data.token_rows import NO_LABEL


class PackedAnswers(Dataset[dict[str, Tensor]]):
    def __init__(self, answers: AnswerRows, length: int, padding: int) -> None:
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
        columns = {
            "input_ids": ids + [self.padding] * missing,
            "labels": labels + [NO_LABEL] * missing,
            "position_ids": [*positions, *range(missing)],
        }
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
