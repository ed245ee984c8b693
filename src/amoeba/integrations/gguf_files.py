"""GGUF files: their headers and tokenizers. `amoeba.integrations.gguf_families` says what models they are.

    header = read_header("model.gguf")                    # all parts of a split file; no weight is read
    tokenizer = tokenizer_of(header)

A header is somebody else's: every length in it is checked against the file before anything is read or allocated.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import BadValue, bad_value, one_line

SUFFIX = ".gguf"
AGAIN = "copy or download it again"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS, _MOST_NESTED, _MOST_ALIGNMENT = 4, 3, 2**20
# Numbers in a block and bytes of a block, by ggml's number of the type; other types are refused by name.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_OTHER_KINDS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_exps\.(weight|bias)")


@dataclass(frozen=True)
class GgufTensor:
    """shape: as torch has it: numbers of the last dimension lie together. kind: ggml's name of the format."""

    file: Path
    start: int  # bytes from the start of the file
    kind: str
    shape: tuple[int, ...]
    size: int  # in bytes


@dataclass(frozen=True, eq=False)
class GgufHeader:
    path: Path  # of the first part
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: bfloat16, unless its experts are stored as plain numbers that need another one."""
        found = ((EXPERTS.fullmatch(name), tensor.kind) for name, tensor in self.tensors.items())
        plain = {kind for match, kind in found if match and match[3] == "weight" and kind in PLAIN}
        if "F32" in plain or len(plain) > 1:
            return torch.float32
        return PLAIN[next(iter(plain))] if plain else torch.bfloat16


def is_gguf(name: str | Path) -> bool:
    path = Path(name).expanduser()
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def need_gguf(path: Path) -> None:
    """ValueError where the package is missing that knows the names of tensors."""
    if importlib.util.find_spec("gguf") is None:
        remedy = "install it: pip install 'amoeba-moe[gguf]'"
        raise bad_value("MODEL", f"the package gguf for {str(path)!r}", "none", remedy)


def read_header(name: str | Path) -> GgufHeader:
    """Of a file, or of all parts of a split one. ValueError where it cannot be used."""
    paths = parts_of(name)
    missing = next((each for each in paths if not each.is_file()), None)
    if missing is not None:
        raise bad_value("MODEL", "all parts of a GGUF file", f"no file {str(missing)!r}", "correct the path")
    return _read_parts(tuple((each, each.stat().st_size, each.stat().st_mtime_ns) for each in paths))


def parts_of(name: str | Path) -> list[Path]:
    """All files of a split one, whichever of them is named."""
    path = Path(name).expanduser()
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    stem, _, count = split.groups()
    return [path.with_name(f"{stem}-{number:05d}-of-{count}{SUFFIX}") for number in range(1, int(count) + 1)]


@functools.lru_cache(maxsize=2)
def _read_parts(stamps: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    metadata, tensors = _read_file(stamps[0][0])
    for number, (path, *_) in enumerate(stamps[1:], 1):
        of_part, more = _read_file(path)
        if of_part.get("split.no") != number or tensors.keys() & more.keys():
            raise bad_value(str(path), f"part {number + 1} of {len(stamps)}", "another file's part", AGAIN)
        tensors |= more
    counts = metadata.get("split.count", 1), metadata.get("split.tensors.count", len(tensors))
    if counts not in ((len(stamps), len(tensors)), (0, len(tensors))):
        got = f"{len(stamps)} and {len(tensors)}"
        raise bad_value(str(stamps[0][0]), f"{counts[0]} files with {counts[1]} tensors, as it says", got, AGAIN)
    return GgufHeader(stamps[0][0], metadata, tensors)


class _Bytes:
    """A file's header, read from front to back. ValueError where it ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError(f"{count} bytes at {self.at}, where {self.left} are left")
        self.at += count
        return self._data[self.at - count : self.at]

    def numbers(self, format: str) -> tuple:
        return struct.unpack("<" + format, self.take(struct.calcsize("<" + format)))

    def string(self) -> str:
        return self.take(*self.numbers("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, nested: int = 0) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or nested == _MOST_NESTED:
            raise ValueError(f"a value of type {kind}")
        kind, count = self.numbers("IQ")
        if kind in _SCALARS:
            if count > self.left:
                raise ValueError(f"an array of {count}")
            return list(self.numbers(f"{count}{_SCALARS[kind]}"))
        if count > self.left // 8:  # each begins with a length
            raise ValueError(f"an array of {count}")
        return [self.value(kind, nested + 1) for _ in range(count)]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise bad_value(str(path), "a GGUF file", "a file of another kind", "check the name")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Bytes(data))
    except OSError as error:
        raise bad_value(str(path), "a file that can be read", one_line(error), AGAIN) from error
    except BadValue:
        raise
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise bad_value(str(path), "a complete GGUF file", f"a damaged one ({one_line(error)})", AGAIN) from error


def _parse(path: Path, data: _Bytes) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    data.take(4)
    (version,) = data.numbers("I")
    if version not in _VERSIONS:
        big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        got = "a big-endian file" if big else f"version {version}"
        remedy = "use a newer aMoEba, or another file of the same model"
        raise bad_value(str(path), "GGUF version 2 or 3", got, remedy)
    count, pairs = data.numbers("QQ")
    if max(count, pairs) > data.left // 12:
        raise ValueError(f"{count} tensors and {pairs} values in {data.left} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = data.string()
        metadata[key] = data.value(*data.numbers("I"))
    infos = [_info(data) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment!r}")
    begin, size = -(-data.at // alignment) * alignment, data.at + data.left
    found: dict[str, GgufTensor] = {}
    ends: list[tuple[int, int, str]] = []
    for name, shape, kind, offset in infos:
        tensor = _tensor(path, name, shape, kind, begin + offset)
        if offset % alignment or name in found or tensor.start + tensor.size > size:
            end = tensor.start + tensor.size
            raise ValueError(f"two {name}" if name in found else f"{name}: bytes {tensor.start} to {end} of {size}")
        found[name] = tensor
        ends.append((tensor.start, tensor.start + tensor.size, name))
    ends.sort()
    for (_, end, name), (start, _, other) in itertools.pairwise(ends):
        if start < end:
            raise ValueError(f"{name} and {other} overlap")
    return metadata, found


def _info(data: _Bytes) -> tuple[str, tuple[int, ...], int, int]:
    name = data.string()
    (dimensions,) = data.numbers("I")
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{name} of {dimensions} dimensions")
    *shape, kind, offset = data.numbers(f"{dimensions}QIQ")
    return name, tuple(reversed(shape)), kind, offset


def _tensor(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    if number not in KINDS:
        got = f"{name} in {_OTHER_KINDS.get(number, f'type {number}')}"
        expected = f"tensors in {', '.join(kind for kind, *_ in KINDS.values())}"
        raise bad_value(str(path), expected, got, "take another file of the same model, for example Q4_K_M or Q8_0")
    kind, numbers, width = KINDS[number]
    if min(shape) < 1 or shape[-1] % numbers:
        raise ValueError(f"{name} of shape {shape} in blocks of {numbers}")
    return GgufTensor(path, start, kind, shape, math.prod(shape) // numbers * width)


TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
# What splits text of tokenizers that transformers does not name, as it splits that of others.
_SAME_SPLITS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "olmo": "default", "gpt-2": "default"}
_OWN_TOKENIZER = "put the model's tokenizer.json and tokenizer_config.json next to the file"


def tokenizer_of(header: GgufHeader) -> Any:
    """From tokenizer.json next to the file, if there is one, else from the file itself."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (header.path.parent / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(header.path.parent, trust_remote_code=False)
    convert, splits = _converter(header)
    own, prefix = header.metadata.items(), "tokenizer."
    data = {key.removeprefix(prefix): value for key, value in own if key.startswith(prefix)}
    vocabulary = data.get("ggml.tokens")
    if not isinstance(vocabulary, list):
        raise bad_value(str(header.path), "a tokenizer in the file", "none", _OWN_TOKENIZER)
    split = _SAME_SPLITS.get(str(data.get("ggml.pre", "default")), data.get("ggml.pre", "default"))
    if data.get("ggml.model") == "gpt2" and split != "default" and split not in splits:
        raise bad_value(str(header.path), "a tokenizer that transformers knows", f"one that splits text as {split}",
                        _OWN_TOKENIZER)  # fmt: skip
    facts = {name: data[f"ggml.{key}"] for key, name in _TOKENIZER.items() if f"ggml.{key}" in data}
    fast, more = convert(header.architecture, facts | {"pre_tokenizer_type": split})
    options = {name: data[key] for key, name in _TOKENIZER_OPTIONS.items() if key in data} | more
    for name, key in (*TOKENS, ("unk", "unknown")):
        place = data.get(f"ggml.{key}_token_id")
        if isinstance(place, int) and place < len(vocabulary):
            options[f"{name}_token"] = vocabulary[place]
    options.setdefault("bos_token", None)
    return PreTrainedTokenizerFast(tokenizer_object=fast, **options)


_TOKENIZER = {
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_TOKENIZER_OPTIONS = {"chat_template": "chat_template"}
_TOKENIZER_OPTIONS |= {"ggml.add_bos_token": "add_bos_token", "ggml.add_eos_token": "add_eos_token"}


def _converter(header: GgufHeader) -> tuple[Callable[[str, dict], tuple[Any, dict]], Mapping[str, str]]:
    import transformers

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        remedy = f"upgrade it (pip install --upgrade transformers), or {_OWN_TOKENIZER}"
        expected, got = "transformers 5.18 or newer, which reads tokenizers of GGUF files", transformers.__version__
        raise bad_value(str(header.path), expected, got, remedy) from error
    return convert_gguf_tokenizer, GGUF_PRE_TOKENIZER_SPLITS
