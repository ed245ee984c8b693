"""Which bytes of a checkpoint are which expert's, by transformers' own table of names and conversions.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    layers, rest = map_experts(folder, checkpoint_tensors(folder))

transformers loads a checkpoint by renaming its tensors and running conversions over whole layers: experts stacked, gate
and up concatenated, transposed. Here the same table is read for a model without weights
(integrations/checkpoint_names.py), and each conversion is undone on a view of an expert's blob: what remains is where
in the blob each piece of the checkpoint belongs, as strides. A conversion that is not known here is refused by its
name. Codes and scales of a quantised checkpoint stay as they are: coded.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.checkpoint_names import sort_names
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.experts_module import ExpertsLayout, described, experts_modules, layout_of
from amoeba.integrations.model_folder import load_config, load_without_weights
from amoeba.integrations.quantised_files import REMEDY, check_scaled, format_of
from amoeba.integrations.quantised_models import dtype_of, facts_of, unquantised
from amoeba.stream.store.layers import DTYPES, layer_entry
from amoeba.stream.store.quantised import CodedCheckpoint
from amoeba.stream.store.tensor_files import MappedLayer, Piece, TensorEntry

_BESIDE = "keep its experts resident, or convert it to a checkpoint with one tensor per expert and projection"


def map_experts(
    folder: Path, tensors: Mapping[str, TensorEntry], *, trust_remote_code: bool = False
) -> tuple[list[MappedLayer], dict[str, TensorEntry]]:
    """The layers with experts, and the tensors that belong to the rest of the model, with the scales of those that are
    quantised. What the model has no place for, as transformers ignores it in loading, is in neither."""
    config = load_config(str(folder), trust_remote_code=trust_remote_code)
    facts = facts_of(config)
    if facts is not None and format_of(facts) is None:
        raise bad_value(
            "MODEL",
            "experts in bfloat16, float16 or float32, or quantised (fp8, mxfp8, mxfp4, nvfp4)",
            f"{config.model_type} quantised by {facts.get('quant_method')}, in a way that aMoEba does not know",
            REMEDY,
        )
    model = load_without_weights(unquantised(config), str(folder), trust_remote_code=trust_remote_code)
    check_coverage(model, "MODEL", "run it as transformers computes it: amoeba generate without --ram or --vram")
    checkpoint: _Checkpoint | CodedCheckpoint
    if facts is None:
        checkpoint = _Checkpoint(model, tensors)
        for name, tensor in checkpoint.rest.items():
            check_scaled(name, tensor.dtype, ())
    else:
        checkpoint = CodedCheckpoint(model, tensors, facts, dtype_of(config))
    layers = [checkpoint.layer(name, module) for name, module in experts_modules(model).items()]
    return layers, checkpoint.rest


class _Checkpoint:
    def __init__(self, model: Any, tensors: Mapping[str, TensorEntry]) -> None:
        self.family, self._tensors = str(model.config.model_type), tensors
        self._names = sort_names(model, tensors)
        self.rest = {name: tensors[name] for name in self._names.rest}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def layer(self, name: str, module: Any) -> MappedLayer:
        layout, found = layout_of(module), described(module)
        if layout is None or found.fused is None:
            got = f"those of {self.family} ({type(module).__name__}: {name})"
            raise bad_value("MODEL", "stacked experts whose activation aMoEba computes itself", got, _BESIDE)
        parameters = {"gate_up_JH": found.up_name, "down_HI": "down_proj"}
        if found.has_bias:
            parameters |= {"gate_up_bias_J": f"{found.up_name}_bias", "down_bias_H": "down_proj_bias"}
        others = {parameter for parameter, _ in module.named_parameters()} - set(parameters.values())
        if others:
            expected = f"experts with {', '.join(parameters.values())} alone"
            raise bad_value("MODEL", expected, f"{sorted(others)[0]} in {self.family} ({name})", _BESIDE)
        activation = replace(found.fused, interleaved=False)  # in the blob all rows of gate come first
        sizes = layout.num_experts, layout.hidden, layout.intermediate
        dtype = self._dtype([f"{name}.{parameter}" for parameter in parameters.values()])
        entry = layer_entry(name, *sizes, activation, dtype, found.has_bias)
        blob = torch.empty(entry.expert_bytes, dtype=torch.uint8, device="meta")
        views = entry.views(blob)._asdict()
        pieces: list[Piece] = []
        for part, parameter in parameters.items():
            target = _as_stored(views[part], layout, is_up=part.startswith("gate_up"))
            pieces += self._pieces(f"{name}.{parameter}", target, layout.num_experts)
        return MappedLayer(entry, tuple(pieces))

    def _dtype(self, parameters: Sequence[str]) -> torch.dtype:
        found = {
            self._tensors[name].dtype: name
            for parameter in parameters
            for names in self._names.sources(parameter).values()
            for name in names
        }
        for dtype, name in found.items():
            if dtype not in DTYPES.values():
                raise bad_value("MODEL", f"experts in {', '.join(DTYPES)}", f"{name} in {dtype}", _BESIDE)
        if len(found) > 1:
            got = " and ".join(f"{name} in {dtype}" for dtype, name in found.items())
            raise bad_value("MODEL", "one dtype for a layer's experts", got, "save the model in one dtype")
        return next(iter(found), torch.bfloat16)  # with none of its tensors there the layer is refused soon

    def _pieces(self, parameter: str, target: _Axes, experts: int) -> list[Piece]:
        sources, converter = self._names.sources(parameter), self._names.converter(parameter)
        if not sources:
            raise bad_value("MODEL", f"weights for {parameter}", "none in the checkpoint", "download it again")
        patterns: list[str | None] = [None] if converter is None else list(converter.source_patterns)
        if set(sources) != set(patterns):
            raise self._refused(parameter, f"tensors for {len(sources)} of {len(patterns)} patterns")
        first = self._tensors[sources[patterns[0]][0]]
        whole = self._shapes[parameter] == first.shape
        targets = [target]
        for operation in [] if converter is None else reversed(converter.operations):
            if len(targets) > 1 and not _stacks(operation):
                raise self._refused(parameter, f"by {operation} before a concatenation")
            undone = targets if len(targets) > 1 else _undo(operation, targets[0], len(patterns), whole)
            if undone is None:
                raise self._refused(parameter, f"by {operation}")
            targets = undone
        if len(targets) != len(patterns):
            raise self._refused(parameter, f"by {converter}")
        return [
            self._piece(parameter, axes, sources[pattern], experts)
            for axes, pattern in zip(targets, patterns, strict=True)
        ]

    def _piece(self, parameter: str, axes: _Axes, names: list[str], experts: int) -> Piece:
        tensors = tuple(self._tensors[name] for name in names)
        stacked = len(tensors) == 1 and len(tensors[0].shape) == len(axes.shape) + 1
        expected = (experts, *axes.shape) if stacked else axes.shape
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.shape != expected:
                raise bad_value(name, f"shape {expected}", tensor.shape, f"it does not match config.json ({parameter})")
        if not stacked and len(tensors) != experts:
            raise bad_value(parameter, f"tensors for {experts} experts", len(tensors), "download the checkpoint again")
        view = axes.view
        size = view.numel() * view.element_size()
        return Piece(tensors, stacked, size, tuple(view.shape), view.stride(), int(view.storage_offset()), view.dtype)

    def _refused(self, parameter: str, got: str) -> ValueError:
        expected = f"a checkpoint of {self.family} that is converted in a way known here"
        return bad_value("MODEL", expected, f"{parameter} {got}", _BESIDE)


class _Axes(NamedTuple):
    """A view of a part whose dimensions, in groups, are the axes of a checkpoint's tensor: an axis in which gate and up
    take turns is two dimensions here."""

    view: Tensor
    groups: tuple[int, ...]  # dimensions of each axis

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.view.shape[self._first(axis) :][:count]) for axis, count in enumerate(self.groups))

    def swapped(self, one: int, other: int) -> _Axes:
        dimensions = [list(range(self._first(axis), self._first(axis + 1))) for axis in range(len(self.groups))]
        dimensions[one], dimensions[other] = dimensions[other], dimensions[one]
        order = [dimension for axis in dimensions for dimension in axis]
        return _Axes(self.view.permute(order), tuple(map(len, dimensions)))

    def in_turns(self, axis: int, turns: int) -> _Axes:
        """`turns` blocks of the axis, interleaved."""
        dimension = self._first(axis)
        view = self.view.unflatten(dimension, (turns, -1)).transpose(dimension, dimension + 1)
        return _Axes(view, (*self.groups[:axis], 2, *self.groups[axis + 1 :]))

    def cut(self, axis: int, count: int) -> list[_Axes]:
        return [self._replace(view=view) for view in self.view.chunk(count, self._first(axis))]

    def _first(self, axis: int) -> int:
        return sum(self.groups[:axis])


def _as_stored(part: Tensor, layout: ExpertsLayout, *, is_up: bool) -> _Axes:
    """A part as the module stores it."""
    axes = _Axes(part, (1,) * part.dim())
    if is_up and layout.interleaved:
        axes = axes.in_turns(0, 2)
    return axes.swapped(0, 1) if layout.transposed and part.dim() == 2 else axes


def _undo(operation: Any, axes: _Axes, sources: int, whole: bool) -> list[_Axes] | None:
    """What the operation makes this of, or None. Its dimension 0 is that of the experts, which nothing may touch."""
    kind, rank = type(operation).__name__, len(axes.groups) + 1
    if _stacks(operation):
        return [axes]
    if kind == "Transpose":
        if whole and getattr(operation, "check_dims", False):
            return [axes]
        one, other = operation.dim0 % rank, operation.dim1 % rank
        return [axes.swapped(one - 1, other - 1)] if one and other else None
    axis = getattr(operation, "dim", 0) % rank - 1
    if axis < 0 or axes.groups[axis] != 1:
        return None
    size = axes.shape[axis]
    if kind == "Concatenate" and size % sources == 0:
        return axes.cut(axis, sources)
    if kind == "Interleave" and size % 2 == 0:
        return [axes.in_turns(axis, size // 2 if getattr(operation, "inverse", False) else 2)]
    return None


def _stacks(operation: Any) -> bool:
    """Whether it makes a tensor of all experts out of their list, or leaves every number where it is."""
    kind = type(operation).__name__
    return (kind == "MergeModulelist" and operation.dim == 0) or kind == "Force16BytesAlignment"
