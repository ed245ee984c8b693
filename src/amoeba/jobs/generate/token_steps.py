"""Generates tokens step by step: our Decoder with captured or native steps, or transformers' own loop.

    steps = choose_steps(model, sampling, batch=1, prompt_tokens=17, new_tokens=200)
    steps.kind, steps.reason            # "captured", "compiled", "native" or "plain", and why
    steps.decoder                       # None where plain

Native steps are those of a CPU: all layers in one call of the C++ core. Plain is what remains.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from amoeba.core.errors import is_out_of_memory, one_line
from amoeba.core.graph_replays import CannotCapture
from amoeba.core.log import logger

Kind = Literal["compiled", "captured", "native", "plain"]

# Compiling the layers takes about a minute, loading them from the cache some seconds, and a step then saves a
# millisecond or two. Not measured yet.
STEPS_WORTH_COMPILING = 20_000
STEPS_WORTH_LOADING = 2_000


@dataclass(frozen=True)
class Steps:
    kind: Kind
    reason: str
    decoder: Any  # amoeba.decoding.Decoder, or None
    seconds: float  # to prepare them


def choose_steps(
    model: Any,
    sampling: dict[str, Any],
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    compile: bool | None = None,
    dense: str = "auto",
) -> Steps:
    """prompt_tokens: of the longest prompt. new_tokens: at most, after each prompt.
    compile: None for compiled where it pays. The model has its generation_config already.
    dense: "int8": native steps read weights that are not experts in int8."""
    started = time.perf_counter()
    reason = why_plain(model)
    if reason is not None and why_no_graphs(model.device) is not None:
        return _native(model, sampling, batch, prompt_tokens + new_tokens, dense, started)
    if reason is None:
        length = prompt_tokens + new_tokens
        for compiled, why in _ways(model, batch, length, new_tokens, compile):
            try:
                decoder = _prepared(model, sampling, batch, length, prompt_tokens, compiled)
            except CannotCapture as refused:
                reason = str(refused)
                _free_memory()
                break
            except Exception as error:  # of the compiler, of Triton, of CUDA, of the model's own code
                reason = _failed("compiling" if compiled else "capturing", error)
            else:
                why = why if reason is None else reason
                return Steps("compiled" if compiled else "captured", why, decoder, time.perf_counter() - started)
            _free_memory()
    assert reason is not None
    return Steps("plain", reason, None, time.perf_counter() - started)


def _native(model: Any, sampling: dict[str, Any], batch: int, length: int, dense: str, started: float) -> Steps:
    from amoeba.decoding.decoder import Decoder, native_steps, why_not_chosen
    from amoeba.decoding.sampling import Sampling

    native = why_not_chosen(model, model.generation_config) or native_steps(model, dense)
    if isinstance(native, str):
        return Steps("plain", native, None, time.perf_counter() - started)
    decoder = Decoder(model, batch=batch, length=length, sampling=Sampling(**sampling), native=native)
    reason = "the C++ core computes all layers of a step in one call"
    return Steps("native", reason, decoder, time.perf_counter() - started)


def warn_of_dense(dense: str, kind: str, reason: str) -> None:
    """Only native steps read weights in int8."""
    if dense != "auto" and kind != "native":
        logger.warning("--dense %s changes nothing: %s", dense, reason)


def why_plain(model: Any) -> str | None:
    from amoeba.decoding.decoder import why_not, why_not_chosen

    return why_no_graphs(model.device) or why_not(model) or why_not_chosen(model, model.generation_config)


def why_no_graphs(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"CUDA graphs hold steps on an NVIDIA GPU, the model is on {device.type}"


def _ways(model: Any, batch: int, length: int, steps: int, asked: bool | None) -> list[tuple[bool, str]]:
    from amoeba.decoding import compiled_layers
    from amoeba.decoding.cache import why_more_than_keys
    from amoeba.decoding.decoder import cache_length
    from amoeba.integrations.exact_mode import is_exact

    if (refused := why_more_than_keys(model.config) or ("exact mode" if is_exact(model) else None)) is not None:
        return [(False, f"not compiled: {refused}")]
    if asked is not None:
        return [(True, "as requested"), (False, "")] if asked else [(False, "not compiled: as requested")]
    known = compiled_layers.is_there(model, batch, cache_length(length))
    least = STEPS_WORTH_LOADING if known else STEPS_WORTH_COMPILING
    if steps >= least:
        return [(True, f"{steps} steps are worth {'loading compiled code' if known else 'compiling'}"), (False, "")]
    return [(False, f"not compiled: that pays from {least} steps on, and there are {steps} at most")]


def _prepared(model: Any, sampling: dict[str, Any], batch: int, length: int, prompt_tokens: int, compiled: bool) -> Any:
    from amoeba.decoding import compiled_layers
    from amoeba.decoding.decoder import Decoder
    from amoeba.decoding.sampling import Sampling

    decoder = Decoder(model, batch=batch, length=length, sampling=Sampling(**sampling), compiled=compiled)
    decoder.prepare(prompt_tokens)
    if compiled:
        compiled_layers.note(model, batch, decoder.cache.length)
    return decoder


def _failed(what: str, error: Exception) -> str:
    cause = "there was not enough memory" if is_out_of_memory(error) else type(error).__name__
    reason = f"{what} a step failed ({cause}: {one_line(error)[:300]})"
    logger.warning("%s; continuing without it", reason)
    return reason


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
