"""Experts that do not fit in memory: kept in a store on disk and loaded when they are needed.

streamed = amoeba.stream.attach("models/qwen3", ram="8GiB")     # a folder, or a store that `amoeba pack` wrote
streamed.model.generate(...)
print(streamed.report().hit_rate)
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "attach": "amoeba.stream.attaching",
    "open_store": "amoeba.stream.store",
    "SlotMap": "amoeba.stream.gpu.pool",
    "Streamed": "amoeba.stream.attaching",
}

__all__ = ["SlotMap", "Streamed", "attach", "open_store"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'amoeba.stream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
