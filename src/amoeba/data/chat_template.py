"""Messages as a tokenizer's chat template writes them.

    by_template((Message("user", "Hello?"),), tokenizer, add_generation_prompt=True)

A template is a program by the author of the model's folder. transformers runs it in jinja's sandbox, which keeps it
from files and from Python's insides; here it is also kept from running without end, and what it raises becomes a
sentence.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from amoeba.core.errors import bad_value, one_line
from amoeba.data.documents import Completion, Conversation, Document, Message, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        case Conversation(messages=messages):
            if tokenizer is None or not tokenizer.chat_template:
                return "\n".join(f"{role}: {content}" for role, content in messages)
            return by_template(messages, tokenizer)


def by_template(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False
) -> str:
    turns = [message._asdict() for message in messages]
    most = TEMPLATE_CHARACTERS + TIMES_LONGER * sum(len(message.content) for message in messages)
    try:
        with _time_limit(TEMPLATE_SECONDS):
            _refuse_powers(tokenizer.chat_template)
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
        if not isinstance(text, str) or len(text) > most:
            raise ValueError(f"it wrote {len(text):,} characters")
        return text
    except Exception as error:  # the template's own, or any that Python raises while it runs
        raise bad_value(
            "messages",
            "a conversation that the tokenizer's chat template accepts",
            f"the roles {', '.join(message.role for message in messages)}: {one_line(error)}",
            "change the messages, or use a tokenizer with another template",
        ) from error


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
