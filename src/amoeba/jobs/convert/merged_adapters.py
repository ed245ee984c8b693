"""Which adapters were already merged into a model folder, so that none is added twice.

note_merged(folder, base, adapter)     # in the folder that merge writes
check_not_merged(model, adapter)       # ValueError where this adapter is in this model
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value
from amoeba.integrations.model_folder import check_json
from amoeba.lora.peft_files import TENSORS_NAME
from amoeba.system.files import write_whole

NAME = "merged_adapters.json"


def note_merged(folder: Path, base: str, adapter: Path) -> None:
    """What the base model had in it, and this one."""
    entry = {"adapter": str(adapter), "base_model": base, "sha256": _digest(adapter)}
    write_whole(folder / NAME, json.dumps({"adapters": [*_merged_into(base), entry]}, indent=1) + "\n")


def check_not_merged(model: str, adapter: Path) -> None:
    entries = _merged_into(model)
    if not entries or not (adapter / TENSORS_NAME).is_file():
        return
    digest = _digest(adapter)
    for entry in entries:
        if entry.get("sha256") == digest:
            raise bad_value(
                "--adapter",
                "an adapter that is not merged into the model yet",
                f"{str(adapter)!r}, which is already merged into {model!r} ({NAME})",
                f"use that model without the adapter, or the base model {entry.get('base_model')!r} with it",
            )


def _merged_into(model: str) -> list[dict[str, Any]]:
    path = Path(model) / NAME
    if not path.is_file():
        return []
    check_json(path)
    entries = json.loads(path.read_bytes()).get("adapters")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise bad_value(str(path), '"adapters", a list of objects', repr(entries)[:60], "correct or remove the file")
    return entries


def _digest(adapter: Path) -> str:
    with (adapter / TENSORS_NAME).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
