"""index.json of a packed store: what is in it and where. It is written last, so a folder with one is whole.

    {"format": "amoeba expert store", "version": 1, "part_bytes": 1048576,
     "model": {"model_type": "qwen3_moe"}, "source": {...},
     "rest": {"file": "rest.safetensors", "bytes": 1234, "crc32": 5678},
     "layers": [{"name": "model.layers.0.mlp.experts", "file": "experts/00000.bin", "experts": 128, "hidden": 2048,
                 "intermediate": 768, "activation": {"kind": "silu", "gated": true, ...},
                 "format": {"kind": "plain", "dtype": "bfloat16"}, "expert_bytes": 9437184,
                 "parts": [{"name": "gate_up_JH", "offset": 0, "shape": [1536, 2048]}, ...],
                 "checksums": [1, 2, ...]}],
     "crc32": 9012}

Block-scaled numbers are another kind with parts of their own: {"kind": "block_scaled", "name": "fp8-128",
"row_parts": 2, "dtype": "bfloat16"}, where dtype is that of biases, x and y. A reader refuses kinds and versions
that it does not know.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amoeba.config import Activation
from amoeba.errors import one_line
from amoeba.precision.formats import Format, format_named
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.layers import BLOCK, DTYPES, LayerEntry, Part, part_shapes
from amoeba.stream.store.reading import PART

INDEX, UNFINISHED, REST = "index.json", "packing.json", "rest.safetensors"
FORMAT, VERSION, PLAIN, BLOCK_SCALED = "amoeba expert store", 1, "plain", "block_scaled"
_AGAIN = "copy the store again, or pack it anew with `amoeba pack`"


@dataclass(frozen=True)
class StoredLayer:
    entry: LayerEntry
    file: str
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    model: dict[str, Any]
    source: dict[str, Any]
    rest: dict[str, Any]
    layers: tuple[StoredLayer, ...]


def is_store(path: str | Path) -> bool:
    """Whether it is one that `amoeba pack` wrote, or began to write."""
    folder = Path(path).expanduser()
    return (folder / UNFINISHED).is_file() or _says_so(folder / INDEX)


def _says_so(path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        # an index that cannot be read beside the file of experts: a damaged store, no Hugging Face folder
        return path.is_file() and (path.parent / REST).is_file()
    return isinstance(found, dict) and found.get("format") == FORMAT


def layer_file(number: int) -> str:
    return f"experts/{number:05d}.bin"


def written(index: Index) -> str:
    layers = [_layer_facts(layer.entry) | {"file": layer.file, "checksums": layer.checksums} for layer in index.layers]
    facts = {"format": FORMAT, "version": VERSION, "part_bytes": PART}
    facts |= {"model": index.model, "source": index.source, "rest": index.rest, "layers": layers}
    return json.dumps(facts | {"crc32": _crc32(facts)}, allow_nan=False)


def _crc32(facts: dict[str, Any]) -> int:
    """Of the index itself, so that a changed digit in it is noticed too."""
    return zlib.crc32(json.dumps(facts, sort_keys=True, allow_nan=False).encode())


def _layer_facts(entry: LayerEntry) -> dict[str, Any]:
    activation = asdict(entry.activation)
    activation["limit"] = None if math.isinf(entry.activation.limit) else entry.activation.limit
    return {
        "name": entry.name,
        "experts": entry.experts,
        "hidden": entry.hidden,
        "intermediate": entry.intermediate,
        "activation": activation,
        "format": _format_facts(entry),
        "expert_bytes": entry.expert_bytes,
        "parts": [part._asdict() for part in entry.parts],
    }


def _format_facts(entry: LayerEntry) -> dict[str, Any]:
    dtype = {"dtype": str(entry.dtype).removeprefix("torch.")}
    if entry.format is None:
        return {"kind": PLAIN} | dtype
    return {"kind": BLOCK_SCALED, "name": entry.format.name, "row_parts": entry.row_parts} | dtype


def _format(path: Path, facts: dict[str, Any]) -> tuple[Format | None, int]:
    """Of the codes, and the parts of the rows; None and 1 of plain numbers."""
    kind, name = facts["kind"], facts.get("name")
    found, row_parts = None, int(facts.get("row_parts", 1))
    try:
        found = format_named(str(name)) if kind == BLOCK_SCALED else None
        known = kind == PLAIN or found is not None
    except ValueError:
        known = False
    if not known or facts["dtype"] not in DTYPES or row_parts not in (1, 2):
        got = " ".join(str(each) for each in (kind, name, facts.get("dtype")) if each is not None)
        expected = f"numbers as {PLAIN} {', '.join(DTYPES)}, or as {BLOCK_SCALED} fp8, mxfp8, mxfp4 or nvfp4"
        raise StoreError(path, expected, got, "use a newer aMoEba")
    return found, row_parts


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    if not path.is_file() and (folder / UNFINISHED).is_file():
        remedy = "run the same `amoeba pack` again: it goes on where it was"
        raise StoreError(folder, "a whole store", "one that is not packed to its end", remedy)
    try:
        facts = json.loads(path.read_bytes())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}")
        if (facts["version"], facts["part_bytes"]) != (VERSION, PART):
            got = f"version {facts['version']} with parts of {facts['part_bytes']} bytes"
            raise StoreError(
                path, f"version {VERSION} with parts of {PART} bytes", got, "use a newer aMoEba, or pack anew"
            )
        if facts.pop("crc32") != _crc32(facts):
            raise ValueError("its checksum does not go with it")
        layers = tuple(_stored_layer(path, layer) for layer in facts["layers"])
        return Index(dict(facts["model"]), dict(facts["source"]), dict(facts["rest"]), layers)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(path, "a file that can be read", one_line(error), _AGAIN) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(path, "the index of a store", f"a damaged one ({one_line(error)})", _AGAIN) from error


def _stored_layer(path: Path, facts: dict[str, Any]) -> StoredLayer:
    format, row_parts = _format(path, facts["format"])
    limit = facts["activation"]["limit"]
    activation = Activation(**facts["activation"] | {"limit": math.inf if limit is None else limit})
    parts = tuple(Part(part["name"], int(part["offset"]), tuple(map(int, part["shape"]))) for part in facts["parts"])
    entry = LayerEntry(
        name=str(facts["name"]),
        experts=int(facts["experts"]),
        hidden=int(facts["hidden"]),
        intermediate=int(facts["intermediate"]),
        activation=activation,
        dtype=DTYPES[facts["format"]["dtype"]],
        parts=parts,
        expert_bytes=int(facts["expert_bytes"]),
        format=format,
        row_parts=row_parts,
    )
    checksums = tuple(map(int, facts["checksums"]))
    _check_layer(entry, checksums)
    return StoredLayer(entry, str(facts["file"]), checksums)


def _check_layer(entry: LayerEntry, checksums: Sequence[int]) -> None:
    end, shapes = 0, part_shapes(entry, entry.has_bias)
    for part, (name, shape) in zip(entry.parts, shapes.items(), strict=False):
        misplaced = part.offset < end or part.offset % entry.dtype_of(name).itemsize
        if (part.name, part.shape) != (name, shape) or misplaced:
            raise ValueError(f"{entry.name}: {part}")
        end = part.offset + entry.size_of(part)
    if len(entry.parts) != len(shapes) or end > entry.expert_bytes or entry.expert_bytes % BLOCK:
        raise ValueError(f"{entry.name}: {len(entry.parts)} parts of {end} bytes in {entry.expert_bytes}")
    if len(checksums) != entry.experts:
        raise ValueError(f"{entry.name}: {len(checksums)} checksums of {entry.experts}")
