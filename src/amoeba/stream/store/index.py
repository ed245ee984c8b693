"""index.json of a packed store: what is in it and where. It is written last, so a folder with one is whole.

    {"format": "amoeba expert store", "version": 1, "part_bytes": 1048576,
     "model": {"model_type": "qwen3_moe"}, "source": {...},
     "rest": {"file": "rest.safetensors", "bytes": 1234, "crc32": 5678},
     "files": {"config.json": 3456, "tokenizer.json": 7890},
     "layers": [{"name": "model.layers.0.mlp.experts", "file": "experts/00000.bin", "experts": 128, "hidden": 2048,
                 "intermediate": 768, "activation": {"kind": "silu", "gated": true, ...},
                 "format": {"kind": "plain", "dtype": "bfloat16"}, "expert_bytes": 9437184,
                 "parts": [{"name": "gate_up_JH", "offset": 0, "shape": [1536, 2048]}, ...],
                 "checksums": [1, 2, ...]}],
     "crc32": 9012}

Quantised numbers are another kind with parts of their own: {"kind": "block_scaled", "name": "fp8-128",
"row_parts": 2, "dtype": "bfloat16"}, where dtype is that of biases, x and y. A reader refuses kinds and versions
that it does not know. `files` has the CRC-32 of each small file that what the model says depends on; stores of earlier
versions have none. All names are of files inside the store.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amoeba.core.config import Activation
from amoeba.core.errors import one_line
from amoeba.integrations.model_folder import PACKING, STORE_INDEX, is_unfinished_store
from amoeba.precision.formats import Format, format_named
from amoeba.stream.store.error import DamagedIndex, StoreError
from amoeba.stream.store.layers import BLOCK, DTYPES, LayerEntry, Part, part_shapes
from amoeba.stream.store.reading import PART

INDEX, UNFINISHED, REST = STORE_INDEX, PACKING, "rest.safetensors"
FORMAT, VERSION, PLAIN, BLOCK_SCALED = "amoeba expert store", 1, "plain", "block_scaled"
_AGAIN = "copy the store again, or repack it with `amoeba pack`"


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
    files: dict[str, int]  # CRC-32 of small files, by name


def is_store(path: str | Path) -> bool:
    """Whether it is one that `amoeba pack` wrote, or began to write; it may be damaged."""
    folder = Path(path).expanduser()
    try:
        found = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict) and found.get("format") == FORMAT:
        return True
    # without an index that can be read: by the files that only a store has
    return is_unfinished_store(folder) or all((folder / name).is_file() for name in (REST, layer_file(0)))


def layer_file(number: int) -> str:
    return f"experts/{number:05d}.bin"


def written(index: Index) -> str:
    layers = [_layer_facts(layer.entry) | {"file": layer.file, "checksums": layer.checksums} for layer in index.layers]
    facts = {"format": FORMAT, "version": VERSION, "part_bytes": PART}
    facts |= {"model": index.model, "source": index.source, "rest": index.rest, "files": index.files}
    facts |= {"layers": layers}
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
    down = {"down_name": entry.down_format.name} if entry.down_format else {}
    return {"kind": BLOCK_SCALED, "name": entry.format.name, "row_parts": entry.row_parts} | down | dtype


def _format(path: Path, facts: dict[str, Any]) -> tuple[Format | None, int, Format | None]:
    """Of the codes, the parts of the rows, and of the codes of down alone; None, 1 and None of plain numbers."""
    kind, name = facts["kind"], facts.get("name")
    found, row_parts, down = None, int(facts.get("row_parts", 1)), None
    try:
        found = format_named(str(name)) if kind == BLOCK_SCALED else None
        down = format_named(str(facts["down_name"])) if found is not None and "down_name" in facts else None
        known = kind == PLAIN or found is not None
    except ValueError:
        known = False
    if not known or facts["dtype"] not in DTYPES or row_parts not in (1, 2):
        got = " ".join(str(each) for each in (kind, name, facts.get("dtype")) if each is not None)
        expected = (
            f"numbers as {PLAIN} {', '.join(DTYPES)}, or quantised as fp8, mxfp8, mxfp4, nvfp4 or in blocks of GGUF"
        )
        raise StoreError(path, expected, got, "use a newer aMoEba")
    return found, row_parts, down


def read_index(folder: Path) -> Index:
    path = folder / INDEX
    if is_unfinished_store(folder):
        remedy = "run the same `amoeba pack` again: it continues where it stopped"
        raise StoreError(folder, "a complete store", "an incomplete one", remedy)
    try:
        facts = json.loads(path.read_bytes())
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}")
        if facts.pop("crc32") != _crc32(facts):
            raise ValueError("its checksum does not match")
        if (facts["version"], facts["part_bytes"]) != (VERSION, PART):
            got = f"version {facts['version']} with parts of {facts['part_bytes']} bytes"
            raise StoreError(
                path,
                f"version {VERSION} with parts of {PART} bytes",
                got,
                "use a newer aMoEba, or pack the model again",
            )
        layers = tuple(_stored_layer(path, *each) for each in enumerate(facts["layers"]))
        if not layers:
            raise ValueError("no layers with experts")
        files = {str(name): int(crc32) for name, crc32 in facts.get("files", {}).items()}
        for name in files:
            _check_name(name, Path(name).name)
        return Index(dict(facts["model"]), dict(facts["source"]), _rest(facts["rest"]), layers, files)
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise DamagedIndex(path, "the index of a store", "none", _AGAIN) from error
    except OSError as error:
        raise StoreError(path, "a file that can be read", one_line(error), _AGAIN) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else one_line(error)
        raise DamagedIndex(path, "the index of a store", f"a damaged one ({said})", _AGAIN) from error


def _rest(facts: dict[str, Any]) -> dict[str, Any]:
    _check_name(facts["file"], REST)
    return {"file": REST, "bytes": int(facts["bytes"]), "crc32": int(facts["crc32"])}


def _check_name(found: object, expected: str) -> None:
    """An index names the files that packing writes and none elsewhere, such as ../other or /etc/passwd."""
    if found != expected or expected in ("", ".", ".."):
        raise ValueError(f"the file {found!r}, where it must be {expected!r}")


def _stored_layer(path: Path, number: int, facts: dict[str, Any]) -> StoredLayer:
    format, row_parts, down_format = _format(path, facts["format"])
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
        down_format=down_format,
    )
    checksums = tuple(map(int, facts["checksums"]))
    _check_layer(entry, checksums)
    _check_name(facts["file"], layer_file(number))
    return StoredLayer(entry, layer_file(number), checksums)


def _check_layer(entry: LayerEntry, checksums: Sequence[int]) -> None:
    if min(entry.experts, entry.hidden, entry.intermediate) < 1:
        raise ValueError(f"{entry.name}: {entry.experts} experts of {entry.hidden} and {entry.intermediate}")
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
