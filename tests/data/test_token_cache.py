"""What was made of a text is found again by the same text and settings, whole, and by nothing else."""

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from amoeba.data import token_rows, tokenizer
from amoeba.data.documents import Completion, Conversation, Message, Text
from amoeba.data.token_rows import PackedDataset
from amoeba.data.tokenizer import kept, key_of, train_tokenizer

TEXTS = ["one two three four", "five six", "seven"]
KINDS = {
    "texts": [Text(text) for text in TEXTS],
    "completions": [Completion(text, f" and {text}") for text in TEXTS],
    "conversations": [Conversation((Message("user", text), Message("assistant", "yes"))) for text in TEXTS],
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path))


@pytest.fixture
def _keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (token_rows, tokenizer):
        monkeypatch.setattr(module, "WORTH_KEEPING", 0)


def made(content: bytes = b"made") -> Any:
    return lambda: content


def refuse() -> bytes:
    raise AssertionError("made again")


def files(folder: Path) -> list[Path]:
    return sorted((folder / "data").iterdir())


def test_the_second_run_finds_what_the_first_one_made(tmp_path: Path) -> None:
    assert kept("key", made()) == kept("key", refuse) == b"made"
    assert kept("another", made(b"other")) == b"other"
    assert [stat.S_IMODE(file.stat().st_mode) for file in files(tmp_path)] == [0o600, 0o600]


@pytest.mark.parametrize(
    "other",
    [
        key_of("tokens", ["ab", "d"], vocab=1),
        key_of("tokens", ["a", "bc"], vocab=1),
        key_of("tokens", ["abc"], vocab=1),
        key_of("tokens", ["c", "ab"], vocab=1),
        key_of("tokens", ["ab", "c", ""], vocab=1),
        key_of("tokens", ["ab", "c"], vocab=2),
        key_of("tokenizer", ["ab", "c"], vocab=1),
    ],
)
def test_whatever_changes_it_is_another_key(other: str) -> None:
    assert key_of("tokens", ["ab", "c"], vocab=1) != other


def test_other_code_and_other_packages_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of("tokens", ["ab"])
    for place in range(1 + len(tokenizer._PACKAGES)):
        code = list(tokenizer._code())
        code[place] = "other"
        with monkeypatch.context() as patched:
            patched.setattr(tokenizer, "_code", lambda code=code: code)
            assert key_of("tokens", ["ab"]) != before


@pytest.mark.parametrize("place", [0, 31, 32, 35, None])
def test_a_damaged_file_is_made_anew_with_a_warning(place, tmp_path, caplog):
    kept("key", made())
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    if place is None:
        del content[-1:]
    else:
        content[place] ^= 1
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "amoeba"):
        assert kept("key", made()) == b"made"
    assert "is damaged" in caplog.text
    assert kept("key", refuse) == b"made"


def test_those_not_used_for_longest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MOST_BYTES", 3 * (32 + 4))
    for age, key in enumerate(("third", "second", "first")):
        kept(key, made())
        os.utime(tmp_path / "data" / key, (1000 - age, 1000 - age))
    kept("first", refuse)  # and is the last now
    kept("new", made())
    assert [file.name for file in files(tmp_path)] == ["first", "new", "third"]
    assert kept("huge", made(b"x" * 200)) == b"x" * 200
    assert [file.name for file in files(tmp_path)] == ["first", "new", "third"]


def test_without_a_folder_everything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path / "file"))
    assert kept("key", made()) == b"made"


def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer.os, "replace", full)
    assert kept("key", made()) == b"made"
    assert files(tmp_path) == []


@pytest.mark.usefixtures("_keeps_everything")
@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens_are_those_that_were_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = train_tokenizer(TEXTS, 300)
    first = PackedDataset(KINDS[kind], trained, 5, keep_last=True)
    monkeypatch.setattr(token_rows, "_tokenised", lambda *_: refuse())
    again = PackedDataset(KINDS[kind], train_tokenizer(TEXTS, 300), 5, keep_last=True)
    assert len(again) == len(first) and again.documents_per_row() == first.documents_per_row()
    for row, other in zip(first, again, strict=True):
        assert all(torch.equal(row[name], other[name]) for name in row)
    PackedDataset(KINDS[kind], trained, 7)  # tokens do not depend on the length of a row


@pytest.mark.usefixtures("_keeps_everything")
def test_another_tokenizer_gives_its_own_tokens() -> None:
    def tokens(change: Any) -> list[int]:
        trained = train_tokenizer(TEXTS, 300)
        change(trained)
        return PackedDataset(KINDS["conversations"], trained, 5).tokens.tolist()

    changes = [
        lambda trained: None,
        lambda trained: trained.add_tokens(["three"]),
        lambda trained: setattr(trained, "eos_token", "o"),
        lambda trained: setattr(trained, "chat_template", "{{ messages[0].content }}"),
        lambda trained: setattr(trained, "chat_template", "{{ messages[1].content }} yes and no and yes"),
    ]
    found = [tokens(change) for change in changes]
    assert len({tuple(each) for each in found}) == len(changes)
    assert [tokens(change) for change in changes] == found


@pytest.mark.usefixtures("_keeps_everything")
def test_a_tokenizer_with_code_of_its_own_is_asked_each_time(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300)

    class Own(type(trained)):  # type: ignore[misc]
        pass

    trained.__class__ = Own
    PackedDataset(KINDS["texts"], trained, 5)
    assert all(not file.name.startswith("tokens") for file in files(tmp_path))


@pytest.mark.usefixtures("_keeps_everything")
def test_a_kept_tokenizer_is_the_one_that_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_tokenizer(TEXTS, 300)
    monkeypatch.setattr(tokenizer, "_trained", lambda *_: refuse())
    again = train_tokenizer(TEXTS, 300)
    assert again.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    assert again.special_tokens_map == first.special_tokens_map
    for other in (TEXTS[:-1], [*TEXTS, "eight"]):
        with pytest.raises(AssertionError, match="made again"):
            train_tokenizer(other, 300)
    with pytest.raises(AssertionError, match="made again"):
        train_tokenizer(TEXTS, 301)


def test_little_text_is_not_kept(tmp_path: Path) -> None:
    PackedDataset(KINDS["texts"], train_tokenizer(TEXTS, 300), 5)
    assert not (tmp_path / "data").exists()
