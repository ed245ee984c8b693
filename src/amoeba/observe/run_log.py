"""Reads the folder of a training run: config.json, environment.json and metrics.jsonl.

E experts of a layer

    run = read_run("runs/small")
    run.train[-1]["loss"], run.finished, run.torn_line

metrics.jsonl has one JSON object per line, with a "kind" and a "step":
    train         loss, lr, tokens_per_second, ...
    eval          loss and perplexity on held-out text
    router        layers: layer, load (E), entropy, max_violation, dead_experts, drop_rate
    coactivation  layers: layer, counts (E × E)
    text_kinds    kinds: names; layers: layer, loads (kinds × E): whom each kind of held-out text was sent to
    final         the last evaluation
A number that is not finite is NaN, Infinity or null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amoeba.core.errors import bad_value

RUN_FIELD = "model_config"  # of a run's config.json
KINDS = ("train", "eval", "router", "coactivation", "text_kinds", "final")
Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Records are in the order of their steps, and each step is there once: the later, where training went back."""

    folder: Path
    config: dict[str, Any] | None  # None: there is no such file
    environment: dict[str, Any] | None
    train: tuple[Record, ...]
    eval: tuple[Record, ...]
    router: tuple[Record, ...]
    coactivation: tuple[Record, ...]
    text_kinds: tuple[Record, ...]
    final: Record | None
    torn_line: int | None  # number of the last line, where its writer was stopped in the middle of it
    went_back_to: tuple[int, ...]  # steps from which training was done again
    unknown_kinds: dict[str, int]  # lines that this version does not know, counted
    last_written: float | None  # seconds since the epoch

    @property
    def finished(self) -> bool:
        return self.final is not None

    @property
    def last_step(self) -> int | None:
        records = (*self.train[-1:], *self.eval[-1:], *self.router[-1:], *([self.final] if self.final else []))
        return max((record["step"] for record in records), default=None)


def read_run(folder: str | Path) -> Run:
    """The run in this folder. ValueError where there is none, or where a file of it is broken."""
    folder = Path(folder)
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise bad_value(str(folder), "the folder of a training run", got, "give the folder that `amoeba train` wrote")
    metrics = folder / "metrics.jsonl"
    config = _read_object(folder / "config.json")
    if not metrics.is_file() and RUN_FIELD not in (config or {}):  # a model's folder has a config.json too
        names = sorted(path.name for path in folder.iterdir()) or ["nothing in it"]
        got = f"a folder with {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        remedy = "give the folder that `amoeba train` wrote, not the one above or below it"
        raise bad_value(str(folder), "a training run (metrics.jsonl, config.json)", got, remedy)
    by_kind, torn_line, went_back_to, unknown_kinds = _read_metrics(metrics)
    final = by_kind["final"][-1] if by_kind["final"] else None
    if final is not None and by_kind["train"] and by_kind["train"][-1]["step"] > final["step"]:
        final = None  # training went on after it
    return Run(
        folder=folder,
        config=config,
        environment=_read_object(folder / "environment.json"),
        **{kind: tuple(by_kind[kind]) for kind in KINDS if kind != "final"},
        final=final,
        torn_line=torn_line,
        went_back_to=tuple(went_back_to),
        unknown_kinds=unknown_kinds,
        last_written=metrics.stat().st_mtime if metrics.is_file() else None,
    )


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise bad_value(str(path), "a JSON object", f"invalid JSON ({error})", "correct or remove the file") from None
    if not isinstance(found, dict):
        raise bad_value(str(path), "a JSON object", f"a {type(found).__name__}", "correct or remove the file")
    return found


def _read_metrics(path: Path) -> tuple[dict[str, list[Record]], int | None, list[int], dict[str, int]]:
    by_kind: dict[str, list[Record]] = {kind: [] for kind in KINDS}
    torn_line, went_back_to, unknown_kinds = None, [], dict[str, int]()
    lines = path.read_bytes().rstrip().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                torn_line = number
                break
            raise _bad_line(path, number, "a JSON object", f"invalid JSON ({error})") from None
        _check(record, path, number)
        kind = record["kind"]
        if kind not in by_kind:
            unknown_kinds[kind] = unknown_kinds.get(kind, 0) + 1
            continue
        earlier = by_kind[kind]
        if kind == "train" and earlier and earlier[-1]["step"] >= record["step"]:
            went_back_to.append(record["step"])
        while earlier and earlier[-1]["step"] >= record["step"]:
            earlier.pop()
        earlier.append(record)
    return by_kind, torn_line, went_back_to, unknown_kinds


def _check(record: Any, path: Path, number: int) -> None:
    if not isinstance(record, dict):
        raise _bad_line(path, number, "a JSON object", f"a {type(record).__name__}")
    if not isinstance(record.get("kind"), str):
        raise _bad_line(path, number, f'"kind", one of {", ".join(KINDS)}', repr(record.get("kind")))
    if record["kind"] not in KINDS:
        return
    if not _is_count(record.get("step")):
        raise _bad_line(path, number, '"step", a whole number from 0', repr(record.get("step")))
    field = {"router": "load", "coactivation": "counts", "text_kinds": "loads"}.get(record["kind"])
    if field is None:
        return
    layers = record.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise _bad_line(path, number, '"layers", a list of objects', repr(layers)[:60])
    for layer in layers:
        if not _is_count(layer.get("layer")):
            raise _bad_line(path, number, '"layer", a whole number from 0', repr(layer.get("layer")))
        values = layer.get(field)
        rows = values if field != "load" and isinstance(values, list) else [values]
        if not all(_is_numbers(row) for row in rows):
            raise _bad_line(path, number, f'"{field}" of numbers in layer {layer["layer"]}', repr(values)[:60])
        if field == "counts" and any(len(row) != len(rows) for row in rows):
            raise _bad_line(path, number, f'square "counts" in layer {layer["layer"]}', f"{len(rows)} rows of others")
        if field == "loads" and not _fits(record.get("kinds"), rows):
            expected = f'"kinds", a name for each of the {len(rows)} rows of "loads" in layer {layer["layer"]}'
            raise _bad_line(path, number, expected, repr(record.get("kinds"))[:60])


def _fits(kinds: Any, rows: list[Any]) -> bool:
    named = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    return named and len(kinds) == len(rows) and len({len(row) for row in rows}) <= 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(value is None or isinstance(value, int | float) for value in values)


def _bad_line(path: Path, number: int, expected: str, got: str) -> ValueError:
    return bad_value(f"{path}, line {number}", expected, got, "remove the line to see the rest of the run")
