"""Every kind of model of the installed transformers that has experts and writes text token by token.

for kind in kinds(): model = build_kind(kind)      # tiny, the same weights every time
"""

import functools

import tiny_composites
from tiny_models import build, experts_classes, text_models

# What does not write token by token: kind -> why.
OTHERS = {
    "diffusion_gemma": "writes blocks of tokens at once",
    "openai_privacy_filter": "classifies tokens",
}
VOCABULARY = 60  # of prompts: less than any of the models has, and no id that stands for an image


def kinds() -> list[str]:
    return [kind for kind in experts_classes() if kind not in OTHERS]


@functools.cache
def _whole() -> dict[str, str]:
    """Folder of a text model -> the first type that has it as a part."""
    return {folder: kind for kind, folder in reversed(tiny_composites.kinds().items())}


def build_kind(kind: str, **changes):
    """Its causal model, or the whole one where the text part has no head."""
    if text_models(kind)[0][0].__name__.endswith("ForCausalLM"):
        model = build(kind, **changes)
    else:
        model = tiny_composites.build_composite(_whole()[kind]).eval()
    model.generation_config.eos_token_id = None  # texts without an end
    return model
