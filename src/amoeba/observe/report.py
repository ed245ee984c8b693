"""A training run as one HTML page that needs no network and no other file.

write_report("runs/small")     # runs/small/report.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value
from amoeba.observe.run_log import Record, Run, read_run
from amoeba.system.files import finite, write_whole

_PLACEHOLDER = "__RUN__"
TIMELINE = "amoeba-trace.svg"
# What a browser still moves through without a pause; more is thinned evenly, and the page says so.
_LOAD_VALUES = 400_000
_LINE_RECORDS = 5_000
_TRAIN_FIELDS = (
    *("step", "time", "loss", "lr", "grad_norm", "tokens_per_second", "tokens", "memory_bytes"),
    *("share_of_peak", "max_violation", "dead_experts", "drop_rate"),
)
# Always numbers while a run is sound: where one is null, it was not finite.
_NEVER_NULL = ("loss", "perplexity", "start_loss", "grad_norm")


def write_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page (RUN/report.html unless `out` names a file), whole or not at all; returns where it is."""
    run = read_run(run_folder)
    path = run.folder / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise bad_value(str(path), "the name of a file", "a folder", "give a name, such as report.html in it")
    write_whole(path, page(run))
    return path


def page(run: Run) -> str:
    template = resources.files("amoeba.observe").joinpath("page.html").read_text(encoding="utf-8")
    # With no "<" in it, nothing in the data can end the script element that holds it.
    shown = finite(page_data(run), lambda number: f"not finite ({number})")
    data = json.dumps(shown, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = template.split(_PLACEHOLDER)
    return before + data + after


def page_data(run: Run) -> dict[str, Any]:
    """What the page draws, still with NaN and infinities where the run had them."""
    values = sum(len(layer["load"]) for layer in run.router[-1]["layers"]) if run.router else 0
    router = _thin(run.router, max(2, _LOAD_VALUES // max(1, values)))
    train = _thin(run.train, _LINE_RECORDS)
    steps, written = [0, *(record["step"] for record in run.train)], run.last_written
    return {
        "name": run.folder.resolve().name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": run.finished,
        "last_step": run.last_step,
        "last_line_steps": steps[-1] - steps[-2] if run.train else 0,  # a line is about those since the one before it
        "last_written": None if written is None else datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        "notes": [*_notes(run), *_thinned("train", run.train, train), *_thinned("router", run.router, router)],
        "config": run.config,
        "environment": run.environment,
        "train": [_spoken({name: record[name] for name in _TRAIN_FIELDS if name in record}) for record in train],
        "eval": [_spoken(record) for record in _thin(run.eval, _LINE_RECORDS)],
        "router": router,
        "coactivation": run.coactivation[-1] if run.coactivation else None,
        "text_kinds": run.text_kinds[-1] if run.text_kinds else None,
        "final": None if run.final is None else _spoken(run.final),
        "timeline": _timeline(run.folder),
    }


def _timeline(folder: Path) -> str | None:
    picture = folder / TIMELINE
    return picture.read_text(encoding="utf-8") if picture.is_file() else None


def _spoken(record: Record) -> Record:
    return {name: "not finite" if value is None and name in _NEVER_NULL else value for name, value in record.items()}


def _notes(run: Run) -> list[str]:
    notes = []
    if run.torn_line is not None:
        why = "its writer was stopped in the middle of it, or is still writing"
        notes.append(f"Line {run.torn_line} of metrics.jsonl, the last one, is incomplete and left out: {why}.")
    for step in run.went_back_to:
        notes.append(f"Training went back to step {step:,} and did it again; the later lines are shown.")
    for kind, count in run.unknown_kinds.items():
        notes.append(f"{count:,} lines of kind {kind!r} are left out: this version of aMoEba does not know them.")
    return notes


def _thin(records: Sequence[Record], most: int) -> list[Record]:
    if len(records) <= most:
        return list(records)
    return [records[index * (len(records) - 1) // (most - 1)] for index in range(most)]


def _thinned(kind: str, records: Sequence[Record], kept: Sequence[Record]) -> list[str]:
    if len(kept) == len(records):
        return []
    return [f"{len(kept):,} of the {len(records):,} {kind} lines are shown, evenly spaced: all would slow the page."]
