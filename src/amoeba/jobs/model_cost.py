"""What a token of a whole language model costs in training, and what this machine could do at best."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch

from amoeba.integrations.experts_module import experts_modules, layout_of, placed_in


def training_flops_per_token(model: Any, tokens_per_row: float) -> float:
    """Per parameter at work 2 forward, 2 for the gradient of its input, and 2 for its own if it is trained; and 6·S·H
    per layer for causal attention (half of the 12·S·H of full attention)."""
    config = model.config
    attention = 6.0 * config.num_hidden_layers * config.hidden_size * tokens_per_row
    return attention + sum((6.0 if trained else 4.0) * numbers for numbers, trained in _at_work(model))


def _at_work(model: Any) -> Iterator[tuple[float, bool]]:
    """(numbers that work on one token, whether they are trained): all but the experts that a token does not visit, and
    but the embedding table."""
    config = model.config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if hasattr(config, name)), 0)
    share = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is None or head.weight is embedding
    for parameter in model.parameters():
        stacked = parameter.dim() == 3 and parameter.shape[0] == experts
        if parameter is not embedding or tied:
            yield parameter.numel() * (share if stacked else 1.0), parameter.requires_grad
    for module in experts_modules(model).values():  # those that are no parameters any more
        if (layout := layout_of(module)) is None or placed_in(module) is None:
            continue
        yield layout.num_experts * layout.hidden * layout.intermediate * (3 if layout.gated else 2) * share, False


@functools.cache
def measured_ceiling(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training uses there; the peak that shares refer to."""
    gpu = device.type == "cuda"
    # 1024 on a CPU: as fast as 2048 to within a few per cent, and five of them take a quarter of a second, not three
    size, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    left = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        left @ left
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
