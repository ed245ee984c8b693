"""GGUF files: their headers, and what transformers keeps in config.json and tokenizer.json.

    header = read_header("model.gguf")                    # all parts of a split file; no weight is read
    config, tokenizer = config_of(header), tokenizer_of(header)
    names_of(header, model_on_meta)                       # GGUF's name of each parameter that is no expert's

A header is somebody else's: every length in it is checked against the file before anything is read or allocated, and a
file that is damaged, cut short or of an unknown version, architecture or number format is refused by name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import logging
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
from amoeba.system.files import sampled_hash

logger = logging.getLogger("amoeba")

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


def facts_of(header: GgufHeader) -> _Facts:
    if header.architecture not in _FAMILIES:
        got = f"{header.architecture} in {str(header.path)!r}"
        remedy = "take the model's safetensors folder"
        raise bad_value("MODEL", f"a GGUF file of one of {', '.join(_FAMILIES)}", got, remedy)
    return _Facts(header)


class _Facts:
    """The values of an architecture. ValueError that names one that is missing or of another type."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}", default)

    def number(self, key: str, default: int | float | None = None) -> Any:
        found = self.get(key, default)
        if isinstance(found, list) and found and len({*map(str, found)}) == 1:
            found = found[0]  # of each layer, all the same
        if isinstance(found, bool) or not isinstance(found, int | float) or found < 0:
            name = f"{self.header.architecture}.{key}"
            raise bad_value(str(self.header.path), f"a number {name}", repr(found), AGAIN)
        return float(f"{found:.7g}") if isinstance(found, float) else found  # 1e-6, not the fp32 number next to it

    def has(self, *names: str) -> bool:
        """Whether there is a tensor of one of these names in some layer."""
        return any(name.partition(".")[2].partition(".")[2] in names for name in self.header.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.header.tensors:
            raise bad_value(str(self.header.path), f"a tensor {name}", "none", AGAIN)
        return self.header.tensors[name].shape


def config_of(header: GgufHeader) -> Any:
    """The configuration that the model's config.json would give."""
    from transformers import AutoConfig

    facts = facts_of(header)
    model_type, own = _FAMILIES[header.architecture](facts)
    tokens = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{long}_token_id") for name, long in _TOKENS}
    common = {
        "max_position_embeddings": facts.number("context_length"),
        "num_hidden_layers": facts.number("block_count") - facts.number("nextn_predict_layers", 0),
        "hidden_size": facts.number("embedding_length"),
        "num_attention_heads": facts.number("attention.head_count"),
        "num_key_value_heads": facts.number("attention.head_count_kv"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "rope_parameters": _rope(facts),
        "vocab_size": facts.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": header.dtype,
    }
    config = AutoConfig.for_model(model_type, **common | tokens | own)
    config.architectures = [_causal_class(model_type)]
    config.gguf_fingerprint = _fingerprint(header)  # which an adapter records of its base model
    return config


def _fingerprint(header: GgufHeader) -> str:
    found = hashlib.blake2b(digest_size=16)
    for path in parts_of(header.path):
        found.update(repr(sampled_hash(path)).encode())
    return found.hexdigest()


_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def _causal_class(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _rope(facts: _Facts) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(facts.number("rope.freq_base", 10000.0))}
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return found
    if kind not in ("yarn", "linear"):
        raise bad_value(
            str(facts.header.path), "rope.scaling.type yarn, linear or none", repr(kind), "take another file"
        )
    found |= {"rope_type": kind, "factor": float(facts.number("rope.scaling.factor"))}
    if kind == "yarn":
        original = facts.number("rope.scaling.original_context_length", facts.number("context_length"))
        found |= {"original_max_position_embeddings": original}
        found |= {f"beta_{name}": float(facts.number(f"rope.scaling.yarn_beta_{name}", default))
                  for name, default in (("fast", 32.0), ("slow", 1.0))}  # fmt: skip
    return found


def _expert_width(facts: _Facts) -> dict[str, Any]:
    return {"moe_intermediate_size": facts.number("expert_feed_forward_length")}


def _head_width(facts: _Facts) -> dict[str, Any]:
    heads = facts.number("attention.head_count")
    return {"head_dim": facts.number("attention.key_length", facts.number("embedding_length") // max(heads, 1))}


def _qwen2moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    shared = {"shared_expert_intermediate_size": facts.shape("blk.0.ffn_up_shexp.weight")[0]}
    return "qwen2_moe", {"num_experts": facts.number("expert_count")} | _expert_width(facts) | shared


def _qwen3moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    # llama.cpp always normalises the chosen weights of this family
    own = {"num_experts": facts.number("expert_count"), "norm_topk_prob": True}
    return "qwen3_moe", own | _expert_width(facts) | _head_width(facts)


def _olmoe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = {"num_experts": facts.number("expert_count"), "intermediate_size": facts.number("feed_forward_length")}
    return "olmoe", own | {"norm_topk_prob": False}


def _gpt_oss(facts: _Facts) -> tuple[str, dict[str, Any]]:
    own = {
        "num_local_experts": facts.number("expert_count"),
        "intermediate_size": facts.number("expert_feed_forward_length"),
        "sliding_window": facts.number("attention.sliding_window"),
        "rope_parameters": _rope(facts) | {"truncate": False},
    }
    return "gpt_oss", own | _head_width(facts)


def _router_of_groups(facts: _Facts) -> dict[str, Any]:
    shared = facts.number("expert_shared_count", 0)
    return {
        "n_routed_experts": facts.number("expert_count"),
        "n_shared_experts": shared,
        "routed_scaling_factor": float(facts.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": max(1, facts.number("expert_group_count", 1)),
        "topk_group": max(1, facts.number("expert_group_used_count", 1)),
        "first_k_dense_replace": facts.number("leading_dense_block_count", 0),
        "intermediate_size": facts.number("feed_forward_length"),
    }


def _deepseek2(facts: _Facts) -> tuple[str, dict[str, Any]]:
    rotary = facts.number("rope.dimension_count")
    own = {
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": facts.number("attention.key_length_mla", facts.get("attention.key_length")) - rotary,
        "v_head_dim": facts.number("attention.value_length_mla", facts.get("attention.value_length")),
        "num_key_value_heads": facts.number("attention.head_count"),
        "rope_parameters": _rope(facts),
    }
    if (scale := facts.get("rope.scaling.yarn_log_multiplier")) is not None:
        own["rope_parameters"] |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    router = _router_of_groups(facts)
    if facts.get("expert_gating_func") == _SIGMOID or facts.has("exp_probs_b.bias"):
        return "deepseek_v3", own | router | _expert_width(facts)
    grouped = router["n_group"] > 1
    router["topk_method"] = "group_limited_greedy" if grouped else "greedy"
    return "deepseek_v2", own | router | _expert_width(facts)


_SIGMOID = 2  # as expert_gating_func


def _glm4moe(facts: _Facts) -> tuple[str, dict[str, Any]]:
    width = _head_width(facts)
    own = {
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "attention_bias": facts.has("attn_q.bias"),
        "rope_parameters": _rope(facts)
        | {"partial_rotary_factor": facts.number("rope.dimension_count") / max(1, width["head_dim"])},
    }
    return "glm4_moe", own | _router_of_groups(facts) | _expert_width(facts) | width


# By general.architecture: transformers' model type, and the fields that are this family's own.
_FAMILIES: dict[str, Callable[[_Facts], tuple[str, dict[str, Any]]]] = {
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
}


def names_of(header: GgufHeader, model: Any) -> dict[str, str]:
    """Of each tensor in the model's state dict that is no expert's: what the file calls it. model: on meta."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from amoeba.integrations.experts_module import experts_modules

    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(architecture, int(facts_of(header).number("block_count")))
    inside = tuple(f"{name}." for name in experts_modules(model))
    tied = model.config.tie_word_embeddings
    found: dict[str, str] = {}
    for name in model.state_dict():
        if name.startswith(inside) or (tied and name == "lm_head.weight"):
            continue
        if name.endswith("e_score_correction_bias"):
            layer = name.split(".layers.")[1].partition(".")[0]
            found[name] = f"blk.{layer}.exp_probs_b.bias"
            continue
        stem, _, suffix = name.rpartition(".")
        stem, suffix = (stem, suffix) if suffix in ("weight", "bias") else (name, "weight")
        own = names.get_name(stem)
        if own is None:
            raise bad_value(str(header.path), f"a name of {name} in GGUF files", "none known to the package gguf",
                            "upgrade it: pip install --upgrade gguf")  # fmt: skip
        found[name] = f"{own}.{suffix}"
    return found


# What splits text of tokenizers that transformers does not name, as it splits that of others.
_SAME_SPLITS = {"glm4": "llama-bpe", "chatglm-bpe": "llama-bpe", "olmo": "default", "gpt-2": "default"}
_OWN_TOKENIZER = "put the model's tokenizer.json and tokenizer_config.json next to the file"


def tokenizer_of(header: GgufHeader) -> Any:
    """From tokenizer.json next to the file, if there is one, else from the file itself."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (header.path.parent / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(header.path.parent, trust_remote_code=False)
    convert, splits = _converter(header)
    data = {
        key.removeprefix("tokenizer."): value for key, value in header.metadata.items() if key.startswith("tokenizer.")
    }
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
    for name, key in (*_TOKENS, ("unk", "unknown")):
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
_TOKENIZER_OPTIONS = {
    "chat_template": "chat_template",
    "ggml.add_bos_token": "add_bos_token",
    "ggml.add_eos_token": "add_eos_token",
}


def _converter(header: GgufHeader) -> tuple[Callable[[str, dict], tuple[Any, dict]], Mapping[str, str]]:
    """What makes a tokenizer, and the ways of splitting text that it knows."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        remedy = f"upgrade transformers (pip install --upgrade transformers), or {_OWN_TOKENIZER}"
        raise bad_value(str(header.path), "a transformers that reads tokenizers of GGUF files", "an older one",
                        remedy) from error  # fmt: skip
    return convert_gguf_tokenizer, GGUF_PRE_TOKENIZER_SPLITS
