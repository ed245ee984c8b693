"""Which bytes of a quantised checkpoint are which expert's: codes and scales, which stay as the files have them.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    checkpoint = CodedCheckpoint(model_on_meta, tensors, facts, torch.bfloat16)    # facts: quantization_config
    checkpoint.layer("model.layers.0.mlp.experts", module).pieces

The layouts are those of integrations/quantised_files.py, which loads the same experts resident, and so are their rows:
gate and up in turns stay so. Scales that files have in half precision or as exponents become fp32, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from amoeba.errors import bad_value
from amoeba.integrations.checkpoint_names import sort_names
from amoeba.integrations.experts_module import described, layout_of
from amoeba.integrations.quantised_files import (
    BLOCKS,
    OURS,
    REMEDY,
    SCALE_INV,
    SUFFIXES,
    format_of,
    is_quantised,
    matrices_of,
    weight_of,
)
from amoeba.integrations.quantised_files import SCALES as FILE_SCALES
from amoeba.stream.store.layers import BIASES, CODES, SCALES, LayerEntry, Part, layer_entry
from amoeba.stream.store.pieces import MappedLayer, Piece
from amoeba.stream.store.tensor_files import TensorEntry

_CODES = (torch.uint8, torch.float8_e4m3fn)
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu)


class CodedCheckpoint:
    """dtype: of biases, x and y."""

    def __init__(
        self, model: Any, tensors: Mapping[str, TensorEntry], facts: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        self.family, self._tensors, self._dtype = str(model.config.model_type), tensors, dtype
        found = format_of(facts)
        assert found is not None
        if found.has_matrix_scale:
            remedy = "keep them resident: leave --ram out, or load the model without amoeba.stream"
            raise bad_value("MODEL", "experts in fp8, mxfp8 or mxfp4 to be streamed", found.name, remedy)
        self._format, self._is_ours = found, facts["quant_method"] == OURS
        self._names = sort_names(model, {weight_of(name) for name in tensors})
        self.rest = {
            name: tensors[name]
            for weight in self._names.rest
            for name in (weight, *(weight + suffix for suffix in SUFFIXES))
            if name in tensors
        }

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
        for matrix, of_parts in sources.items():
            for number, names in enumerate(of_parts):
                place = number, len(of_parts)
                pieces.append(self._codes(entry, parts[matrix + CODES], place, names))
                pieces.append(self._scales(entry, parts[matrix + SCALES], place, names))
        for part, parameter in zip(BIASES if found.has_bias else (), (up, down), strict=False):
            (names,) = matrices_of(self._names, f"{parameter}_bias", found)
            pieces.append(self._piece(entry, parts[part], (0, 1), names, parts[part].shape))
        return MappedLayer(entry, tuple(pieces))

    def _codes(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str]) -> Piece:
        for name in names:
            if not is_quantised(name, self._tensors):
                raise bad_value("MODEL", f"{name} in {self._format.name}", "a tensor without scales", REMEDY)
        (rows, columns), in_blocks = part.shape, names[0] + BLOCKS in self._tensors
        shape = rows // place[1], *((columns // 16, 16) if in_blocks else (columns, 1) if self._is_ours else (columns,))
        return self._piece(entry, part, place, [n + BLOCKS if in_blocks else n for n in names], shape, _CODES)

    def _scales(self, entry: LayerEntry, part: Part, place: tuple[int, int], names: list[str]) -> Piece:
        suffix = FILE_SCALES if names[0] + BLOCKS in self._tensors else SCALE_INV
        shape = part.shape[0] // place[1], part.shape[1]
        return self._piece(entry, part, place, [name + suffix for name in names], shape, _SCALES)

    def _piece(
        self,
        entry: LayerEntry,
        part: Part,
        place: tuple[int, int],
        names: list[str],
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    ) -> Piece:
        """place: which of how many equal parts of the rows. names: of a tensor of all experts, or of each expert's.
        shape: of an expert's. dtypes: that such a tensor may have."""
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
                remedy = f"it does not go with config.json ({entry.name})"
                raise bad_value(name, f"shape {expected} in one of {one_of}, as all others", got, remedy)
        if not stacked and len(tensors) != entry.experts:
            raise bad_value(entry.name, f"tensors for {entry.experts} experts", len(tensors), "download it again")
        number, count = place
        dtype, whole = entry.dtype_of(part.name), (part.shape[0] // count, *part.shape[1:])
        stride = tuple(math.prod(whole[axis + 1 :]) for axis in range(len(whole)))
        offset = part.offset // dtype.itemsize + number * math.prod(whole)
        return Piece(tensors, stacked, math.prod(shape) * tensors[0].dtype.itemsize, whole, stride, offset, dtype)
