"""Which bytes of a checkpoint are which expert's, by transformers' own table of names and conversions.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    layers, rest = map_experts(folder, checkpoint_tensors(folder))

transformers loads a checkpoint by renaming its tensors and running conversions over whole layers: experts stacked, gate
and up concatenated, transposed. Here the same table is read for a model without weights
(integrations/checkpoint_names.py), and each conversion is undone on a view of an expert's blob: what remains is where
in the blob each piece of the checkpoint belongs, as strides. A conversion that is not known here is refused by its
name.

Of a quantised checkpoint, numbers and scales stay as stored:

    checkpoint = CodedCheckpoint(model_on_meta, tensors, facts, torch.bfloat16)    # facts: quantization_config
    checkpoint.layer("model.layers.0.mlp.experts", module).pieces

The layouts are those of integrations/quantised_files.py, which loads the same experts resident, and so are their rows:
interleaved gate and up stay interleaved. Scales that files have in half precision or as exponents become fp32, which is
exact. Where gate and up are tensors of their own, both have the scale of their matrix, the same one.
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
from amoeba.integrations.checkpoint_names import SPLITS_LISTS, sort_names
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.experts_module import ExpertsLayout, ExpertsModule, described, experts_modules, layout_of
from amoeba.integrations.model_folder import load_config, load_without_weights
from amoeba.integrations.nf4_files import ABSMAX, state_of
from amoeba.integrations.quantised_files import (
    BLOCKS,
    CODE_DTYPES,
    MATRIX_DIVISOR,
    OURS,
    REMEDY,
    SCALE_INV,
    SUFFIXES,
    check_scaled,
    check_square,
    described_method,
    foreign_name,
    foreign_shape,
    format_of,
    is_foreign,
    is_quantised,
    is_stack,
    is_transposed,
    matrices_of,
    scale_dtypes,
    usual_name,
    weight_of,
)
from amoeba.integrations.quantised_files import MATRIX_SCALE as FILE_MATRIX_SCALE
from amoeba.integrations.quantised_files import SCALES as FILE_SCALES
from amoeba.integrations.quantised_models import dtype_of, facts_of, unquantised
from amoeba.stream.store.layers import BIASES, CODES, DTYPES, MATRIX_SCALE, SCALES, LayerEntry, Part, layer_entry
from amoeba.stream.store.nf4 import SmallReads, nf4_pieces
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
            "experts in bfloat16, float16 or float32, or quantised (fp8, mxfp8, mxfp4, nvfp4, nf4)",
            f"{config.model_type} quantised by {described_method(facts)}, in a way that aMoEba does not know",
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
            for names in self._names.own_sources(parameter).values()
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
        sources, converter = self._names.own_sources(parameter), self._names.converter(parameter)
        if not sources or not all(sources.values()):
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
        expected = f"a checkpoint of {self.family} whose conversion streaming supports"
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
    fuses = kind == SPLITS_LISTS and operation.stack_dim == 0
    axis = (operation.concat_dim if fuses else getattr(operation, "dim", 0)) % rank - 1
    if axis < 0 or axes.groups[axis] != 1:
        return None
    size = axes.shape[axis]
    if (kind == "Concatenate" or fuses) and size % sources == 0:
        return axes.cut(axis, sources)
    if kind == "Interleave" and size % 2 == 0:
        return [axes.in_turns(axis, size // 2 if getattr(operation, "inverse", False) else 2)]
    return None


def _stacks(operation: Any) -> bool:
    """Whether it makes a tensor of all experts out of their list, or leaves every number where it is."""
    kind = type(operation).__name__
    return (kind == "MergeModulelist" and operation.dim == 0) or kind == "Force16BytesAlignment"


class _Divisor(TensorEntry):
    """Of a matrix's scale it has the reciprocal."""

    def values(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        return 1 / super().values(source, dtype)


def _foreign(name: str, tensor: TensorEntry) -> TensorEntry:
    """name: the usual."""
    kind = _Divisor if name.endswith(MATRIX_DIVISOR) else TensorEntry
    return kind(tensor.file, tensor.start, tensor.dtype, foreign_shape(name, tensor.shape))


class CodedCheckpoint:
    """dtype: of biases, x and y."""

    def __init__(
        self, model: Any, tensors: Mapping[str, TensorEntry], facts: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        codes = {name for name, each in tensors.items() if each.dtype.itemsize == 1 and each.dtype.is_floating_point}
        if is_foreign(facts):
            tensors = {(usual := foreign_name(name)): _foreign(usual, tensor) for name, tensor in tensors.items()}
        else:
            tensors = {usual_name(name, codes): tensor for name, tensor in tensors.items()}
        self.family, self._tensors, self._dtype = str(model.config.model_type), tensors, dtype
        found = format_of(facts)
        assert found is not None
        self._format, self._is_ours = found, facts["quant_method"] == OURS
        self._small = SmallReads(tensors)
        self._names = sort_names(model, {weight_of(name) for name in tensors})
        self.rest = {
            name: tensors[name]
            for weight in self._names.rest
            for name in (weight, *(weight + suffix for suffix in SUFFIXES))
            if name in tensors
        }
        for name in self._names.rest:
            if name in tensors:
                check_scaled(name, tensors[name].dtype, tensors)

    def layer(self, name: str, module: Any) -> MappedLayer:
        layout, found = layout_of(module), described(module)
        if layout is None or found.fused is None:
            got = f"those of {self.family} ({type(module).__name__}: {name})"
            raise bad_value("MODEL", "stacked experts whose activation aMoEba computes itself", got, REMEDY)
        up, down = f"{name}.{found.up_name}", f"{name}.down_proj"
        sources = {"gate_up": matrices_of(self._names, up, found), "down": matrices_of(self._names, down, found)}
        sizes = layout.num_experts, layout.hidden, layout.intermediate
        in_blocks = self._format.scale == "inside"
        row_parts = 1 if in_blocks else len(sources["gate_up"])
        entry = layer_entry(name, *sizes, found.fused, self._dtype, found.has_bias, self._format, row_parts)
        parts = {part.name: part for part in entry.parts}
        pieces: list[Piece] = []
        for (matrix, of_parts), parameter in zip(sources.items(), (up, down), strict=True):
            rows, columns = parts[matrix + CODES].shape
            swapped = self._is_transposed(parameter, found, of_parts[0][0], (layout.num_experts, rows, columns))
            for number, names in enumerate(of_parts):
                place = number, len(of_parts)
                if in_blocks:
                    self._check_quantised(names)
                    pieces += nf4_pieces(names, self._small, entry, parts[matrix + CODES], place)
                    continue
                pieces.append(self._codes(entry, parts[matrix + CODES], place, names, swapped))
                pieces.append(self._scales(entry, parts[matrix + SCALES], place, names, swapped))
                if self._format.has_matrix_scale:
                    pieces.append(self._matrix_scale(entry, parts[matrix + MATRIX_SCALE], names, again=number > 0))
        for part, parameter in zip(BIASES if found.has_bias else (), (up, down), strict=False):
            (names,) = matrices_of(self._names, f"{parameter}_bias", found)
            pieces.append(self._piece(entry, parts[part], (0, 1), names, parts[part].shape))
        return MappedLayer(entry, tuple(pieces))

    def _is_transposed(self, parameter: str, found: ExpertsModule, name: str, shape: tuple[int, int, int]) -> bool:
        if self._is_ours or name not in self._tensors or not is_stack(self._names, parameter):
            return False
        there = self._tensors[name].shape
        if name + ABSMAX in self._tensors:
            there = state_of(name, self._tensors, self._small).shape
        if not is_transposed(self._names, parameter, found, there, shape):
            return False
        check_square(name, self._format)
        return True

    def _codes(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str], swapped: bool) -> Piece:
        self._check_quantised(names)
        (rows, columns), in_blocks = part.shape, names[0] + BLOCKS in self._tensors
        shape = rows // place[1], *((columns // 16, 16) if in_blocks else (columns, 1) if self._is_ours else (columns,))
        names = [name + BLOCKS if in_blocks else name for name in names]
        return self._piece(entry, part, place, names, shape, CODE_DTYPES, swapped)

    def _check_quantised(self, names: list[str]) -> None:
        for name in names:
            if not is_quantised(name, self._tensors):
                raise bad_value("MODEL", f"{name} in {self._format.name}", "a tensor without scales", REMEDY)

    def _scales(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str], swapped: bool) -> Piece:
        suffix = FILE_SCALES if names[0] + BLOCKS in self._tensors else SCALE_INV
        shape = part.shape[0] // place[1], part.shape[1]
        names = [name + suffix for name in names]
        return self._piece(entry, part, place, names, shape, scale_dtypes(self._format), swapped)

    def _matrix_scale(self, entry: LayerEntry, part: Part, names: list[str], again: bool) -> Piece:
        divides = names[0] + MATRIX_DIVISOR in self._tensors
        names = [name + (MATRIX_DIVISOR if divides else FILE_MATRIX_SCALE) for name in names]
        return self._piece(entry, part, (0, 1), names, (), (torch.float32,))._replace(again=again)

    def _piece(
        self,
        entry: LayerEntry,
        part: Part,
        place: tuple[int, int],
        names: list[str],
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
        swapped: bool = False,
    ) -> Piece:
        """place: which of how many equal parts of the rows. names: of a tensor of all experts, or of each expert's.
        shape: of an expert's. dtypes: that such a tensor may have. swapped: whether files have columns first."""
        shape = shape[::-1] if swapped else shape
        missing = [name for name in names if name not in self._tensors]
        if missing:
            raise bad_value("MODEL", f"a tensor {missing[0]}", "none in the checkpoint", "download it again")
        tensors = tuple(self._tensors[name] for name in names)
        stacked = len(tensors) == 1 and len(tensors[0].shape) == len(shape) + 1
        expected = (entry.experts, *shape) if stacked else shape
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.shape != expected or tensor.dtype not in dtypes or tensor.dtype != tensors[0].dtype:
                one_of = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                got = f"{tensor.shape} in {str(tensor.dtype).removeprefix('torch.')}"
                remedy = f"it does not match config.json ({entry.name})"
                raise bad_value(name, f"shape {expected} in one of {one_of}, as all others", got, remedy)
        if not stacked and len(tensors) != entry.experts:
            raise bad_value(entry.name, f"tensors for {entry.experts} experts", len(tensors), "download it again")
        number, count = place
        dtype, whole = entry.dtype_of(part.name), (part.shape[0] // count, *part.shape[1:])
        stride = tuple(math.prod(whole[axis + 1 :]) for axis in range(len(whole)))
        if swapped:
            whole, stride = whole[::-1], stride[::-1]
        offset = part.offset // dtype.itemsize + number * math.prod(whole)
        return Piece(tensors, stacked, math.prod(shape) * tensors[0].dtype.itemsize, whole, stride, offset, dtype)
