"""The dtype in which a model computes on this CPU: fp32, or bf16 if the CPU supports it and it is faster.

    choice = dtype_to_load(None, "models/qwen3", config, torch.device("cpu"))       # generate, finetune
    dtype = faster_dtype(model, rows, batch_size=8, passes=2000, say=print)         # train

A CPU without bf16 instructions takes fp32. On others a model that is not trained is computed in the dtype of its
checkpoint; to train one, a pass is timed in each, and the figures are kept for the next run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.log import logger
from amoeba.data.token_rows import PackedDataset, stack
from amoeba.jobs.model_cost import keep, kept, training_flops_per_token
from amoeba.stream.store import StoreError
from amoeba.stream.store.tensor_files import checkpoint_tensors
from amoeba.system.cpu_features import has_bf16_instructions
from amoeba.system.machine import cpu_model, load_average, usable_cores

# Of all passes of a run: one of fewer operations is over within a minute or two on a CPU that multiplies bf16.
WORTH_MEASURING = 2e13
# The timed rows take at most this many operations, unless one row takes more; a second or two on a few cores.
_MOST_FLOPS = 2e11
# A pass is timed up to this often, and not again after this many seconds: the first one has to load libraries.
_PASSES, _MOST_SECONDS = 3, 1.0
_DTYPES = torch.float32, torch.bfloat16


class DtypeChoice(NamedTuple):
    """dtype: to load a model in; None: the checkpoint's own.
    stored: the checkpoint's, where `dtype` is another one because that is faster; else None.
    reason: why this one."""

    dtype: torch.dtype | None
    stored: torch.dtype | None
    reason: str


def dtype_to_load(asked: torch.dtype | None, name: str, config: Any, device: torch.device) -> DtypeChoice:
    """asked: None to choose. name, config: of the model. device: where all but its experts will compute."""
    if asked is not None:
        return DtypeChoice(asked, None, "as requested")
    stored = _stored_dtype(name, config)
    if device.type != "cpu" or stored not in (torch.bfloat16, torch.float16) or has_bf16_instructions():
        return DtypeChoice(None, None, "the checkpoint's own")
    return DtypeChoice(torch.float32, stored, f"faster on this CPU than the checkpoint's {_name(stored)}")


def _stored_dtype(name: str, config: Any) -> torch.dtype | None:
    """As transformers finds it: in the configuration, else that of the first weight. None where it is not known yet."""
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if found is not None:
        return getattr(torch, found) if isinstance(found, str) else found
    try:
        entries = checkpoint_tensors(Path(name)).values()
    except (StoreError, OSError):
        return None
    return next((entry.dtype for entry in entries if entry.dtype.is_floating_point), None)


def faster_dtype(
    model: Any, rows: PackedDataset, *, batch_size: int, passes: int, say: Callable[[str], None]
) -> torch.dtype:
    """passes: of the run, each of batch_size rows."""
    if not has_bf16_instructions():
        return torch.float32
    length = rows.sequence_length
    flops_per_row = length * training_flops_per_token(model, length)
    if passes * batch_size * flops_per_row < WORTH_MEASURING:
        return torch.float32
    count = max(1, min(batch_size, len(rows), int(_MOST_FLOPS / flops_per_row)))
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    model_hash = hashlib.sha256(config.encode()).hexdigest()[:12]
    cpu = f"{cpu_model()}, {torch.get_num_threads()} threads"
    about = {"device": cpu, "torch": str(torch.__version__), "model": model_hash, "rows": count, "length": length}
    seconds = _known(about) or _measured(model, stack([rows[row] for row in range(count)]), about)
    if seconds is None:
        return torch.float32
    fp32, bf16 = seconds
    dtype = torch.bfloat16 if bf16 < fp32 else torch.float32
    taken = f"{fp32:.3g} s in float32, {bf16:.3g} s in bfloat16"
    say(f"a pass of {count} rows on this CPU: {taken}; training in {_name(dtype)}")
    return dtype


def _known(about: dict[str, Any]) -> tuple[float, float] | None:
    found = kept("dtype", about) or {}
    fp32, bf16 = (found.get(_name(dtype)) for dtype in _DTYPES)
    return (fp32, bf16) if isinstance(fp32, float) and isinstance(bf16, float) else None


def _measured(model: Any, batch: dict[str, Tensor], about: dict[str, Any]) -> tuple[float, float] | None:
    """None where the model does not pass: the run itself will say why."""
    try:
        fp32, bf16 = (seconds_of_a_pass(model, batch, dtype) for dtype in _DTYPES)
    except Exception as error:  # a model may fail in many ways
        logger.info("dtypes on this CPU", exc_info=error)
        return None
    load = load_average()
    if load is None or load <= usable_cores():
        keep("dtype", about, {_name(dtype): each for dtype, each in zip(_DTYPES, (fp32, bf16), strict=True)})
    return fp32, bf16


def seconds_of_a_pass(model: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> float:
    """Forward and backward, the best of a few. Nothing of them stays."""
    taken: list[float] = []
    training = model.training
    model.train()
    try:
        with torch.random.fork_rng(devices=[]):
            while not taken or (len(taken) < _PASSES and sum(taken) < _MOST_SECONDS):
                began = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    loss = model(**batch).loss
                loss.backward()
                taken.append(time.perf_counter() - began)
                model.zero_grad(set_to_none=True)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
    return min(taken)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
