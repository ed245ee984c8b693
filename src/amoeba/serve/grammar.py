"""Answers that are JSON of a given schema, by the package xgrammar.

grammars = Grammars(tokenizer, vocabulary, ends)
grammar = grammars.of({"type": "json_schema", ...})        # None for plain text; Refused without xgrammar
grammar.allowed()                                          # (V,) bool: tokens that the text may go on with
grammar.accept(token)
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import one_line
from amoeba.serve.protocol import Refused, ResponseFormat


class Grammars:
    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends

    def of(self, wanted: ResponseFormat | None) -> JsonGrammar | None:
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type not in ("json_schema", "json_object"):
            expected = "text, json_object or json_schema"
            raise Refused(422, f"response_format: expected {expected}; got {wanted.type}", "response_format")
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        if wanted.type == "json_schema" and schema is None:
            raise Refused(422, "response_format: expected a schema in json_schema; got none", "response_format")
        try:
            import xgrammar
        except ImportError:
            remedy = "Install it there: pip install xgrammar, or ask for the format in a message"
            message = f"response_format: expected the package xgrammar on the server; got none. {remedy}"
            raise Refused(422, message, "response_format") from None
        try:
            compiled = self._compiled(json.dumps({"type": "object"} if wanted.type == "json_object" else schema))
        except Exception as error:  # of xgrammar, about the schema
            message = f"response_format: expected a schema that xgrammar takes; {one_line(error)[:300]}"
            raise Refused(422, message, "response_format") from None
        return JsonGrammar(xgrammar, compiled, self._vocabulary, self._ends)

    @functools.lru_cache(maxsize=64)  # noqa: B019  as long as the server
    def _compiled(self, schema: str) -> Any:
        # on one line: a small model may otherwise write spaces and line ends to the end of its tokens
        return self._compiler.compile_json_schema(schema, any_whitespace=False)

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar

        told: Any = {"vocab_size": self._vocabulary, "stop_token_ids": sorted(self._ends) or None}
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, **told)
        return xgrammar.GrammarCompiler(info)


class JsonGrammar:
    def __init__(self, xgrammar: Any, compiled: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._vocabulary, self._ends = vocabulary, ends

    def allowed(self) -> Tensor:
        if self._matcher.is_terminated():
            allowed = torch.zeros(self._vocabulary, dtype=torch.bool, device="cpu")
            allowed[sorted(self._ends)] = True
            return allowed
        self._matcher.fill_next_token_bitmask(self._bits)
        places = torch.arange(32, dtype=torch.int32, device="cpu")
        return ((self._bits[0][:, None] >> places) & 1).bool().flatten()[: self._vocabulary]

    def accept(self, token: int) -> None:
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)
