"""Writes a small world to learn: nine kinds of short texts, questions with answers, and a test of ten questions.

    python examples/small_world.py runs/world

    corpus.jsonl     texts to train on, each with its kind: {"kind": "animals", "text": "The fox is red. ..."}
    questions.jsonl  questions with their answers, to fine-tune on; the corpus has them too, three a text
    test.jsonl       one question of each topic that neither file asks: there the fact is asked for in other words

All of it follows from the tables below and one seed, so the files are the same every time. Plain Python, no packages.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SEED = 0
TEXTS = 3000

COUNTRIES = {  # capital, continent
    "France": ("Paris", "Europe"), "Italy": ("Rome", "Europe"), "Norway": ("Oslo", "Europe"),
    "Japan": ("Tokyo", "Asia"), "Egypt": ("Cairo", "Africa"), "Kenya": ("Nairobi", "Africa"),
}  # fmt: skip
ANIMALS = {  # colour, home, food
    "fox": ("red", "in the forest", "mice"), "bear": ("brown", "in the mountains", "honey"),
    "camel": ("yellow", "in the desert", "grass"), "frog": ("green", "in the pond", "flies"),
    "whale": ("blue", "in the sea", "fish"), "pig": ("pink", "on the farm", "apples"),
}  # fmt: skip
WORDS = {  # German, French
    "bread": ("Brot", "pain"), "milk": ("Milch", "lait"), "house": ("Haus", "maison"),
    "moon": ("Mond", "lune"), "sun": ("Sonne", "soleil"), "dog": ("Hund", "chien"),
}  # fmt: skip
OPPOSITES = (("hot", "cold"), ("big", "small"), ("long", "short"), ("fast", "slow"))
NUMBERS = range(1, 7)
# How often each kind of text is drawn: more often where more has to be remembered.
WEIGHTS = {
    "animals": 2, "countries": 4, "dictionary": 5, "arithmetic": 4, "Python": 4, "questions": 14,
    "stories": 1, "German": 1, "French": 1,
}  # fmt: skip

NAMES, DAYS = ("Anna", "Ben", "Clara", "David"), ("Monday", "Tuesday", "Friday", "Sunday")
PLACES, GOODS = ("market", "river", "garden", "school"), ("apples", "eggs", "books", "flowers")
GERMAN = (
    ("Der Hund", "Die Katze", "Das Kind", "Der Vogel"),
    ("liegt", "schläft", "spielt", "wartet"),
    ("im Garten", "unter dem Baum", "vor dem Haus", "auf dem Stuhl"),
)
FRENCH = (
    ("Le chien", "Le chat", "La fille", "Le roi"),
    ("mange", "attend", "chante", "dort"),
    ("dans le jardin", "sous la table", "devant la maison", "avec son ami"),
)


class Fact(NamedTuple):
    """statements: how the texts say it; the first is also the answer."""

    kind: str
    topic: str
    subject: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


def facts() -> Iterator[Fact]:
    for country, (capital, continent) in COUNTRIES.items():
        stated = f"The capital of {country} is {capital}.", f"{capital} is the capital of {country}."
        asked = f"What is the capital of {country}?", f"Which city is the capital of {country}?"
        yield Fact("countries", "capital", country, stated, asked)
        stated = f"{country} is in {continent}.", f"{country} is a country in {continent}."
        asked = f"On which continent is {country}?", f"Where is {country}?"
        yield Fact("countries", "continent", country, stated, asked)
    for animal, (colour, home, food) in ANIMALS.items():
        asked = f"What colour is the {animal}?", f"Which colour has the {animal}?"
        yield Fact("animals", "colour", animal, (f"The {animal} is {colour}.",), asked)
        stated = f"The {animal} lives {home}.", f"You find the {animal} {home}."
        asked = f"Where does the {animal} live?", f"Where do you find the {animal}?"
        yield Fact("animals", "home", animal, stated, asked)
        stated = f"The {animal} eats {food}.", f"The food of the {animal} is {food}."
        asked = f"What does the {animal} eat?", f"What is the food of the {animal}?"
        yield Fact("animals", "food", animal, stated, asked)
    for word, names in WORDS.items():
        for language, name in zip(("German", "French"), names, strict=True):
            stated = f"The {language} word for {word} is {name}.", f"{name} is {language} for {word}."
            asked = f"What is the {language} word for {word}?", f"How do you say {word} in {language}?"
            yield Fact("dictionary", language, word, stated, asked)
    for pair in OPPOSITES:
        for word, other in (pair, pair[::-1]):
            asked = f"What is the opposite of {word}?", f"Which word is the opposite of {word}?"
            yield Fact("dictionary", "opposite", pair[0], (f"The opposite of {word} is {other}.",), asked)
    for number in NUMBERS:
        double, square = 2 * number, number * number
        stated = (
            f"The double of {number} is {double}.",
            f"{number} + {number} = {double}",
            f"Half of {double} is {number}.",
        )
        asked = f"What is the double of {number}?", f"How much is the double of {number}?"
        yield Fact("arithmetic", "double", str(number), stated, asked)
        call = f"square({number})"
        stated = f"{call} returns {square}.", f">>> {call}\n{square}", f"assert {call} == {square}"
        asked = f"What does {call} return?", f"In Python, what is {call}?"
        yield Fact("Python", "square", str(number), stated, asked)


def held_out() -> list[Fact]:
    """One fact of each topic, all of different subjects. The test asks for it by the second of its questions, which the
    training never asks; it asks the first one, and the second one of other facts."""
    draw = random.Random(SEED)
    topics: dict[str, list[Fact]] = {}
    for fact in facts():
        topics.setdefault(fact.topic, []).append(fact)
    held: list[Fact] = []
    for group in topics.values():
        held.append(draw.choice([fact for fact in group if fact.subject not in {one.subject for one in held}]))
    return held


def conversations(held: list[Fact]) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": fact.statements[0]}]
        for fact in facts()
        for question in (fact.questions[:1] if fact in held else fact.questions)
    ]


def texts(held: list[Fact]) -> list[dict]:
    """A few sentences each: all about three subjects, or what a small grammar makes; and questions with answers."""
    draw = random.Random(SEED)
    of_kind: dict[str, dict[str, list[str]]] = {}  # kind, subject, statements
    for fact in facts():
        of_kind.setdefault(fact.kind, {}).setdefault(fact.subject, []).extend(fact.statements)
    answered = conversations(held)
    made: list[dict] = []
    for kind in draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=TEXTS):
        if kind == "questions":
            made.append({"kind": kind, "messages": [turn for turns in draw.sample(answered, 3) for turn in turns]})
        else:
            made.append({"kind": kind, "text": _text(kind, of_kind.get(kind, {}), draw)})
    return made


def _text(kind: str, group: dict[str, list[str]], draw: random.Random) -> str:
    if kind == "stories":
        return _story(draw)
    if kind in ("German", "French"):
        parts = GERMAN if kind == "German" else FRENCH
        return " ".join(" ".join(draw.choice(part) for part in parts) + "." for _ in range(5))
    stated = []
    for subject in draw.sample(list(group), 3):
        stated += draw.sample(group[subject], len(group[subject]))
    if kind == "Python":
        stated.insert(0, "def square(n):\n    return n * n")
    return ("\n" if kind in ("arithmetic", "Python") else " ").join(stated)


def _story(draw: random.Random) -> str:
    one, other = draw.sample(NAMES, 2)
    goods = draw.choice(GOODS)
    return (
        f"On {draw.choice(DAYS)} {one} went to the {draw.choice(PLACES)} and found some {goods}. "
        f"{one} gave the {goods} to {other}. {other} was happy and said thank you. Then they went home."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write texts, questions and a test about a small world.")
    parser.add_argument("out", type=Path, help="The folder to write into.")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    held = held_out()
    answered = [{"messages": turns} for turns in conversations(held)]
    test = [{"prompt": fact.questions[1], "answer": fact.statements[0]} for fact in held]
    for name, rows in (("corpus", texts(held)), ("questions", answered), ("test", test)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    made = f"{TEXTS} texts of {len(WEIGHTS)} kinds, {len(answered)} questions with answers, {len(test)} for the test"
    print(f"the corpus is made up by examples/small_world.py: {made}")
    print(f"none of the {len(test)} is in the training data, which asks for these facts in other words; see {out}")


if __name__ == "__main__":
    main()
