"""Writes a small instruction set: short questions, each asked in several ways, with one right answer.

    python examples/make_instructions.py runs/instructions.jsonl

Rows are {"messages": [user, assistant]}, the same in every run. A model that has heard some of the ways to ask after a
thing can answer the others, so that a held-out part shows whether it has learnt.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

KINDS = {
    "a statement": ("for", "while", "if", "try", "with", "return", "import", "class", "raise", "del"),
    "a type": ("list", "int", "str", "dict", "tuple", "set", "float", "bool"),
    "an operator": ("and", "or", "not", "in", "is", "plus"),
    "an exception": ("ValueError", "TypeError", "KeyError", "IndexError", "NameError", "OSError"),
}
KIND_QUESTIONS = (
    "What is {}?",
    "What kind of thing is {}?",
    "Tell me what {} is.",
    "Do you know what {} is?",
    "In Python, what is {}?",
    "I have read {}. What is it?",
    "Please explain {} in short.",
    "{}: what is that?",
)
OPPOSITES = {
    "true": "false", "first": "last", "open": "close", "long": "short", "new": "old", "more": "less", "left": "right",
    "before": "after", "high": "low", "same": "different", "start": "end", "read": "write", "all": "none",
}  # fmt: skip
OPPOSITE_QUESTIONS = (
    "What is the opposite of {}?",
    "Which word is the opposite of {}?",
    "Tell me the opposite of {}.",
    "{}: what is the opposite?",
)


def questions() -> Iterator[tuple[str, str]]:
    for kind, things in KINDS.items():
        for thing in things:
            for question in KIND_QUESTIONS:
                yield question.format(thing), f"It is {kind}."
    for pair in OPPOSITES.items():
        for word, opposite in (pair, pair[::-1]):
            for question in OPPOSITE_QUESTIONS:
                yield question.format(word), f"The opposite is {opposite}."


def rows() -> list[dict]:
    found = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in questions()
    ]
    random.Random(0).shuffle(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small instruction set as JSONL.")
    parser.add_argument("out", type=Path, help="The file to write.")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    written = rows()
    out.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    print(f"{len(written)} questions with their answers written to {out}")


if __name__ == "__main__":
    main()
