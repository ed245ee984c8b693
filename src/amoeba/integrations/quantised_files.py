"""Reads quantised Hugging Face checkpoints: names and shapes of experts, scales, and the rest of the model.

E experts · H hidden · I intermediate · J = 2I (gated) or I

    with QuantisedFiles(folder, model_on_meta, facts) as files:    # facts: quantization_config of config.json
        files.experts(name, module, dtype)                         # QuantisedExperts, as the files have them
        files.rest(dtype)                                          # name -> tensor; what was quantised is dequantised

Layouts: DeepSeek-V3's and Qwen3-FP8's (`experts.3.up_proj.weight` in e4m3 with `weight_scale_inv`), Qwen3-VL's (all
experts in one tensor, (E, in, out) or (E, out, in)), gpt-oss's (`experts.down_proj_blocks` and `_scales`), those of
`amoeba quantise`, of compressed-tensors and ModelOpt what has floating point codes (`_foreign_format`), and NF4 of
bitsandbytes (`nf4_files`). Names go through transformers' own table of renamings and conversions, as in loading.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value, one_line
from amoeba.integrations.checkpoint_names import SPLITS_LISTS, CheckpointNames, sort_names
from amoeba.integrations.experts_module import ExpertsModule, described, experts_modules, layout_of
from amoeba.integrations.nf4_files import ABSMAX, read_nf4, state_of
from amoeba.integrations.nf4_files import SUFFIXES as NF4_SUFFIXES
from amoeba.precision.formats import E8M0, FP8_128, MXFP4, MXFP8, NVFP4, OF_BLOCKS, Format, format_named, fp8_blocks
from amoeba.precision.quantised import QuantisedMatrix, block_counts
from amoeba.precision.quantised_experts import Products, QuantisedExperts

# What follows the name of a quantised tensor's weight; "" is the weight itself.
BLOCKS, SCALES, SCALE_INV, MATRIX_SCALE = "_blocks", "_scales", "_scale_inv", "_matrix_scale"
MATRIX_DIVISOR = "_global_scale"  # the reciprocal of a matrix's scale
SUFFIXES = (BLOCKS, SCALES, SCALE_INV, MATRIX_SCALE, MATRIX_DIVISOR, *NF4_SUFFIXES)
# What other files call `weight_scale_inv`: DeepSeek-V4's, Mistral Large 4's.
_OTHER_SCALES = (".scale", ".qscale_weight")
# And names of compressed-tensors and ModelOpt.
_FOREIGN_NAMES = {
    ".weight_packed": ".weight",
    ".weight_scale": f".weight{SCALE_INV}",
    ".weight_scale_2": f".weight{MATRIX_SCALE}",
}
_WHOLE = 2**16  # no matrix has more rows or columns: a block that is all of them
CODE_DTYPES = (torch.float8_e4m3fn, torch.uint8)  # in files
_PLAIN = {"F64", "F32", "BF16", "F16"}  # of safetensors
_NAMED = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # of safetensors, what no weight may be alone
_WIDE_SCALES, _SCALE_CODES = (torch.float32, torch.bfloat16, torch.float16), (torch.uint8, torch.float8_e8m0fnu)
# quant_method of what transformers does not know. It would read the codes as numbers and leave out the scales, with a
# warning: so these codes have a dimension more than the weight, of length 1, at which it raises.
OURS, BITSANDBYTES = "amoeba", "bitsandbytes"
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
REMEDY = "load it dequantised with transformers and save that, or take its unquantised checkpoint"
OTHERWISE = "take its unquantised checkpoint, or its FP8 one with blocks of scales (weight_scale_inv)"
AGAIN = "download it again, or take its unquantised checkpoint"


def format_of(facts: Mapping[str, Any]) -> Format | None:
    method = facts.get("quant_method")
    if method == "mxfp4":
        return MXFP4
    if method == OURS:
        return format_named(str(facts.get("format")))
    if method == "fp8" and facts.get("expert_dtype", "fp8") == "fp8":
        block = facts.get("weight_block_size")
        if block is None:
            return None
        if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int | float) for n in block)):
            raise bad_value("weight_block_size in config.json", "two numbers, such as [128, 128]", repr(block), AGAIN)
        return fp8_blocks(int(block[0]), int(block[1]))
    if method == BITSANDBYTES:
        return OF_BLOCKS["nf4"] if facts.get("load_in_4bit") and facts.get("bnb_4bit_quant_type") == "nf4" else None
    return _foreign_format(facts)


def _foreign_format(facts: Mapping[str, Any]) -> Format | None:
    """Of a checkpoint of compressed-tensors (llm-compressor) or ModelOpt, all of whose groups of layers are alike."""
    if facts.get("quant_method") == "modelopt" and facts.get("quant_algo") in ("NVFP4", "FP8"):
        return NVFP4 if facts["quant_algo"] == "NVFP4" else fp8_blocks(_WHOLE, _WHOLE)
    groups = facts.get("config_groups")
    if facts.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    found = {_format_of_group((each or {}).get("weights") or {}) for each in groups.values()}
    return found.pop() if len(found) == 1 else None


def _format_of_group(weights: Mapping[str, Any]) -> Format | None:
    kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    match kind, weights.get("group_size"), weights.get("block_structure"):
        case ("float", 8, "tensor"), _, _:
            return fp8_blocks(_WHOLE, _WHOLE)
        case ("float", 8, "channel"), _, _:
            return fp8_blocks(1, _WHOLE)
        case ("float", 8, "block"), _, [int(rows), int(columns)]:
            return fp8_blocks(rows, columns)
        case ("float", 4, "tensor_group"), 16, _:
            return NVFP4
        case ("float", 4, "group"), 32, _:
            return MXFP4
        case ("float", 8, "group"), 32, _:
            return MXFP8
    return None


def products_for(format: Format, facts: Mapping[str, Any]) -> Products:
    """As a checkpoint's quantization_config wants rows to be multiplied: quantised one by one, or as they are."""
    return "auto" if format == FP8_128 and facts.get("activation_scheme") == "dynamic" else "bf16"


class QuantisedFiles:
    def __init__(self, folder: Path, model: Any, facts: Mapping[str, Any]) -> None:
        """model: without weights, on the meta device."""
        found = format_of(facts)
        assert found is not None
        self.format, self._is_ours = found, facts["quant_method"] == OURS
        self._products = products_for(found, facts)
        files = _files(folder)
        dtypes = {path: _dtypes_in(path) for path in set(files.values())}
        codes = {name for name, path in files.items() if dtypes[path][name] in _NAMED}
        self._is_foreign = is_foreign(facts)
        usual = foreign_name if self._is_foreign else functools.partial(usual_name, codes=codes)
        self._name_in_file = {usual(name): name for name in files}
        self._file_of = {name: files[own] for name, own in self._name_in_file.items()}
        self._open: dict[Path, Any] = {}
        self._names = sort_names(model, {weight_of(name) for name in self._file_of})

    def has_quantised_experts(self) -> bool:
        """ValueError where they are codes that nothing here tells the scales of."""
        found = self._names.of_experts.values()
        names = [name for sources in found for names in sources.values() for name in names]
        if any(is_quantised(name, self._file_of) for name in names):
            return True
        for name in names:
            check_scaled(name, _NAMED.get(self._header(name).get_dtype(), torch.uint8), self._file_of)
        return False

    def rest(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Linears of attention, for one, which transformers computes in FP8 without a backward: dequantised."""
        found: dict[str, Tensor] = {}
        for name in self._names.rest:
            if is_quantised(name, self._file_of):
                found[name] = self._quantised(name).dequantise(dtype)
            else:
                found[name] = self._read(name)
                check_scaled(name, found[name].dtype, self._file_of)
        return found

    def plain_experts(self) -> dict[str, Tensor]:
        found = self._names.of_experts.values()
        return {name: self._read(name) for sources in found for names in sources.values() for name in names}

    def experts(self, name: str, module: Any, dtype: torch.dtype) -> QuantisedExperts:
        found = described(module)
        if found.fused is None:
            expected = "an activation that aMoEba computes itself"
            raise bad_value("MODEL", expected, f"that of {type(module).__name__} ({name})", REMEDY)
        layout = layout_of(module)
        assert layout is not None  # fused experts are stacked
        experts, hidden, intermediate = layout.num_experts, layout.hidden, layout.intermediate
        gate_up_shape = experts, found.fused.width(intermediate), hidden
        gate_up = self._matrix(f"{name}.{found.up_name}", found, gate_up_shape)
        down = self._matrix(f"{name}.down_proj", found, (experts, hidden, intermediate))
        up_bias = down_bias = None
        if found.has_bias:
            names = (_one(self._names, f"{name}.{part}_bias") for part in (found.up_name, "down_proj"))
            up_bias, down_bias = (self._read(each).to(dtype) for each in names)
        return QuantisedExperts.holding(gate_up, down, up_bias, down_bias, found.fused, dtype, self._products)

    def __enter__(self) -> QuantisedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def _matrix(self, parameter: str, found: ExpertsModule, shape: tuple[int, int, int]) -> QuantisedMatrix:
        """All experts' matrices of a parameter, whatever number of tensors they are in. shape: (E, rows, columns)."""
        sources = matrices_of(self._names, parameter, found)
        if is_stack(self._names, parameter):
            matrix = self._stack(parameter, sources[0][0], found, shape)
        else:
            matrix = self._joined(parameter, sources, shape[2])
        if matrix.shape != shape:
            expected, got = f"{parameter} of shape {shape}, as config.json says", f"{matrix.shape} in the files"
            raise bad_value("MODEL", expected, got, "correct config.json, or download the checkpoint again")
        return matrix

    def _stack(self, parameter: str, name: str, found: ExpertsModule, shape: tuple[int, int, int]) -> QuantisedMatrix:
        may_be = name in self._file_of and not self._is_ours  # blocks of MXFP4 and our own files are (E, out, in)
        there = self._shape(name) if may_be else ()
        if not (may_be and is_transposed(self._names, parameter, found, there, shape)):
            return self._quantised(name, shape[2])
        check_square(name, self.format)
        stored = self._quantised(name, shape[1])
        data, scales = (each.transpose(1, 2).contiguous() for each in (stored.data, stored.scales))
        return replace(stored, data=data, scales=scales, columns=data.shape[2])

    def _joined(self, parameter: str, sources: list[list[str]], columns: int) -> QuantisedMatrix:
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
            1 if self.format.scale == "inside" else len(sources),
            scale,
        )

    def _quantised(self, name: str, columns: int | None = None) -> QuantisedMatrix:
        return read_quantised(name, self.format, self._file_of, self._read, columns, is_ours=self._is_ours)

    def _read(self, name: str) -> Tensor:
        found = self._file(name).get_tensor(self._name_in_file[name])
        return found.reshape(foreign_shape(name, tuple(found.shape))) if self._is_foreign else found

    def _shape(self, name: str) -> tuple[int, ...]:
        if name + ABSMAX in self._file_of:
            return state_of(name, self._file_of, self._read).shape
        return tuple(self._header(name).get_shape())

    def _header(self, name: str) -> Any:
        return self._file(name).get_slice(self._name_in_file[name])

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]


def check_readable(folder: Path, model: Any, facts: Mapping[str, Any]) -> None:
    """ValueError for a quantisation that is left to transformers, but that transformers skips with a warning, or whose
    experts it does not hand over as numbers. model: without weights, on the meta device."""
    from transformers.quantizers.auto import AutoHfQuantizer

    method = facts.get("quant_method")
    if method == "fp8":
        return  # one scale for a matrix, or experts in FP4: transformers dequantises them
    got = f"{model.config.model_type} quantised by {described_method(facts)}"
    expected = "experts in bfloat16, float16 or float32, or quantised (fp8, mxfp4, nf4)"
    if method is not None and not AutoHfQuantizer.supports_quant_method(dict(facts)):
        raise bad_value("MODEL", expected, f"{got}, which transformers does not know either", OTHERWISE)
    files = _files(folder)
    names = sort_names(model, files)
    dtypes = {path: _dtypes_in(path) for path in set(files.values())}
    for name, module in experts_modules(model).items() if files else ():
        for parameter, _ in module.named_parameters():
            sources = [each[0] for each in names.sources(f"{name}.{parameter}").values()]
            kinds = {dtypes[files[each]][each] for each in sources}
            if not sources or not kinds <= _PLAIN:
                there = " and ".join(sorted(kinds)) or "no such tensor"
                raise bad_value("MODEL", expected, f"{got}: {there} for {name}.{parameter}", OTHERWISE)


def described_method(facts: Mapping[str, Any]) -> str:
    named = (facts.get(each) for each in ("quant_algo", "format", "bnb_4bit_quant_type", "quant_type"))
    algorithm = next((f" ({str(each)[:40]})" for each in named if each is not None), "")
    return f"{facts.get('quant_method')}{algorithm}"


def check_no_codes(folder: Path) -> None:
    """ValueError where config.json tells of no quantisation and weights are codes: they would be read as numbers."""
    for path in _paths(folder):
        for name, dtype in _dtypes_in(path).items():
            if dtype.startswith("F8"):
                expected = "quantization_config in config.json for weights in FP8"
                raise bad_value("MODEL", expected, f"none, and {name} in {dtype}", OTHERWISE)


def is_quantised(name: str, names: Container[str]) -> bool:
    return any(name + suffix in names for suffix in (BLOCKS, SCALE_INV, ABSMAX))


def check_scaled(name: str, dtype: torch.dtype, names: Container[str]) -> None:
    """Codes without their scales would be loaded as the numbers that they are not."""
    if dtype.itemsize == 1 and dtype.is_floating_point and not is_quantised(name, names):
        got = f"the numbers alone ({str(dtype).removeprefix('torch.')})"
        raise bad_value("MODEL", f"{name} with its scales, {name}{SCALE_INV}", got, AGAIN)


def usual_name(name: str, codes: Container[str]) -> str:
    """`weight_scale_inv` where these files call it something else. codes: the weights that are such."""
    for ending in _OTHER_SCALES:
        weight = name.removesuffix(ending) + ".weight"
        if name.endswith(ending) and weight in codes:
            return weight + SCALE_INV
    return name


def is_foreign(facts: Mapping[str, Any]) -> bool:
    return facts.get("quant_method") in ("compressed-tensors", "modelopt")


def foreign_name(name: str) -> str:
    """The usual one."""
    ending = next((each for each in _FOREIGN_NAMES if name.endswith(each)), None)
    return name if ending is None else name.removesuffix(ending) + _FOREIGN_NAMES[ending]


def foreign_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of scales, as it would be here. name: the usual."""
    if name.endswith((MATRIX_SCALE, MATRIX_DIVISOR)) and shape == (1,):
        return ()
    return (math.prod(shape), 1) if name.endswith(SCALE_INV) and len(shape) < 2 else shape


def scale_dtypes(format: Format) -> tuple[torch.dtype, ...]:
    """In files. Where the format has fp32, those of one byte are exponents."""
    if format.scale == "fp32":
        return (*_WIDE_SCALES, *_SCALE_CODES)
    return CODE_DTYPES if format.scale == "e4m3" else _SCALE_CODES


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
    if name + ABSMAX in names:
        rows = read_nf4(name, names, read)
        numbers = rows.shape[-1] * format.block[1] // format.stored_columns(format.block[1])
        return QuantisedMatrix(rows, rows.new_empty((*rows.shape[:-2], 0, 0)), format, numbers)
    of_blocks = (name + SCALES,) if name + BLOCKS in names else ()
    divides = name + MATRIX_DIVISOR in names
    of_matrix = (name + (MATRIX_DIVISOR if divides else MATRIX_SCALE),) if format.has_matrix_scale else ()
    for needed in (*of_blocks, *of_matrix):
        if needed not in names:
            raise bad_value("MODEL", f"a tensor {needed}", "none in the checkpoint", AGAIN)
    if name + BLOCKS in names:
        codes, scales = read(name + BLOCKS), read(name + SCALES)
        data = codes.flatten(-2)  # (..., H/32, 16)
    else:
        codes, scales = read(name), read(name + SCALE_INV)
        data = codes.squeeze(-1) if is_ours else codes
    columns = columns or data.shape[-1] * 8 // format.element.bits
    _check_tensors(name, format, data, codes.dtype, scales, columns)
    if scales.dtype.itemsize == 1:
        scales = scales.view(torch.uint8)
        scales = E8M0.decode(scales) if format.scale == "fp32" else scales  # ue8m0
    elif format.scale == "fp32":
        scales = scales.float()
    matrix_scale = None
    if format.has_matrix_scale:
        matrix_scale = 1 / read(*of_matrix) if divides else read(*of_matrix)
    return QuantisedMatrix(data.view(torch.uint8), scales, format, columns, 1, matrix_scale)


def _check_tensors(name: str, format: Format, data: Tensor, codes: torch.dtype, scales: Tensor, columns: int) -> None:
    for dtype, dtypes, what in ((codes, CODE_DTYPES, "numbers"), (scales.dtype, scale_dtypes(format), "scales")):
        if dtype not in dtypes:
            expected = f"{what} of {name} in one of {', '.join(str(each).removeprefix('torch.') for each in dtypes)}"
            raise bad_value("MODEL", expected, str(dtype).removeprefix("torch."), REMEDY)
    *leading, rows, stored = data.shape
    blocks = *leading, *block_counts(rows, columns, format)
    if stored != format.stored_columns(columns) or tuple(scales.shape) != blocks:
        expected = f"{name} in {format.name}: {columns} columns and scales of shape {blocks}"
        got = f"numbers of shape {tuple(data.shape)} and scales of shape {tuple(scales.shape)}"
        raise bad_value("MODEL", expected, got, REMEDY)


def matrices_of(names: CheckpointNames, parameter: str, found: ExpertsModule) -> list[list[str]]:
    """The weights that a parameter of experts is made of: of each part of its rows, gate and up, all experts' in their
    order; or one alone, of all experts."""
    sources, converter = names.own_sources(parameter), names.converter(parameter)
    if not sources:
        raise bad_value("MODEL", f"weights for {parameter}", "none in the checkpoint", "download it again")
    if converter is None:
        return [[_one(names, parameter)]]
    patterns = list(converter.source_patterns)
    if is_stack(names, parameter) and not (found.interleaved or found.transposed):
        return [[_one(names, parameter)]]
    kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    known = {("MergeModulelist", 0), ("Concatenate", 1), ("Force16BytesAlignment", None), (SPLITS_LISTS, None)}
    if set(sources) != set(patterns) or not set(kinds) <= known or found.interleaved or found.transposed:
        raise bad_value("MODEL", "experts stored one by one, gate, up and down", f"{parameter} by {kinds}", REMEDY)
    return [sources[each] for each in patterns]


def is_stack(names: CheckpointNames, parameter: str) -> bool:
    """Whether the checkpoint has all experts of a parameter in one tensor."""
    converter = names.converter(parameter)
    if converter is None:
        return True
    kinds = [type(each).__name__ for each in converter.operations]
    return kinds == ["Transpose"] and {converter.operations[0].dim0, converter.operations[0].dim1} == {1, 2}


def is_transposed(
    names: CheckpointNames, parameter: str, found: ExpertsModule, there: tuple[int, ...], shape: tuple[int, int, int]
) -> bool:
    """Whether one tensor of all experts is (E, in, out). there: its shape. shape: (E, out, in)."""
    converter = names.converter(parameter)
    if converter is None:
        return found.transposed
    return not (getattr(converter.operations[0], "check_dims", False) and there == shape)


def check_square(name: str, format: Format) -> None:
    rows, columns = format.block
    if rows != columns:
        got = f"{rows} x {columns} in {name}, which is stored as (experts, in, out)"
        raise bad_value("MODEL", "square blocks of scales in a transposed tensor", got, REMEDY)


def _one(names: CheckpointNames, parameter: str) -> str:
    found = [name for each in names.sources(parameter).values() for name in each]
    if len(found) != 1:
        raise bad_value("MODEL", f"one tensor for {parameter}", f"{len(found)}", "download the checkpoint again")
    return found[0]


def _files(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for path in _paths(folder):
        if not path.is_file():
            raise bad_value("MODEL", f"a file {path.name}, as {_INDEX} says", f"none in {str(folder)!r}", AGAIN)
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _paths(folder: Path) -> Iterable[Path]:
    index = folder / _INDEX
    if (folder / _ONE_FILE).is_file():
        return [folder / _ONE_FILE]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise bad_value(str(index), "an index of safetensors files", one_line(error), AGAIN) from error
    return [folder / name for name in sorted(names)]


def _dtypes_in(path: Path) -> dict[str, str]:
    """As safetensors calls them; nothing of a file that cannot be read, which loading it will tell."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError):
        return {}


def weight_of(name: str) -> str:
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix)


def _common(parts: list[QuantisedMatrix]) -> Tensor:
    scales = [part.matrix_scale for part in parts if part.matrix_scale is not None]
    if any(not torch.equal(scale, scales[0]) for scale in scales):
        remedy = "quantise the model with amoeba quantise"
        raise bad_value("MODEL", "one scale for gate and up of an expert", "two", remedy)
    return scales[0]
