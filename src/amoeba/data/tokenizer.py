"""A tokenizer for a corpus: the checkpoint's own, or byte-level BPE trained on the text.

    tokenizer = load_or_train_tokenizer(None, corpus, vocab_size=4096)
    content = kept(key, make)       # what make() gave when a run had that key, else what it gives now

Bytes are the alphabet, so every text can be encoded and decode(encode(text)) is the text itself. What was made of a
large text, a tokenizer or tokens, is kept for the next run. A key is a hash of everything that the content follows
from, the code of this folder included, so nothing kept is ever out of date. Files can be read by their owner alone; the
ones not used for longest go when all together are too large.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.cpu.library_cache import prepared
from amoeba.data.corpus import Corpus
from amoeba.data.documents import Document, contents, render
from amoeba.integrations.model_folder import has_tokenizer, has_weights, load_config, load_tokenizer
from amoeba.integrations.text_model import vocabulary
from amoeba.system.files import default_folder

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end of text
# What is checked to tell whether a tokenizer knows the text: this many documents, and the start of each.
SAMPLED_DOCUMENTS, SAMPLED_CHARACTERS = 64, 2000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The same texts in any order give the same vocabulary; short texts give fewer than `vocab_size` entries."""
    if vocab_size < SMALLEST_VOCABULARY:
        expected = f"at least {SMALLEST_VOCABULARY} (256 bytes and the end of text)"
        raise bad_value("vocab_size", expected, vocab_size, "4096 suits a few hundred kB of text")
    texts = list(texts)
    if sum(map(len, texts)) < WORTH_KEEPING:
        tokenizer = _trained(texts, vocab_size)
    else:
        key = key_of("tokenizer", texts, vocab_size=vocab_size)
        made = kept(key, lambda: _trained(texts, vocab_size).to_str().encode())
        tokenizer = Tokenizer.from_str(made.decode())
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **ends)


def _trained(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    told: Any = {"special_tokens": [END_OF_TEXT], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **told)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def load_or_train_tokenizer(
    model_folder: str | None, corpus: Corpus, vocab_size: int, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint (then `vocab_size` has no say), or one trained on the corpus's train split.

    A folder with a config.json alone has a model that was never trained, so that any tokenizer will do whose ids are
    below its vocab_size; one with weights needs the tokenizer that they were trained with.
    """
    texts = (render(document, None) for document in corpus.train)
    if model_folder is None:
        return train_tokenizer(texts, vocab_size)
    folder = Path(model_folder)
    if not has_tokenizer(folder):
        if has_weights(folder) or not (folder / "config.json").is_file():
            remedy = "check the name, or copy tokenizer.json and tokenizer_config.json into the folder"
            raise bad_value(model_folder, "a checkpoint with a tokenizer", "none of its files in there", remedy)
        most = vocabulary(load_config(model_folder, trust_remote_code=trust_remote_code))
        if most < SMALLEST_VOCABULARY:
            least = f"at least {SMALLEST_VOCABULARY} (256 bytes and the end of text)"
            expected = f"{least} for a tokenizer trained on the data"
            remedy = "raise it in config.json, or copy a tokenizer into the folder"
            raise bad_value(f"{model_folder}: vocab_size", expected, most, remedy)
        return train_tokenizer(texts, min(vocab_size, most))
    tokenizer = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        expected, got = "a tokenizer with an end-of-text token, which goes between documents", "one without eos_token"
        raise bad_value(str(model_folder), expected, got, "set eos_token in its tokenizer_config.json")
    check_understands(tokenizer, corpus.train)
    return tokenizer


def check_understands(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> None:
    """Refuses a tokenizer that loses most of the text: an empty one, or one of another script, gives nothing or unk."""
    step = max(1, len(documents) // SAMPLED_DOCUMENTS)
    sample = documents[::step][:SAMPLED_DOCUMENTS]
    texts = ["".join(itertools.islice(itertools.chain.from_iterable(contents(d)), SAMPLED_CHARACTERS)) for d in sample]
    there = kept = tokens = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        known = [token for token in ids if token != tokenizer.unk_token_id]
        written = _letters(str(tokenizer.decode(known, skip_special_tokens=True)))
        there, tokens = there + _letters(text).total(), tokens + len(known)
        kept += (written & _letters(text)).total()
    if 2 * kept < there:
        got = f"{tokens:,} known tokens for {there:,} characters, of which {1 - kept / there:.0%} are lost"
        remedy = "use the tokenizer that the model was trained with, or text in its language"
        raise bad_value("tokenizer", "one that understands the text", got, remedy)


def _letters(text: str) -> Counter[str]:
    """Without what tokenizers change on purpose: case and spaces."""
    return Counter("".join(text.casefold().split()))


# Characters from which on keeping pays: below, tokenising takes a fraction of a second.
WORTH_KEEPING = 1_000_000
MOST_BYTES = 4 * 2**30  # of all files together
_PACKAGES = ("tokenizers", "transformers", "torch")
_DIGEST = 32


def key_of(kind: str, texts: Iterable[str], **others: Any) -> str:
    """others: what else the content depends on, as JSON."""
    found = hashlib.blake2b(json.dumps([kind, _code(), others], sort_keys=True, default=repr).encode())
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        found.update(len(content).to_bytes(8, "little"))
        found.update(content)
    return f"{kind}-{found.hexdigest()[: 2 * _DIGEST]}"


def kept(key: str, make: Callable[[], bytes]) -> bytes:
    try:
        folder = prepared(prepared(default_folder()) / "data")
    except OSError as error:
        logger.info("the tokenised data is not cached: %s", error)
        return make()
    path = folder / key
    content = _read(path)
    if content is None:
        content = make()
        with contextlib.suppress(OSError):  # a full disk, or one that only lets itself be read
            _write(path, content)
    return content


def _read(path: Path) -> bytes | None:
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    if digest != _hash(content):
        logger.warning("%s is damaged: writing it again", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return content


def _write(path: Path, content: bytes) -> None:
    size = _DIGEST + len(content)
    if size > MOST_BYTES:
        return
    _make_room(path.parent, size)
    handle, staged = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_hash(content))
            file.write(content)
        os.replace(staged, path)
    finally:
        Path(staged).unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    files = [(file, file.stat()) for file in folder.iterdir() if file.is_file()]
    total = size + sum(found.st_size for _, found in files)
    for file, found in sorted(files, key=lambda each: each[1].st_mtime):
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= found.st_size


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


@cache
def _code() -> list[str]:
    """What the code is that makes it: the files of this folder, and packages."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return [_hash(sources).hex(), *(_version(package) for package in _PACKAGES)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
