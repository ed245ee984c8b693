"""Whether a store holds the experts of a model.

    check_match(model, store)        # ValueError names the layer, the expert, what differs and what to do

Sizes, activation, biases and number format are always compared. Weights are compared where the model has them: each
expert is laid out as the store keeps it and checked against the store, by checksum (packed, exact, no read) or by
samples (a folder, a few KB per expert). Experts on the meta device have no weights to compare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import described, experts_modules, layout_of, placed_in, resident
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.experts import ExpertsInSlots
from amoeba.stream.store import FolderStore, PackedStore, aligned_buffer
from amoeba.stream.store.layers import LayerEntry, StoredExperts

_OWN = "name the model's own store"
_CHANGED = "save the changed model with save_pretrained and pack that (amoeba pack), or load the model that was packed"


def check_match(model: nn.Module, store: PackedStore | FolderStore, dtype: torch.dtype | None = None) -> None:
    """dtype: of the model; None: that of the store's experts."""
    modules = experts_modules(model)
    names = [entry.name for entry in store.layers]
    if names != list(modules):
        got = f"{names[0]}, ... ({len(names)}) in {store.folder}"
        raise bad_value("store", f"the experts of this model ({len(modules)} layers)", got, _OWN)
    in_memory: dict[int, StoredExperts] = {}
    for number, entry in enumerate(store.layers):
        module = modules[entry.name]
        _check_sizes(entry, module)
        if model.dtype != (dtype or entry.dtype):
            remedy = f"load the model with dtype={entry.dtype}"
            raise bad_value("dtype", f"{entry.dtype}, as the store has its experts", model.dtype, remedy)
        experts = _experts_of(entry, module, store)
        if experts is not None:
            in_memory[number] = experts
    _check_weights(in_memory, store)


def _check_sizes(entry: LayerEntry, module: Any) -> None:
    layout, found = layout_of(module), described(module)
    sizes = entry.experts, entry.hidden, entry.intermediate
    if layout is None or (layout.num_experts, layout.hidden, layout.intermediate) != sizes:
        raise bad_value("store", f"{entry.name} with {layout}", sizes, _OWN)
    if found.fused is None:
        expected = "an activation that aMoEba computes itself"
        raise bad_value(
            "model", expected, f"that of {type(module).__name__} ({entry.name})", "keep the experts resident"
        )
    _check_activation(entry, found.fused)
    if found.has_bias != entry.has_bias:
        with_or_without = ("without biases", "with biases")
        expected = f"experts {with_or_without[found.has_bias]} ({entry.name})"
        raise bad_value("store", expected, with_or_without[entry.has_bias], _OWN)


def _check_activation(entry: LayerEntry, activation: Activation) -> None:
    if entry.format is None:  # a store puts plain rows of gate first, whatever the order in the model
        activation = replace(activation, interleaved=False)
    if activation == entry.activation:
        return
    ours, theirs = asdict(activation), asdict(entry.activation)
    differing = [name for name in ours if ours[name] != theirs[name]]
    expected, got = (", ".join(f"{name}={each[name]}" for name in differing) for each in (ours, theirs))
    remedy = "pack the model again as it is now, or correct config.json"
    raise bad_value("store", f"the activation of the model ({entry.name}): {expected}", got, remedy)


def _experts_of(entry: LayerEntry, module: Any, store: PackedStore | FolderStore) -> StoredExperts | None:
    """Those in memory; None where there are none to compare."""
    placed = placed_in(module)
    if isinstance(placed, ExpertsInSlots):
        before = getattr(placed.memory.store, "folder", None)  # experts that were streamed from memory have none
        if before is None or before.resolve() != store.folder.resolve():
            got = f"experts streamed from {before or 'memory'} ({entry.name})"
            raise bad_value("model", f"experts in memory, or streamed from {store.folder}", got, "load the model again")
        return None
    if placed is None and module.down_proj.is_meta:
        return None
    experts = resident(module) if placed is None else placed
    if not isinstance(experts, StoredExperts):
        got = f"{experts.placement} ones ({entry.name})"
        raise bad_value("model", "experts as the checkpoint has them", got, "load the model without a placement")
    kept_as = (
        experts.format.name if isinstance(experts, QuantisedExperts) else str(experts.dtype).removeprefix("torch.")
    )
    if kept_as != entry.numbers:
        got = f"{entry.numbers} in {store.folder}"
        raise bad_value("store", f"experts in {kept_as}, as the model has them ({entry.name})", got, _OWN)
    if isinstance(experts, QuantisedExperts):
        _check_activation(entry, experts.activation)
        if experts.parts != entry.row_parts:
            got = f"blocks of {entry.row_parts}"
            raise bad_value("store", f"blocks of {experts.parts} parts of gate_up ({entry.name})", got, _OWN)
    return experts


def _check_weights(in_memory: dict[int, StoredExperts], store: PackedStore | FolderStore) -> None:
    stacks = {layer: store.layers[layer].parts_of(experts) for layer, experts in in_memory.items()}
    mine = threading.local()  # a blob for each thread

    def is_same(place: tuple[int, int]) -> bool:
        layer, expert = place
        entry = store.layers[layer]
        if getattr(mine, "size", None) != entry.expert_bytes:
            mine.size, mine.blob = entry.expert_bytes, aligned_buffer(entry.expert_bytes)
        for begin, end in entry.gaps():
            mine.blob[begin:end] = 0
        in_turns = entry.format is None and in_memory[layer].activation.interleaved
        for name, view in entry.tensors(mine.blob).items():
            part = stacks[layer][name][expert]
            view.copy_(torch.cat((part[::2], part[1::2])) if in_turns and name.startswith("gate_up") else part)
        return store.holds(layer, expert, mine.blob)

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        places = list(_places(in_memory, store))
        for (layer, expert), same in zip(places, pool.map(is_same, places), strict=True):
            if not same:
                pool.shutdown(cancel_futures=True)
                expected = f"the experts that the model has now ({store.layers[layer].name}, expert {expert})"
                raise bad_value("store", expected, f"other weights in {store.folder}", _CHANGED)


def _places(in_memory: dict[int, StoredExperts], store: PackedStore | FolderStore) -> Iterator[tuple[int, int]]:
    for layer in in_memory:
        yield from ((layer, expert) for expert in range(store.layers[layer].experts))
