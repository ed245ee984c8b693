"""A tokenizer for a corpus: the checkpoint's own, or byte-level BPE trained on the text.

    tokenizer = load_or_train_tokenizer(None, corpus, vocab_size=4096)

Bytes are the alphabet, so every text can be encoded and decode(encode(text)) is the text itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from amoeba.errors import bad_value
from amoeba.jobs.data import Corpus
from amoeba.jobs.documents import render

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end of text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The same texts in any order give the same vocabulary; short texts give fewer than `vocab_size` entries."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise bad_value(
            "vocab_size",
            f"at least {SMALLEST_VOCABULARY} (256 bytes and the end of text)",
            vocab_size,
            "4096 suits a few hundred kB of text",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_or_train_tokenizer(model_folder: str | None, corpus: Corpus, vocab_size: int) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint (then `vocab_size` has no say), or one trained on the corpus's train split."""
    if model_folder is None:
        return train_tokenizer((render(document, None) for document in corpus.train), vocab_size)
    try:
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(model_folder))
    except (OSError, ValueError) as error:
        raise bad_value(
            str(model_folder),
            "a checkpoint with a tokenizer",
            f"none that transformers can load ({str(error).splitlines()[0].rstrip(' .:')})",
            "check the name, or copy tokenizer.json and tokenizer_config.json into the folder",
        ) from error
    if tokenizer.eos_token_id is None:
        raise bad_value(
            str(model_folder),
            "a tokenizer with an end-of-text token, which goes between documents",
            "one without eos_token",
            "set eos_token in its tokenizer_config.json",
        )
    return tokenizer
