"""A model's folder written again with its experts in a block-scaled format, one layer in memory at a time.

    report = quantise_folder("models/qwen3", "models/qwen3-fp8", "fp8", progress=print)

Experts alone are quantised. In fp8 the folder is one like DeepSeek-V3's and Qwen3's, in mxfp4 one of gpt-oss is as
OpenAI ships it: plain transformers reads both. The other formats it does not know, and says so.

Each layer is a file that gets its name when it is whole; config.json, without which a folder is no model, comes last.
So what was killed goes on with the layer it was in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amoeba.core.errors import BadValue, bad_value
from amoeba.integrations.experts_module import described, experts_modules
from amoeba.integrations.model_folder import UNFINISHED, load_config, load_without_weights
from amoeba.integrations.quantised_files import BLOCKS, MATRIX_SCALE, OURS, SCALE_INV, SCALES
from amoeba.precision.formats import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.layers import LayerEntry
from amoeba.stream.store.packing import appears_whole, copy_small_files, fingerprint, only_one, room_for
from amoeba.stream.store.pieces import Piece
from amoeba.stream.store.tensor_files import SHARDS, TensorEntry, checkpoint_tensors, header_of, tensors_of

FORMATS: dict[str, Format] = {"fp8": FP8_128, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
_CONFIG = "config.json"


@dataclass(frozen=True)
class Progress:
    layer: int  # being written
    layers: int


@dataclass(frozen=True)
class QuantiseReport:
    model: str
    out: str
    format: str
    layers: int
    experts: int
    expert_bytes: int
    bytes_per_parameter: float  # of experts, with their scales
    read_by_transformers: bool
    resumed_layers: int  # that an earlier run had written
    seconds: float


def quantise_folder(
    model: str | Path,
    out: str | Path,
    format: str,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] = lambda now: None,
) -> QuantiseReport:
    """format: fp8, mxfp8, mxfp4 or nvfp4. Called again after it was interrupted, it goes on where it was."""
    if format not in FORMATS:
        raise bad_value("--format", f"one of {', '.join(FORMATS)}", repr(format), "use fp8, the most accurate one")
    with FolderStore(model, trust_remote_code=trust_remote_code) as source:
        source.check_plain("give the unquantised checkpoint")
        return _Quantising(source, Path(out).expanduser(), format, trust_remote_code, progress).run()


class _Quantising:
    def __init__(
        self, source: FolderStore, out: Path, name: str, trust_remote_code: bool, progress: Callable[[Progress], None]
    ) -> None:
        self.source, self.out, self.name, self.format, self.progress = source, out, name, FORMATS[name], progress
        config = load_config(str(source.folder), trust_remote_code=trust_remote_code)
        self.model = load_without_weights(config, str(source.folder), trust_remote_code=trust_remote_code)
        self.tensors = checkpoint_tensors(source.folder)
        self.name_of = {(entry.file, entry.start): each for each, entry in self.tensors.items()}
        count = len(source.layers) + 1
        self.files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        self.facts = {"fingerprint": fingerprint(source), "format": name}

    def run(self) -> QuantiseReport:
        began = time.monotonic()
        self._check_out()
        is_new = not self.out.exists()
        self.out.mkdir(parents=True, exist_ok=True)
        with only_one(self.out), room_for(self.out, lambda: "room"):
            resumed = [number for number, file in enumerate(self.files[:-1]) if (self.out / file).is_file()]
            _write(self.out / UNFINISHED, json.dumps(self.facts))
            for number, file in enumerate(self.files[:-1]):
                self.progress(Progress(number, len(self.source.layers)))
                if number not in resumed:
                    try:
                        tensors = self._layer(number)
                    except BadValue:  # this checkpoint can never be finished, so nothing of it stays
                        self._remove(is_new)
                        raise
                    self._save(file, tensors)
            if not (self.out / self.files[-1]).is_file():
                left_out = {name: _read(self.tensors[name]) for name in self.source.left_out}
                self._save(self.files[-1], dict(self.source.rest_tensors()) | left_out)
            copy_small_files(self.source.folder, self.out, but=(_CONFIG,))
            expert_bytes = self._write_index()
            _write(self.out / _CONFIG, json.dumps(self._config(), indent=2))
            (self.out / UNFINISHED).unlink()
        layers = self.source.layers
        numbers = sum(entry.experts * sum(_numbers(entry)) for entry in layers)
        return QuantiseReport(
            model=str(self.source.folder),
            out=str(self.out),
            format=self.name,
            layers=len(layers),
            experts=sum(entry.experts for entry in layers),
            expert_bytes=expert_bytes,
            bytes_per_parameter=round(expert_bytes / numbers, 4),
            read_by_transformers=self._method() != OURS,
            resumed_layers=len(resumed),
            seconds=round(time.monotonic() - began, 3),
        )

    def _check_out(self) -> None:
        if not self.out.exists():
            return
        unfinished = self.out / UNFINISHED
        told = json.loads(unfinished.read_text()) if unfinished.is_file() else None
        if told != self.facts and any(self.out.iterdir()):
            own = self.out.resolve() == self.source.folder.resolve()
            found = "is the model itself" if own else "holds another model or format" if told else "is there"
            remedy = "choose another name" if own else "choose another name, or remove it"
            raise bad_value("--out", "a new folder, or an unfinished one", f"{str(self.out)!r}, which {found}", remedy)

    def _remove(self, with_folder: bool) -> None:
        for file in (*self.files, UNFINISHED):
            (self.out / file).unlink(missing_ok=True)
        if with_folder:
            self.out.rmdir()

    def _layer(self, number: int) -> dict[str, Tensor]:
        """All tensors of a layer's experts, by the names of the checkpoint's own where it has one for each expert."""
        entry, pieces, matrices = self.source.layers[number], self.source.pieces[number], self._matrices(number)
        if any(piece.stacked for piece in matrices):
            found = self._stacked(number, entry)
        else:
            self._check_plain(entry, matrices)
            found = self._one_by_one(number, entry, matrices)
        biases = pieces[-2:] if entry.has_bias else ()
        return found | {self.name_of[t.file, t.start]: _read(t) for piece in biases for t in piece.tensors}

    def _matrices(self, number: int) -> tuple[Piece, ...]:
        return self.source.pieces[number][: -2 if self.source.layers[number].has_bias else None]

    def _one_by_one(self, number: int, entry: LayerEntry, pieces: tuple[Piece, ...]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        parts = len(pieces) - 1
        for expert, (gate_up, down) in enumerate(self._experts(number, entry)):
            names = [self.name_of[each.tensors[expert].file, each.tensors[expert].start] for each in pieces]
            up = quantise(gate_up, self.format, parts=parts)
            rows = zip(up.data.chunk(parts), up.scales.chunk(parts), strict=True)
            for name, (data, scales) in zip(names[:parts], rows, strict=True):
                found |= self._named(name, QuantisedMatrix(data, scales, up.format, up.columns, 1, up.matrix_scale))
            found |= self._named(names[-1], quantise(down, self.format))
        return found

    def _stacked(self, number: int, entry: LayerEntry) -> dict[str, Tensor]:
        about = described(experts_modules(self.model)[entry.name])
        matrices: list[list[QuantisedMatrix]] = [[], []]
        for gate_up, down in self._experts(number, entry):
            if about.interleaved:  # as the module has its rows
                gate_up = torch.stack(gate_up.chunk(2), dim=1).flatten(0, 1)
            for stack, matrix in zip(matrices, (gate_up, down), strict=True):
                stack.append(quantise(matrix, self.format))
        found: dict[str, Tensor] = {}
        for parameter, stack in zip((about.up_name, "down_proj"), matrices, strict=True):
            scales = [one.matrix_scale for one in stack if one.matrix_scale is not None]
            whole = QuantisedMatrix(
                torch.stack([one.data for one in stack]),
                torch.stack([one.scales for one in stack]),
                self.format,
                stack[0].columns,
                1,
                torch.stack(scales) if scales else None,
            )
            found |= self._named(f"{entry.name}.{parameter}", whole)
        return found

    def _named(self, name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
        if self._method() == "mxfp4":
            return {name + BLOCKS: matrix.data.unflatten(-1, (-1, 16)), name + SCALES: matrix.scales}
        data = matrix.data.unsqueeze(-1) if self._method() == OURS else matrix.data.view(torch.float8_e4m3fn)
        found = {name: data, name + SCALE_INV: matrix.scales}
        return found if matrix.matrix_scale is None else found | {name + MATRIX_SCALE: matrix.matrix_scale}

    def _experts(self, number: int, entry: LayerEntry) -> Iterator[tuple[Tensor, Tensor]]:
        """gate_up, all rows of gate first, and down; in memory that the next ones overwrite."""
        blob = aligned_buffer(entry.expert_bytes)
        for expert in range(entry.experts):
            self.source.read(number, expert, blob)
            self._check_finite(self._matrices(number), expert, blob)
            gate_up, down, _, _ = self.source.views(number, blob)
            yield gate_up, down

    def _check_finite(self, matrices: tuple[Piece, ...], expert: int, blob: Tensor) -> None:
        """Codes and scales of a block with a NaN or an infinity would pass for those of numbers, here or elsewhere."""
        for piece in matrices:
            if not piece.numbers(blob).isfinite().all():
                tensor = piece.tensors[0 if piece.stacked else expert]
                name = self.name_of[tensor.file, tensor.start]
                found = f"a NaN or an infinity in {name}" + (f", expert {expert}" if piece.stacked else "")
                raise bad_value("MODEL", f"finite numbers, which {self.name} can hold", found, "correct the checkpoint")

    def _check_plain(self, entry: LayerEntry, pieces: tuple[Piece, ...]) -> None:
        plain = all(len(piece.shape) == 2 and piece.stride == (piece.shape[1], 1) for piece in pieces)
        if not plain or any(len(piece.tensors) != entry.experts for piece in pieces):
            expected = "experts stored one by one as gate, up and down, or all in one tensor"
            raise bad_value(
                "MODEL", expected, f"another layout ({entry.name})", "convert the checkpoint to one of these"
            )

    def _method(self) -> str:
        """quant_method of config.json: transformers' own where it reads what is written here as it was meant."""
        sizes = [size for entry in self.source.layers for size in (entry.hidden, entry.intermediate)]
        if self.name == "mxfp4" and self.model.config.model_type == "gpt_oss":
            return OURS if any(size % 32 for size in sizes) else "mxfp4"  # its reader knows whole blocks alone
        # its reader takes blocks to be equal parts of a matrix
        whole = all(size % 128 == 0 or size < 128 for size in sizes)
        return "fp8" if self.name == "fp8" and whole and not self.source.pieces[0][0].stacked else OURS

    def _config(self) -> dict[str, Any]:
        config = json.loads((self.source.folder / _CONFIG).read_bytes())
        method = self._method()
        facts: dict[str, Any] = {"quant_method": method, "modules_to_not_convert": self._others()}
        if method == "fp8":
            facts |= {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
        elif method == OURS:
            facts |= {"format": self.format.name}
        return config | {"quantization_config": facts}

    def _others(self) -> list[str]:
        """Linears beside the experts, as names end: transformers would take them for quantised ones."""
        linears = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        # of parts that are copied and not loaded here, such as a vision part
        linears += [name.removesuffix(".weight") for name in self.source.left_out if name.endswith(".weight")]
        return sorted({".".join(name.split(".")[-2:]) for name in linears if ".experts." not in f".{name}."})

    def _save(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """The widest numbers first, so that each tensor begins at a multiple of its own width."""
        ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        path = self.out / file
        entries = {name: TensorEntry(path, 0, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered}
        with appears_whole(path) as write:
            write(memoryview(header_of(entries)))
            for _, tensor in ordered:
                flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
                write(Memory(flat, flat.numel()).bytes)

    def _write_index(self) -> int:
        """The bytes of the experts' matrices."""
        found = {file: tensors_of(self.out / file) for file in self.files}
        sizes = [entry.size for tensors in found.values() for entry in tensors.values()]
        weight_map = {name: file for file, tensors in found.items() for name in tensors}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        _write(self.out / SHARDS, json.dumps(index, indent=1))
        experts = (e for file in self.files[:-1] for name, e in found[file].items() if not name.endswith("bias"))
        return sum(entry.size for entry in experts)


def _numbers(entry: LayerEntry) -> tuple[int, int]:
    """Of one expert's two matrices."""
    return entry.activation.width(entry.intermediate) * entry.hidden, entry.hidden * entry.intermediate


def _read(entry: TensorEntry) -> Tensor:
    data = torch.empty(entry.size, dtype=torch.uint8, device="cpu")
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        file.readinto(Memory(data, entry.size).bytes)
    return data.view(entry.dtype).view(entry.shape)


def _write(path: Path, text: str) -> None:
    with appears_whole(path) as write:
        write(memoryview(text.encode()))
