"""What a plan needs to know of a model: sizes, dtypes and formats, from its configuration and the headers of its files.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    facts = read_facts("models/qwen3")        # a folder, a store, or a name on the hub; no weight is read
    facts.expert_bytes("mxfp4-weights"), facts.rest_bytes, facts.kv_numbers

A model without files here is built on the meta device, which takes no memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.cost import expert_bytes
from amoeba.core.errors import BadValue, bad_value
from amoeba.core.log import logger
from amoeba.core.placement import LayerSizes
from amoeba.integrations.experts_module import described, experts_modules, layout_of
from amoeba.integrations.gguf_files import is_gguf
from amoeba.integrations.model_folder import load_config, load_without_weights
from amoeba.integrations.quantised_files import OTHERWISE, check_no_codes, check_readable, described_method, format_of
from amoeba.integrations.quantised_models import dtype_of, facts_of, unquantised
from amoeba.integrations.text_model import positions, text_config
from amoeba.jobs.model_cost import attention_width, keep, kept
from amoeba.placements import RESIDENT, placement_named
from amoeba.precision.formats import Format
from amoeba.stream.cpu.memory import READS
from amoeba.stream.store import LayerEntry, StoreError, is_store, open_store
from amoeba.stream.store.layers import BLOCK, layer_entry
from amoeba.stream.store.tensor_files import checkpoint_tensors

_PIECES = 8  # of an expert, at most: three matrices with their scales, biases


@dataclass(frozen=True)
class ModelFacts:
    """
    entries:       of each layer with experts, as a store describes it; () for a model without any.
    dtype:         of everything but quantised experts.
    rest_numbers:  of everything but the experts; embedding_numbers of them are looked up, not multiplied.
    kv_numbers:    per token, of all layers; state_bytes: per row, of layers that keep a state of one size.
    attention_width: of all query heads of a layer together.
    why_not_streamed: why its experts cannot be read one by one, or None.
    scratch_bytes: for reading experts from a folder.
    files_here:    False: the configuration says what files to download hold.
    """

    name: str
    family: str
    entries: tuple[LayerEntry, ...]
    dtype: torch.dtype
    rest_numbers: int
    embedding_numbers: int
    head_numbers: int
    decoder_layers: int
    hidden: int
    vocabulary: int
    top_k: int
    kv_numbers: int
    state_bytes: int
    attention_width: int
    positions: int | None
    why_not_streamed: str | None
    scratch_bytes: int = 0
    packed: bool = False
    files_here: bool = True

    @property
    def rest_bytes(self) -> int:
        return self.rest_numbers * self.dtype.itemsize

    @property
    def numbers(self) -> str:
        """How the checkpoint keeps its experts: bfloat16, or the format of codes."""
        return self.entries[0].numbers if self.entries else str(self.dtype).removeprefix("torch.")

    @property
    def is_quantised(self) -> bool:
        return bool(self.entries) and self.entries[0].format is not None

    @property
    def sizes(self) -> Counter[LayerSizes]:
        return Counter(map(_sizes, self.entries))

    @property
    def expert_numbers(self) -> int:
        return sum(each.experts * _numbers(each) for each in self.entries)

    @property
    def active_numbers(self) -> int:
        experts = sum(min(self.top_k, each.experts) * _numbers(each) for each in self.entries)
        return self.rest_numbers - self.embedding_numbers + experts

    def one_expert(self, placement: str, dtype: torch.dtype | None = None) -> int:
        """Bytes of an expert of the first layer. dtype: of resident ones; None: the checkpoint's."""
        return self.of_layer(self.entries[0], placement, dtype) if self.entries else 0

    def of_layer(self, entry: LayerEntry, placement: str, dtype: torch.dtype | None = None) -> int:
        """Bytes of one expert of this layer in a placement that keeps all of them in memory."""
        if placement == RESIDENT or entry.format is not None:
            if entry.format is None:
                return _numbers(entry) * (dtype or entry.dtype).itemsize
            return sum(map(entry.size_of, entry.parts))
        count = placement_named(placement).expert_bytes
        assert count is not None, placement
        return count(_sizes(entry))

    def quantised(self, format: Format) -> ModelFacts:
        entries = []
        for each in self.entries:
            sizes = each.experts, each.hidden, each.intermediate, each.activation
            parts = 2 if each.activation.gated and not each.activation.interleaved else 1
            entries.append(layer_entry(each.name, *sizes, each.dtype, each.has_bias, format, parts))
        return replace(self, entries=tuple(entries))

    def expert_bytes(self, placement: str, dtype: torch.dtype | None = None) -> int:
        return sum(each.experts * self.of_layer(each, placement, dtype) for each in self.entries)


def _sizes(entry: LayerEntry) -> LayerSizes:
    return LayerSizes(entry.experts, entry.hidden, entry.intermediate, entry.activation, entry.has_bias)


def _numbers(entry: LayerEntry) -> int:
    gated = entry.activation.gated
    biases = entry.activation.width(entry.intermediate) + entry.hidden if entry.has_bias else 0
    return expert_bytes(hidden=entry.hidden, intermediate=entry.intermediate, itemsize=1, gated=gated) + biases


def read_facts(name: str, *, config: Any = None, trust_remote_code: bool = False) -> ModelFacts:
    """config: of a model to train from scratch, which has no files yet."""
    if config is not None:
        return _from_config(name, config, trust_remote_code)
    config = load_config(name, trust_remote_code=trust_remote_code)
    folder = Path(name).expanduser()
    if not folder.is_dir() and not is_gguf(folder):
        return _from_hub(name, config, trust_remote_code)
    try:
        with open_store(folder, direct=False, trust_remote_code=trust_remote_code) as store:
            entries, rest, scratch = store.layers, store.rest_bytes, store.scratch_bytes(READS)
    except (StoreError, ValueError, OSError) as error:
        return _from_headers(name, folder, config, trust_remote_code, error)
    dtype = entries[0].dtype
    facts = _described(name, config, entries, dtype, rest // dtype.itemsize, None, trust_remote_code)
    return replace(facts, scratch_bytes=scratch, packed=is_store(folder))


def _from_headers(name: str, folder: Path, config: Any, trust_remote_code: bool, error: Exception) -> ModelFacts:
    """Of a model that cannot be streamed: sizes of its configuration, in the dtype of its files. What no command could
    load is refused."""
    quantised = facts_of(config)
    if quantised is None:
        check_no_codes(folder)
    elif format_of(quantised) is None:
        empty = load_without_weights(unquantised(config), name, trust_remote_code=trust_remote_code)
        check_readable(folder, empty, quantised)
    facts = _from_config(name, config, trust_remote_code)
    try:
        tensors = checkpoint_tensors(folder)
    except (StoreError, OSError):
        _check_told(config)
        return facts
    why = error.args[0] if isinstance(error, BadValue) else str(error)
    floating = Counter[torch.dtype]()
    for entry in tensors.values():
        if entry.dtype.is_floating_point:
            floating[entry.dtype] += entry.size
    dtype = floating.most_common(1)[0][0] if floating and not facts.is_quantised else facts.dtype
    return replace(facts, dtype=dtype, why_not_streamed=why, files_here=True)


def _check_told(config: Any) -> None:
    """Of a format that is transformers' own, only files tell whether experts are in it."""
    quantised = facts_of(config)
    if quantised is not None and format_of(quantised) is None and quantised.get("quant_method") != "fp8":
        expected = "files, or a configuration of experts in numbers or quantised (fp8, mxfp4, nvfp4, nf4)"
        got = f"{config.model_type} quantised by {described_method(quantised)}, and no files"
        raise bad_value("MODEL", expected, got, f"plan after downloading it, or {OTHERWISE}")


def _from_hub(name: str, config: Any, trust_remote_code: bool) -> ModelFacts:
    _check_told(config)
    facts = _from_config(name, config, trust_remote_code)
    try:
        from huggingface_hub import get_safetensors_metadata

        counts = get_safetensors_metadata(name).parameter_count  # of the headers alone
    except Exception as error:  # no network, a private model, files of another kind: the configuration is enough
        logger.info("headers of %s", name, exc_info=error)
        return facts
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    known = {names[kind]: count for kind, count in counts.items() if kind in names}
    if not known or facts.is_quantised:
        return facts
    dtype = max(known, key=lambda kind: known[kind])
    entries = tuple(replace(each, dtype=dtype) for each in facts.entries)
    return replace(facts, dtype=dtype, entries=entries)


def _from_config(name: str, config: Any, trust_remote_code: bool) -> ModelFacts:
    quantised = facts_of(config)
    model = load_without_weights(unquantised(config), name, trust_remote_code=trust_remote_code)
    format = None if quantised is None else format_of(quantised)
    dtype, entries, of_experts = dtype_of(config), [], 0
    for path, module in experts_modules(model).items():
        layout, found = layout_of(module), described(module)
        if layout is not None and found.fused is not None:
            sizes = layout.num_experts, layout.hidden, layout.intermediate
            parts = 2 if layout.gated and not layout.interleaved else 1
            entries.append(layer_entry(path, *sizes, found.fused, dtype, found.has_bias, format, parts))
            of_experts += sum(each.numel() for each in module.parameters())
    rest = sum(each.numel() for each in model.parameters()) - of_experts
    # experts of published files are read one by one, through scratch memory that has whole blocks of each piece
    scratch = READS * max((each.expert_bytes + _PIECES * BLOCK for each in entries), default=0)
    facts = _described(name, config, tuple(entries), dtype, rest, None, trust_remote_code)
    return replace(facts, scratch_bytes=scratch, files_here=False)


def _described(
    name: str,
    config: Any,
    entries: tuple[LayerEntry, ...],
    dtype: torch.dtype,
    rest: int,
    why_not_streamed: str | None,
    trust_remote_code: bool,
) -> ModelFacts:
    text = text_config(config)
    table = text.vocab_size * text.hidden_size
    tied = bool(getattr(text, "tie_word_embeddings", False))
    kv_numbers, state_bytes = _kept_between_tokens(name, config, trust_remote_code)
    return ModelFacts(
        name=name,
        family=config.model_type,
        entries=entries,
        dtype=dtype,
        rest_numbers=rest,
        embedding_numbers=0 if tied else min(rest, table),
        head_numbers=table,
        decoder_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        top_k=_top_k(text, entries),
        kv_numbers=kv_numbers,
        state_bytes=state_bytes,
        attention_width=round(attention_width(text)),
        positions=positions(config),
        why_not_streamed=why_not_streamed if entries else "it has no experts that aMoEba computes",
    )


def _top_k(text: Any, entries: tuple[LayerEntry, ...]) -> int:
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    found = next((value for each in names if isinstance(value := getattr(text, each, None), int)), None)
    return found or (min(8, entries[0].experts) if entries else 1)


def _kept_between_tokens(name: str, config: Any, trust_remote_code: bool) -> tuple[int, int]:
    """Numbers of each token, and bytes of each row however long it is, as transformers' caches hold them."""
    import transformers

    text = text_config(config)
    if _keeps_plain_keys(text):
        return _keys_and_values(text), 0
    about = {"config": json.loads(config.to_json_string(use_diff=False)), "transformers": transformers.__version__}
    if (found := kept("cache", about)) is None:
        try:
            found = _tried_without_weights(name, config, trust_remote_code)
        except Exception as error:  # code of many authors, some of which looks at numbers
            logger.info("cache of %s", name, exc_info=error)
            return _keys_and_values(text), 0
        keep("cache", about, found)
    return found["numbers"], found["bytes"]


def _keeps_plain_keys(text: Any) -> bool:
    from transformers import DynamicCache

    if any(getattr(text, each, None) is not None for each in ("qk_nope_head_dim", "v_head_dim", "index_head_dim")):
        return False
    kinds = {type(layer).__name__ for layer in DynamicCache(config=text).layers}
    return kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}


def _keys_and_values(text: Any) -> int:
    kinds, layers, heads = getattr(text, "layer_types", None), text.num_hidden_layers, text.num_attention_heads
    if isinstance(kinds, list | tuple):
        layers = sum(1 for kind in kinds if "attention" in kind and "linear" not in kind)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return layers * 2 * (getattr(text, "num_key_value_heads", None) or heads) * size


def _tried_without_weights(name: str, config: Any, trust_remote_code: bool) -> dict[str, int]:
    """Two rows of different lengths through the model on the meta device, past its experts."""
    model = load_without_weights(unquantised(config), name, trust_remote_code=trust_remote_code)
    for module in experts_modules(model).values():
        module.forward = lambda hidden_TH, *_, **__: hidden_TH
    found = []
    for tokens in (4, 8):
        with torch.no_grad(), torch.device("meta"):
            ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
            cache = model(input_ids=ids, use_cache=True).past_key_values
        found.append(list(_tensors_in([vars(each) for each in (cache, *cache.layers)])))
    numbers, sizes = ([sum(map(count, each)) for each in found] for count in (torch.numel, lambda each: each.nbytes))
    return {"numbers": (numbers[1] - numbers[0]) // 4, "bytes": 2 * sizes[0] - sizes[1]}


def _tensors_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor) and found.is_floating_point():
        yield found
    elif isinstance(found, list | tuple | dict):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _tensors_in(each)
