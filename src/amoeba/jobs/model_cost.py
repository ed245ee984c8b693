"""What a token of a whole language model costs in training, and what this machine could do at best."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch


def active_parameters(model: Any) -> int:
    """Parameters that work on one token: all but the experts that it does not visit (and the embedding table)."""
    config = model.config
    experts = next(
        (getattr(config, n) for n in ("num_experts", "num_local_experts", "n_routed_experts") if hasattr(config, n)), 0
    )
    top_k = getattr(config, "num_experts_per_tok", experts)
    share = top_k / experts if experts else 1.0
    embedding = model.get_input_embeddings().weight
    total = 0.0
    for parameter in model.parameters():
        stacked = parameter.dim() == 3 and parameter.shape[0] == experts
        total += parameter.numel() * (share if stacked else 1.0)
    tied = model.get_output_embeddings() is None or model.get_output_embeddings().weight is embedding
    return int(total if tied else total - embedding.numel())


def training_flops_per_token(model: Any, sequence_length: int) -> float:
    """6 per active parameter, and 6·S·H per layer for causal attention (half of the 12·S·H of full attention)."""
    config = model.config
    return 6.0 * active_parameters(model) + 6.0 * config.num_hidden_layers * config.hidden_size * sequence_length


@functools.cache
def measured_ceiling(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training uses there; the peak that shares refer to."""
    gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if gpu else (2048, torch.float32)
    left = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        left @ left
        if gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2.0 * size**3 / best
