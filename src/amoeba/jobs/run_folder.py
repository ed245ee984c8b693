"""The folder of a run, which `amoeba report` and `--resume` read.

RUN/config.json environment.json metrics.jsonl tensorboard/ checkpoints/ and model/ or adapter/
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from amoeba.errors import bad_value
from amoeba.files import write_whole
from amoeba.shell import shell_words


class Console(Protocol):
    """Where a run tells how it goes: a progress bar, plain lines, or nothing."""

    def say(self, text: str) -> None: ...

    def step(self, line: dict[str, Any], total: int) -> None: ...


@dataclass(frozen=True)
class RunReport:
    """How a run ended."""

    folder: str
    steps: int
    start_loss: float  # held out
    final_loss: float
    perplexity: float
    dead_experts: int
    tokens_per_second: float
    seconds: float
    interrupted: bool


def prepare_folder(out: str, resume: bool) -> Path:
    """The folder, which can be written and holds a run if, and only if, it is to go on."""
    folder = Path(out)
    if resume and not (folder / "config.json").is_file():
        raise bad_value("--resume", "a folder of an earlier run", str(folder), "check the path, or train anew")
    if not resume and (folder / "metrics.jsonl").exists():
        raise bad_value(
            "--out",
            "a folder that holds no run yet",
            str(folder),
            f"use {shell_words('--resume', folder)}, or another --out",
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise bad_value("--out", "a folder that can be written", f"{folder} ({error})", "choose another") from error
    return folder


def describe_run(folder: Path, settings: dict[str, Any], model_config: dict[str, Any]) -> None:
    """What was asked for, and on which machine."""
    from amoeba.machine import commit, machine, versions

    environment = {
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
    }
    for name, content in {"config": settings | {"model_config": model_config}, "environment": environment}.items():
        write_whole(folder / f"{name}.json", json.dumps(content, indent=1, default=str) + "\n")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint. One that was being written has another name."""
    found = [path for path in (folder / "checkpoints").glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def remove_unfinished(folder: Path) -> None:
    """What a killed run left half-written."""
    shutil.rmtree(folder / "checkpoints" / "writing", ignore_errors=True)
