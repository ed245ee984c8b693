"""Optimizers for training with bf16 parameters. torch alone is needed; Triton where a parameter lies on a GPU."""

from amoeba.optim.adamw import AdamW

__all__ = ["AdamW"]
