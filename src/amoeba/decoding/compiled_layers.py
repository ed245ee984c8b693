"""Decoder layers compiled one by one for a step, all by the same code, so that the compiler sees one layer and not all.

with compiled_layers(model, cache):
    model(input_ids, past_key_values=cache, ...)
if is_there(model, batch, length): ...          # the code is on disk already: the next run only has to load it
note(model, batch, length)                      # after it was compiled

Inductor keeps the code in its cache (`integrations.compiled_layers`); here is only noted for which steps it was made.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amoeba._version import __version__
from amoeba.decoding.cache import FixedCache, OneLayer
from amoeba.integrations.compiled_layers import decoder_layers, folder, keep_compiled_code

# bf16 numbers are rounded where the plain model rounds them, so that greedy decoding chooses the same tokens. Products
# of one row become reductions that the compiler fuses with what is around them, once it may search for their tiles.
OPTIONS = {"emulate_precision_casts": True, "coordinate_descent_tuning": True}


@contextmanager
def compiled_layers(model: nn.Module, cache: FixedCache) -> Iterator[None]:
    """While it lasts each decoder layer runs compiled, with its own part of the cache."""
    keep_compiled_code()
    layers = decoder_layers(model)
    for layer, own in zip(layers, cache.layers, strict=True):
        layer.forward = _with_own_cache(layer, OneLayer(own), cache)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _with_own_cache(layer: nn.Module, own: OneLayer, whole: FixedCache) -> Callable[..., Any]:
    compiled = _compiled()

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: own if value is whole else value for name, value in kwargs.items()}
        return compiled(layer, args, kwargs)

    return forward


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_run, dynamic=False, fullgraph=True, options=OPTIONS)  # type: ignore[arg-type]


def _run(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def is_there(model: Any, batch: int, length: int) -> bool:
    try:
        return _mark(model, batch, length).exists()
    except OSError:
        return False


def note(model: Any, batch: int, length: int) -> None:
    with contextlib.suppress(OSError):  # then it is compiled again
        mark = _mark(model, batch, length)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(model: Any, batch: int, length: int) -> Path:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    adapted = sum(parameter.numel() for parameter in model.parameters())  # factors count, and change the code
    known = (__version__, torch.__version__, device, str(model.dtype), batch, length, adapted)
    text = json.dumps([*known, model.config.to_json_string()])
    return folder() / "amoeba_steps" / hashlib.sha256(text.encode()).hexdigest()[:24]
