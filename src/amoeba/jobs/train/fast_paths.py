"""The techniques that make a training step fast, enabled for a run after each was tried on a first batch.

    with fast_paths(trainer, settings.compile, say):
        trainer.train()

- the loss comes straight from the last hidden states (`integrations.fused_loss`),
- documents that share a row are kept apart by attention over lengths, not by a mask (`integrations.fused_attention`),
- the decoder layers are compiled, one code for all (`integrations.compiled_layers`),
- forward and backward of a step are captured in a CUDA graph (`jobs.train.trainer`).

A CPU takes the second, or the third where it is asked for. Where one of them does not serve a model the run goes on
without it, and a sentence says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from amoeba.core.log import logger
from amoeba.data.token_rows import document_arguments
from amoeba.integrations.compiled_layers import CompiledLayers, looping_parts
from amoeba.integrations.coverage import repeats_forward, why_waits
from amoeba.integrations.fused_loss import fused_loss
from amoeba.integrations.text_model import draws_random_numbers, text_decoder

# Compiling takes up to half a minute. A run of fewer operations is over within one or two on an H200.
WORTH_COMPILING = 1e16


@contextmanager
def fast_paths(trainer: Any, compile_layers: str, say: Callable[[str], None], *, exact: bool = False) -> Iterator[None]:
    """compile_layers: "on", "off", or "auto", which is on where there is a GPU and enough to do for it. exact: the loss
    and the capture alone, which launches the kernels of exact mode as they are."""
    if trainer.rows.has_images:
        say("each step runs as transformers computes it, but for the experts: rows have images")
        yield
        return
    gpu = _is_on_a_gpu(trainer)
    # which exchange counts and gradients within a pass
    over_ranks = "several ranks share each batch" if trainer.rank_zero.count > 1 else None
    if exact and not gpu:
        yield
        return
    compile_layers = "off" if exact else compile_layers
    compiles = compile_layers == "on" or (compile_layers == "auto" and gpu and trainer.flops() >= WORTH_COMPILING)
    against = over_ranks
    if compiles and compile_layers == "auto" and repeats_forward(trainer.model):
        against = against or "a compiled backward would compute the forward of its experts again"
    if compiles and against is not None:
        say(f"no compiled decoder layers: {against}")
        compiles = False
    looping = _looping(trainer) if compiles else []
    with ExitStack() as stack:
        taken: list[str] = []
        if gpu:
            with trainer.as_it_trains():  # it runs a few tokens
                reason = stack.enter_context(fused_loss(trainer.model))
            _tell(taken, "fused loss", reason, say)
        if gpu and not exact:
            reason = stack.enter_context(_documents_apart(trainer))
            _tell(taken, "per-document attention", reason, say)
            if reason is None:
                from amoeba.integrations.fused_attention import fused_attention

                stack.enter_context(fused_attention(trainer.model))
        if compiles:
            began = time.monotonic()
            reason = stack.enter_context(_compiled(trainer, looping))
            _tell(taken, f"compiled decoder layers ({time.monotonic() - began:.0f} s)", reason, say)
        if not gpu and not trainer.compiled:
            stack.enter_context(_documents_apart(trainer))  # not told: without it a mask does the same
        if gpu:
            reason = stack.enter_context(_captured(trainer, over_ranks or why_waits(trainer.model, trains=True)))
            _tell(taken, "CUDA graph", reason, say)
        if taken:
            say(f"each step uses: {', '.join(taken)}")
        yield


def _is_on_a_gpu(trainer: Any) -> bool:
    return trainer.args.device.type == "cuda"


def why_not_by_documents(model: Any) -> str | None:
    """Why attention by documents does not serve a model here, found out on a few tokens, for those who have to know it
    before there is a trainer. The model is moved to the GPU for that, where it will train."""
    from amoeba.integrations.fused_attention import NAME

    if not torch.cuda.is_available():
        return "there is no GPU"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    model.to(device)
    ids = torch.zeros(1, 128, dtype=torch.int64, device="cpu")
    positions = torch.arange(128, dtype=torch.int64, device="cpu")[None] % 64
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    batch |= document_arguments(batch, 2, 128)
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    text = text_decoder(model)  # vision and audio parts keep their own attention
    own = text.config._attn_implementation

    def run() -> None:
        text.set_attn_implementation(NAME)
        with torch.no_grad():
            model(**given, use_cache=False)

    try:
        return _why_not("attention by documents", run)
    finally:
        text.set_attn_implementation(own)


def _why_not(what: str, run: Callable[[], object]) -> str | None:
    """Why it fails, in a line; None where it does not. Memory that is missing is an error all the same."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # an architecture may refuse, and a compiler fail, in many ways
        logger.info(what, exc_info=error)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return None


def _tell(taken: list[str], what: str, reason: str | None, say: Callable[[str], None]) -> None:
    if reason is None:
        taken.append(what)
        logger.info("tried: %s", what)
    else:
        say(f"no {what}: {reason}")


@contextmanager
def _documents_apart(trainer: Any) -> Iterator[str | None]:
    from amoeba.integrations.fused_attention import NAME

    model = trainer.model
    text = text_decoder(model)  # vision and audio parts keep their own attention
    own = text.config._attn_implementation

    def run() -> None:
        text.set_attn_implementation(NAME)
        trainer.by_documents = True
        trainer.try_batch(rows=1, gradients=False)

    if (reason := _why_not("attention by documents", run)) is not None:
        trainer.by_documents = False
        text.set_attn_implementation(own)
    try:
        yield reason
    finally:
        trainer.by_documents = False
        text.set_attn_implementation(own)


def _looping(trainer: Any) -> list[torch.nn.Module]:
    model, found = trainer.model, list[torch.nn.Module]()
    training = model.training
    model.eval()
    try:
        with trainer.as_it_trains():
            _why_not("loops over a text", lambda: found.extend(looping_parts(model)))
    finally:
        model.train(training)
        trainer.watch.forget()
    return found


@contextmanager
def _compiled(trainer: Any, looping: list[torch.nn.Module]) -> Iterator[str | None]:
    layers = None

    def run() -> None:
        nonlocal layers
        layers = CompiledLayers(trainer.model, looping)
        layers.begin()
        trainer.try_batch(rows=trainer.args.per_device_train_batch_size, gradients=True)

    reason = _why_not("decoder layers compiled", run)
    try:
        if reason is not None and layers is not None:
            layers.end()
        trainer.compiled = reason is None
        trainer.compiles_evaluation = trainer.evaluation_flops() >= WORTH_COMPILING
        yield reason
    finally:
        trainer.compiled = trainer.compiles_evaluation = False
        if layers is not None:
            layers.end()


@contextmanager
def _captured(trainer: Any, reason: str | None) -> Iterator[str | None]:
    if reason is None and trainer.args.gradient_checkpointing and draws_random_numbers(trainer.model):
        reason = "activation checkpointing draws the model's random numbers again, for which it has to ask the device"
    trainer.captures = reason is None
    try:
        yield reason
    finally:
        trainer.release()
