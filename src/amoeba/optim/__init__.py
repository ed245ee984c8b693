"""Optimizers for training with bf16 parameters. torch alone is needed; Triton where a parameter lies on a GPU.

optimizer = amoeba.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
"""

from amoeba.optim.adamw import AdamW

__all__ = ["AdamW"]
