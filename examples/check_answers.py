"""Compares the answers that `amoeba generate --prompts` wrote with the right ones, and prints a table.

    python examples/check_answers.py runs/world/test.jsonl runs/answers.jsonl

An answer is right if it is the expected sentence, word for word.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(test: list[dict], given: list[dict]) -> tuple[list[str], int]:
    """Its lines, and how many answers are right. An answer's `line` is that of its question in the test, from 1."""
    said = {answer["line"]: answer["text"].strip() for answer in given}
    rows = [(asked["prompt"], said.get(line, "(none)"), asked["answer"]) for line, asked in enumerate(test, start=1)]
    first, second = (max(len(row[at]) for row in [*rows, ("question", "answer")]) for at in (0, 1))
    lines = [f"{'question':{first}}  {'answer':{second}}", "-" * (first + second + 9)]
    lines += [f"{q:{first}}  {a:{second}}  {'right' if a == expected else 'wrong'}" for q, a, expected in rows]
    right = sum(a == expected for _, a, expected in rows)
    return [*lines, f"{right} of {len(rows)} right; none of these questions was in the training data"], right


def main() -> None:
    parser = argparse.ArgumentParser(description="Print which answers are right.")
    parser.add_argument("test", type=Path, help="Questions and right answers, JSONL with prompt and answer.")
    parser.add_argument("given", type=Path, help="What amoeba generate --prompts --out wrote.")
    told = parser.parse_args()
    print("\n".join(table(read(told.test), read(told.given))[0]))


if __name__ == "__main__":
    main()
