"""What was measured on this machine, in the folder for caches, so that the next run does not measure it again.

    found = kept("ceiling", about)              # None where it is not there, or is of something else
    keep("ceiling", about, {"flops_per_second": 1e12})

about: all that the measurement hangs on, as JSON has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from amoeba.cpu.library_cache import prepared
from amoeba.system.files import default_folder, write_whole


def kept(kind: str, about: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = json.loads(_file(kind, about, default_folder()).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("of") == about else None


def keep(kind: str, about: dict[str, Any], found: dict[str, Any]) -> None:
    text = json.dumps({"of": about} | found, indent=1) + "\n"
    with contextlib.suppress(OSError):  # then the next run measures again
        write_whole(_file(kind, about, prepared(default_folder())), text)


def _file(kind: str, about: dict[str, Any], folder: Path) -> Path:
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{kind}-{name}.json"
