"""`amoeba merge`: a model and its adapter as one Hugging Face folder, which plain transformers loads.

report = merge("models/base", "runs/mine", "models/mine")

The new folder is the base model's, file by file and tensor by tensor, with other numbers in the weights that the
adapter changes. A base with quantised experts, or a store, is written as a folder of plain numbers first
(`plain_folder`), and what was quantised is quantised again in the same format, unless another dtype is asked for. The
folder notes which adapters are in it, so that none is added twice (`check_not_merged`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba import lora
from amoeba.core.errors import bad_value, one_line
from amoeba.integrations.checkpoint_names import as_stored, sort_names
from amoeba.integrations.gguf_files import is_gguf
from amoeba.integrations.model_folder import (
    check_json,
    check_model,
    find_adapter,
    has_tokenizer,
    load_config,
    load_model,
    load_tokenizer_and_config,
)
from amoeba.integrations.quantised_models import facts_of
from amoeba.jobs.convert.plain_folder import write_plain
from amoeba.jobs.convert.quantise import FORMATS, quantise_folder
from amoeba.jobs.placed_model import read_expert
from amoeba.lora.attaching import Attached
from amoeba.lora.peft_files import TENSORS_NAME
from amoeba.lora.targets import places_of
from amoeba.stream.store import FolderStore, Store, is_store, open_store
from amoeba.stream.store.buffers import Memory
from amoeba.stream.store.packing import copy_small_files
from amoeba.stream.store.tensor_files import ONE_FILE, SHARDS, TensorEntry, checkpoint_tensors, header_of
from amoeba.system.files import appears_whole, write_whole

_CONFIG = "config.json"


@dataclass(frozen=True)
class MergeReport:
    model: str
    base_model: str
    adapter: str
    dtype: str
    experts_layers: int  # whose weights the adapter changed
    linear_layers: int
    format: str | None = None  # of the written experts; None: plain numbers
    quantisation_error: float | None = None  # of the merged experts, relative L2


def merge(
    model_folder: str | Path,
    adapter: str | Path,
    out: str | Path,
    dtype: torch.dtype | None = None,
    *,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Writes W + scaling · B @ A in place of each adapted W; the folder `out` appears whole or not at all.

    dtype: of the written model; None for the base checkpoint's own.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    target = Path(out).expanduser()
    if target.exists():
        remedy = "choose another name"
        raise bad_value("--out", "a folder that does not exist yet", f"{str(out)!r}, which exists", remedy)
    name, adapter = check_model(str(model_folder)), find_adapter(adapter)
    check_not_merged(name, adapter)
    with _opened(name, trust_remote_code) as store:
        if store is None:
            return _merge(name, name, adapter, target, dtype, trust_remote_code)
        return _merge_by_way_of_numbers(store, name, adapter, target, dtype, trust_remote_code)


@contextmanager
def _opened(name: str, trust_remote_code: bool) -> Iterator[Store | None]:
    """A store, or a folder whose experts are codes; None where the files have numbers."""
    of_store = is_gguf(name) or (Path(name).is_dir() and is_store(name))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if not of_store and not (Path(name).is_dir() and facts_of(load_config(name, **options))):
        yield None
        return
    with open_store(name, **options) as store:
        yield store if of_store or store.format is not None else None


def _merge_by_way_of_numbers(
    store: Store, name: str, adapter: Path, target: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> MergeReport:
    quantises = store.format is not None and dtype is None
    format = next((each for each, known in FORMATS.items() if known == store.format), None)
    if quantises and format is None:
        expected, got = f"experts in one of {', '.join(FORMATS)}", str(store.as_codes.removeprefix(", as "))
        raise bad_value("MODEL", expected, got, "add --dtype bfloat16, which writes plain numbers")
    numbers, merged = (target.with_name(f".{target.name}.{part}") for part in ("numbers", "merged"))
    try:
        for folder in (numbers, merged):
            shutil.rmtree(folder, ignore_errors=True)
        write_plain(store, numbers, dtype, trust_remote_code=trust_remote_code)
        out = merged if quantises else target
        report = _merge(str(numbers), name, adapter, out, dtype, trust_remote_code)
        if quantises:
            assert format is not None
            quantise_folder(merged, target, format, trust_remote_code=trust_remote_code)
            error = _quantisation_error(merged, target, trust_remote_code)
            report = replace(report, model=str(target), format=format, quantisation_error=error)
        return report
    finally:
        for folder in (numbers, merged):
            shutil.rmtree(folder, ignore_errors=True)


def _quantisation_error(plain: Path, quantised: Path, trust_remote_code: bool) -> float:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    wrong = size = 0.0
    with FolderStore(plain, **options) as numbers, FolderStore(quantised, **options) as codes:
        for layer in range(len(numbers.layers)):
            of_both = (read_expert(each, layer, 0)[:2] for each in (numbers, codes))
            for expected, found in zip(*of_both, strict=True):
                assert expected is not None and found is not None
                wrong += float((found.double() - expected.double()).square().sum())
                size += float(expected.double().square().sum())
    return round((wrong / size) ** 0.5, 5) if size else 0.0


def _merge(
    source: str, name: str, adapter: Path, target: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> MergeReport:
    """source: where the numbers of the base model are, whose name is `name`."""
    from safetensors import SafetensorError

    tokenizer, _ = load_tokenizer_and_config(source, adapter, trust_remote_code=trust_remote_code)
    model = load_model(source, dtype, trust_remote_code=trust_remote_code)
    state = lora.load(model, adapter)
    lora.merge(model, keep_base=False)
    folder = _folder_of(source)
    staging = target.with_name(f".{target.name}.writing")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _write_weights(model, state, folder, staging, dtype)
        copy_small_files(folder, staging)
        if dtype is not None:
            config = json.loads((folder / _CONFIG).read_bytes())
            config = {"dtype": None} | config if "torch_dtype" not in config else config
            write_whole(staging / _CONFIG, json.dumps(_with_dtype(config, dtype), indent=2) + "\n")
        if has_tokenizer(adapter):
            tokenizer.save_pretrained(staging)
        note_merged(staging, name, adapter)
        os.rename(staging, target)
    except (OSError, SafetensorError) as error:
        remedy = "free some space, or choose another folder"
        raise bad_value("--out", f"room to write {str(target)!r}", one_line(error), remedy) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    written_in = str(model.dtype).removeprefix("torch.")
    return MergeReport(str(target), name, str(adapter), written_in, len(state.experts), len(state.linears))


def _folder_of(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf"]))


def _write_weights(model: Any, state: Attached, folder: Path, out: Path, dtype: torch.dtype | None) -> None:
    """The same files with the same tensors in the same order."""
    from safetensors import safe_open

    tensors, module_of = checkpoint_tensors(folder), dict[str, str]()
    names, changed = sort_names(model, tensors), dict[str, dict[str, Tensor]]()
    parameters = model.state_dict()
    for parameter in dict.fromkeys([*state.changed, *state.replaced]):
        group = names.made_together(parameter)
        sources = [name for member in group for each in names.sources(member).values() for name in each]
        if not sources:
            if {*places_of(model, parameter)} & {*state.replaced} - {parameter}:
                continue  # tied to one that the checkpoint has
            remedy = "save the base model with save_pretrained, and merge into that folder"
            raise bad_value("MODEL", f"a tensor for {parameter}", "none in the checkpoint", remedy)
        module = group[0].rpartition(".")[0]
        changed.setdefault(module, {}).update({name: parameters[name] for name in group})
        module_of |= dict.fromkeys(sources, module)

    @functools.lru_cache(maxsize=2)  # a checkpoint has the tensors of a module one after another
    def stored(module: str) -> dict[str, Tensor]:
        return as_stored(model, names, changed[module])

    total = 0
    for file in dict.fromkeys(entry.file for entry in tensors.values()):
        here = {name: entry for name, entry in tensors.items() if entry.file == file}
        here = dict(sorted(here.items(), key=lambda item: item[1].start))
        written = {name: replace(entry, dtype=_dtype(entry, dtype)) for name, entry in here.items()}
        total += sum(entry.size for entry in written.values())
        with safe_open(file, framework="pt") as source, appears_whole(out / file.name) as write:
            write(memoryview(header_of(written)))
            for name, entry in written.items():
                tensor = stored(module_of[name])[name] if name in module_of else source.get_tensor(name)
                _write_tensor(name, entry, tensor, write)
    if (folder / SHARDS).is_file() and not (folder / ONE_FILE).is_file():
        index = json.loads((folder / SHARDS).read_bytes())
        index["metadata"] = (index.get("metadata") or {}) | {"total_size": total}
        write_whole(out / SHARDS, json.dumps(index, indent=2) + "\n")


def _write_tensor(name: str, entry: TensorEntry, tensor: Tensor, write: Callable[[memoryview], None]) -> None:
    if tensor.shape != entry.shape:
        expected, got = f"shape {entry.shape}, as the base model has it", tuple(tensor.shape)
        raise bad_value(name, expected, got, "save the base model with save_pretrained, and merge into that folder")
    if entry.size:
        flat = tensor.to(entry.dtype).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        write(Memory(flat, flat.numel()).bytes)


def _dtype(entry: TensorEntry, asked: torch.dtype | None) -> torch.dtype:
    """Whole numbers and codes stay what they are."""
    return asked if asked is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 1 else entry.dtype


def _with_dtype(config: Any, dtype: torch.dtype) -> Any:
    """config.json of a model in another dtype; a composite one has it in every part."""
    if not isinstance(config, dict):
        return config
    named, names = str(dtype).removeprefix("torch."), ("dtype", "torch_dtype")
    return {key: named if key in names else _with_dtype(value, dtype) for key, value in config.items()}


NAME = "merged_adapters.json"


def note_merged(folder: Path, base: str, adapter: Path) -> None:
    entry = {"adapter": str(adapter), "base_model": base, "sha256": _digest(adapter)}
    write_whole(folder / NAME, json.dumps({"adapters": [*_merged_into(base), entry]}, indent=1) + "\n")


def check_not_merged(model: str, adapter: Path) -> None:
    entries = _merged_into(model)
    if not entries or not (adapter / TENSORS_NAME).is_file():
        return
    digest = _digest(adapter)
    for entry in entries:
        if entry.get("sha256") == digest:
            got = f"{str(adapter)!r}, which is already merged into {model!r} ({NAME})"
            remedy = f"use that model without the adapter, or the base model {entry.get('base_model')!r} with it"
            raise bad_value("--adapter", "an adapter that is not merged into the model yet", got, remedy)


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
