"""Which models `Decoder` does not serve, and why: the sentence goes into the log and the report."""

from __future__ import annotations

from typing import Any

from amoeba.decoding.cache import why_not_fixed
from amoeba.decoding.regions import decoder_layers

# Their tables of angles are computed anew, by a decision of the host, when a text gets longer
_ROTATIONS_BY_LENGTH = ("dynamic", "longrope")


def why_not(model: Any) -> str | None:
    """None, or why the steps of this model are no fixed sequence of kernels."""
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is no class of transformers, and may do anything between tokens"
    if len({parameter.device for parameter in model.parameters()}) > 1 or getattr(model, "hf_device_map", None):
        return "its parameters are on several devices"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not promise that a step of {kind.__name__} has no decisions by the host"
    text = model.config.get_text_config(decoder=True)
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


def _rotations(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    own = {parameters["rope_type"]} if isinstance(parameters.get("rope_type"), str) else set()
    return own.union(*(_rotations(each) for each in parameters.values()))
