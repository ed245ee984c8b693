"""What a token of a whole language model costs in training, and what this machine could do at best.

    found = kept("ceiling", about)              # measured by an earlier run; None: not there, or of something else
    keep("ceiling", about, {"flops_per_second": 1e12})

about: all that the measurement hangs on, as JSON has it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from amoeba.cpu.library_cache import prepared
from amoeba.integrations.experts_module import experts_modules, layout_of, placed_in
from amoeba.integrations.text_model import text_config
from amoeba.system.files import default_folder, write_whole
from amoeba.system.machine import cpu_model, load_average, usable_cores

# Products that are timed for the ceiling, at least and at most, and the seconds after which there are no more.
_PRODUCTS, _MOST_SECONDS = (2, 10), 0.4
# On a GPU: this many between two waits, until it has been busy for this long. A shorter time, or waiting for each,
# gives a peak that is a few per cent too low: clocks have not risen yet, and the launch is counted.
_GPU_PRODUCTS, _GPU_SECONDS = 20, 0.2
# If the median product takes this many times as long as the best one, the machine is busy: the result is not kept.
_CALM = 1.1


def training_flops_per_token(model: Any, tokens_per_row: float) -> float:
    """Per parameter at work 2 forward, 2 for the gradient of its input, and 2 for its own if it is trained; and per
    layer, for causal attention over S tokens with Q heads of size D, 6·S·Q·D (half of the 12·S·Q·D of full attention).

    What is computed again, routing, norms and the optimizer's own work do not count."""
    config = text_config(model.config)
    attention = 6.0 * config.num_hidden_layers * attention_width(config) * tokens_per_row
    return attention + sum((6.0 if trained else 4.0) * numbers for numbers, trained in _at_work(model))


def attention_width(config: Any) -> float:
    """Of all query heads together; where keys and values have different sizes, the mean of them."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size / heads
    keys = getattr(config, "qk_nope_head_dim", None)
    if keys is not None:
        size = (keys + config.qk_rope_head_dim + config.v_head_dim) / 2
    return heads * size


def _at_work(model: Any) -> Iterator[tuple[float, bool]]:
    """(numbers that work on one token, whether they are trained): all but the experts that a token does not visit, and
    but the embedding table."""
    config = text_config(model.config)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if hasattr(config, name)), 0)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is None or head.weight is embedding
    placed = {name: module for name, module in experts_modules(model).items() if placed_in(module) is not None}
    codes = {id(tensor) for module in placed.values() for tensor in module._parameters.values()}  # or a rank's share
    for parameter in model.parameters():
        stacked = parameter.dim() == 3 and parameter.shape[0] == experts
        if id(parameter) not in codes and (parameter is not embedding or tied):
            yield parameter.numel() * (share if stacked else 1.0), parameter.requires_grad
    for module in placed.values():
        if (layout := layout_of(module)) is not None:
            trained = any(tensor is not None and tensor.requires_grad for tensor in module._parameters.values())
            numbers = layout.num_experts * layout.hidden * layout.intermediate * (3 if layout.gated else 2)
            yield numbers * share, trained


@functools.cache
def measured_ceiling(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training uses there; the peak that shares refer to.

    It is measured once per device, dtype and torch, and kept in the folder for caches, unless the machine was busy.
    """
    gpu = device.type == "cuda"
    # 1024 on a CPU: as fast as 2048 to within a few per cent, in an eighth of the time
    size, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    name = torch.cuda.get_device_name(device) if gpu else f"{cpu_model()}, {torch.get_num_threads()} threads"
    about: dict[str, Any] = {"device": name, "dtype": str(dtype).removeprefix("torch."), "size": size}
    about |= {"torch": str(torch.__version__)} | ({"busy_seconds": _GPU_SECONDS} if gpu else {})
    known = (kept("ceiling", about) or {}).get("flops_per_second")
    if isinstance(known, float) and 0 < known < math.inf:
        return known
    seconds = _seconds_of_products(size, dtype, device)
    found = 2.0 * size**3 / min(seconds)
    load = None if gpu else load_average()
    calm = statistics.median(seconds) <= _CALM * min(seconds) and (load is None or load <= usable_cores() / 2)
    if calm:
        keep("ceiling", about, {"flops_per_second": found})
    return found


def _seconds_of_products(size: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    left = torch.randn(size, size, device=device, dtype=dtype)
    result, taken = torch.empty_like(left), list[float]()
    if device.type == "cuda":
        while sum(taken) < _GPU_SECONDS:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_GPU_PRODUCTS + 1)]
            events[0].record()
            for event in events[1:]:
                torch.mm(left, left, out=result)
                event.record()
            events[-1].synchronize()
            taken += [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
        return taken
    while len(taken) < _PRODUCTS[0] or (len(taken) < _PRODUCTS[1] and sum(taken) < _MOST_SECONDS):
        began = time.perf_counter()
        torch.mm(left, left, out=result)
        taken.append(time.perf_counter() - began)
    return taken


def kept(kind: str, about: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(_file(kind, about, default_folder()).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("of") == about else None


def keep(kind: str, about: dict[str, Any], found: dict[str, Any]) -> None:
    text = json.dumps({"of": about} | found, indent=1) + "\n"
    with contextlib.suppress(OSError):  # then the next run measures again
        write_whole(_file(kind, about, prepared(default_folder())), text)


def _file(kind: str, about: dict[str, Any], folder: Path) -> Path:
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{kind}-{name}.json"
