"""Decoding with a model of transformers: a cache of fixed addresses, and a step that the host only has to start.

    from amoeba.decoding import Decoder, Sampling, why_not

    reason = why_not(model)                       # None, or why only transformers' own loop will do
    decoder = Decoder(model, batch=1, length=700)
    for tokens in decoder.generate([ids], max_new_tokens=64): ...

transformers is imported by what is imported from here, and only then.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Decoder", "Sampling", "why_not"]

_MODULES = {"Decoder": "decoder", "Sampling": "sampling", "why_not": "decoder"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
