"""Which bytes of a quantised checkpoint belong to which expert; numbers and scales stay as stored.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    checkpoint = CodedCheckpoint(model_on_meta, tensors, facts, torch.bfloat16)    # facts: quantization_config
    checkpoint.layer("model.layers.0.mlp.experts", module).pieces

The layouts are those of integrations/quantised_files.py, which loads the same experts resident, and so are their rows:
interleaved gate and up stay interleaved. Scales that files have in half precision or as exponents become fp32, which is
exact. Where gate and up are tensors of their own, both have the scale of their matrix, the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.integrations.checkpoint_names import sort_names
from amoeba.integrations.experts_module import ExpertsModule, described, layout_of
from amoeba.integrations.quantised_files import (
    BLOCKS,
    CODE_DTYPES,
    OURS,
    REMEDY,
    SCALE_INV,
    SUFFIXES,
    check_scaled,
    check_square,
    format_of,
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
from amoeba.stream.store.layers import BIASES, CODES, MATRIX_SCALE, SCALES, LayerEntry, Part, layer_entry
from amoeba.stream.store.tensor_files import MappedLayer, Piece, TensorEntry


class CodedCheckpoint:
    """dtype: of biases, x and y."""

    def __init__(
        self, model: Any, tensors: Mapping[str, TensorEntry], facts: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        codes = {name for name, each in tensors.items() if each.dtype.itemsize == 1 and each.dtype.is_floating_point}
        tensors = {usual_name(name, codes): tensor for name, tensor in tensors.items()}
        self.family, self._tensors, self._dtype = str(model.config.model_type), tensors, dtype
        found = format_of(facts)
        assert found is not None
        self._format, self._is_ours = found, facts["quant_method"] == OURS
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
        row_parts = len(sources["gate_up"])
        entry = layer_entry(name, *sizes, found.fused, self._dtype, found.has_bias, self._format, row_parts)
        parts = {part.name: part for part in entry.parts}
        pieces: list[Piece] = []
        for (matrix, of_parts), parameter in zip(sources.items(), (up, down), strict=True):
            rows, columns = parts[matrix + CODES].shape
            swapped = self._is_transposed(parameter, found, of_parts[0][0], (layout.num_experts, rows, columns))
            for number, names in enumerate(of_parts):
                place = number, len(of_parts)
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
        if not is_transposed(self._names, parameter, found, self._tensors[name].shape, shape):
            return False
        check_square(name, self._format)
        return True

    def _codes(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str], swapped: bool) -> Piece:
        for name in names:
            if not is_quantised(name, self._tensors):
                raise bad_value("MODEL", f"{name} in {self._format.name}", "a tensor without scales", REMEDY)
        (rows, columns), in_blocks = part.shape, names[0] + BLOCKS in self._tensors
        shape = rows // place[1], *((columns // 16, 16) if in_blocks else (columns, 1) if self._is_ours else (columns,))
        names = [name + BLOCKS if in_blocks else name for name in names]
        return self._piece(entry, part, place, names, shape, CODE_DTYPES, swapped)

    def _scales(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str], swapped: bool) -> Piece:
        suffix = FILE_SCALES if names[0] + BLOCKS in self._tensors else SCALE_INV
        shape = part.shape[0] // place[1], part.shape[1]
        names = [name + suffix for name in names]
        return self._piece(entry, part, place, names, shape, scale_dtypes(self._format), swapped)

    def _matrix_scale(self, entry: LayerEntry, part: Part, names: list[str], again: bool) -> Piece:
        names = [name + FILE_MATRIX_SCALE for name in names]
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
