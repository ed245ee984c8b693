"""A document to train on: a text, a conversation, or a prompt with its completion.

document = parse_document({"messages": [...]}, "chat.jsonl, line 3")
render(document, tokenizer)      # one string

Images of a conversation are parts of its messages' content, as transformers and TRL have them.
"""

from __future__ import annotations

import base64
import binascii
import functools
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from amoeba.core.errors import bad_value, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RECORD_FIELDS = ("text", "messages", "prompt", "completion")
IMAGES_FIELD = "images"
IMAGE = "\ufffc"  # in the content of a message in a conversation with images, where one is
KIND_FIELD = "kind"  # what kind of text it is, where a record says so
RECORDS = "`text`, or `messages`, or `prompt` and `completion`"
TOOLS_FIELD = "tools"
_FORMS = (("text",), ("messages",), ("prompt", "completion"))  # the first that a record has is read


class Message(NamedTuple):
    role: str
    content: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    given: int = 0  # this many messages at the start are context, from which no answer is learnt


@dataclass(frozen=True)
class IllustratedConversation(Conversation):
    images: tuple[str | bytes, ...] = ()  # files, or what is in them: one for each IMAGE in the messages


@dataclass(frozen=True)
class Completion:
    prompt: str
    completion: str


Document = Text | Conversation | Completion


def is_blank(document: Document) -> bool:
    return not any(content.strip() for content in contents(document))


def contents(document: Document) -> Iterator[str]:
    match document:
        case Text(text):
            yield text
        case Completion(prompt, completion):
            yield from (prompt, completion)
        case Conversation(messages=messages):
            yield from (message.content for message in messages)


def characters(documents: Iterable[Document]) -> int:
    return sum(len(content) for document in documents for content in contents(document))


# --- from one record of JSON, parquet or a dataset


def parse_document(record: object, place: str, folder: Path | None = None) -> Document:
    """folder: to which paths of images are relative."""
    if not isinstance(record, dict):
        raise bad_value(place, f"an object with {RECORDS}", shown(record), "write one object per document")
    match {field: record[field] for field in RECORD_FIELDS if record.get(field) is not None}:
        case {"text": text}:
            return Text(parse_string(text, "text", place))
        case {"messages": messages}:
            return _conversation(record, {"messages": messages}, place, folder)
        case {"prompt": list() as prompt, "completion": list() as completion}:
            return _conversation(record, {"prompt": prompt, "completion": completion}, place, folder)
        case {"prompt": prompt, "completion": completion}:
            return Completion(parse_string(prompt, "prompt", place), parse_string(completion, "completion", place))
    fields = ", ".join(f"{field} (null)" if value is None else str(field) for field, value in record.items())
    remedy = "rename or add a field, or remove it"
    raise bad_value(place, f"an object with {RECORDS}", f"the fields {fields or '(none)'}", remedy)


def unread_fields(record: dict[str, Any]) -> Iterator[str]:
    """Of a record that `parse_document` took, what it did not read and other trainers do: a second form of the text,
    what chat templates take (`tools`, `thinking` of a message), `weight` of a message."""
    there = [field for field in RECORD_FIELDS if record.get(field) is not None]
    read = next(form for form in _FORMS if set(form) <= set(there))
    yield from (field for field in there if field not in read)
    messages = [each for field in read if isinstance(record[field], list) for each in record[field]]
    if messages and record.get(TOOLS_FIELD):
        yield TOOLS_FIELD
    for message in messages:
        others = (name for name in message if name not in Message._fields)
        yield from (name for name in others if message[name] not in (None, "", [], {}))


def _conversation(record: dict[str, Any], parts: dict[str, object], place: str, folder: Path | None) -> Conversation:
    sources: list[object] = []
    parsed = [parse_messages(messages, field, place, sources) for field, messages in parts.items()]
    messages, given = sum(parsed, ()), len(parsed[0]) if len(parsed) > 1 else 0
    listed = record.get(IMAGES_FIELD)
    listed = [] if listed is None else listed if isinstance(listed, list) else [listed]
    if listed and not sources:  # as TRL takes them: before the first question
        first = next((number for number, message in enumerate(messages) if message.role == "user"), 0)
        question = messages[first]._replace(content=IMAGE * len(listed) + messages[first].content)
        messages, sources = (*messages[:first], question, *messages[first + 1 :]), [None] * len(listed)
    bare = sources.count(None)
    if bare != len(listed):
        remedy = f"list as many `{IMAGES_FIELD}` as there are parts without a file"
        raise bad_value(place, f"{bare} `{IMAGES_FIELD}`, one for each such part of the messages", len(listed), remedy)
    if not sources:
        return Conversation(messages, given)
    if sum(message.content.count(IMAGE) for message in messages) != len(sources):
        raise bad_value(place, "text without U+FFFC, which stands for an image", "some", "remove the character")
    left = iter(listed)
    images = tuple(_image(next(left) if source is None else source, place, folder) for source in sources)
    return IllustratedConversation(messages, given, images)


def _image(source: object, place: str, folder: Path | None) -> str | bytes:
    if isinstance(source, dict):  # of a parquet file, or {"url": ...}
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), None)
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise bad_value(place, "an image in base64", f"invalid base64 ({error})", "correct it") from error
    if not isinstance(source, str) or not (path := (folder or Path()) / Path(source).expanduser()).is_file():
        remedy = "download it" if str(source).startswith("http") else "correct the path, which is relative to the data"
        raise bad_value(place, "an image: a file, or its content", shown(source), remedy)
    return str(path)


def parse_messages(messages: object, field: str, place: str, images: list[object] | None = None) -> tuple[Message, ...]:
    """images: gets what a part says about its image, None where it says nothing; without a list there may be none."""
    if not isinstance(messages, list) or not messages:
        remedy = "correct or remove it"
        raise bad_value(place, f"`{field}` to be a list of messages with role and content", shown(messages), remedy)
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("tool_calls"):
            expected = f"message {number} of `{field}` to be an object with role and content, without tool calls"
            remedy = "write calls of tools as content, or remove the conversation"
            raise bad_value(place, expected, shown(message), remedy)
        role = parse_string(message.get("role"), f"{field}[{number - 1}].role", place)
        where, content = f"{field}[{number - 1}].content", message.get("content")
        if isinstance(content, list):
            content = "".join(_part(part, where, place, role, images) for part in content)
        found.append(Message(role, parse_string(content, where, place)))
    return tuple(found)


def _part(part: object, where: str, place: str, role: str, images: list[object] | None) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text":
        return parse_string(part.get("text"), f"{where}.text", place)
    if isinstance(part, dict) and kind in ("image", "image_url") and images is not None and role != "assistant":
        images.append(next((part[key] for key in ("image", "path", "url", "image_url") if part.get(key)), None))
        return IMAGE
    expected = "text" if images is None else "text, or images of a user"
    raise bad_value(place, f"parts of `{where}` of type {expected}", f"{kind!r} of {role}", "correct or remove it")


def messages_of(document: Conversation) -> list[dict[str, Any]]:
    if not isinstance(document, IllustratedConversation):
        return [message._asdict() for message in document.messages]
    return [with_parts(message) for message in document.messages]


def with_parts(message: Message) -> dict[str, Any]:
    if IMAGE not in message.content:
        return message._asdict()
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message.content.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return {"role": message.role, "content": parts}


def parse_string(value: object, field: str, place: str) -> str:
    if not isinstance(value, str):
        raise bad_value(place, f"`{field}` to be a string", shown(value), "correct or remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        got = f"half of a surrogate pair, \\u{ord(value[error.start]):04x}, at character {error.start}"
        raise bad_value(place, f"`{field}` to be valid Unicode", got, "write the whole pair or remove it") from error
    return value


def shown(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Of one conversation. Templates take milliseconds and add some thousand characters (descriptions of tools, dates).
TEMPLATE_SECONDS = 10.0
TEMPLATE_CHARACTERS = 1_000_000
TIMES_LONGER = 10  # than the messages


def render(document: Document, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The document as one string; messages by the tokenizer's chat template, or `role: content` lines without one.

    A prompt and its completion are joined as they are, as TRL does.
    """
    match document:
        case Text(text):
            return text
        case Completion(prompt, completion):
            return prompt + completion
        case IllustratedConversation():
            remedy = "use amoeba finetune, which reads them"
            raise bad_value("messages", "text alone", "a conversation with images", remedy)
        case Conversation(messages=messages):
            if tokenizer is None or not tokenizer.chat_template:
                return "\n".join(f"{role}: {content}" for role, content in messages)
            return by_template(messages, tokenizer)


def by_template(
    messages: Sequence[Message | dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool = False,
    **more: Any,
) -> str:
    """messages: as dicts where they have more than a role and a content. more: tools, or what the template knows."""
    turns = [message if isinstance(message, dict) else message._asdict() for message in messages]
    most = TEMPLATE_CHARACTERS + TIMES_LONGER * sum(len(turn["content"]) for turn in turns)
    try:
        with _time_limit(TEMPLATE_SECONDS):
            _refuse_powers(tokenizer.chat_template)
            told = {"add_generation_prompt": add_generation_prompt} | more
            text = tokenizer.apply_chat_template(turns, tokenize=False, **told)
        if not isinstance(text, str) or len(text) > most:
            raise ValueError(f"it wrote {len(text):,} characters")
        return text
    except Exception as error:  # the template's own, or any that Python raises while it runs
        got = f"the roles {', '.join(turn['role'] for turn in turns)}: {one_line(error)}"
        remedy = "change the messages, or use a tokenizer with another template"
        raise bad_value("messages", "a conversation that the tokenizer's chat template accepts", got, remedy) from error


@functools.lru_cache(maxsize=4)
def _powers(template: str) -> bool:
    from jinja2 import Environment

    return any(kind == "operator" and token == "**" for _, kind, token in Environment().lex(template))


def _refuse_powers(template: object) -> None:
    """10 ** 10 ** 10 runs for years inside one instruction, which no signal interrupts; no real template needs it."""
    templates = template.values() if isinstance(template, dict) else [template]
    if any(isinstance(source, str) and _powers(source) for source in templates):
        raise ValueError("it computes powers (**)")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError where it takes longer. Only the main thread gets signals; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"it ran for more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
