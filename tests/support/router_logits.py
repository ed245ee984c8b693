"""Logits as routers are tested with: T tokens · E experts."""

import torch


def random_logits(num_tokens, num_experts, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)
