"""Text to train on, from a file, a folder, a dataset's name or nothing at all, with a part held out.

    corpus = load_corpus("notes/")          # or None: the Python language reference that comes with Python
    render(corpus.train[0], tokenizer)      # one string

What cannot be read raises, and what is left out on purpose is counted in `Corpus.description`.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from amoeba.core.errors import bad_value, counted
from amoeba.data.documents import Document, Text, characters, is_blank
from amoeba.data.sources import cut_before, read_source

# A held-out share this many times the requested one, or above 1 in this many, is mentioned in the description.
FAR_FROM_ASKED = 3
# More kinds than this are no kinds but names of documents.
MOST_KINDS = 16


@dataclass(frozen=True)
class Corpus:
    train: list[Document]
    held_out: list[Document]
    description: str
    held_out_by_kind: dict[str, list[Document]] = field(default_factory=dict)  # empty unless there are several kinds


def load_corpus(
    source: str | None,
    *,
    held_out: float | str = 0.05,
    seed: int = 0,
    check: Callable[[Document, str], None] = lambda document, place: None,
) -> Corpus:
    """The documents of `source`, of which at most about `held_out` are kept for evaluation: of the documents, and of
    the characters. Where all are of a length both are met, else one of them.

    source: None, a file (.jsonl, .json, .parquet, anything else is UTF-8 text), a folder of such files, or the name
    of a dataset of the Hugging Face hub (`name` or `name:configuration`), whose split "train" is read. A record may
    name the kind of its text in a field `kind`; in a folder, the subfolder of a file is its kind.
    held_out: a share, or a source of its own.
    check: called with each document and its place ("a.jsonl, line 3"), may raise.
    """
    if not isinstance(held_out, str) and not 0 < held_out < 1:
        raise bad_value("held_out", "a fraction between 0 and 1, both excluded", held_out, "0.05 holds out 5 %")
    left_out: Counter[str] = Counter()
    name = source if source is not None else f"the language reference of Python {platform.python_version()}"
    kinds: dict[Document, str] = {}
    documents = _documents(source, name, left_out, check, kinds)
    if isinstance(held_out, str):
        train, held = documents, _documents(held_out, held_out, left_out, check, kinds)
    else:
        train, held = _split(documents, held_out, seed, name)
    description = f"{name}: {counted(len(train), 'document')} to train on ({characters(train):,} characters), "
    description += f"{len(held)} held out ({characters(held):,} characters)"
    if not isinstance(held_out, str):
        share = characters(held) / (characters(train) + characters(held))
        if not held_out / FAR_FROM_ASKED < share < held_out * FAR_FROM_ASKED:
            description += f", {share:.1%} instead of {held_out:.1%} because document lengths vary widely"
    for kind, count in left_out.items():
        description += f"; skipped: {counted(count, kind)}"
    by_kind: dict[str, list[Document]] = {}
    for document in held if 2 <= len(set(kinds.values())) <= MOST_KINDS else ():
        if document in kinds:
            by_kind.setdefault(kinds[document], []).append(document)
    return Corpus(train, held, description, dict(sorted(by_kind.items())))


def _documents(
    source: str | None,
    name: str,
    left_out: Counter[str],
    check: Callable[[Document, str], None],
    kinds: dict[Document, str],
) -> list[Document]:
    """kinds: gets those that the source names."""
    documents = []
    for document, place, kind, unread in read_source(source, left_out):
        check(document, place)
        if is_blank(document):
            left_out["blank document"] += 1
        else:
            documents.append(document)
            left_out.update(f"`{name}` field" for name in unread)
            if kind is not None:
                kinds[document] = kind
    if not documents:
        found = ", ".join(counted(count, kind) for kind, count in left_out.items()) or "no document at all"
        raise bad_value(name, "text to train on", found, "give a file or a folder that holds text")
    return documents


def _split(documents: list[Document], held_out: float, seed: int, name: str) -> tuple[list[Document], list[Document]]:
    """By content, so that neither the order of the files nor a second copy of a document moves the border.

    There is room for a share of the documents and for the same share of the characters: one long document among many
    short ones must not send all of these to one side.
    """
    keys = [_key(document, seed) for document in documents]
    # copies of a document go to the same side, so what counts is how much one content weighs with all its copies
    copies, weight = Counter(keys), Counter[str]()
    for key, document in zip(keys, documents, strict=True):
        weight[key] += characters([document])
    if len(weight) == 1:
        head, tail = _cut_in_two(documents[0], held_out, name)
        return [head] * len(documents), [tail] * len(documents)
    places, room = math.ceil(held_out * len(documents)), held_out * weight.total()
    held_keys = set()
    for key in sorted(weight):
        if copies[key] <= places and weight[key] <= room:
            held_keys.add(key)
            places -= copies[key]
            room -= weight[key]
    if not held_keys:  # no content fits: the one that takes least away from either
        held_keys.add(min(weight, key=lambda key: (max(copies[key] / len(keys), weight[key] / weight.total()), key)))
    train = [document for key, document in zip(keys, documents, strict=True) if key not in held_keys]
    held = [document for key, document in zip(keys, documents, strict=True) if key in held_keys]
    return train, held


def _key(document: Document, seed: int) -> str:
    content = json.dumps([seed, asdict(document)], sort_keys=True, default=repr)  # bytes of an image
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _cut_in_two(document: Document, held_out: float, name: str) -> tuple[Text, Text]:
    text = document.text.strip() if isinstance(document, Text) else ""
    if len(text) < 2:
        expected = "two different documents, one to train on and one to hold out, or one text to cut in two"
        raise bad_value(name, expected, f"a single {type(document).__name__.lower()}", "add documents")
    near = min(max(int((1 - held_out) * len(text)), 1), len(text) - 1)
    cut = cut_before(text, max(near // 2, 1), near)
    return Text(text[:cut].rstrip()), Text(text[cut:].lstrip("\n"))
