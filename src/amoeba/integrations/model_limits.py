"""What a model's configuration can take: ids below its vocabulary, rows no longer than its positions."""

from __future__ import annotations

from typing import Any

from amoeba.core.errors import bad_value
from amoeba.integrations.text_model import text_config


def vocabulary(config: Any) -> int:
    return text_config(config).vocab_size


def positions(config: Any) -> int | None:
    """None where the architecture has no limit of its own."""
    return getattr(text_config(config), "max_position_embeddings", None)


def check_sequence_length(config: Any, length: int) -> None:
    most = positions(config)
    if most is not None and length > most:
        raise bad_value(
            "--sequence-length",
            f"at most {most}, the model's max_position_embeddings",
            length,
            f"take --sequence-length {most}, or raise max_position_embeddings in config.json",
        )


def check_ids(config: Any, largest: int) -> None:
    if largest >= vocabulary(config):
        raise bad_value(
            "tokenizer",
            f"ids below the model's vocab_size, {vocabulary(config)}",
            largest,
            "use the tokenizer that the model was trained with",
        )
