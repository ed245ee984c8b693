"""Whether a model draws random numbers in training: activation checkpointing then has to draw the same ones again.

draws_random_numbers(model)      # False for most models of today: their dropout is 0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMES = (
    "dropout",
    "drop",
    "dropout_rate",
    "dropout_prob",
    "layerdrop",
    "drop_path_rate",
    "jitter_noise",
    "jitter_eps",
)


def draws_random_numbers(model: nn.Module) -> bool:
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and any(_named(config.to_dict()))


def _named(config: Mapping[str, Any]) -> Iterator[bool]:
    """Of each probability or noise in a configuration, and in those inside it, whether there is any."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif isinstance(value, int | float) and str(name).endswith(_NAMES):
            yield value > 0
