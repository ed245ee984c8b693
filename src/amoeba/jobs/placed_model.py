"""A model read from its folder layer by layer, its experts placed as they are read.

E experts · H hidden · I intermediate · J = 2I or I

    model, placed = load_placed("models/qwen3", choice, "auto", trains=False, device=torch.device("cpu"))
    streamed, choice = attach_in(choice, "models/qwen3", ram="8GiB")

Memory never holds more than the model as it will be, and one layer's experts as the checkpoint has them. Experts that
cannot be read one by one, quantised ones and models on the hub are loaded by transformers, and placed afterwards.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import BadValue, bad_value
from amoeba.core.log import logger
from amoeba.core.placement import Load, Placement
from amoeba.integrations.block_linear import layers_in_blocks, put_blocks, stand_in
from amoeba.integrations.experts_module import described, hand_over, stored, take_back_shapes
from amoeba.integrations.gguf_files import is_gguf
from amoeba.integrations.model_folder import UnreadTensor, load_config, load_model, load_rest, load_without_weights
from amoeba.integrations.place_experts import Placed, place_experts
from amoeba.integrations.quantised_models import unquantised
from amoeba.jobs.cpu_dtype import DtypeChoice
from amoeba.placements import AUTO, RESIDENT
from amoeba.precision.placements import placement_of
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts
from amoeba.stream.attaching import Streamed, attach
from amoeba.stream.store import GgufStore, Store, aligned_buffer, is_store, open_store


def load_placed(
    name: str,
    choice: DtypeChoice,
    placement: str,
    load: Load | None = None,
    *,
    trains: bool,
    device: torch.device,
    trust_remote_code: bool = False,
    rest_in_blocks: bool = False,
) -> tuple[Any, Placed]:
    """The model on the CPU. placement, load, trains, device: as `place_experts` takes them.
    rest_in_blocks: linear layers and the embedding of a GGUF file, too, where that is faster (`block_linear`)."""
    place = functools.partial(
        place_experts, placement=placement, load=load, trains=trains, device=device, stored_dtype=choice.stored
    )
    store = _open(name, trust_remote_code, placement)
    if store is None:
        model = load_model(name, choice.dtype, trust_remote_code=trust_remote_code)
        logger.info("dtype %s: %s", model.dtype, choice.reason)
        return model, place(model)
    with store:
        config = unquantised(load_config(name, trust_remote_code=trust_remote_code))
        shape = load_without_weights(config, name, trust_remote_code=trust_remote_code)
        from_gguf = isinstance(store, GgufStore)
        rest: dict[str, Any] = _unread(store) if store.format is None or from_gguf else dict(store.rest_tensors())
        in_blocks = {}
        if isinstance(store, GgufStore) and rest_in_blocks and device.type == "cpu":
            in_blocks = layers_in_blocks(shape, store.kinds_of_rest())
        dtype = choice.dtype or shape.dtype
        rest |= {each: stand_in(store.rest[each].shape, dtype) for each in in_blocks}
        model = load_rest(shape, name, rest, choice.dtype)
        for each, kind in in_blocks.items():
            assert isinstance(store, GgufStore)
            put_blocks(model, each, kind, store.read_blocks(each))
        logger.info("dtype %s: %s", model.dtype, choice.reason)
        if store.format is not None and from_gguf and not placement.startswith("cpu-"):
            placed = _as_stored(model, store, placement)
        else:
            placed = place(model, read=functools.partial(_read_layer_for, store))
    model.set_experts_implementation("amoeba")
    return model, placed


def streams(name: str, options: Any) -> bool:
    """options: with ram and vram. A store has no experts that could be resident."""
    return options.ram is not None or options.vram is not None or is_store(name)


def attach_in(choice: DtypeChoice, name: str, **options: Any) -> tuple[Streamed, DtypeChoice]:
    """A model with streamed experts, as `attach` takes its options, and the dtype that it got: the checkpoint's where a
    faster but wider one has no room in the budget."""
    try:
        return attach(name, dtype=choice.dtype, **options), choice
    except BadValue:
        if choice.stored is None:
            raise
        streamed = attach(name, **options)
    logger.info("dtype %s: in float32 the model would not fit into the budget", choice.stored)
    return streamed, DtypeChoice(None, None, "the checkpoint's own")


def _open(name: str, trust_remote_code: bool, placement: str) -> Store | None:
    """None where transformers has to load the model."""
    packs = placement.startswith("cpu-")  # numbers, whatever they were stored as
    if is_gguf(name):
        return open_store(name, direct=False)
    if not Path(name).is_dir() or (is_store(name) and not packs):
        return None
    try:
        store = open_store(name, direct=False, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        logger.info("loaded by transformers: %s", error)
        return None
    if store.format is not None and not packs:
        store.close()
        return None
    return store


def _as_stored(model: Any, store: Store, placement: str) -> Placed:
    assert store.format is not None
    found = placement_of(store.format)
    if placement not in (AUTO, RESIDENT, found.name):
        remedy = "leave the placement out, or choose one that packs numbers, such as cpu-int8"
        raise bad_value("experts", f"{found.name}, as they are in the file", placement, remedy)
    for number, entry in enumerate(store.layers):
        module = model.get_submodule(entry.name)
        if entry.format is None:
            take_back_shapes(module, model.dtype)
            read_layer(store, number, module)
            continue
        stacks = {
            part.name: torch.empty((entry.experts, *part.shape), dtype=entry.dtype_of(part.name), device="cpu")
            for part in entry.parts
        }
        blob = aligned_buffer(entry.expert_bytes)
        for expert in range(entry.experts):
            store.read(number, expert, blob)
            for name, part in entry.tensors(blob).items():
                stacks[name][expert].copy_(part)
        experts = entry.weights_of({name: nn.Parameter(stack, False) for name, stack in stacks.items()})
        assert isinstance(experts, QuantisedExperts)
        hand_over(module, experts.to(model.dtype), placement_of(entry.format))
    return Placed(found.name, "as stored in the file")


def _unread(store: Store) -> dict[str, UnreadTensor]:
    def read(name: str) -> Tensor:
        found = store.read_rest(name)  # which may have blocks around it
        return found if found.untyped_storage().nbytes() == found.nbytes else found.clone()

    return {name: UnreadTensor(functools.partial(read, name), entry.dtype) for name, entry in store.rest.items()}


def _read_layer_for(store: Store, name: str, module: Any, chosen: Placement | None) -> None:
    """In the model's dtype; or in bf16 where the checkpoint has that and the placement does not compute in the model's
    anyway, since a layer then takes half the memory while it is placed."""
    layer = next(number for number, entry in enumerate(store.layers) if entry.name == name)
    dtype: torch.dtype = module.down_proj.dtype
    if chosen is not None and dtype not in chosen.tolerances and store.layers[layer].dtype == torch.bfloat16:
        dtype = torch.bfloat16
    take_back_shapes(module, dtype)
    read_layer(store, layer, module)


@torch.no_grad()
def read_layer(store: Store, layer: int, module: Any) -> None:
    entry, found = store.layers[layer], described(module)
    parts = [_gate_first(part, found.interleaved, place) for place, part in enumerate(stored(module, found))]
    if entry.format is None:
        store.read_stacked(layer, range(entry.experts), parts)
        return
    for expert in range(entry.experts):
        for part, read in zip(parts, read_expert(store, layer, expert), strict=True):
            if part is not None and read is not None:
                part[expert].copy_(read.reshape(part[expert].shape))


def read_expert(store: Store, layer: int, expert: int) -> tuple[Tensor | None, ...]:
    """gate_up (rows of gate first), down and their biases; in fp32, if they are codes."""
    entry, blob = store.layers[layer], aligned_buffer(store.expert_bytes(layer))
    store.read(layer, expert, blob)
    weights = entry.weights(blob[None])
    if isinstance(weights, QuantisedExperts):
        weights = dequantise_experts(weights)
    parts = (weights.gate_up_EJH, weights.down_EHI, weights.gate_up_bias_EJ, weights.down_bias_EH)
    found: list[Tensor | None] = []
    for place, part in enumerate(parts):
        ordered = _gate_first(part, entry.activation.interleaved, place)
        found.append(None if part is None or ordered is None else ordered.reshape(part.shape)[0])
    return tuple(found)


def _gate_first(part: Tensor | None, interleaved: bool, place: int) -> Tensor | None:
    """A view (E, 2, I, ...) of interleaved rows of gate and up: elsewhere all of gate comes first."""
    if part is None or not interleaved or place % 2:
        return part
    return part.unflatten(1, (-1, 2)).transpose(1, 2)
