"""A conversation with a model: each answer continues all that was said before.

    with closing(open_chat("models/qwen3", options, context=4096)) as chat:
        answer = chat.answer("What is a list?", write=print)        # a KeyboardInterrupt ends the answer, and is kept
        chat.retry(write=print), chat.undo(), chat.clear()

The model and, on a GPU, its captured steps are kept from one answer to the next; on other devices so is what the model
has read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.data.documents import Message
from amoeba.jobs.generate.generate import TokenStream, stream_tokens
from amoeba.jobs.generate.loaded_model import LoadedModel, find_model, load
from amoeba.jobs.generate.options import GenerationOptions, end_ids, set_generation_config
from amoeba.jobs.generate.prompt_tokens import checked_context, tokenise
from amoeba.jobs.generate.token_steps import Steps, choose_steps, warn_of_dense
from amoeba.parallel.rank_zero import ALONE

DEFAULT_CONTEXT = 4096
Stopped = Literal["end of text", "length", "interrupted"]


class TooLong(ValueError):
    """The conversation, or its last message, has no room for an answer."""


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int  # the whole conversation
    read_tokens: int  # of it, those that the model had not read yet
    generated_tokens: int
    seconds_to_first_token: float | None  # None: interrupted before it
    tokens_per_second: float | None  # None with fewer than two tokens
    stopped: Stopped


def open_chat(
    model_folder: str | Path,
    options: GenerationOptions,
    adapter: str | Path | None = None,
    context: int | None = None,
    system: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Chat:
    """context: tokens of a conversation at most; None: `DEFAULT_CONTEXT`, or fewer if the model has fewer positions.
    system: a message that begins every conversation. Others: as of `generate`."""
    found = find_model(model_folder, adapter, options)
    if not getattr(found.tokenizer, "chat_template", None):
        remedy = "use the family's chat model (its name often ends in Instruct), or amoeba generate"
        raise bad_value("MODEL", "a tokenizer with a chat template", "one without", remedy)
    most = checked_context(found.config, context, DEFAULT_CONTEXT)
    token = tokenise(found.tokenizer, "Hello", chat=True)[0]
    return Chat(load(found, options, token, say), options, most, system)


class Chat:
    def __init__(self, loaded: LoadedModel, options: GenerationOptions, context: int, system: str | None) -> None:
        self.loaded, self.context = loaded, context
        self.messages: list[Message] = []
        self._options, self._system = options, system
        self.seed, self._sampling = loaded.begin(options, options.max_new_tokens, ALONE)
        self._answers = 0
        self._steps: Steps | None = None
        self._read = _ReadBefore()
        self.clear()

    def answer(self, text: str, write: Callable[[str], object]) -> Answer:
        """Calls write(piece) for every piece. TooLong, where nothing fits behind it: the conversation is as it was."""
        self.messages.append(Message("user", text))
        try:
            return self._answer(write)
        except BaseException:
            self.messages.pop()
            raise

    def retry(self, write: Callable[[str], object]) -> Answer:
        """The last answer once more, with other random numbers."""
        if not self.messages or self.messages[-1].role != "assistant":
            raise bad_value("retry", "an answer to replace", "none", "ask something first")
        last = self.messages.pop()
        try:
            return self._answer(write)
        except BaseException:
            self.messages.append(last)
            raise

    def undo(self) -> Message | None:
        """Takes the last question and its answer out of the conversation; the question, or None if there was none."""
        asked = None
        while self.messages and self.messages[-1].role != "system" and asked is None:
            last = self.messages.pop()
            asked = last if last.role == "user" else None
        return asked

    def clear(self, system: str | None = None) -> None:
        """A new conversation. system: its first message from now on; None: as it was."""
        self._system = self._system if system is None else system
        self.messages = [Message("system", self._system)] if self._system else []

    def close(self) -> None:
        self.loaded.close()

    def _answer(self, write: Callable[[str], object]) -> Answer:
        loaded, model = self.loaded, self.loaded.model
        ids = tokenise(loaded.tokenizer, self.messages, chat=True, name="message")
        most = min(self._options.max_new_tokens, self.context - len(ids))
        if most < 1:
            raise TooLong(
                f"message: expected at most {self.context - 1} tokens with all that was said before; got {len(ids)}."
                " Shorten it, undo something, or begin a new conversation"
            )
        set_generation_config(model, loaded.tokenizer, self._sampling, most)
        stream, interrupted = TokenStream(loaded.tokenizer, write), False
        device = loaded.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            steps = self._prepared(len(ids))
            cache = self._read.for_prompt(model, ids) if steps.decoder is None else None
            known = steps.decoder.held(ids) if cache is None else cache.get_seq_length()
            began = time.perf_counter()
            try:
                stream_tokens(model, steps, ids, most, self.seed + self._answers, stream, cache)
            except KeyboardInterrupt:
                interrupted = True
                stream.end()
        self._answers += 1
        self._read.keep(None if interrupted else cache, ids + stream.ids)
        text, count = "".join(stream.pieces), len(stream.ids)
        self.messages.append(Message("assistant", text))
        ended = bool(stream.ids) and stream.ids[-1] in end_ids(model)
        first = stream.first_at - began if count else None
        speed = (count - 1) / (stream.last_at - stream.first_at) if count > 1 else None
        stopped: Stopped = "interrupted" if interrupted else "end of text" if ended else "length"
        return Answer(text, len(ids), len(ids) - known, count, first, speed, stopped)

    def _prepared(self, prompt_tokens: int) -> Steps:
        if self._steps is None:
            told: dict[str, Any] = {"prompt_tokens": prompt_tokens, "new_tokens": self.context - prompt_tokens}
            told |= {"compile": self._options.compile, "dense": self._options.dense}
            self._steps = choose_steps(self.loaded.model, self._sampling, batch=1, **told)
            logger.info("steps %s: %s", self._steps.kind, self._steps.reason)
            warn_of_dense(self._options.dense, self._steps.kind, self._steps.reason)
        return self._steps


class _ReadBefore:
    """The keys and values of a conversation, for models whose layers all keep those of every token, and nothing else:
    states of linear attention cannot be taken back to an earlier token."""

    def __init__(self) -> None:
        self._cache: Any = None
        self._ids: list[int] = []

    def for_prompt(self, model: Any, ids: list[int]) -> Any:
        from transformers import DynamicCache

        cache, self._cache = self._cache, None
        pairs = zip(self._ids, ids[:-1], strict=False)  # the last token has to be read: its logits are asked for
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if cache is None or not common:
            return DynamicCache(config=model.config)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[..., :common, :], layer.values[..., :common, :]
        return cache

    def keep(self, cache: Any, ids: list[int]) -> None:
        """ids: what it holds, and maybe more. None: an interruption may have left it half written."""
        from transformers.cache_utils import DynamicLayer

        whole = cache is not None and all(type(layer) is DynamicLayer for layer in cache.layers)
        self._cache = cache if whole else None
        self._ids = ids[: cache.get_seq_length()] if whole else []
