"""Which models `Decoder` does not support, and why; the sentence goes into the log and the report."""

from __future__ import annotations

import copy
import re
from typing import Any

from amoeba.core.errors import one_line
from amoeba.core.graph_replays import replays_of
from amoeba.decoding.cache import why_not_fixed
from amoeba.integrations.compiled_layers import decoder_layers
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.host_waits import why_waits
from amoeba.integrations.text_model import text_config

# Their tables of angles are computed anew, by a decision of the host, when a text gets longer
_ROTATIONS_BY_LENGTH = ("dynamic", "longrope")
# What `Sampler` computes
_PROCESSORS = frozenset({"RepetitionPenalty", "Temperature", "TopK", "TopP"})
# What a generation_config may ask of the loop itself, apart from processing logits
_OF_THE_LOOP = ("min_new_tokens", "stop_strings", "max_time", "prompt_lookup_num_tokens", "penalty_alpha")


def why_not(model: Any) -> str | None:
    """None, or why the steps of this model are no fixed sequence of kernels."""
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not a class of transformers, so its steps are unknown"
    if (reason := why_waits(model)) is not None:
        return reason
    if len({parameter.device for parameter in model.parameters()}) > 1 or getattr(model, "hf_device_map", None):
        return "its parameters are on several devices"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not guarantee that a step of {kind.__name__} needs no decision by the host"
    if len(replays_of(placed_in(module) for module in experts_modules(model).values())) > 1:
        return "its experts are streamed through several memories, which would wait for each other"
    text = text_config(model.config)
    if (reason := why_not_fixed(model.config)) is not None:
        return reason
    kinds = _rotations(getattr(text, "rope_parameters", None))
    if by_length := sorted(kinds & set(_ROTATIONS_BY_LENGTH)):
        return f"its rotary embedding changes with the length ({', '.join(by_length)})"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention is not dispatched by transformers"
    try:
        decoder_layers(model)
    except NotImplementedError as error:
        return str(error)
    return None


def why_not_chosen(model: Any, config: Any, computed: frozenset[str] = _PROCESSORS) -> str | None:
    """None, or what the generation_config asks for that `Sampler` and `Decoder` do not do.

    computed: the processing of logits that there is, by transformers' names."""
    if asked := [name for name in _OF_THE_LOOP if getattr(config, name, None)]:
        return f"its generation_config has {', '.join(asked)}"
    if config.use_cache is False:
        return "its generation_config turns the cache off"
    config = copy.copy(config)
    config._eos_token_tensor = None  # which `generate` makes, and some processors look for
    try:
        processors = model._get_logits_processor(config, 1)
    except Exception as error:  # private to transformers, and by what a config may hold
        return f"transformers cannot build logits processors from its generation_config ({one_line(error)})"
    names = {re.sub("Logits(Processor|Warper)$", "", type(processor).__name__) for processor in processors}
    others = sorted(names - computed)
    return (
        f"its generation_config asks for {', '.join(others)}, which captured steps do not support" if others else None
    )


def _rotations(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_rotations(each) for each in parameters.values()))
