"""Builds, loads and saves a Hugging Face model with experts distributed over ranks; each rank reads its own experts.

E experts · H hidden · I intermediate · J = 2I or I

    shard_model(model, ranks)                                    # of a model that has all experts here
    model = load_share("models/qwen3", None, ranks)              # reads this rank's experts, and what all have
    save_share(model, folder, mesh, None, {}); finish_folder(folder)     # each rank, then the first

The folder has Hugging Face's names and an index. Where a family keeps all experts of a layer in one tensor on disk, the
first rank gathers and writes them.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.weights import ExpertWeights
from amoeba.integrations.experts_module import described, experts_modules, hand_over, layout_of, place
from amoeba.integrations.model_folder import MODEL_FOLDER, load_config, load_model, load_rest, load_without_weights
from amoeba.integrations.own_tensors import own_tensors, sharded_modules
from amoeba.parallel.expert_owners import Owners
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.ranks import Ranks
from amoeba.parallel.sharded import ShardedExperts, Tokens, gather_share, own_parameter, shard_experts
from amoeba.parallel.sharded_backend import RANKS
from amoeba.parallel.shards import copy_here, is_shard, local_part, whole
from amoeba.stream.store import Store, is_store, open_store
from amoeba.stream.store.tensor_files import ONE_FILE, SHARDS, save_tensors, tensors_of
from amoeba.system.files import write_whole

_SHARD = "model-{number:05d}-of-{count:05d}.safetensors"
_ONE_EXPERT = re.compile(r"(.*\bexperts\.)(\d+)(\..+)")
_NO_LIMIT = 1 << 60  # bytes of a file
_APART = "of-all-ranks"


def shard_model(model: Any, ranks: Ranks, tokens: Tokens = "own") -> None:
    """Leaves of each layer's experts this rank's share."""
    from amoeba.integrations.transformers import take_over

    take_over(model)
    chosen = replace(RANKS, make=functools.partial(shard_experts, ranks=ranks, tokens=tokens))
    for module in experts_modules(model).values():
        place(module, chosen)


def load_share(
    name: str,
    dtype: torch.dtype | None,
    ranks: Ranks,
    *,
    tokens: Tokens = "own",
    trains: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """dtype: None for the checkpoint's own. trains: whether the experts will."""
    try:
        store = open_store(name, direct=False, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:  # a name on the hub, or a form that is not read expert by expert
        if is_store(name):
            raise
        logger.warning("every rank reads all experts: %s", error)
        model = load_model(name, dtype, trust_remote_code=trust_remote_code)
        shard_model(model.requires_grad_(trains), ranks, tokens)
        return model
    with store:
        store.check_plain("leave --experts ranks out: quantised experts cannot be distributed yet")
        config = load_config(name, trust_remote_code=trust_remote_code)
        shape = load_without_weights(config, name, trust_remote_code=trust_remote_code)
        model = load_rest(shape, name, dict(store.rest_tensors()), dtype)
        for layer, entry in enumerate(store.layers):
            module = model.get_submodule(entry.name)
            owners = Owners.even(entry.experts, ranks.count)
            local = _read_experts(store, layer, module, owners.experts_of(ranks.rank), dtype or entry.dtype)
            hand_over(module, ShardedExperts(local, owners, ranks, tokens), RANKS)
            for tensor in local.tensors():
                if tensor is not None:
                    tensor.requires_grad_(trains)
    model.set_experts_implementation("amoeba")
    return model


def _read_experts(store: Store, layer: int, module: Any, mine: list[int], dtype: torch.dtype) -> ExpertWeights:
    entry, layout, activation = store.layers[layer], layout_of(module), described(module).fused
    assert layout is not None
    if activation is None:
        expected = "an activation that aMoEba computes itself"
        raise bad_value("experts", expected, f"that of {type(module).__name__}", "keep the experts resident")
    shapes = [part.shape for part in entry.parts] + [None] * (4 - len(entry.parts))
    parts = [None if shape is None else torch.empty(len(mine), *shape, dtype=dtype, device="cpu") for shape in shapes]
    store.read_stacked(layer, mine, parts)
    if layout.interleaved:  # a store has all rows of gate first
        parts[0], parts[2] = (_in_turns(part) for part in (parts[0], parts[2]))
    gate_up, down, gate_up_bias, down_bias = (None if part is None else own_parameter(part) for part in parts)
    assert gate_up is not None
    assert down is not None
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias, activation)


def _in_turns(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def count_parameters(model: nn.Module, ranks: Ranks | None, *, trained: bool = False) -> int:
    """Of the whole model; trained: those that require a gradient."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad or not trained}
    own = [name for name in own_tensors(model) if name in parameters]
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    mine = torch.tensor(sum(sizes[name] for name in own), dtype=torch.int64, device="cpu")
    others = sum(size for name, size in sizes.items() if name not in own)
    return others + int(mine if ranks is None else ranks.add_up(mine, "numbers of parameters"))


class ShardedModel:
    """What a run over ranks keeps, see `jobs.train.manifest.Artifact`."""

    name = MODEL_FOLDER

    def __init__(self, mesh: RankMesh) -> None:
        self._mesh = mesh
        self._experts: dict[str, Tensor] | None = None
        self._dense: dict[str, Tensor] = {}

    def gather(self, model: Any) -> None:
        own, parameters = own_tensors(model), dict(model.named_parameters())
        shares = {each.name: each.in_other_layout(local_part(parameters[here])) for here, each in own.items()}
        two = {name: torch.empty((2, *t.shape[1:]), dtype=t.dtype, device="meta") for name, t in shares.items()}
        one_by_one = all(_ONE_EXPERT.fullmatch(name) for name in _on_disk(model, two))
        self._experts = None if one_by_one else gather_experts(model)
        self._dense = _gather_dense(model, self._mesh.every.rank == 0)

    def save(self, model: Any, folder: Path) -> None:
        experts, dense, self._experts, self._dense = self._experts, self._dense, None, {}
        save_share(model, folder, self._mesh, experts, dense)

    def finish(self, folder: Path) -> None:
        finish_folder(folder)

    def load(self, model: Any, folder: Path) -> None:
        stored = load_share(str(folder), model.dtype, self._mesh.experts)
        theirs = {**dict(stored.named_parameters()), **dict(stored.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                copy_here(tensor, theirs[name])


def save_share(
    model: Any, folder: Path, mesh: RankMesh, experts: dict[str, Tensor] | None, dense: dict[str, Tensor]
) -> None:
    """experts: those of all ranks, on the first, where the family keeps them in one tensor; else None.
    dense: on the first rank what FSDP2 has sharded of all else, whole."""
    layers, ranks = sharded_modules(model), mesh.every
    owners = [placed.owners for _, placed in layers.values()]
    owning = [rank for rank in range(ranks.count) if any(mesh.experts_of(each, rank) for each in owners)]
    owning = owning if experts is None else []
    count = 1 + len(owning)
    if ranks.rank == 0:
        shared = _shared_tensors(model) | dense | (experts or {})
        apart = folder / _APART  # save_pretrained removes what it takes for shards of an earlier model
        model.save_pretrained(apart, state_dict=shared, max_shard_size=_NO_LIMIT)
        for path in apart.iterdir():
            renamed = _SHARD.format(number=1, count=count) if owning and path.name == ONE_FILE else path.name
            os.replace(path, folder / renamed)
        apart.rmdir()
    if ranks.rank not in owning:
        return
    tensors: dict[str, Tensor] = {}
    own, parameters = own_tensors(model), dict(model.named_parameters())
    for name in layers:
        mine = {here: each for here, each in own.items() if here.startswith(f"{name}.placed_")}
        stacked = {each.name: each.in_other_layout(local_part(parameters[here])) for here, each in mine.items()}
        ids = mesh.experts_of(layers[name][1].owners, ranks.rank)
        for key, tensor in _on_disk(model, stacked).items() if ids else ():
            match = _ONE_EXPERT.fullmatch(key)
            assert match is not None
            tensors[f"{match[1]}{ids[int(match[2])]}{match[3]}"] = tensor
    number = 2 + owning.index(ranks.rank)
    save_tensors(folder / _SHARD.format(number=number, count=count), tensors)


def finish_folder(folder: Path) -> None:
    """The index over the files that all ranks have written; none where there is one file."""
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    if not files:
        return
    expected = [_SHARD.format(number=number + 1, count=len(files)) for number in range(len(files))]
    if [path.name for path in files] != expected:
        got = ", ".join(path.name for path in files)
        remedy = "give all ranks the same folder, on one file system"
        raise bad_value(str(folder), "a part from every rank", got, remedy)
    entries = {name: (path.name, entry.size) for path in files for name, entry in tensors_of(path).items()}
    index = {
        "metadata": {"total_size": sum(size for _, size in entries.values())},
        "weight_map": {name: file for name, (file, _) in sorted(entries.items())},
    }
    write_whole(folder / SHARDS, json.dumps(index, indent=2) + "\n")


def gather_experts(model: Any) -> dict[str, Tensor]:
    """On the first rank of each group that has all experts those of the group, by the names of a process that has them;
    elsewhere nothing."""
    parameters = dict(model.named_parameters())
    layers = {name: placed for name, (_, placed) in sharded_modules(model).items()}
    found: dict[str, Tensor] = {}
    for here, own in own_tensors(model).items():
        placed = layers[here.rpartition(".")[0]]
        share = own.in_other_layout(whole(parameters[here])).cpu()
        experts = gather_share(share, placed.owners, placed.ranks, own.name)
        if experts is not None:
            found[own.name] = experts
    return found


def _gather_dense(model: Any, first: bool) -> dict[str, Tensor]:
    """On the first rank what FSDP2 has sharded over all of them, one tensor after another; elsewhere nothing."""
    own = own_tensors(model)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in own and is_shard(parameter):
            tensor = whole(parameter)
            if first:
                found[name] = tensor.cpu()
    return found


def _shared_tensors(model: Any) -> dict[str, Tensor]:
    own = own_tensors(model)
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (module._parameters | module._buffers).items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            kept = tensor is not None and name not in own and leaf not in module._non_persistent_buffers_set
            if kept and not is_shard(tensor):
                found[name] = tensor.detach()
    return found


def _on_disk(model: Any, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of experts as save_pretrained would write them. A model that was loaded without its experts remembers no
    conversion of them, so that it is asked as one that was never loaded."""
    from transformers.core_model_loading import revert_weight_conversion

    remembered = model.__dict__.pop("_weight_conversions", None)
    try:
        return revert_weight_conversion(model, dict(stacked))
    finally:
        if remembered is not None:
            model._weight_conversions = remembered
