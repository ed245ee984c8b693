"""The text part of a configuration, the class that computes text with it, and what a model can take.

    text_config(config).vocab_size        # of Qwen3_5MoeConfig too, which has its sizes in text_config
    auto_class(config).from_pretrained(folder)
    draws_random_numbers(model)           # False for most models of today: their dropout is 0

A composite configuration holds one configuration per part (text, vision, audio) and has no sizes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from amoeba.core.errors import bad_value

# How transformers' names of such parts begin: vision_tower, visual, audio_encoder, Ernie's vision_moe.
_OTHER_PARTS = ("vision", "visual", "audio")


def text_config(config: Any) -> Any:
    """The configuration of the text decoder: a part of a composite one, otherwise `config` itself."""
    return config.get_text_config(decoder=True)


def auto_class(config: Any) -> Any:
    """The Auto class of transformers that loads a model of this configuration to read and write text.

    It is that of the class which config.json names: a checkpoint with a vision part keeps it, and adapters have the
    names of that class. Otherwise a text-only class comes first.
    """
    import transformers

    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
    autos = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    for auto in autos:
        if auto.__name__ in (getattr(config, "auto_map", None) or {}):
            return auto
    classes = {auto: auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping}
    serving = [auto for auto, model_class in classes.items() if _computes(model_class)]
    stored = getattr(config, "architectures", None) or ()
    named = [auto for auto in serving if classes[auto].__name__ in stored]
    return next(iter(named or serving), autos[0])  # whose own error says that it does not know the type


def leave_out_router_loss(config: Any) -> None:
    """Where a checkpoint's config asks for it, transformers adds a balance loss to that of the language model; ours is
    added layer by layer (`routing.balance`)."""
    for part in (config, text_config(config)):
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False


def text_decoder(model: Any) -> Any:
    """The part of a composite model that reads and writes text; any other model itself."""
    return model if text_config(model.config) is model.config else model.get_decoder()


def decoder_name(model: Any) -> str | None:
    """Of the text part of a composite model; None for any other model."""
    decoder = text_decoder(model)
    return None if decoder is model else next(name for name, each in model.named_modules() if each is decoder)


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


def vocabulary(config: Any) -> int:
    return text_config(config).vocab_size


def positions(config: Any) -> int | None:
    """None where the architecture has no limit of its own."""
    return getattr(text_config(config), "max_position_embeddings", None)


def check_sequence_length(config: Any, length: int) -> None:
    most = positions(config)
    if most is not None and length > most:
        remedy = f"take --sequence-length {most}, or raise max_position_embeddings in config.json"
        raise bad_value("--sequence-length", f"at most {most}, the model's max_position_embeddings", length, remedy)


def check_ids(config: Any, largest: int) -> None:
    if largest >= vocabulary(config):
        remedy = "use the tokenizer that the model was trained with"
        raise bad_value("tokenizer", f"ids below the model's vocab_size, {vocabulary(config)}", largest, remedy)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMES = (
    *("dropout", "drop", "dropout_rate", "dropout_prob", "layerdrop", "drop_path_rate"),
    *("jitter_noise", "jitter_eps"),
)


def draws_random_numbers(model: nn.Module) -> bool:
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    config: Any = getattr(model, "config", None)
    return config is not None and any(_named(config.to_dict()))


def _named(config: Mapping[str, Any]) -> Iterator[bool]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif isinstance(value, int | float) and str(name).endswith(_NAMES):
            yield value > 0
