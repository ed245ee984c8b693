"""What OpenAI's clients send and expect: the bodies of requests, and the documents of answers.

    body = ChatBody.model_validate_json(data)          # ValidationError names the field
    body.check()                                       # Refused with a sentence where we do not do what it asks for

Fields that do not change the text (user, metadata, store, ...) are ignored. Others that we do not serve are refused.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

MOST_CHOICES = 16
MOST_STOPS, STOP_CHARACTERS = 16, 1000
MOST_LOGPROBS = 20


class Refused(Exception):
    """status: of HTTP. kind, param and code: as OpenAI's error document names them."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def document(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class StreamOptions(_Part):
    include_usage: bool = False


class JsonSchema(_Part):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Part):
    type: str
    json_schema: JsonSchema | None = None


class _Body(_Part):
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if len(self.stops) > MOST_STOPS or not all(0 < len(each) <= STOP_CHARACTERS for each in self.stops):
            expected = f"at most {MOST_STOPS} texts of 1 to {STOP_CHARACTERS} characters"
            raise Refused(422, f"stop: expected {expected}. Leave out the others", "stop")
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise Refused(422, f"{name}: expected 0. Use repetition_penalty, which is served", name)
        if self.logit_bias:
            raise Refused(422, "logit_bias: expected none, which is all that is served. Leave it out", "logit_bias")


class Message(_Part):
    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """content as one text; what else a message has (tool_calls, tool_call_id, name) as it came."""
        content = self.content
        if isinstance(content, list):
            kinds = {part.get("type") for part in content}
            if not kinds <= {"text"} or not all(isinstance(part.get("text"), str) for part in content):
                got = ", ".join(sorted(str(kind) for kind in kinds))
                raise Refused(422, f"messages: expected parts of type text; got {got}. Send the text alone", "messages")
            content = "".join(part["text"] for part in content)
        more = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = more.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise Refused(422, "messages: expected tool_calls that are a list of objects", "messages")
        for call in calls:
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:  # templates write arguments as objects
                    function["arguments"] = json.loads(function["arguments"])
                except ValueError:
                    raise Refused(422, "messages: expected arguments of a tool call in JSON", "messages") from None
        return {"role": self.role, "content": content or "", **more}


class ChatBody(_Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def check(self) -> None:
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            message = "tool_choice: expected auto or none; the model chooses. Leave it out, or say it in a message"
            raise Refused(422, message, "tool_choice")


class CompletionBody(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    def check(self) -> None:
        super().check()
        if not self.prompts or len(self.prompts) * self.n > MOST_CHOICES:
            raise Refused(422, f"prompt: expected 1 to {MOST_CHOICES} texts, counted n times. Send fewer", "prompt")
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise Refused(422, f"{name}: expected none, which is all that is served. Leave it out", name)
        if self.best_of is not None and self.best_of != self.n:
            raise Refused(422, f"best_of: expected {self.n}, the value of n. Leave it out", "best_of")


class About(NamedTuple):
    kind: Literal["chat.completion", "text_completion"]
    id: str
    created: int
    model: str

    @classmethod
    def new(cls, chat: bool, model: str) -> About:
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        return cls(kind, f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)  # type: ignore[arg-type]

    def document(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        found: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        found["choices"] = choices
        if usage is not None:
            found["usage"] = usage
        return found


def usage(prompt_tokens: int, completion_tokens: int, shared: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return counts | {"total_tokens": sum(counts.values()), "prompt_tokens_details": {"cached_tokens": shared}}
