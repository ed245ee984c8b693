"""What tiny models write, greedily, by transformers' own `generate` and by the Decoder."""

from typing import Any

import torch
from transformers import GenerationConfig

from amoeba.decoding import Decoder
from tiny_models import VOCABULARY, build

TOKENS = 21  # past the window of 16 of the layers that have one


def endless(family: str, **changes: Any) -> Any:
    """A model whose texts have no end."""
    model = build(family, max_position_embeddings=128, **changes)
    model.set_experts_implementation("amoeba")
    model.generation_config.eos_token_id = None
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def plain(model: Any, rows: list[list[int]], tokens: int = TOKENS, **changes: Any) -> list[list[int]]:
    """One prompt at a time, so that nothing is padded."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, **changes)
    found = []
    for row in rows:
        ids = torch.tensor([row], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        found.append(out[0, len(row) :].tolist())
    return found


def decoded(
    model: Any, rows: list[list[int]], tokens: int = TOKENS, decoder: Decoder | None = None, **options: Any
) -> list[list[int]]:
    decoder = decoder or Decoder(model, batch=len(rows), length=max(map(len, rows)) + tokens, **options)
    return [list(row) for row in zip(*decoder.generate(rows, tokens), strict=True)]
