"""An extension of griffe, which reads our docstrings for the API pages: makes Markdown of how we write them.

A paragraph of lines like `name: what it is`, or of a name, two spaces and what it is, becomes a list; an indented one
becomes a block of code.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*)(?::| {2}) *(?P<about>\S.*)")


class DocstringLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(_as_markdown, paragraphs))


def _as_markdown(paragraph: str) -> str:
    if paragraph.startswith("    "):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"  # indented, it would be part of a list above it
    paragraph = paragraph.replace("](", "]\\(")  # expert[t, k](x) is no link
    if _ITEM.match(paragraph) is None:
        return paragraph
    lines: list[str] = []
    for line in paragraph.split("\n"):
        found = _ITEM.match(line)
        if found is None:
            lines.append(f"    {line.strip()}")
        else:
            names = ", ".join(f"`{name}`" for name in found["names"].split(", "))
            lines.append(f"- {names}: {found['about']}")
    return "\n".join(lines)
