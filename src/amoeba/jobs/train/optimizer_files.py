"""The optimizer's state in a checkpoint: each rank writes its part, and any number of ranks can read it.

E experts

    save_optimizer(optimizer, model, folder, rank_zero)     # on every rank
    load_optimizer(optimizer, model, folder)                # as many ranks, more, fewer, or a process alone

    optimizer.json                          {"groups": [{"lr": ..., "parameters": [names]}]}
    optimizer-00000-of-00002.safetensors    NAME/exp_avg and so on; of experts' tensors the rank's entries, and in the
                                            header under "experts" which these are; of other tensors that FSDP2 has
                                            sharded the rank's rows, under "rows" the first and the one behind the last

Names are those of a process with all experts. What all ranks have alike is in the first file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.own_tensors import OwnTensor, own_tensors
from amoeba.jobs.train.manifest import save_file
from amoeba.parallel.rank_zero import RankZero
from amoeba.parallel.shards import local_parameter, rows_here
from amoeba.system.files import write_whole

GROUPS, SCHEDULER = "optimizer.json", "scheduler.pt"
_PARTS = "optimizer-{rank:05d}-of-{count:05d}.safetensors"
_EXPERTS, _ROWS = "experts", "rows"  # in a file's header


def save_optimizer(optimizer: Any, model: Any, folder: Path, rank_zero: RankZero) -> None:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's is around ours
    own, named, rows_of = _here(model)
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[int]] = {}
    rows: dict[str, tuple[int, int]] = {}
    groups = []
    for group in optimizer.param_groups:
        names = []
        for parameter in group["params"]:
            mine, sharded = own.get(named[parameter]), rows_of[named[parameter]]
            name = named[parameter] if mine is None else mine.name
            names.append(name)
            if mine is None and sharded is None and not rank_zero.here:
                continue
            for key, value in optimizer.state[parameter].items():
                if not isinstance(value, Tensor):  # a number of steps
                    value = torch.tensor(value, dtype=torch.int64, device="cpu")
                value = value.detach()
                if mine is not None and value.dim():
                    experts[f"{name}/{key}"] = mine.experts
                    value = mine.in_other_layout(value)
                elif sharded is not None and value.dim():
                    rows[f"{name}/{key}"] = sharded.start, sharded.stop
                tensors[f"{name}/{key}"] = value.contiguous()
        groups.append({key: value for key, value in group.items() if key != "params"} | {"parameters": names})
    path = folder / _PARTS.format(rank=rank_zero.rank, count=rank_zero.count)
    save_file(tensors, path, metadata={"format": "pt", _EXPERTS: json.dumps(experts), _ROWS: json.dumps(rows)})
    if rank_zero.here:
        write_whole(folder / GROUPS, json.dumps({"groups": groups}, default=float, indent=1) + "\n")


def load_optimizer(optimizer: Any, model: Any, folder: Path) -> None:
    """Reads of experts' states those of the experts that are here, and of sharded ones the rows that are."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    stored = _Parts(folder)
    own, named, rows_of = _here(model)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    place = 0
    if len(stored.groups) != len(optimizer.param_groups):
        raise _another_model(folder, f"{len(stored.groups)} groups of parameters")
    known = {name for group in stored.groups for name in group["parameters"]}
    for group, saved in zip(optimizer.param_groups, stored.groups, strict=True):
        places = []
        for parameter in group["params"]:
            mine = own.get(named[parameter])
            name = named[parameter] if mine is None else mine.name
            if name not in known:
                raise _another_model(folder, f"none for {name}")
            found = stored.state_of(name, rows_of[named[parameter]] if mine is None else mine.experts)
            if mine is not None:
                found = {key: mine.in_other_layout(value) if value.dim() else value for key, value in found.items()}
            for key, value in found.items():
                if value.dim() and value.shape != parameter.shape:
                    raise _another_model(folder, f"{key} of {name} in shape {tuple(value.shape)}")
            state[place] = {key: _laid_out_as(parameter, value) for key, value in found.items()}
            places.append(place)
            place += 1
        told = {key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "parameters"}
        groups.append(told | {"params": places})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """As in a new state: a fused optimizer takes its numbers in the order of the parameter's memory."""
    if not value.dim():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _here(model: Any) -> tuple[dict[str, OwnTensor], dict[Any, str], dict[str, range | None]]:
    """What a rank has alone; the names of what the optimizer steps; and by name the rows of it that are here."""
    parameters = dict(model.named_parameters())
    named = {local_parameter(parameter): name for name, parameter in parameters.items()}
    return own_tensors(model), named, {name: rows_here(parameter) for name, parameter in parameters.items()}


class _Parts:
    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.groups: list[dict[str, Any]] = json.loads((folder / GROUPS).read_bytes())["groups"]
        self._files = [safe_open(path, "pt") for path in sorted(folder.glob("optimizer-*.safetensors"))]
        self._entries: list[dict[str, Sequence[int]]] = []  # of each file: which entries of all that there are
        for file in self._files:
            experts, rows = (json.loads(file.metadata().get(name, "{}")) for name in (_EXPERTS, _ROWS))
            self._entries.append(experts | {key: range(*each) for key, each in rows.items()})
        self._holders: dict[str, list[int]] = {}  # of a tensor, which files have it or some of it
        for place, file in enumerate(self._files):
            for key in file.keys():  # noqa: SIM118  it is no mapping
                self._holders.setdefault(key, []).append(place)

    def state_of(self, name: str, wanted: Sequence[int] | None) -> dict[str, Tensor]:
        """wanted: the experts, or the rows, whose entries; None for all that there are."""
        keys = [key for key in self._holders if key.rpartition("/")[0] == name]
        return {key.rpartition("/")[2]: self._tensor(key, wanted) for key in keys}

    def _tensor(self, key: str, wanted: Sequence[int] | None) -> Tensor:
        holders = self._holders[key]
        lists = {place: self._entries[place].get(key) for place in holders}
        if None in lists.values():  # all of it in one file, or one number for all entries
            part = self._files[holders[0]].get_slice(key)
            if wanted is None or not part.get_shape():
                return self._files[holders[0]].get_tensor(key)
            if isinstance(wanted, range):
                return part[wanted.start : wanted.stop]
            return torch.cat([part[begin:end] for _, begin, end in _runs([(0, each) for each in wanted])] or [part[:0]])
        where = {each: (place, at) for place, ids in lists.items() for at, each in enumerate(ids or ())}
        slices = {place: self._files[place].get_slice(key) for place in holders}
        places = [where[each] for each in (sorted(where) if wanted is None else wanted)]
        entries = [slices[place][begin:end] for place, begin, end in _runs(places)]
        return torch.cat(entries) if entries else slices[holders[0]][:0]


def _runs(places: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Entries, each by file and place in it, put together where they follow each other: file, begin, end."""
    found: list[tuple[int, int, int]] = []
    for file, at in places:
        if found and found[-1][0] == file and found[-1][2] == at:
            found[-1] = file, found[-1][1], at + 1
        else:
            found.append((file, at, at + 1))
    return found


def _another_model(folder: Path, got: str) -> ValueError:
    return bad_value(str(folder), "the optimizer's state for this model", got, "resume with the settings of the run")
