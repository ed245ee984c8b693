"""A server of a tiny random model, for all tests of this folder, and what they need to talk to it.

What imports kernels is imported inside: `pytest tests/serve` reads this file before Triton's interpreter is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from server_thread import Running

TEMPLATE = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.arguments.city }}]{% endfor %}{% endfor %}[assistant]"
)
NAME = "tiny"


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    from transformers import AutoTokenizer

    from tiny_models import build, save_byte_tokenizer

    folder = tmp_path_factory.mktemp("served") / NAME
    build("qwen3_moe", vocab_size=257, max_position_embeddings=600, eos_token_id=256).save_pretrained(folder)
    save_byte_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(tmp_path_factory) -> dict[str, str]:
    """Two that change the text; the second has a chat template of its own."""
    from transformers import AutoTokenizer

    from amoeba import lora
    from tiny_models import build, save_byte_tokenizer

    found = {}
    for seed, name in enumerate(("first", "second")):
        model = build("qwen3_moe", vocab_size=257, max_position_embeddings=600, eos_token_id=256)
        lora.attach(model, r=2, alpha=64, targets=["experts", "o_proj"])
        generator = torch.Generator().manual_seed(seed)
        for parameter_name, parameter in model.named_parameters():
            if "lora" in parameter_name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        found[name] = str(tmp_path_factory.mktemp("adapters") / name)
        lora.save(model, found[name])
    save_byte_tokenizer(found["second"])
    tokenizer = AutoTokenizer.from_pretrained(found["second"])
    tokenizer.chat_template = "<{{ messages[0].content }}>"
    tokenizer.save_pretrained(found["second"])
    return found


@pytest.fixture(scope="session")
def server(folder, adapters) -> Iterator[Running]:
    from server_thread import running

    with running(folder, adapters=adapters) as found:
        yield found
