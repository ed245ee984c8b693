"""Experts on disk, each readable by itself: a packed store, or the folder that a model was downloaded into.

    with open_store("models/qwen3.store") as store:
        blob = aligned_buffer(store.expert_bytes(0))
        store.read(0, 17, blob)                          # layer 0, expert 17
        gate_up_JH, down_HI, _, _ = store.views(0, blob)

`amoeba pack` writes a packed store: one read per expert, with checksums. A folder is read as it is, in several reads.
"""

from __future__ import annotations

from pathlib import Path

from amoeba.integrations.gguf_files import is_gguf
from amoeba.stream.store.buffers import aligned_buffer
from amoeba.stream.store.error import StoreError
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.gguf import GgufStore
from amoeba.stream.store.index import INDEX, is_store
from amoeba.stream.store.layers import ExpertViews, LayerEntry, Part
from amoeba.stream.store.packed import PackedStore
from amoeba.stream.store.reading import THREADS
from amoeba.stream.store.store import Store, Verify

__all__ = [
    "INDEX",
    "ExpertViews",
    "FolderStore",
    "GgufStore",
    "LayerEntry",
    "PackedStore",
    "Part",
    "Store",
    "StoreError",
    "Verify",
    "aligned_buffer",
    "is_store",
    "open_store",
]


def open_store(
    path: str | Path,
    *,
    verify: Verify = "first",
    threads: int = THREADS,
    direct: bool = True,
    trust_remote_code: bool = False,
) -> PackedStore | FolderStore:
    """A packed store, a Hugging Face folder or a GGUF file, whichever is there.

    verify:  when a packed expert's checksum is compared: at its "first" read, "always" or "never". A folder has none.
    threads: reads at a time.
    direct:  past the page cache (O_DIRECT), where the file system allows that.
    trust_remote_code: run Python code of a folder's own to learn how its model is built; a packed store needs none.
    """
    if is_gguf(path):
        return GgufStore(path, threads=threads, direct=direct)
    if is_store(path):
        return PackedStore(path, verify=verify, threads=threads, direct=direct)
    return FolderStore(path, threads=threads, direct=direct, trust_remote_code=trust_remote_code)
