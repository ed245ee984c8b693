"""Text from tokens as they come, written as soon as it cannot change any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_REPLACEMENT = "\ufffd"  # what a decoder puts for bytes that are no character, or not one yet


class TokenStream:
    """The streamer that transformers calls with every token, the prompt's first; `add` is for new tokens alone.

    ids[prefix:read] was written last and is decoded again together with the new tokens, since a tokenizer may drop
    the space at the start of what it decodes. Text that ends inside a character waits for the rest of it.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], object], at_first: Callable[[], object] = lambda: None
    ) -> None:
        """at_first: is called when the first token is there."""
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.first_at = self.last_at = 0.0
        self._tokenizer, self._write, self._at_first = tokenizer, write, at_first
        self._prefix = self._read = 0
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self.add(value.flatten().tolist())

    def add(self, ids: list[int]) -> None:
        self.last_at = time.perf_counter()
        if not self.ids:
            self.first_at = self.last_at
            self._at_first()
        self.ids += ids
        self._emit(final=False)

    def end(self) -> None:
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        text = self._decode(self.ids[self._prefix :])
        fresh = text[len(self._decode(self.ids[self._prefix : self._read])) :]
        if not fresh or (fresh.endswith(_REPLACEMENT) and not final):
            return
        # Noted before it is written: an interruption in between must not write it twice
        self._prefix, self._read = self._read, len(self.ids)
        self.pieces.append(fresh)
        self._write(fresh)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
