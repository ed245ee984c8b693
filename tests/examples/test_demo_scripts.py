"""The scripts of `make demo`: no question of the test is asked in training, and answers are checked."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("world")
    subprocess.run([sys.executable, ROOT / "examples" / "small_world.py", folder], check=True)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def test_the_training_data_asks_for_the_facts_of_the_test_in_other_words(world: dict[str, list[dict]]) -> None:
    assert len(world["test"]) == len({row["prompt"] for row in world["test"]}) == 10
    fact_of = {question: fact for fact in script("small_world").facts() for question in fact.questions}
    trained = "\n".join(json.dumps(row, ensure_ascii=False) for row in (*world["corpus"], *world["questions"]))
    stated = "\n".join(row["text"] for row in world["corpus"] if "text" in row)
    for row in world["test"]:
        fact = fact_of[row["prompt"]]
        assert json.dumps(row["prompt"])[1:-1] not in trained
        assert json.dumps(fact.questions[0])[1:-1] in trained and row["prompt"] != fact.questions[0]
        assert row["answer"] == fact.statements[0] and all(statement in stated for statement in fact.statements)
    assert len({row["kind"] for row in world["corpus"]}) == 9


def test_the_table_counts_the_answers_that_are_right_word_for_word() -> None:
    test = [
        {"prompt": "A?", "answer": "It is a."},
        {"prompt": "B?", "answer": "It is b."},
        {"prompt": "C?", "answer": "c"},
    ]
    given = [{"line": 2, "text": " It is b.\n"}, {"line": 1, "text": "It is b."}]
    lines, right = script("check_answers").table(test, given)
    assert right == 1 and lines[-1].startswith("1 of 3 right")
    assert [line.split()[-1] for line in lines[2:5]] == ["wrong", "right", "wrong"] and "(none)" in lines[4]


def test_grpo_rewards_the_right_sentence_and_half_the_words_at_their_places() -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install 'amoeba-moe[trl]'")
    said = [" Paris is big.", "Rome is big.", "no", "Paris is big. Rome is big."]
    assert script("grpo").right(said, ["Paris is big."] * 4) == [1.0, pytest.approx(1 / 3), 0.0, 0.25]
