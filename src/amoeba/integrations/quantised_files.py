"""What a quantised checkpoint of Hugging Face holds: experts in a block-scaled format, and the rest of the model.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    with QuantisedFiles(folder, model_on_meta, facts) as files:    # facts: quantization_config of config.json
        files.experts(name, module, dtype)                         # BlockScaledExperts, as the files have them
        files.rest(dtype)                                          # name -> tensor; what was quantised is dequantised

Layouts: DeepSeek-V3's and Qwen3-FP8's (`experts.3.up_proj.weight` in e4m3 with `weight_scale_inv`), gpt-oss's
(`experts.down_proj_blocks` and `_scales`), and those of `amoeba quantise`. Names go through transformers' own table of
renamings and conversions, as in loading.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.errors import bad_value
from amoeba.integrations.checkpoint_names import CheckpointNames, sort_names
from amoeba.integrations.experts_module import ExpertsModule, described, layout_of
from amoeba.precision.experts import BlockScaledExperts
from amoeba.precision.formats import E8M0, MXFP4, Format, format_named, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix

# What follows the name of a quantised tensor's weight; "" is the weight itself.
BLOCKS, SCALES, SCALE_INV, MATRIX_SCALE = "_blocks", "_scales", "_scale_inv", "_matrix_scale"
SUFFIXES = (BLOCKS, SCALES, SCALE_INV, MATRIX_SCALE)
# quant_method of what transformers does not know. It would read the codes as numbers and leave out the scales, with a
# warning: so these codes have a dimension more than the weight, of length 1, at which it raises.
OURS = "amoeba"
REMEDY = "load it dequantised with transformers and save that, or take its unquantised checkpoint"


def format_of(facts: Mapping[str, Any]) -> Format | None:
    """The format of a checkpoint's experts by its quantization_config; None where it is not known here."""
    method = facts.get("quant_method")
    if method == "mxfp4":
        return MXFP4
    if method == OURS:
        return format_named(str(facts.get("format")))
    if method == "fp8" and facts.get("expert_dtype", "fp8") == "fp8":
        rows, columns = facts.get("weight_block_size") or (0, 0)
        return fp8_blocks(int(rows), int(columns)) if rows else None
    return None


class QuantisedFiles:
    def __init__(self, folder: Path, model: Any, facts: Mapping[str, Any]) -> None:
        """model: without weights, on the meta device."""
        found = format_of(facts)
        assert found is not None
        self.format, self._is_ours = found, facts["quant_method"] == OURS
        self._file_of = _files(folder)
        self._open: dict[Path, Any] = {}
        self._names = sort_names(model, {weight_of(name) for name in self._file_of})

    def has_quantised_experts(self) -> bool:
        names = (name for sources in self._names.of_experts.values() for names in sources.values() for name in names)
        return any(is_quantised(name, self._file_of) for name in names)

    def rest(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Linears of attention, for one, which transformers computes in FP8 without a backward: dequantised."""
        return {
            name: self._quantised(name).dequantise(dtype) if is_quantised(name, self._file_of) else self._read(name)
            for name in self._names.rest
        }

    def experts(self, name: str, module: Any, dtype: torch.dtype) -> BlockScaledExperts:
        found = described(module)
        if found.fused is None:
            expected = "an activation that aMoEba computes itself"
            raise bad_value("MODEL", expected, f"that of {type(module).__name__} ({name})", REMEDY)
        layout = layout_of(module)
        assert layout is not None  # fused experts are stacked
        gate_up = self._matrix(f"{name}.{found.up_name}", found, layout.hidden)
        down = self._matrix(f"{name}.down_proj", found, layout.intermediate)
        up_bias = down_bias = None
        if found.has_bias:
            names = (_one(self._names, f"{name}.{part}_bias") for part in (found.up_name, "down_proj"))
            up_bias, down_bias = (self._read(each).to(dtype) for each in names)
        return BlockScaledExperts.holding(gate_up, down, up_bias, down_bias, found.fused, dtype)

    def __enter__(self) -> QuantisedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _matrix(self, parameter: str, found: ExpertsModule, columns: int) -> QuantisedMatrix:
        """All experts' matrices of a parameter, whatever number of tensors they are in."""
        sources = matrices_of(self._names, parameter, found)
        if self._names.converter(parameter) is None:
            return self._quantised(sources[0][0], columns)
        of_parts = [[self._quantised(name, columns) for name in each] for each in sources]
        experts = {len(each) for each in of_parts}
        shapes = {one.shape for each in of_parts for one in each}
        if len(experts) != 1 or len(shapes) != 1 or len(next(iter(shapes))) != 2:
            got = f"{sorted(experts)} of them, shapes {sorted(shapes)}"
            raise bad_value("MODEL", f"as many equal matrices for each part of {parameter}", got, "download it again")
        joined = [list(each) for each in zip(*of_parts, strict=True)]  # by expert
        scale = None
        if self.format.has_matrix_scale:
            scale = torch.stack([_common(each) for each in joined])
        return QuantisedMatrix(
            torch.stack([torch.cat([part.data for part in each]) for each in joined]),
            torch.stack([torch.cat([part.scales for part in each]) for each in joined]),
            self.format,
            joined[0][0].columns,
            len(sources),
            scale,
        )

    def _quantised(self, name: str, columns: int | None = None) -> QuantisedMatrix:
        return read_quantised(name, self.format, self._file_of, self._read, columns, is_ours=self._is_ours)

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path].get_tensor(name)


def is_quantised(name: str, names: Container[str]) -> bool:
    """Whether a weight has scales among these."""
    return any(name + suffix in names for suffix in (BLOCKS, SCALE_INV))


def read_quantised(
    name: str,
    format: Format,
    names: Container[str],
    read: Callable[[str], Tensor],
    columns: int | None = None,
    *,
    is_ours: bool = False,
) -> QuantisedMatrix:
    """One tensor with its scales, a matrix or a stack of them. columns: where the last block may be cut short."""
    if not is_quantised(name, names):
        raise bad_value("MODEL", f"{name} in {format.name}", "a tensor without scales", REMEDY)
    if name + BLOCKS in names:
        data, scales = read(name + BLOCKS).flatten(-2), read(name + SCALES)  # (..., H/32, 16)
    else:
        data, scales = read(name).view(torch.uint8), read(name + SCALE_INV)
        data = data.squeeze(-1) if is_ours else data
    if scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
        scales = E8M0.decode(scales) if format.scale == "fp32" else scales  # ue8m0
    elif format.scale == "fp32":
        scales = scales.float()
    matrix_scale = read(name + MATRIX_SCALE) if format.has_matrix_scale else None
    columns = columns or data.shape[-1] * 8 // format.element.bits
    return QuantisedMatrix(data, scales, format, columns, 1, matrix_scale)


def matrices_of(names: CheckpointNames, parameter: str, found: ExpertsModule) -> list[list[str]]:
    """The weights that a parameter of experts is made of: of each part of its rows, gate and up, all experts' in their
    order; or one alone, of all experts."""
    sources, converter = names.sources(parameter), names.converter(parameter)
    if not sources:
        raise bad_value("MODEL", f"weights for {parameter}", "none in the checkpoint", "download it again")
    if converter is None:
        return [[_one(names, parameter)]]
    patterns = list(converter.source_patterns)
    kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    known = {("MergeModulelist", 0), ("Concatenate", 1), ("Force16BytesAlignment", None)}
    if set(sources) != set(patterns) or not set(kinds) <= known or found.interleaved or found.transposed:
        raise bad_value("MODEL", "experts stored one by one, gate, up and down", f"{parameter} by {kinds}", REMEDY)
    return [sources[each] for each in patterns]


def _one(names: CheckpointNames, parameter: str) -> str:
    found = [name for each in names.sources(parameter).values() for name in each]
    if len(found) != 1:
        raise bad_value("MODEL", f"one tensor for {parameter}", f"{len(found)}", "download the checkpoint again")
    return found[0]


def _files(folder: Path) -> dict[str, Path]:
    """Where each tensor is."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def weight_of(name: str) -> str:
    """Of a weight's own name, of its scales' or of its blocks'."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _common(parts: list[QuantisedMatrix]) -> Tensor:
    scales = [part.matrix_scale for part in parts if part.matrix_scale is not None]
    if any(not torch.equal(scale, scales[0]) for scale in scales):
        raise bad_value(
            "MODEL", "one scale for gate and up of an expert", "two", "quantise the model with amoeba quantise"
        )
    return scales[0]
