"""The text of one choice, token by token: whole characters, up to a stop text, with its logprobs and tool calls.

answer = ChoiceText(tokenizer, stops=["\\n\\n"], calls_tools=False)
piece = answer.add(token)       # Piece: new text and logprobs; held back while it may be the beginning of a stop
if answer.stopped: ...          # a stop text came: nothing more is needed
last = answer.end()
answer.tool_calls
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any, NamedTuple

from amoeba.decoding.engine import Token
from amoeba.jobs.generate.generate import TokenStream

# As the templates of Qwen, Hermes and others have a model write them
_CALL_BEGINS = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Logprob(NamedTuple):
    token: str
    logprob: float
    top: list[tuple[str, float]]
    offset: int  # characters of the answer before it

    def as_chat(self) -> dict[str, Any]:
        def one(token: str, logprob: float) -> dict[str, Any]:
            return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

        return one(self.token, self.logprob) | {"top_logprobs": [one(*each) for each in self.top]}


class Piece(NamedTuple):
    text: str
    logprobs: list[Logprob]


class ChoiceText:
    def __init__(self, tokenizer: Any, stops: list[str], calls_tools: bool) -> None:
        self.text, self.stopped, self.tokens = "", False, 0
        self.tool_calls: list[dict[str, Any]] = []
        self._tokenizer, self._stops, self._calls_tools = tokenizer, stops, calls_tools
        self._held = ""  # text that may be, or is, no part of the answer
        self._stream = TokenStream(tokenizer, self._take)
        self._in_calls, self._offset = False, 0
        self._logprobs: list[Logprob] = []

    def add(self, token: Token) -> Piece:
        self.tokens += 1
        if token.logprob is not None:
            top = [(self._word(each), logprob) for each, logprob in token.top]
            word = self._word(token.id)
            self._logprobs.append(Logprob(word, token.logprob, top, self._offset))
            self._offset += len(word)
        self._stream.add([token.id])
        return self._given(final=False)

    def end(self) -> Piece:
        if not self.stopped:
            self._stream.end()
        piece = self._given(final=True)
        if self._in_calls:
            calls = (_tool_call(found[1]) for found in _CALL.finditer(self._held))
            self.tool_calls = [call for call in calls if call is not None]
            if not self.tool_calls:  # not what it looked like
                piece = Piece(piece.text + self._held, piece.logprobs)
                self.text += self._held
        return piece

    def _word(self, token: int) -> str:
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _take(self, fresh: str) -> None:
        if not self.stopped:
            self._held += fresh
            places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
            if places:
                self._held, self.stopped = self._held[: min(places)], True

    def _given(self, final: bool) -> Piece:
        marks = [_CALL_BEGINS] if self._calls_tools else []
        if marks and not self._in_calls and (place := self._held.find(_CALL_BEGINS)) >= 0:
            self._in_calls = True
            before, self._held = self._held[:place].rstrip(), self._held[place:]
        elif self._in_calls:
            before = ""
        else:
            kept = 0 if final or self.stopped else _begins([*self._stops, *marks], self._held)
            before, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self.text += before
        logprobs, self._logprobs = self._logprobs, []
        return Piece(before, logprobs)


def _begins(marks: list[str], text: str) -> int:
    longest = max((len(mark) - 1 for mark in marks), default=0)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((count for count in lengths if any(mark.startswith(text[-count:]) for mark in marks)), 0)


def _tool_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError):
        return None
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": str(name), "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
