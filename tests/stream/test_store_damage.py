"""Every file of a store, missing, cut short, changed, of another store or of an earlier state: the model says what it
said before, or the store is refused. It never says something else. Packing the model again makes it right."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from stored_models import save

import amoeba
from amoeba.core.errors import BadValue
from amoeba.integrations.model_folder import load_tokenizer
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.stream.store import StoreError
from amoeba.stream.store.packing import pack
from hostile_folders import byte_tokenizer, change_json
from selection import quick

FILES = (
    "index.json",
    "experts/00000.bin",
    "experts/00001.bin",
    "rest.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
KINDS = ("missing", "cut short", "changed", "foreign", "outdated")
QUICK = (
    ("missing", "chat_template.jinja"),
    ("cut short", "tokenizer.json"),
    ("changed", "rest.safetensors"),
    ("foreign", "experts/00001.bin"),
    ("outdated", "config.json"),
)


class Stores(NamedTuple):
    model: Path
    store: Path
    foreign: Path
    outdated: Path
    says: Any


@pytest.fixture(scope="module", params=["plain", "fp8"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stores:
    """Of a model, of another one with the same names and shapes, and of the model before all of it was changed."""
    root, found = tmp_path_factory.mktemp("stores"), {}
    for name in ("model", "foreign", "outdated"):
        torch.manual_seed(len(name))
        model = save(root / f"{name}-plain", dtype=torch.float32, vocab_size=257)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha={"model": 0, "foreign": 0.3, "outdated": 0.1}[name])
        model.save_pretrained(root / f"{name}-plain", save_original_format=True)
        byte_tokenizer("{{ messages[0] }}" + name).save_pretrained(root / f"{name}-plain")
        change_json(
            root / f"{name}-plain" / "config.json", rms_norm_eps={"model": 1e-6, "foreign": 1e-1}.get(name, 1e-2)
        )
        change_json(root / f"{name}-plain" / "generation_config.json", temperature=0.1 * len(name))
        change_json(root / f"{name}-plain" / "tokenizer_config.json", model_max_length=100 * len(name))
        tokens = json.loads((root / f"{name}-plain" / "tokenizer.json").read_text())["model"]
        ids = {token: (id + len(name)) % len(tokens["vocab"]) for token, id in tokens["vocab"].items()}
        change_json(root / f"{name}-plain" / "tokenizer.json", model=tokens | {"vocab": ids})
        found[name] = root / f"{name}-plain"
        if request.param == "fp8":
            quantise_folder(found[name], root / name, "fp8")
            found[name] = root / name
        pack(found[name], root / f"{name}.store")
    of = [root / f"{name}.store" for name in ("model", "foreign", "outdated")]
    return Stores(found["model"], *of, says(of[0]))


def says(store: Path) -> tuple[Any, ...]:
    """Every expert of every layer is computed with."""
    with amoeba.stream.attach(store, ram="auto") as streamed, torch.no_grad():
        ids = torch.arange(2, 250, dtype=torch.int64, device="cpu")[None]
        logits = streamed.model(input_ids=ids, use_cache=False).logits
        assert streamed.report().requested == sum(streamed.report().experts)
        settings = streamed.model.generation_config.to_dict()
    tokenizer = load_tokenizer(str(store))
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    return (
        logits.numpy().tobytes(),
        settings,
        conversation,
        tokenizer.model_max_length,
        tokenizer("some words").input_ids,
    )


def spoil(kind: str, name: str, store: Path, stores: Stores) -> None:
    path = store / name
    if kind == "missing":
        path.unlink()
    elif kind == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    elif kind == "changed":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        shutil.copyfile((stores.foreign if kind == "foreign" else stores.outdated) / name, path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
@quick(lambda stores, kind, name: stores == "plain" and (kind, name) in QUICK)
def test_a_store_with_a_foreign_file_is_refused_and_can_be_repaired(kind, name, stores, tmp_path):
    assert {str(path.relative_to(stores.store)) for path in stores.store.rglob("*.*") if path.is_file()} == set(FILES)
    store = tmp_path / "store"
    shutil.copytree(stores.store, store)
    spoil(kind, name, store, stores)
    assert (store / name).exists() == (kind != "missing")
    with pytest.raises((StoreError, BadValue)):
        says(store)
    if name == "index.json" and kind in ("foreign", "outdated"):
        with pytest.raises(BadValue, match=r"--out: expected a store of .* as it is now; got"):
            pack(stores.model, store)
        return
    report = pack(stores.model, store)
    small = () if name == "index.json" else (name,)
    told = ((name,), ()) if name.endswith((".bin", ".safetensors")) else ((), small)
    assert (report.repaired, report.updated) == told
    assert pack(stores.model, store).repaired == () and says(store) == stores.says
