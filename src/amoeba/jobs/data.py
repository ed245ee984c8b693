"""Text to train on, from a file, a folder, a dataset's name or nothing at all, with a part held out.

    corpus = load_corpus("notes/")          # or None: the Python language reference that comes with Python
    render(corpus.train[0], tokenizer)      # one string

Nothing is left out silently: what cannot be read raises, and what is left out on purpose (blank documents, and in a
folder hidden and binary files) is counted in `Corpus.description`.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amoeba.errors import bad_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text becomes documents of 2 to 4 kB: a novel in one file can have a held-out part, and a page stays in one piece.
BLOCK_CHARACTERS = 4096
# Shorter paragraphs ("For example:") may come again in the reference without giving anything away.
PASSAGE_CHARACTERS = 40
SEPARATORS = ("\n\n", "\n", " ")
RECORD_FIELDS = ("text", "messages", "prompt", "completion")
RECORDS = "`text`, or `messages`, or `prompt` and `completion`"
JSON_LINES = (".jsonl", ".ndjson")
KNOWN_SUFFIXES = (".txt", ".md", ".json", ".parquet", *JSON_LINES)
BINARY_SNIFF_BYTES = 8192


class Message(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


Document = Text | Conversation | Completion


@dataclass(frozen=True)
class Corpus:
    train: list[Document]
    held_out: list[Document]
    description: str


def load_corpus(source: str | None, *, held_out: float = 0.05, seed: int = 0) -> Corpus:
    """The documents of `source`, of which about `held_out` of the characters are kept for evaluation.

    source: None, a file (.jsonl, .json, .parquet, anything else is UTF-8 text), a folder of such files, or the name
    of a dataset of the Hugging Face hub (`name` or `name:configuration`), whose split "train" is read.
    """
    if not 0 < held_out < 1:
        raise bad_value("held_out", "a fraction between 0 and 1, both excluded", held_out, "0.05 holds out 5 %")
    left_out: Counter[str] = Counter()
    documents = []
    for document in _read_source(source, left_out):
        if _is_blank(document):
            left_out["blank documents"] += 1
        else:
            documents.append(document)
    name = source if source is not None else f"the language reference of Python {platform.python_version()}"
    if not documents:
        found = ", ".join(f"{count} {kind}" for kind, count in left_out.items()) or "no document at all"
        raise bad_value(name, "text to train on", found, "give a file or a folder that holds text")
    train, held = _split(documents, held_out, seed, name)
    description = f"{name}: {len(train)} documents to train on ({_characters(train):,} characters), "
    description += f"{len(held)} held out ({_characters(held):,} characters)"
    for kind, count in left_out.items():
        description += f"; left out: {count} {kind}"
    return Corpus(train, held, description)


def render(document: Document, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The document as one string; messages by the tokenizer's chat template, or `role: content` lines without one.

    A prompt and its completion are joined as they are, as TRL does.
    """
    match document:
        case Text(text):
            return text
        case Completion(prompt, completion):
            return prompt + completion
        case Conversation(messages):
            if tokenizer is None or not tokenizer.chat_template:
                return "\n".join(f"{role}: {content}" for role, content in messages)
            return _by_template(messages, tokenizer)


def _by_template(messages: tuple[Message, ...], tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template([message._asdict() for message in messages], tokenize=False))
    except TemplateError as error:
        raise bad_value(
            "messages",
            "a conversation that the tokenizer's chat template accepts",
            f"the roles {', '.join(message.role for message in messages)}: {error}",
            "change the messages, or use a tokenizer with another template",
        ) from error


def _is_blank(document: Document) -> bool:
    return not any(content.strip() for content in _contents(document))


def _contents(document: Document) -> Iterator[str]:
    match document:
        case Text(text):
            yield text
        case Completion(prompt, completion):
            yield from (prompt, completion)
        case Conversation(messages):
            yield from (message.content for message in messages)


def _characters(documents: Iterable[Document]) -> int:
    return sum(len(content) for document in documents for content in _contents(document))


# --- the split


def _split(documents: list[Document], held_out: float, seed: int, name: str) -> tuple[list[Document], list[Document]]:
    """By content, so that neither the order of the files nor a second copy of a document moves the border."""
    keys = [_key(document, seed) for document in documents]
    # copies of a document go to the same side, so what counts is how much one content weighs with all its copies
    weight: Counter[str] = Counter()
    for key, document in zip(keys, documents, strict=True):
        weight[key] += _characters([document])
    if len(weight) == 1:
        head, tail = _cut_in_two(documents[0], held_out, name)
        return [head] * len(documents), [tail] * len(documents)
    room = held_out * weight.total()
    held_keys = set()
    for key in sorted(weight):
        if weight[key] <= room:
            held_keys.add(key)
            room -= weight[key]
    if not held_keys:
        held_keys.add(min(weight, key=lambda key: (weight[key], key)))
    train = [document for key, document in zip(keys, documents, strict=True) if key not in held_keys]
    held = [document for key, document in zip(keys, documents, strict=True) if key in held_keys]
    return train, held


def _key(document: Document, seed: int) -> str:
    content = json.dumps([seed, asdict(document)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _cut_in_two(document: Document, held_out: float, name: str) -> tuple[Text, Text]:
    text = document.text.strip() if isinstance(document, Text) else ""
    if len(text) < 2:
        raise bad_value(
            name,
            "two different documents, one to train on and one to hold out, or one text to cut in two",
            f"a single {type(document).__name__.lower()}",
            "add documents",
        )
    near = min(max(int((1 - held_out) * len(text)), 1), len(text) - 1)
    cut = _cut_before(text, max(near // 2, 1), near)
    return Text(text[:cut].rstrip()), Text(text[cut:].lstrip("\n"))


def _cut_before(text: str, low: int, high: int) -> int:
    """The last place in low..high after a paragraph, else after a line, else after a word, else `high`."""
    for separator in SEPARATORS:
        found = text.rfind(separator, low, high)
        if found >= 0:
            return found + len(separator)
    return high


def _blocks(text: str) -> Iterator[Text]:
    start = 0
    while len(text) - start > BLOCK_CHARACTERS:
        cut = _cut_before(text, start + BLOCK_CHARACTERS // 2, start + BLOCK_CHARACTERS)
        yield Text(text[start:cut].strip("\n"))
        start = cut
    yield Text(text[start:].strip("\n"))


# --- where the documents come from


def _read_source(source: str | None, left_out: Counter[str]) -> Iterable[Document]:
    if source is None:
        return _language_reference()
    if not source:
        raise bad_value("data", "a file, a folder or the name of a dataset", "''", "leave it out for the default text")
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, left_out)
    if path.exists():
        return _read_file(path)
    if path.is_absolute() or source.startswith((".", "~")) or path.suffix.lower() in KNOWN_SUFFIXES:
        raise _not_found(source, "an existing file or folder", "no such path", "check the spelling")
    return _read_dataset(source)


def _not_found(name: str, expected: str, got: str, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(str(bad_value(name, expected, got, remedy)))


def _language_reference() -> Iterator[Text]:
    """The topics of `help()`, in which a passage is kept once, in the longest topic that has it.

    Some topics are made of others ("compound" holds "for"): what is held out in one must not be trained on in another.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise bad_value(
            "data",
            "the module pydoc_data, the default text",
            "a Python without it",
            "name a file or a folder with text, or install the full standard library (Debian: apt install python3)",
        ) from error
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
            yield from _blocks(remains)


def _read_folder(folder: Path, left_out: Counter[str]) -> Iterator[Document]:
    files = []
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        if path.is_dir():
            continue
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out["hidden files"] += 1
        elif path.suffix.lower() not in KNOWN_SUFFIXES and _is_binary(path):
            left_out["binary files"] += 1
        else:
            files.append(path)
    if not files:
        found = ", ".join(f"{count} {kind}" for kind, count in left_out.items()) or "an empty folder"
        raise bad_value(
            str(folder), "a folder with text, JSON or parquet files", found, "name the folder that holds the text"
        )
    return chain.from_iterable(map(_read_file, files))


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(BINARY_SNIFF_BYTES)


def _read_file(path: Path) -> Iterable[Document]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path)
    text = _read_text(path)
    if suffix in JSON_LINES:
        return _read_json_lines(path, text)
    if suffix == ".json":
        return _read_json(path, text)
    return _blocks(text)


def _read_text(path: Path) -> str:
    """UTF-8 with or without a byte order mark; the line ends of Windows become \\n."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_value(
            str(path),
            "text in UTF-8",
            f"the byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})",
            "convert the file, for example `iconv -f latin1 -t utf-8`, or leave it out",
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _read_json_lines(path: Path, text: str) -> Iterator[Document]:
    # not splitlines(): U+2028 and others that it breaks at are allowed inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield _document(_parse_json(line, place), place)


def _read_json(path: Path, text: str) -> Iterator[Document]:
    if not text.strip():
        return
    content = _parse_json(text, str(path))
    if isinstance(content, dict):
        yield _document(content, str(path))
    elif isinstance(content, list):
        for number, record in enumerate(content, start=1):
            place = f"{path}, entry {number}"
            yield _document(record, place)
    else:
        raise bad_value(str(path), "a list of objects or one object", _shown(content), f"write objects with {RECORDS}")


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise bad_value(
            place, "valid JSON", f"{_shown(text)} ({error.msg}, {where})", "correct or remove it"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        raise bad_value(place, "valid JSON", f"{_shown(text)} ({error})", "correct or remove it") from error


def _read_parquet(path: Path) -> Iterator[Document]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise bad_value(
            str(path), "the package pyarrow, which reads parquet", "no such package", "run `pip install pyarrow`"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise bad_value(str(path), "a parquet file", f"one that pyarrow refuses ({error})", "write it again") from error
    names = file.schema_arrow.names
    columns = [name for name in RECORD_FIELDS if name in names]
    if not {"text", "messages"} & set(columns) and len(columns) < 2:
        raise bad_value(str(path), f"the columns {RECORDS}", f"the columns {', '.join(names)}", "rename a column")
    rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(columns=columns))
    for number, row in enumerate(rows, start=1):
        yield _document(row, f"{path}, row {number}")


def _read_dataset(source: str) -> Iterator[Document]:
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
        yield _document(row, f"{source}, row {number}")


# --- one record of JSON, parquet or a dataset


def _document(record: object, place: str) -> Document:
    if not isinstance(record, dict):
        raise bad_value(place, f"an object with {RECORDS}", _shown(record), "write one object per document")
    match {field: record[field] for field in RECORD_FIELDS if record.get(field) is not None}:
        case {"text": text}:
            return Text(_string(text, "text", place))
        case {"messages": messages}:
            return Conversation(_messages(messages, "messages", place))
        case {"prompt": list() as prompt, "completion": list() as completion}:
            return Conversation(_messages(prompt, "prompt", place) + _messages(completion, "completion", place))
        case {"prompt": prompt, "completion": completion}:
            return Completion(_string(prompt, "prompt", place), _string(completion, "completion", place))
    fields = ", ".join(f"{field} (null)" if value is None else str(field) for field, value in record.items())
    raise bad_value(
        place, f"an object with {RECORDS}", f"the fields {fields or '(none)'}", "rename or add a field, or remove it"
    )


def _messages(messages: object, field: str, place: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise bad_value(
            place, f"`{field}` to be a list of messages with role and content", _shown(messages), "correct or remove it"
        )
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("tool_calls"):
            raise bad_value(
                place,
                f"message {number} of `{field}` to be an object with role and content, without tool calls",
                _shown(message),
                "write calls of tools as content, or remove the conversation",
            )
        role, content = (_string(message.get(part), f"{field}[{number - 1}].{part}", place) for part in Message._fields)
        found.append(Message(role, content))
    return tuple(found)


def _string(value: object, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise bad_value(place, f"`{field}` to be a string", _shown(value), "correct or remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad_value(
            place,
            f"`{field}` to be valid Unicode",
            f"half of a surrogate pair, \\u{ord(value[error.start]):04x}, at character {error.start}",
            "write the whole pair or remove it",
        ) from error
    return value


def _shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
