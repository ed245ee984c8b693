"""The text part of a configuration, and the class that computes text with it.

    text_config(config).vocab_size        # of Qwen3_5MoeConfig too, which has its sizes in text_config
    auto_class(config).from_pretrained(folder)

A composite configuration holds one configuration per part (text, vision, audio) and has no sizes of its own. Code
that needs a size of the language model asks `text_config`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# How transformers' names of such parts begin: vision_tower, visual, audio_encoder, Ernie's vision_moe.
_OTHER_PARTS = ("vision", "visual", "audio")


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


def text_decoder(model: Any) -> Any:
    """The part of a composite model that reads and writes text; any other model itself."""
    return model if text_config(model.config) is model.config else model.get_decoder()


def beyond_text(model: Any) -> set[str]:
    """Names of the modules that no text goes through: vision and audio parts, and what joins them to the text model."""
    names = [name for name, _ in model.named_modules()]
    found = {name for name in names if any(word.startswith(_OTHER_PARTS) for word in name.split("."))}
    if text_config(model.config) is not model.config:
        text = {id(module) for module in text_decoder(model).modules()} | {id(model.get_output_embeddings())}
        around = {name for name, module in model.named_modules() if text & {id(each) for each in module.modules()}}
        found |= set(names) - around
    return found


def _computes(model_class: Any) -> bool:
    """One token after another. Qwen3-Omni's whole model only holds others together and has no forward; DiffusionGemma
    writes blocks of tokens at once."""
    from transformers import GenerationMixin

    return issubclass(model_class, GenerationMixin) and model_class.forward is not nn.Module.forward
