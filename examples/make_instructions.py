"""Writes a small instruction set: short questions over simple rules, with one right answer each.

    python examples/make_instructions.py runs/instructions.jsonl

Rows are {"messages": [user, assistant]}, the same in every run, each question once. A small model can learn the rules
from some of the questions and answer others: letters after letters, sums, the larger of two numbers, even and odd,
opposites, repeated words.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "true": "false", "first": "last", "open": "closed",
    "long": "short", "new": "old", "more": "less", "before": "after", "high": "low", "same": "different", "in": "out",
}  # fmt: skip
WORDS = ("red", "blue", "green", "list", "name", "value", "class", "string", "number", "module", "tree", "light")


def questions() -> Iterator[tuple[str, str]]:
    letters = string.ascii_lowercase
    for before, after in itertools.pairwise(letters):
        yield f"Which letter comes after {before}?", f"The letter {after}."
        yield f"Which letter comes before {after}?", f"The letter {before}."
    for left in range(10):
        for right in range(10):
            yield f"What is {left} plus {right}?", f"It is {left + right}."
            if left != right:
                yield f"Which is larger, {left} or {right}?", f"{max(left, right)} is larger."
    for number in range(100):
        yield f"Is {number} even or odd?", f"{number} is {'odd' if number % 2 else 'even'}."
    for word, opposite in OPPOSITES.items():
        yield f"What is the opposite of {word}?", f"The opposite is {opposite}."
        yield f"What is the opposite of {opposite}?", f"The opposite is {word}."
    for word in WORDS:
        for other in WORDS:
            if word != other:
                yield f"Say {word} and then {other}.", f"{word} {other}"


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
