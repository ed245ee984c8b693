"""A Hugging Face model whose experts are streamed through a budget of memory.

    streamed = attach("models/qwen3", ram="8GiB")       # a folder, or a store; no expert is ever loaded as a parameter
    streamed = attach("models/qwen3", vram="8GiB", ram="32GiB")         # the same on a GPU, over pinned memory
    streamed = attach(model, store="qwen3.store", ram="8GiB")
    streamed.model.generate(...)
    streamed.report(); streamed.close()

The budget is for all of the model: what is not an expert stays in memory, the rest of the budget is slots, shared among
the layers. On a GPU that budget is vram, and ram is for experts below it. What a pass needs in addition, activations
and the cache of keys and values, comes on top.

First it is checked that the store holds the experts of the model:

    check_match(model, store)        # ValueError names the layer, the expert, what differs and what to do

Sizes, activation, biases and number format are always compared. Weights are compared where the model has them: each
expert is laid out as the store keeps it and checked against the store, by checksum (packed, exact, no read) or by
samples (a folder, a few KB per expert). Experts on the meta device have no weights to compare.

On a GPU the two budgets become slots there, next to everything but the experts, and in pinned memory.
"""

from __future__ import annotations

import bisect
import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.cpu.pointers import CPU
from amoeba.integrations.experts_module import (
    described,
    experts_modules,
    hand_over,
    layout_of,
    placed_in,
    resident,
)
from amoeba.integrations.model_folder import load_config, load_rest, load_without_weights
from amoeba.integrations.quantised_models import unquantised
from amoeba.precision.quantised_experts import QuantisedExperts
from amoeba.stream.cache.trace import LayerShape, Recorder
from amoeba.stream.cpu.memory import READS, ExpertMemory
from amoeba.stream.experts import ExpertsInSlots
from amoeba.stream.gpu.device import CudaDevice, Device
from amoeba.stream.gpu.host_compute import check_miss
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.gpu.reads import PASSING
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.placement import MOST_IDS, STREAMED, STREAMED_TO_GPU
from amoeba.stream.report import StreamReport
from amoeba.stream.sizes import parse_size, show_size
from amoeba.stream.store import FolderStore, PackedStore, Store, aligned_buffer, is_store, open_store
from amoeba.stream.store.layers import LayerEntry, StoredExperts
from amoeba.stream.timeline import Timeline, time_calls
from amoeba.system.files import model_folder
from amoeba.system.machine import available_memory, total_memory


@dataclass(eq=False)
class Streamed:
    """A model with streamed experts. close() ends reading; the model computes no more after it."""

    model: Any
    memory: ExpertMemory | DeviceMemory
    ram_bytes: int
    rest_bytes: int
    vram_bytes: int | None = None
    timeline: Timeline | None = None

    def record(self, path: str | Path) -> None:
        """Writes the routing of every pass from now on, for `python -m benchmarks cache`; whole after close()."""
        self.memory.record(Recorder(path, _shapes(self.memory.store)))

    def trace(self, path: str | Path) -> None:
        """A timeline of what the host does from now on, for ui.perfetto.dev; close() writes it."""
        self.timeline = Timeline(path)
        time_calls(self.memory, self.timeline)

    def report(self) -> StreamReport:
        memory, counters = self.memory, self.memory.cache.counters
        recorder = memory.recorder
        return StreamReport(
            store="packed" if is_store(memory.store.folder) else "folder",
            numbers=memory.store.layers[0].numbers,
            ram_bytes=self.ram_bytes,
            rest_bytes=self.rest_bytes,
            slot_bytes=memory.slot_bytes,
            expert_bytes=sum(entry.experts * entry.expert_bytes for entry in memory.store.layers),
            slots=list(memory.slots),
            experts=[entry.experts for entry in memory.store.layers],
            tokens=counters.tokens,
            requested=counters.requested,
            hits=counters.hits,
            hit_rate=counters.top_hit_rate,
            read_bytes=counters.disk_bytes,
            read_bytes_per_token=counters.per_token(counters.disk_bytes),
            waited_seconds=memory.waited_seconds,
            waited_seconds_per_token=memory.waited_seconds / max(1, counters.tokens),
            trace=None if recorder is None else str(recorder.path),
            vram_bytes=self.vram_bytes,
            host_slots=list(memory.host_slots),
            host_hits=counters.from_host,
            host_hit_rate=counters.host_hit_rate,
            host_bytes_per_token=counters.per_token(counters.host_bytes),
            timeline=None if self.timeline is None else str(self.timeline.path),
            miss=memory.miss,
            computed=counters.computed,
        )

    def close(self) -> None:
        timeline, self.timeline = self.timeline, None
        try:
            self.memory.close()
        finally:
            if timeline is not None:
                timeline.close()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    model: nn.Module | str | Path,
    *,
    ram: str | int = "auto",
    vram: str | int | None = None,
    store: str | Path | None = None,
    miss: str = "move",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    reserved: Callable[[Store], int] = lambda store: 0,
) -> Streamed:
    """Runs a model with experts streamed from a store.

    model:  a folder written by save_pretrained or a store written by `amoeba pack`, from which everything but the
            experts is loaded; or a transformers model, whose expert parameters are freed.
    ram:    bytes for the model without its experts and for slots: 8GiB, a number, or "auto" for most of what is free.
            With vram: bytes of pinned memory for experts.
    vram:   the same on a GPU, where the model then runs; None: on the CPU.
    store:  where the experts of a loaded model are; by default, the folder it was loaded from. It must contain the
            experts that the model has now; others, such as those from before a merge, are refused.
    miss:   what to do when a captured step on a GPU misses an expert that is in pinned memory: "move" copies it to the
            GPU (bitwise identical to resident experts), "cpu" computes it on the CPU, "auto" does whichever is faster.
    dtype:  of everything but the experts, which keep the checkpoint's numbers; None: the checkpoint's. On a CPU without
            bf16 instructions, float32 is many times faster; a GPU computes in the checkpoint's dtype.
    reserved: bytes needed where the model runs that no budget includes, for example for LoRA factors: "auto"
            leaves them free, and on a GPU a budget that leaves too little for them is refused.
    """
    from amoeba.integrations.transformers import register

    check_miss(miss)
    if miss != "move" and vram is None:
        raise bad_value(
            "miss", "move, or vram as well", repr(miss), "without a GPU experts are computed on the CPU anyway"
        )
    home_of(vram)
    if isinstance(model, nn.Module):
        loaded, source = model, model_folder(str(store or getattr(model, "name_or_path", "")))
    else:
        loaded, source = None, model_folder(model)
    opened = open_store(source, trust_remote_code=trust_remote_code)
    closing: Store | ExpertMemory | DeviceMemory = opened
    try:
        _check_dtype(opened, dtype, vram is not None or loaded is not None)
        stored = opened.layers[0].dtype
        rest = opened.rest_bytes * (dtype or stored).itemsize // stored.itemsize
        make, budget, on_gpu = _ways(opened, rest, ram, vram, miss, reserved(opened))
        if loaded is None:
            config = unquantised(load_config(str(source), trust_remote_code=trust_remote_code))
            shape = load_without_weights(config, str(source), trust_remote_code=trust_remote_code)
            of_rest = None if opened.format is None else opened.layers[0].dtype
            loaded = load_rest(shape, str(source), dict(opened.rest_tensors()), dtype or of_rest)
        check_match(loaded, opened, dtype)
        closing = memory = make()
        register()
        loaded.set_experts_implementation("amoeba")  # type: ignore[operator]
        placement = STREAMED if on_gpu is None else STREAMED_TO_GPU
        for entry, experts in zip(opened.layers, memory.layers, strict=True):
            hand_over(loaded.get_submodule(entry.name), experts, placement)
        loaded.to(memory.layers[0].device)
    except BaseException:
        closing.close()
        raise
    return Streamed(loaded, memory, budget, rest, on_gpu)


def home_of(vram: str | int | None) -> torch.device:
    """Where the model runs with this budget; ValueError where there is no GPU for it."""
    return CPU if vram is None else gpu().device


def gpu() -> Device:
    if not torch.cuda.is_available():
        raise bad_value("vram", "a machine with a GPU", "none here", "leave it out: ram alone streams on the CPU")
    return CudaDevice(torch.device("cuda"))


def _ways(
    store: Store, rest: int, ram: str | int, vram: str | int | None, miss: str, reserved: int
) -> tuple[Callable[[], ExpertMemory | DeviceMemory], int, int | None]:
    """What makes the memory, and its budgets: on the host, and on the GPU."""
    if vram is None:
        budget, slots = _share(store, rest, ram, reserved)
        return partial(ExpertMemory, store, slots), budget, None
    device = gpu()
    found = share(store, rest, vram, ram, device.device, reserved)

    def make() -> DeviceMemory:
        try:
            return DeviceMemory(store, device, found.slots, found.host_slots, MOST_IDS, miss)
        except BaseException:
            device.close()
            raise

    return make, found.ram_bytes, found.vram_bytes


def _shapes(store: Store) -> list[LayerShape]:
    return [LayerShape(entry.experts, 1, entry.expert_bytes) for entry in store.layers]


def _share(store: Store, rest: int, ram: str | int, reserved: int) -> tuple[int, list[int]]:
    """The budget in bytes, and the slots of each layer."""
    scratch = store.scratch_bytes(READS)
    everything = rest + scratch + sum(entry.experts * entry.expert_bytes for entry in store.layers)
    if ram == "auto":
        free = [each for each in (available_memory(CPU), total_memory()) if each is not None]  # a container's is less
        budget = min([everything, *(int(AUTO_SHARE * max(0, each - reserved)) for each in free)])
    else:
        budget = parse_size("ram", ram) if isinstance(ram, str) else ram
    return budget, slots_in_memory(store.layers, rest, scratch, budget)


def slots_in_memory(entries: Sequence[LayerEntry], rest: int, scratch: int, budget: int) -> list[int]:
    """Of each layer, within a budget that holds `rest` and `scratch` too; ValueError where there is no room for one
    expert each."""
    shapes, once = [LayerShape(entry.experts, 1, entry.expert_bytes) for entry in entries], [1] * len(entries)
    least = rest + scratch + least_budget(shapes, once)
    if budget < least:
        needed = f"{show_size(rest)} for everything but the experts, {show_size(least - rest)} for one expert per layer"
        expected = f"at least {show_size(least)} ({needed})"
        raise bad_value("ram", expected, show_size(budget), f"raise it to {show_size(least)} or more")
    return share_budget(budget - rest - scratch, shapes, least=once, name="ram")


def _check_dtype(store: Store, dtype: torch.dtype | None, only_stored: bool) -> None:
    """only_stored: for what runs on a GPU, and for a model that is loaded already."""
    stored = store.layers[0].dtype
    if dtype is None or dtype == stored or (dtype == torch.float32 and not only_stored):
        return
    of = "has its experts" if store.format is None else "says in config.json"
    wider = "" if only_stored or stored == torch.float32 else " (or torch.float32, for all but the experts)"
    raise bad_value("dtype", f"{stored}, as the checkpoint {of}{wider}", dtype, "leave it out")


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
    if not entry.activation.interleaved:  # a store may put all rows of gate first, whatever the order in the model
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


# Of the memory that is free, `auto` takes this part: the rest is for activations, keys and values, and other programs.
AUTO_SHARE = 0.7


class Budgets(NamedTuple):
    vram_bytes: int
    ram_bytes: int
    slots: list[int]
    host_slots: list[int]


def share(store: Store, rest: int, vram: str | int, ram: str | int, device: torch.device, reserved: int = 0) -> Budgets:
    """rest: bytes of everything but the experts, also on the GPU. reserved: bytes needed there that no budget
    includes."""
    entries, scratch = store.layers, store.scratch_bytes(READS)
    all_of_it = rest + _bytes(_on_gpu(entries))
    vram_bytes = _budget("vram", vram, all_of_it, [available_memory(device)], reserved)
    slots = slots_on_gpu(entries, rest, vram_bytes)
    _check_free("vram", rest + least_budget(_on_gpu(entries), slots), available_memory(device), reserved)

    on_host, passing = _on_host(entries, slots), passing_bytes(entries, slots, scratch)
    # as many as there are experts at most: what is on the GPU need then not be written back
    ram_bytes = _budget("ram", ram, passing + _bytes(on_host), [available_memory(CPU), total_memory()])
    host_slots = slots_on_host(entries, slots, scratch, ram_bytes)
    _check_free("ram", passing + least_budget(on_host, host_slots), available_memory(CPU))
    return Budgets(vram_bytes, ram_bytes, slots, host_slots)


def slots_on_gpu(entries: Sequence[LayerEntry], rest: int, vram_bytes: int) -> list[int]:
    """Of each layer, within a budget that holds `rest` too; ValueError where there is no room for one expert each."""
    on_gpu, once = _on_gpu(entries), [1] * len(entries)
    least = rest + least_budget(on_gpu, once)
    if vram_bytes < least:
        needed = f"{show_size(rest)} for everything but the experts, {show_size(least - rest)} for one expert per layer"
        expected = f"at least {show_size(least)} ({needed})"
        raise bad_value("vram", expected, show_size(vram_bytes), f"raise it to {show_size(least)} or more")
    return share_budget(vram_bytes - rest, on_gpu, least=once, name="vram")


def slots_on_host(entries: Sequence[LayerEntry], slots: Sequence[int], scratch: int, ram_bytes: int) -> list[int]:
    """Of each layer in pinned memory, below these on a GPU. scratch: of the store, for reads."""
    on_host, passing = _on_host(entries, slots), passing_bytes(entries, slots, scratch)
    if ram_bytes < passing:
        expected = f"at least {show_size(passing)}, through which experts are read"
        raise bad_value("ram", expected, show_size(ram_bytes), "raise it, or leave it out")
    return share_budget(ram_bytes - passing, on_host, least=[0] * len(on_host), name="ram")


def passing_bytes(entries: Sequence[LayerEntry], slots: Sequence[int], scratch: int) -> int:
    """Host memory through which experts are read."""
    return scratch + PASSING * max(shape.expert_bytes for shape in _on_host(entries, slots))


def _on_gpu(entries: Sequence[LayerEntry]) -> list[LayerShape]:
    return [LayerShape(entry.experts, 1, LayerTiers.slot_bytes(entry)) for entry in entries]


def _on_host(entries: Sequence[LayerEntry], slots: Sequence[int]) -> list[LayerShape]:
    """Nothing below a layer that is on the GPU as a whole."""
    return [
        LayerShape(entry.experts if count < entry.experts else 0, 1, entry.expert_bytes)
        for entry, count in zip(entries, slots, strict=True)
    ]


def _bytes(shapes: list[LayerShape]) -> int:
    return sum(shape.experts * shape.expert_bytes for shape in shapes)


def _check_free(name: str, needed: int, free: int | None, reserved: int = 0) -> None:
    """Before it is allocated: pinned memory cannot be swapped out."""
    if free is not None and needed + reserved > free:
        got = f"{show_size(needed)} to allocate"
        if reserved:
            got += f", with {show_size(reserved)} needed for training"
        raise bad_value(name, f"no more than the {show_size(free)} that are free", got, "lower it, or free memory")


def _budget(name: str, asked: str | int, all_of_it: int, free: list[int | None], reserved: int = 0) -> int:
    if asked != "auto":
        return parse_size(name, asked) if isinstance(asked, str) else asked
    return min([all_of_it, *(int(AUTO_SHARE * max(0, each - reserved)) for each in free if each is not None)])


def least_budget(layers: Sequence[LayerShape], least: Sequence[int]) -> int:
    """Bytes below which `share_budget` refuses."""
    return sum(count * layer.expert_bytes for count, layer in zip(least, layers, strict=True))


def share_budget(budget: int, layers: Sequence[LayerShape], *, least: Sequence[int], name: str = "budget") -> list[int]:
    """Slots of each layer, no more than it has experts. Slots are given one by one to the layer that has the fewest
    bytes, until none fits.

    least: slots that a layer must have.
    name:  of the budget, for the error.
    """
    wanted = least_budget(layers, least)
    if budget < wanted:
        remedy = f"raise it to {show_size(wanted)} or more"
        raise bad_value(name, f"at least {show_size(wanted)} for {len(layers)} layers", show_size(budget), remedy)
    for index, layer in enumerate(layers):
        if layer.expert_bytes < 1:
            raise bad_value(f"layer {index}", "a known size of an expert", layer.expert_bytes, "give expert_bytes")

    def at(level: int, layer: LayerShape, start: int) -> int:
        """Its slots after all that are given while it has fewer bytes than this."""
        return max(start, min(layer.experts, -(-level // layer.expert_bytes)))

    # nearly all at once: what fits while every layer is below one level comes ahead of all else
    kinds = Counter(zip(layers, least, strict=True))
    level = bisect.bisect(
        range(budget),
        budget,
        key=lambda each: sum(n * of[0].expert_bytes * at(each + 1, *of) for of, n in kinds.items()),
    )
    slots = [at(level, *each) for each in zip(layers, least, strict=True)]
    left = budget - least_budget(layers, slots)
    queue = [(count * layers[i].expert_bytes, i) for i, count in enumerate(slots)]
    heapq.heapify(queue)
    while queue:
        _, index = heapq.heappop(queue)
        size = layers[index].expert_bytes
        if slots[index] < layers[index].experts and size <= left:
            slots[index] += 1
            left -= size
            heapq.heappush(queue, (slots[index] * size, index))
    return slots
