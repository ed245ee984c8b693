"""Prompts as tokens, and how many new ones they leave room for.

ids = tokenise(tokenizer, "Once upon", chat=False)
most = most_new_tokens(config, ids, 200)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.data.documents import IMAGE, Message, by_template, shown, with_parts
from amoeba.data.token_rows import begin_tokens
from amoeba.integrations.images import ImageReader
from amoeba.integrations.text_model import check_ids, positions


def tokenise(tokenizer: Any, prompt: str | Sequence[Message], chat: bool, name: str = "prompt") -> list[int]:
    """prompt: a text, which is a user's message where chat is true, or the messages of a conversation."""
    if chat and not getattr(tokenizer, "chat_template", None):
        remedy = "leave --chat out, or use the family's chat model (its name often ends in Instruct)"
        raise bad_value("--chat", "a tokenizer with a chat template", "one without", remedy)
    messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for message in messages:
        _check_unicode(message.content, name)
    if chat:
        text = by_template(messages, tokenizer, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise bad_value(name, "at least one token", f"none from {shown(prompt)}", "write some text to continue")
    if tokenizer.unk_token_id is not None and set(ids) <= {tokenizer.unk_token_id, *begin_tokens(tokenizer)}:
        remedy = "use the tokenizer that the model was trained with"
        raise bad_value(name, "words that the tokenizer knows", f"none in {shown(prompt)}", remedy)
    return ids


def prompt_with_images(reader: ImageReader, tokenizer: Any, prompt: str, images: Sequence[str]) -> dict[str, Tensor]:
    """What the model reads: a user's message by the chat template, the images first."""
    _check_unicode(prompt, "prompt")
    message = with_parts(Message("user", IMAGE * len(images) + prompt.replace(IMAGE, "")))
    return reader.read(by_template([message], tokenizer, add_generation_prompt=True), images)


def _check_unicode(text: str, name: str) -> None:
    """Bytes of an argument that are no UTF-8 come from Python as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start : error.start + 1]!a} at character {error.start}"
        remedy = "set the terminal to UTF-8, or convert the text, for example with iconv"
        raise bad_value(name, "text in UTF-8", got, remedy) from error


def checked_context(config: Any, asked: int | None, default: int) -> int:
    """Tokens of a prompt and its answer at most: as asked for, or as many as the default and the model allow."""
    room = positions(config)
    if asked is not None and (asked < 2 or (room is not None and asked > room)):
        expected = "at least 2" if room is None else f"2 to {room}, the model's max_position_embeddings"
        raise bad_value("--context", expected, asked, "leave it out")
    return asked or min(default, room or default)


def most_new_tokens(config: Any, prompt_ids: list[int], asked: int, name: str = "prompt") -> int:
    check_ids(config, max(prompt_ids))
    room = positions(config)
    if room is None:
        return asked
    if len(prompt_ids) > room:
        expected = f"at most {room} tokens, the model's max_position_embeddings"
        raise bad_value(name, expected, f"{len(prompt_ids)} tokens", "shorten it, or use a model with a longer context")
    most = min(asked, room - len(prompt_ids) + 1)  # the last token takes no position: it is not read again
    if most < asked:
        logger.info("at most %d new tokens instead of %d: the model has %d positions", most, asked, room)
    return most
