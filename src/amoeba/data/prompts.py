"""Prompts from a file: one per line, or one JSON object per line.

for prompt in read_prompts(Path("questions.jsonl"), chat=True):
    prompt.place, prompt.content             # "questions.jsonl, line 3", for errors
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from amoeba.core.errors import bad_value
from amoeba.data.documents import Message, parse_messages, parse_string, shown
from amoeba.data.sources import JSON_LINES, parse_json, read_text

_RECORD = "an object with `prompt`, or `messages` (with --chat)"


class Prompt(NamedTuple):
    """line: its number in the file, from 1."""

    line: int
    place: str
    content: str | tuple[Message, ...]

    def as_json(self) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        return [message._asdict() for message in self.content]


def read_prompts(path: Path, chat: bool) -> list[Prompt]:
    """Blank lines are left out. chat: whether a prompt may be a conversation."""
    found = []
    is_json = path.suffix.lower() in JSON_LINES
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
