"""The text part of a configuration, and the class that computes text with it.

    text_config(config).vocab_size        # of Qwen3_5MoeConfig too, which has its sizes in text_config
    auto_class(config).from_pretrained(folder)

A composite configuration holds one configuration per part (text, vision, audio) and has no sizes of its own. Whoever
needs a size of the language model asks `text_config`.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def text_config(config: Any) -> Any:
    """The configuration of the text decoder: a part of a composite one, otherwise `config` itself."""
    return config.get_text_config(decoder=True)


def auto_class(config: Any) -> Any:
    """The Auto class of transformers that loads a model of this configuration to read and write text.

    Types that have no text-only class are loaded whole, with their vision and audio parts.
    """
    import transformers

    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
    autos = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    for auto in autos:
        if auto.__name__ in (getattr(config, "auto_map", None) or {}):
            return auto
        if type(config) in auto._model_mapping and _computes(auto._model_mapping[type(config)]):
            return auto
    return autos[0]  # its own error says that it does not know the type


def _computes(model_class: Any) -> bool:
    """Some classes only hold others together: Qwen3-Omni's whole model has `generate` and no forward."""
    return model_class.forward is not nn.Module.forward
