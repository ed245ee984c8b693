"""Documents from a file, a folder, a dataset's name, or the language reference that comes with Python.

    for found in read_source("notes/", left_out):
        found.document, found.place     # "notes/a.jsonl, line 3", for errors

What cannot be read raises; what is left out on purpose (in a folder hidden and binary files) is counted in left_out.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from amoeba.core.errors import bad_value, counted
from amoeba.data.documents import (
    IMAGES_FIELD,
    KIND_FIELD,
    RECORD_FIELDS,
    RECORDS,
    Document,
    Message,
    Text,
    parse_document,
    parse_messages,
    parse_string,
    shown,
    unread_fields,
)

# A text becomes documents of 2 to 4 kB: a novel in one file can have a held-out part, and a page stays in one piece.
BLOCK_CHARACTERS = 4096
# Shorter paragraphs ("For example:") may come again in the reference without giving anything away.
PASSAGE_CHARACTERS = 40
SEPARATORS = ("\n\n", "\n", " ")
JSON_LINES = (".jsonl", ".ndjson")
TEXT = (".txt", ".md")
TABLES = (".csv", ".tsv")
KNOWN_SUFFIXES = (*TEXT, ".json", ".parquet", *JSON_LINES)
BINARY_SNIFF_BYTES = 8192
GZIP = b"\x1f\x8b"  # what such files begin with


class Placed(NamedTuple):
    """kind: of text, as the record names it; in a folder otherwise the subfolder that the file is in.
    unread: see `unread_fields`."""

    document: Document
    place: str
    kind: str | None = None
    unread: tuple[str, ...] = ()


def read_source(source: str | None, left_out: Counter[str]) -> Iterable[Placed]:
    """See load_corpus for what a source may be."""
    if source is None:
        return _language_reference()
    if not source:
        raise bad_value("data", "a file, a folder or the name of a dataset", "''", "leave it out for the default text")
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, left_out)
    if path.is_char_device() or path.is_block_device():
        raise bad_value(source, "a file or a folder", "a device, which has no end", "name a file with text")
    if path.exists():
        if _suffix(path) in TABLES:
            got = f"a {_suffix(path)} file, whose lines would be trained on as text, commas included"
            remedy = "write its rows as JSON lines (datasets.load_dataset and to_json), or rename it to .txt"
            raise bad_value(source, "text, JSON lines or parquet", got, remedy)
        return read_file(path)
    if path.is_absolute() or source.startswith((".", "~")) or _suffix(path) in KNOWN_SUFFIXES:
        raise _not_found(source, "an existing file or folder", "no such path", "check the spelling")
    return _read_dataset(source)


def _not_found(name: str, expected: str, got: str, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(str(bad_value(name, expected, got, remedy)))


def _language_reference() -> Iterator[Placed]:
    """The topics of `help()`, in which a passage is kept once, in the longest topic that has it.

    Some topics are made of others ("compound" holds "for"): what is held out in one must not be trained on in another.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        remedy = "name a file or a folder with text, or install the full standard library (Debian: apt install python3)"
        raise bad_value("data", "the module pydoc_data, the default text", "a Python without it", remedy) from error
    seen: set[str] = set()
    for _, topic in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        kept = []
        for passage in topic.split("\n\n"):
            words = " ".join(passage.split())
            if words not in seen:
                kept.append(passage)
            if len(words) >= PASSAGE_CHARACTERS:
                seen.add(words)
        remains = "\n\n".join(kept)
        if len(remains) > len(topic) / 2:
            yield from (Placed(block, "the language reference") for block in blocks(remains))


def _read_folder(folder: Path, left_out: Counter[str]) -> Iterator[Placed]:
    files = []
    for path in sorted(_all_files(folder, left_out), key=lambda path: path.relative_to(folder).as_posix()):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out["hidden file"] += 1
        elif path.exists() and not path.is_file():  # a pipe, a socket, a device
            left_out["special file"] += 1
        elif _suffix(path) not in KNOWN_SUFFIXES and _is_binary(path):
            left_out["binary file"] += 1
        else:
            files.append(path)
    if not files:
        found = ", ".join(counted(count, kind) for kind, count in left_out.items()) or "an empty folder"
        remedy = "name the folder that holds the text"
        raise bad_value(str(folder), "a folder with text, JSON or parquet files", found, remedy)
    return chain.from_iterable(_of_subfolder(path, folder) for path in files)


def _of_subfolder(path: Path, folder: Path) -> Iterator[Placed]:
    subfolders = path.relative_to(folder).parts[:-1]
    for found in read_file(path):
        yield found._replace(kind=subfolders[0]) if subfolders and found.kind is None else found


def _all_files(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """Of the folder and those in it. PermissionError where one cannot be read, which Path.rglob passes over."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in folders:
            if Path(parent, name).is_symlink():  # may lead back to where we are
                left_out["linked folder"] += 1
        yield from (Path(parent, name) for name in names)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(BINARY_SNIFF_BYTES)


def _suffix(path: Path) -> str:
    """Of what is in it, if it is compressed."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def read_file(path: Path) -> Iterable[Placed]:
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _read_parquet(path)
    text = read_text(path)
    if suffix in JSON_LINES or (suffix not in TEXT and _begins_with_a_record(text)):
        return _read_json_lines(path, text)
    if suffix == ".json":
        return _read_json(path, text)
    return (Placed(block, str(path)) for block in blocks(text))


def read_text(path: Path) -> str:
    """UTF-8 with or without a byte order mark, perhaps compressed; the line ends of Windows become \\n."""
    data = path.read_bytes()
    if data.startswith(GZIP):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise bad_value(str(path), "a whole gzip file", str(error), "copy or compress it again") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"the byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})"
        remedy = "convert the file, for example `iconv -f latin1 -t utf-8`, or leave it out"
        raise bad_value(str(path), "text in UTF-8", got, remedy) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _begins_with_a_record(text: str) -> bool:
    """Of a pipe, or a file with another name: whether its first line is an object such as `parse_document` reads."""
    first = text.lstrip().partition("\n")[0]
    try:
        return first.startswith("{") and any(field in json.loads(first) for field in RECORD_FIELDS)
    except (ValueError, RecursionError):
        return False


def _read_json_lines(path: Path, text: str) -> Iterator[Placed]:
    # not splitlines(): U+2028 and others that it breaks at are allowed inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield _placed(parse_json(line, place), place, path.parent)


def _read_json(path: Path, text: str) -> Iterator[Placed]:
    if not text.strip():
        return
    content = parse_json(text, str(path))
    if isinstance(content, dict):
        yield _placed(content, str(path), path.parent)
    elif isinstance(content, list):
        for number, record in enumerate(content, start=1):
            place = f"{path}, entry {number}"
            yield _placed(record, place, path.parent)
    else:
        raise bad_value(str(path), "a list of objects or one object", shown(content), f"write objects with {RECORDS}")


def _placed(record: object, place: str, folder: Path | None = None) -> Placed:
    document = parse_document(record, place, folder)
    assert isinstance(record, dict)  # any other is refused
    kind = record.get(KIND_FIELD)
    return Placed(document, place, kind if isinstance(kind, str) and kind else None, tuple(unread_fields(record)))


def parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise bad_value(place, "valid JSON", f"{shown(text)} ({error.msg}, {where})", "correct or remove it") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise bad_value(place, "valid JSON", f"{shown(text)} ({error})", "correct or remove it") from error


def _read_parquet(path: Path) -> Iterator[Placed]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        remedy = "run `pip install pyarrow`"
        raise bad_value(str(path), "the package pyarrow, which reads parquet", "no such package", remedy) from error
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise bad_value(str(path), "a parquet file", f"one that pyarrow refuses ({error})", "write it again") from error
    names = file.schema_arrow.names
    columns = [name for name in RECORD_FIELDS if name in names]
    more = [name for name in (KIND_FIELD, IMAGES_FIELD) if name in names]
    if not {"text", "messages"} & set(columns) and len(columns) < 2:
        raise bad_value(str(path), f"the columns {RECORDS}", f"the columns {', '.join(names)}", "rename a column")
    rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(columns=[*columns, *more]))
    for number, row in enumerate(rows, start=1):
        yield _placed(row, f"{path}, row {number}", path.parent)


def _read_dataset(source: str) -> Iterator[Placed]:
    try:
        import datasets
    except ImportError as error:
        raise _not_found(
            source,
            "a file, a folder or the name of a dataset",
            "no such path, and the package datasets, which loads datasets by name, is not installed",
            "check the path, or run `pip install datasets`",
        ) from error
    name, _, configuration = source.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train")
    except (OSError, ValueError) as error:
        raise _not_found(
            source,
            "a file, a folder or the name of a dataset with a split `train`",
            f"no such path, and from the package datasets: {error}",
            "check the name; a configuration is written `name:configuration`",
        ) from error
    for number, row in enumerate(rows, start=1):
        yield _placed(row, f"{source}, row {number}")


def cut_before(text: str, low: int, high: int) -> int:
    """The last place in low..high after a paragraph, else after a line, else after a word, else `high`."""
    for separator in SEPARATORS:
        found = text.rfind(separator, low, high)
        if found >= 0:
            return found + len(separator)
    return high


def blocks(text: str) -> Iterator[Text]:
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        cut = cut_before(text, start + BLOCK_CHARACTERS // 2, start + BLOCK_CHARACTERS)
        yield Text(text[start:cut].strip("\n"))
        start = cut
    yield Text(text[start:].strip("\n"))


_RECORD = "an object with `prompt`, or `messages` (with --chat)"


class Prompt(NamedTuple):
    line: int
    place: str
    content: str | tuple[Message, ...]

    def as_json(self) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        return [message._asdict() for message in self.content]


def read_prompts(path: Path, chat: bool) -> list[Prompt]:
    """Blank lines are left out. chat: whether a prompt may be a conversation."""
    if _suffix(path) in (".json", ".parquet"):
        expected = "a text file with one prompt per line, or a .jsonl file with one object per line"
        raise bad_value("--prompts", expected, str(path), "convert it, for example with `jq -c '.[]'`")
    found = []
    is_json = _suffix(path) in JSON_LINES
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            content = _of_record(parse_json(line, place), place, chat) if is_json else line
            found.append(Prompt(number, place, content))
    if not found:
        raise bad_value(str(path), "at least one prompt", "an empty file", "write one per line")
    return found


def _of_record(record: object, place: str, chat: bool) -> str | tuple[Message, ...]:
    if not isinstance(record, dict):
        raise bad_value(place, _RECORD, shown(record), "write one object per prompt, or lines of text in a .txt file")
    match {field: record[field] for field in ("prompt", "messages") if record.get(field) is not None}:
        case {"messages": messages, **others} if not others:
            if not chat:
                raise bad_value(place, "`prompt` without --chat", "`messages`", "add --chat for the chat template")
            return parse_messages(messages, "messages", place)
        case {"prompt": prompt, **others} if not others:
            return parse_string(prompt, "prompt", place)
    fields = ", ".join(map(str, record)) or "(none)"
    raise bad_value(place, _RECORD, f"the fields {fields}", "rename, add or remove a field")
