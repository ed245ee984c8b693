"""Resuming a run: its settings, data, model and checkpoint must be the same and complete, or it is refused.

    earlier = run.earlier("model")          # of a `jobs.train.run.Run`
    earlier.checkpoint           # whole; None: none was finished, the run starts anew
    check_data(earlier, began_with(corpus))

Nothing is overwritten before all of it fits. What the run began with is in its config.json (`began_with`): hashes of
the documents, samples of a frozen model's weights, and the dtype in which `amoeba train` computes on a CPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from amoeba.core.errors import bad_value
from amoeba.data.corpus import Corpus
from amoeba.data.documents import Document, characters
from amoeba.integrations.gguf_files import is_gguf, parts_of
from amoeba.jobs.presets import PRESETS
from amoeba.jobs.settings import AT_RESUME, RunSettings, Settings, TrainSettings, load_settings, read_settings
from amoeba.jobs.train.manifest import DIGEST, MANIFEST, damages, digest_fits
from amoeba.jobs.train.optimizer_files import GROUPS
from amoeba.jobs.train.run_folder import RunReport, step_of
from amoeba.stream.store.index import INDEX, is_store
from amoeba.system.files import sampled_hash, shell_command, shell_words

Report = TypeVar("Report", bound=RunReport)

_RECORDS = ("model_config", "began_with", DIGEST)  # in config.json with the settings
# of a configuration: names and versions, not what the model computes; and what training turns off
_NOT_COMPARED = {"transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache"}
_NOT_COMPARED |= {"output_router_logits"}
_SAME_NUMBERS = {"resident", "ranks"}  # of placements: the same numbers, in other memory


@dataclass(frozen=True)
class Earlier:
    folder: Path
    command: str
    checkpoint: Path | None
    model_config: dict[str, Any]
    began_with: dict[str, Any]

    @property
    def new_run(self) -> str:
        """The remedy where this run cannot go on: a new one, from what was learnt where the command can."""
        start = " MODEL" if self.command == "amoeba finetune" else ""
        if not start and self.checkpoint is not None:
            start = " " + shell_words("--model", self.checkpoint)
        return f"start a new run: {self.command}{start} --data ... --out ANOTHER"


# --- the record of the run


def settings_of(kind: type[Settings], resume: str | None, config: str | None, given: dict[str, Any]) -> Settings:
    """Of a new run, or of the one in the folder `resume`: then what is neither given nor in the file `config` is the
    run's own, and whether the rest may be another is seen when it goes on (`amoeba.jobs.train.resume`)."""
    if resume is None:
        return load_settings(config, given, kind)
    if not (Path(resume) / "config.json").is_file():
        remedy = "check the path, or leave --resume out"
        raise bad_value("--resume", "the folder of an earlier run", repr(resume), remedy)
    earlier = settings_of_run(Path(resume))
    unknown = sorted(set(earlier) - {entry.name for entry in fields(kind)})
    if "model_type" in unknown:
        remedy = "leave --resume out and pass the folder as the model"
        raise bad_value("--resume", "the folder of an earlier run", f"{resume!r}, a model folder", remedy)
    if unknown:
        other = "amoeba finetune" if kind is TrainSettings else "amoeba train"
        raise bad_value("--resume", "a run of this command", f"one with {', '.join(unknown)}", f"use {other} --resume")
    told = (read_settings(config, kind) if config else {}) | given
    if "out" in told and Path(told["out"]).resolve() != Path(resume).resolve():
        raise bad_value("--out", f"the folder of --resume ({resume}), or nothing", told["out"], "leave --out out")
    placed = earlier.get("experts", "auto")
    for name in (name for name in ("ram", "vram") if name in told and "experts" not in told and placed != "auto"):
        expected = f"none: the run in {resume} started with --experts {placed}, which does not stream"
        raise bad_value(f"--{name}", expected, told[name], f"leave --{name} out, or start a new run with another --out")
    if told.get("experts", "ranks") != "ranks":  # then nothing is left of how ranks shared the model
        earlier = {name: value for name, value in earlier.items() if name not in ("expert_ranks", "dense")}
    return kind(**(earlier | told | {"out": resume}))


def settings_of_run(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in read_record(folder).items() if name not in _RECORDS}


def read_record(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    remedy = f"restore it from a copy; the checkpoints in {folder / 'checkpoints'} are unchanged"
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise bad_value(str(path), "the settings of the run, as JSON", str(error), remedy) from error
    if not isinstance(record, dict):
        raise bad_value(str(path), "the settings of the run, as an object", type(record).__name__, remedy)
    if DIGEST in record and not digest_fits(record):
        raise bad_value(str(path), "the settings as the run wrote them", "different ones", remedy)
    return record


def check_settings(settings: RunSettings, record: dict[str, Any], folder: Path, kept: str, command: str) -> None:
    defaults = {entry.name: entry.default for entry in fields(settings) if entry.default is not dataclasses.MISSING}
    record = defaults | record  # a run of a version without this setting had no other value
    for name, now in json.loads(json.dumps(settings.as_dict())).items():
        if name not in record or now == record[name] or AT_RESUME[name] in ("changeable", "place"):
            continue
        if name == "experts" and {now, record[name]} <= _SAME_NUMBERS:
            continue
        moved = isinstance(now, str) and isinstance(record[name], str) and Path(now).expanduser().exists()
        if AT_RESUME[name] == "by content" and moved and record[name] not in PRESETS:
            continue
        remedy = "leave it out, or start a new run with another --out"
        if name == "steps" and command == "amoeba train":  # finetune cannot start from an adapter
            more = f"{shell_command(command, '--model', folder / kept)} --steps ... --out ANOTHER"
            remedy = f"leave it out, or train longer when the run has ended: {more}"
        then, got = ("none" if value is None else repr(value) for value in (record[name], now))
        raise bad_value(f"--{name.replace('_', '-')}", f"{then}, as in the run in {folder}", got, remedy)


# --- the data and the model


def began_with(corpus: Corpus, weights: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"train": _side(corpus.train), "held_out": _side(corpus.held_out), "weights": weights}


def data_facts(content: dict[str, Any]) -> dict[str, Any]:
    names = {"train": "documents to train on", "held_out": "documents held out", "weights": "weights of the model"}
    return {names[name]: content[name] for name in names}


def _side(documents: Sequence[Document]) -> dict[str, Any]:
    found = hashlib.blake2b(digest_size=16)
    for document in documents:
        found.update(json.dumps(dataclasses.asdict(document), default=repr).encode() + b"\n")
    return {"documents": len(documents), "characters": characters(documents), "hash": found.hexdigest()}


def weights_of(model: str) -> dict[str, Any] | None:
    """Sizes, and hashes of samples, of the files with the weights in a folder: all of them would be read for minutes.
    Of a store its index, too, which has a checksum of every expert. None for a name on the hub."""
    if is_gguf(model):
        return {path.name: sampled_hash(path) for path in parts_of(model)}
    files = sorted(path for path in Path(model).expanduser().glob("*") if path.suffix in (".safetensors", ".bin"))
    files += [Path(model).expanduser() / INDEX] if is_store(model) else []
    return {path.name: sampled_hash(path) for path in files} or None


def check_data(earlier: Earlier, now: dict[str, Any]) -> None:
    then = earlier.began_with
    for side, of_what in (("train", "to train on"), ("held_out", "held out")):
        if now[side] != then[side]:
            had, has = _amount(then[side]), _amount(now[side])
            expected = f"the {had} {of_what} that the run in {earlier.folder} started with"
            got = f"{has}, with different text" if has == had else has
            raise bad_value("the data", expected, got, f"restore the data, or {earlier.new_run}")
    if now["weights"] != then["weights"]:
        before, after = then["weights"] or {}, now["weights"] or {}
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        got, remedy = f"different ones in {', '.join(names)}", f"restore them, or {earlier.new_run}"
        raise bad_value("MODEL", f"the weights that the run in {earlier.folder} started from", got, remedy)


def _amount(side: dict[str, Any]) -> str:
    return f"{side['documents']:,} documents ({side['characters']:,} characters)"


def check_model_config(earlier: Earlier, config: Any) -> None:
    """Of the names that both have: another version of transformers may have more."""
    now = json.loads(json.dumps(config.to_dict(), default=str))
    for name, then in earlier.model_config.items():
        if name in now and name not in _NOT_COMPARED and now[name] != then:
            got, remedy = f"{name} {now[name]!r}", "restore the model's config.json, and use the same --model"
            raise bad_value("--resume", f"the model of the run in {earlier.folder} ({name} {then!r})", got, remedy)


# --- the checkpoint


def chosen(found: list[Path], name: str, folder: Path) -> Path:
    for path in found:
        if name in (path.name, str(step_of(path)), str(path)):
            return path
    there = ", ".join(path.name for path in found) or "none"
    raise bad_value("--from", f"a checkpoint of {folder} ({there})", repr(name), "choose one of these")


def check_whole(checkpoint: Path, found: list[Path], folder: Path, command: str) -> None:
    trouble = _trouble(checkpoint)
    if not trouble:
        return
    others = [path for path in reversed(found) if step_of(path) < step_of(checkpoint) and not _trouble(path)]
    remedy = "no earlier checkpoint is complete: restore the file from a copy, or start a new run with another --out"
    if others:
        again = shell_command(command, "--resume", folder, "--from", others[0].name)
        remedy = f"continue from the previous one: {again}"
    raise bad_value(str(checkpoint), "a complete checkpoint", "; ".join(trouble), remedy)


def _trouble(checkpoint: Path) -> list[str]:
    missing = [f"{name} is missing" for name in (MANIFEST, GROUPS) if not (checkpoint / name).is_file()]
    return missing or damages(checkpoint)


# --- the end


def final_line(folder: Path) -> dict[str, Any] | None:
    path = folder / "metrics.jsonl"
    for text in reversed(path.read_text(errors="replace").splitlines() if path.is_file() else []):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("kind") == "final":
            return None if line.get("interrupted") else line
    return None
