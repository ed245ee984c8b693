"""Damaged stores under the same fuzzer: the model says what it said before, or the store is refused.

Bytes are flipped, cut off, added, zeroed, moved and taken from another store, in any file; the index is also changed as
the JSON document that it is, with its old checksum or, as somebody else may write one, with the right one. The truth is
what the undamaged store says, bit for bit; an index with a right checksum may describe another model, but no crash.
"""

import atexit
import functools
import json
import random
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .attempt import OUR_FORM, Outcome, verdict_on

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("support", "stream")]  # helpers of other tests

FORMATS = ("plain", "fp8", "mxfp4")
DAMAGES = ("flip", "cut", "add", "zero", "move", "foreign", "missing", "json", "sealed json")


@dataclass(frozen=True)
class StoreCase:
    seed: int
    device: str = "cpu"
    format: str = "plain"
    file: float = 0.0  # which of the files, as a share of their number
    damage: str = "flip"
    place: float = 0.5  # where in the file, as a share of its length
    size: int = 1  # bytes

    @property
    def row(self) -> str:
        return f"{self.device} {self.format} {self.damage}"


def draw(seed: int, device: str = "cpu") -> StoreCase:
    rng = random.Random(seed)
    return StoreCase(
        seed,
        device,
        format=rng.choice(FORMATS),
        file=rng.random(),
        damage=rng.choice(DAMAGES),
        place=rng.random(),
        size=rng.choice((1, 1, 2, 7, 64, 4096)),
    )


def attempt(case: StoreCase) -> Outcome:
    from amoeba.stream.store import StoreError

    good, foreign, right = _stores(case.format, case.device)
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        shutil.copytree(good, store)
        what = _damage(case, store, foreign)
        try:
            found = _says(store, case.device)
        except StoreError as error:
            said = str(error)
            return Outcome("refused" if OUR_FORM.fullmatch(said) else "failed", said.replace(str(store), "STORE"))
        except Exception as error:
            outcome = verdict_on(error)
            return Outcome(outcome.verdict, f"{what}: {outcome.reason.replace(str(store), 'STORE')}")
    if case.damage == "sealed json":
        return Outcome("passed")
    return Outcome("passed") if found == right else Outcome("failed", f"{what}: the model says something else")


@functools.cache
def _stores(format: str, device: str) -> tuple[Path, Path, tuple[Any, ...]]:
    """A store, one of another model of the same shapes, and what the first one's model says."""
    from amoeba.jobs.convert.quantise import quantise_folder
    from amoeba.stream.store.packing import pack
    from hostile_folders import byte_tokenizer, tiny

    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for factor, name in enumerate(("good", "foreign"), 1):
        model, folder = tiny(), root / f"{name}-plain"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        if format != "plain":
            quantise_folder(folder, root / f"{name}-{format}", format)
            folder = root / f"{name}-{format}"
        pack(folder, root / name)
    return root / "good", root / "foreign", _says(root / "good", device)


def _says(store: Path, device: str) -> tuple[Any, ...]:
    import amoeba
    from amoeba.integrations.model_folder import load_tokenizer

    budget = {"ram": "auto"} if device == "cpu" else {"vram": "auto"}
    with amoeba.stream.attach(store, **budget) as streamed, torch.no_grad():
        ids = torch.arange(2, 50, dtype=torch.int64, device=device)[None]
        logits = streamed.model(input_ids=ids, use_cache=False).logits.float().cpu()
        settings = streamed.model.generation_config.to_dict()
    return logits.numpy().tobytes(), settings, load_tokenizer(str(store))("some words").input_ids


def _damage(case: StoreCase, store: Path, foreign: Path) -> str:
    """What was done, in a few words."""
    files = sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    name = "index.json" if case.damage.endswith("json") else files[int(case.file * len(files))]
    path, rng = store / name, random.Random(case.seed)
    data = bytearray(path.read_bytes())
    at, size = int(case.place * len(data)), min(case.size, len(data))
    if case.damage == "missing":
        path.unlink()
        return f"{name} is missing"
    if case.damage == "foreign":
        shutil.copyfile(foreign / name, path)
        return f"{name} of another store"
    if case.damage.endswith("json"):
        document = json.loads(data)
        seal = document.pop("crc32")
        what = _change(document, rng)
        if case.damage == "sealed json":
            seal = zlib.crc32(json.dumps(document, sort_keys=True).encode())
        document["crc32"] = seal
        path.write_text(json.dumps(document))
        return f"index.json: {what}"
    if case.damage == "flip":
        for byte in range(at, min(at + size, len(data))):
            data[byte] ^= 1 << rng.randrange(8)
    elif case.damage == "cut":
        del data[at:]
    elif case.damage == "add":
        data[at:at] = rng.randbytes(size)
    elif case.damage == "zero":
        data[at : at + size] = bytes(len(data[at : at + size]))
    else:
        other = rng.randrange(len(data) - size + 1)
        here = min(at, len(data) - size)
        data[here : here + size], data[other : other + size] = data[other : other + size], data[here : here + size]
    path.write_bytes(data)
    return f"{case.damage} {size} bytes at {at} of {name}"


def _change(document: Any, rng: random.Random) -> str:
    """Another value at a random place of a JSON document."""
    path, inside = "", document
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = rng.choice(keys)
        path += f"[{key!r}]"
        deeper = inside[key]
        if isinstance(deeper, (dict, list)) and deeper and rng.random() < 0.85:
            inside = deeper
            continue
        if rng.random() < 0.2:
            del inside[key]
            return f"{path} removed"
        values = [None, True, 0, 1, -1, 2**63, 0.5, "", "x", "../x", "/etc/passwd", [], {}]
        if isinstance(deeper, int):
            values += [deeper + 1, deeper - 1, deeper * 2]
        inside[key] = rng.choice(values)
        return f"{path} = {inside[key]!r}"
