"""Optimizers for training with bf16 parameters.

    optimizer = amoeba.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

torch alone is needed; Triton where a parameter lies on a GPU.
"""

from amoeba.optim.adamw import AdamW

__all__ = ["AdamW"]
