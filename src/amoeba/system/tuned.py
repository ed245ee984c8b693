"""What `amoeba tune` measured on this machine's GPU, kept between processes in the folder for caches.

    key = tuned.key("up", torch.float16, rows=256, reduction=2048, columns=1536)
    tuned.keep(tuned.gpu_of(device), key, entry)              # complete or not at all, added to what is there
    tuned.choose(device, key, lambda: candidates(...))        # one of those, or None

What is in a file is looked up among the candidates and never launched unseen; what is damaged, of another GPU or no
candidate is named and ignored. AMOEBA_TUNED=off leaves all of it aside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.system.files import default_folder, write_whole

VARIABLE = "AMOEBA_TUNED"
_FORMAT = 1  # of the file
Entries = dict[str, dict[str, Any]]
Chosen = TypeVar("Chosen")


class Gpu(NamedTuple):
    name: str
    capability: str
    triton: str


def gpu_of(device: torch.device) -> Gpu:
    import triton

    if device.type != "cuda":
        return Gpu("interpreter", "none", triton.__version__)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", triton.__version__)


def key(role: str, dtype: torch.dtype, **sizes: int) -> str:
    """role dtype name=size ..., in this order."""
    return " ".join([role, str(dtype).removeprefix("torch."), *(f"{name}={size}" for name, size in sizes.items())])


def choose(device: torch.device, key: str, allowed: Callable[[], Iterable[Chosen]]) -> Chosen | None:
    """The one of `allowed` that was measured to be the best, or None."""
    found = entries(device).get(key)
    if found is None:
        return None
    for candidate in allowed():
        if plain(candidate) == found.get("configuration"):
            return candidate
    _warn_once(f"{path_of(gpu_of(device))}: {key!r} is no configuration of ours, our own table is used instead")
    return None


def plain(configuration: Any) -> Any:
    if is_dataclass(configuration) and not isinstance(configuration, type):
        return asdict(configuration)
    if isinstance(configuration, tuple) and hasattr(configuration, "_asdict"):
        return {name: plain(value) for name, value in configuration._asdict().items()}
    return configuration


@cache
def entries(device: torch.device) -> Entries:
    """All that is known of this GPU, as far as it is to be used."""
    if not is_wanted():
        return {}
    try:
        gpu = gpu_of(device)
        path = path_of(gpu)
        found = read(path, gpu)
    except (ImportError, OSError):  # no Triton; someone without a home
        return {}
    if found:
        told = f"{len(found)} configurations measured on this GPU are in use ({path}); {VARIABLE}=off ignores them"
        logger.info(told)
    return found


def is_wanted() -> bool:
    value = os.environ.get(VARIABLE, "on")
    if value not in ("on", "off"):
        raise bad_value(VARIABLE, "on or off", repr(value), "unset it for on")
    return value == "on"


def path_of(gpu: Gpu) -> Path:
    """OSError for someone without a home."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu.name} sm{gpu.capability} triton-{gpu.triton}".lower()).strip("-")
    return default_folder() / "tuned" / f"{name}.json"


def read(path: Path, gpu: Gpu) -> Entries:
    """Nothing where there is no such file, or it is not one of ours for this GPU, which is said."""
    try:
        content = json.loads(path.read_bytes())
        about, found = content["of"], content["found"]
        if content["format"] != _FORMAT or about != gpu._asdict():
            _warn_once(f"ignoring {path}: it was measured on {about}, this is {gpu._asdict()}")
            return {}
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise TypeError("found")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _warn_once(f"ignoring {path}: it cannot be read ({type(error).__name__}); `amoeba tune` writes it again")
        return {}
    return found


def keep(gpu: Gpu, key: str, entry: dict[str, Any]) -> Path:
    """A reader finds the file with the entry or without it."""
    path = path_of(gpu)
    found = read(path, gpu) | {key: entry}
    content = {"format": _FORMAT, "of": gpu._asdict(), "found": dict(sorted(found.items()))}
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
