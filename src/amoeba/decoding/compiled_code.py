"""Whether the compiled layers of a step are on disk already, so that the next run only has to load them.

if is_there(model, batch, length): ...
note(model, batch, length)              # after they were compiled

Inductor keeps the code in its cache (`integrations.compile_cache`); here is only noted for which steps it was made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from amoeba._version import __version__
from amoeba.integrations.compile_cache import folder


def is_there(model: Any, batch: int, length: int) -> bool:
    try:
        return _mark(model, batch, length).exists()
    except OSError:
        return False


def note(model: Any, batch: int, length: int) -> None:
    with contextlib.suppress(OSError):  # then it is compiled again
        mark = _mark(model, batch, length)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _mark(model: Any, batch: int, length: int) -> Path:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    adapted = sum(parameter.numel() for parameter in model.parameters())  # factors count, and change the code
    known = (__version__, torch.__version__, device, str(model.dtype), batch, length, adapted)
    text = json.dumps([*known, model.config.to_json_string()])
    return folder() / "amoeba_steps" / hashlib.sha256(text.encode()).hexdigest()[:24]
