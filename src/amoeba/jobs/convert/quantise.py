"""`amoeba quantise`: writes a model folder with quantised experts, a few experts in memory at a time.

    report = quantise_folder("models/qwen3", "models/qwen3-fp8", "fp8", progress=print)

Experts alone are quantised. In fp8 the folder is one like DeepSeek-V3's and Qwen3's, in mxfp4 one of gpt-oss is as
OpenAI ships it: plain transformers reads both. The other formats it does not know, and says so.

Experts are read, quantised and written at the same time: on a GPU where there is one, else by the C++ core, else with
torch; the bytes are the same. In four bits each block has the scale with the least squared error of those near the
usual one. Each layer is a file that gets its name when it is whole, and config.json comes last: what was killed goes on
with the layer it was in.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from amoeba.core.errors import BadValue, bad_value
from amoeba.core.log import logger
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.quantise import Quantise, is_compiled, load_quantise
from amoeba.integrations.experts_module import ExpertsModule, described, experts_modules
from amoeba.integrations.model_folder import UNFINISHED, load_config, load_without_weights
from amoeba.integrations.quantised_files import BLOCKS, MATRIX_SCALE, OURS, SCALE_INV, SCALES
from amoeba.jobs.convert.plain_folder import write_plain
from amoeba.precision.formats import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.precision.quantised import QuantisedMatrix, empty_quantised, quantise
from amoeba.stream.store import open_store
from amoeba.stream.store.folder import FolderStore
from amoeba.stream.store.layers import LayerEntry
from amoeba.stream.store.packing import copy_small_files, fingerprint, only_one, room_for
from amoeba.stream.store.tensor_files import SHARDS, Piece, TensorEntry, checkpoint_tensors, header_of, tensors_of
from amoeba.system.files import WholeFile, write_whole
from amoeba.system.pipeline import ahead

FORMATS: dict[str, Format] = {"fp8": FP8_128, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
_CONFIG = "config.json"
_COPIES = 16  # of a matrix in fp32 that torch has at the same time, at most, while it quantises it


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
    device: torch.device | None = None,
    progress: Callable[[Progress], None] = lambda now: None,
) -> QuantiseReport:
    """format: fp8, mxfp8, mxfp4 or nvfp4. device: that quantises, None for a GPU with enough free memory, else the CPU.
    Called again after it was interrupted, it goes on where it was; not with a store or experts in another format, which
    are written as numbers first."""
    if format not in FORMATS:
        raise bad_value("--format", f"one of {', '.join(FORMATS)}", repr(format), "use fp8, the most accurate one")
    target = Path(out).expanduser()
    with open_store(model, trust_remote_code=trust_remote_code) as source:
        if isinstance(source, FolderStore) and source.rest_is_stored and source.format is None:
            return _Quantising(source, target, format, trust_remote_code, device, progress).run()
        if target.exists():
            remedy = "choose another"
            raise bad_value("--out", "a folder that does not exist yet", f"{str(out)!r}, which exists", remedy)
        numbers, staging = (target.with_name(f".{target.name}.{part}") for part in ("numbers", "writing"))
        try:
            for folder in (numbers, staging):
                shutil.rmtree(folder, ignore_errors=True)
            # in fp32: what is quantised again would otherwise be rounded once more
            write_plain(source, numbers, torch.float32, trust_remote_code=trust_remote_code)
            with FolderStore(numbers, trust_remote_code=trust_remote_code) as plain:
                report = _Quantising(plain, staging, format, trust_remote_code, device, progress).run()
            staging.rename(target)
            return replace(report, model=str(model), out=str(target))
        finally:
            for folder in (numbers, staging):
                shutil.rmtree(folder, ignore_errors=True)


class _Item(NamedTuple):
    file: int
    expert: int | None = None
    copied: tuple[TensorEntry, ...] = ()
    last: bool = False  # of its file


class _Quantising:
    def __init__(
        self,
        source: FolderStore,
        out: Path,
        name: str,
        trust_remote_code: bool,
        device: torch.device | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.source, self.out, self.name, self.format, self.progress = source, out, name, FORMATS[name], progress
        config = load_config(str(source.folder), trust_remote_code=trust_remote_code)
        self.model = load_without_weights(config, str(source.folder), trust_remote_code=trust_remote_code)
        self.tensors = checkpoint_tensors(source.folder)
        self.name_of = {(entry.file, entry.start): each for each, entry in self.tensors.items()}
        count = len(source.layers) + 1
        self.files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        self.facts = {"fingerprint": fingerprint(source), "format": name}
        self.device = _device(source.layers) if device is None else device
        self.threads = torch.get_num_threads()  # another thread would be told another number
        self.layouts: dict[int, dict[str, TensorEntry]] = {}
        self.open_files: dict[int, WholeFile] = {}
        self.free_blobs: deque[Tensor] = deque()

    def run(self) -> QuantiseReport:
        began = time.monotonic()
        self._check_out()
        is_new = not self.out.exists()
        self.out.mkdir(parents=True, exist_ok=True)
        with only_one(self.out), room_for(self.out, lambda: "room"):
            resumed = [number for number, file in enumerate(self.files[:-1]) if (self.out / file).is_file()]
            write_whole(self.out / UNFINISHED, json.dumps(self.facts))
            try:
                self._write_files()
            except BadValue:  # this checkpoint can never be finished, so nothing of it stays
                for file in (*self.files, UNFINISHED):
                    (self.out / file).unlink(missing_ok=True)
                if is_new:
                    self.out.rmdir()
                raise
            copy_small_files(self.source.folder, self.out, but=(_CONFIG,))
            expert_bytes = self._write_index()
            write_whole(self.out / _CONFIG, json.dumps(self._config(), indent=2))
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

    def _write_files(self) -> None:
        """Those that are not there. Reading, quantising, writing and waiting for the disk go on at the same time."""
        missing = [number for number, file in enumerate(self.files) if not (self.out / file).is_file()]
        layers = len(self.source.layers)
        on_gpu = self.device.type == "cuda"
        quantised = ahead(self._quantise, ahead(self._read, self._items(missing), threads=2), threads=1 + on_gpu)
        try:
            self.progress(Progress(min(missing, default=layers), layers))
            with closing(ahead(self._finish, _whole_files(ahead(self._write, quantised)), most=2)) as finished:
                for number in finished:
                    self.progress(Progress(min(number + 1, layers), layers))
        finally:
            while self.open_files:
                self.open_files.popitem()[1].discard()

    def _items(self, files: list[int]) -> Iterator[_Item]:
        for number in files:
            if number < len(self.source.layers):
                entry, pieces = self.source.layers[number], self.source.pieces[number]
                self._check_plain(entry, self._matrices(number))
                for expert in range(entry.experts):
                    yield _Item(number, expert)
                biases = pieces[-2:] if entry.has_bias else ()
                yield _Item(number, copied=tuple(t for piece in biases for t in piece.tensors), last=True)
            else:
                for tensor in self._rest().values():
                    yield _Item(number, copied=(tensor,))
                yield _Item(number, last=True)

    def _rest(self) -> dict[str, TensorEntry]:
        return {name: self.tensors[name] for name in (*self.source.rest, *self.source.left_out)}

    def _read(self, item: _Item) -> tuple[_Item, Tensor | None]:
        if item.expert is None:
            return item, None
        size = self.source.layers[item.file].expert_bytes
        blob = self._blob(size)
        self.source.read(item.file, item.expert, blob[:size])
        return item, blob

    def _blob(self, size: int) -> Tensor:
        """One that was used before, or a new one: there are never more than experts in flight."""
        while self.free_blobs:
            if len(found := self.free_blobs.popleft()) >= size:
                return found
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.device.type == "cuda")

    def _quantise(self, read: tuple[_Item, Tensor | None]) -> tuple[_Item, dict[str, Tensor]]:
        item, blob = read
        if blob is None or item.expert is None:
            return item, {self.name_of[each.file, each.start]: _read(each) for each in item.copied}
        entry = self.source.layers[item.file]
        here = blob[: entry.expert_bytes].to(self.device, non_blocking=True)
        gate_up, down, _, _ = self.source.views(item.file, here)
        if self._is_stacked(item.file) and self._module(item.file).interleaved:  # as the module has its rows
            gate_up = torch.stack(gate_up.chunk(2), dim=1).flatten(0, 1)
        matrices = self._quantised(gate_up, self._parts(item.file)), self._quantised(down)
        if None in matrices:
            self._check_finite(self._matrices(item.file), item.expert, here)
        named = self._named_expert(item.file, item.expert, *cast(tuple[QuantisedMatrix, QuantisedMatrix], matrices))
        found = {name: tensor.cpu() for name, tensor in named.items()}
        self.free_blobs.append(blob)  # what was copied to a GPU is there by now
        return item, found

    def _quantised(self, matrix: Tensor, parts: int = 1) -> QuantisedMatrix | None:
        """None where a number is not finite."""
        format, core = self.format, None if matrix.is_cuda else _core()
        bits, scale, block = format.element.bits, format.scale, format.block
        if core is not None and matrix.numel() and is_compiled(torch.float32, bits, scale, block):
            found = empty_quantised(tuple(matrix.shape), format, parts)
            matrix = matrix if is_compiled(matrix.dtype, bits, scale, block) else matrix.float()
            tensors = found.data, found.scales, found.matrix_scale
            is_finite = core(matrix, bits, scale, block, parts, *tensors, closest=True, threads=self.threads)
            return found if is_finite else None
        return quantise(matrix, format, parts=parts, closest=True) if matrix.isfinite().all() else None

    def _write(self, quantised: tuple[_Item, dict[str, Tensor]]) -> _Item:
        item, tensors = quantised
        if item.file not in self.open_files:
            header, self.layouts[item.file] = self._layout(item.file)
            self.open_files[item.file] = WholeFile(self.out / self.files[item.file])
            self.open_files[item.file].write(0, memoryview(header))
        layout, file = self.layouts[item.file], self.open_files[item.file]
        for name, tensor in tensors.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
            one_of_many = item.expert is not None and self._is_stacked(item.file)
            begin = (item.expert or 0) * len(data) if one_of_many else 0
            file.write(layout[name].start + begin, data.numpy().data)
        return item

    def _finish(self, number: int) -> int:
        self.open_files[number].finish()
        del self.open_files[number]
        return number

    def _layout(self, number: int) -> tuple[bytes, dict[str, TensorEntry]]:
        """The header of a file, and where its tensors belong; the widest numbers first, so that each tensor begins at
        a multiple of its own width."""
        found: dict[str, TensorEntry] = {}
        path = self.out / self.files[number]
        if number == len(self.source.layers):
            found = self._rest()
        else:
            entry = self.source.layers[number]
            stacked, parts = self._is_stacked(number), self._parts(number)
            rows, hidden, inner = entry.activation.width(entry.intermediate), entry.hidden, entry.intermediate
            up = empty_quantised((rows, hidden), self.format, parts, "meta")
            down = empty_quantised((hidden, inner), self.format, 1, "meta")
            for expert in range(1 if stacked else entry.experts):
                for name, tensor in self._named_expert(number, expert, up, down).items():
                    shape = (entry.experts, *tensor.shape) if stacked else tuple(tensor.shape)
                    found[name] = TensorEntry(path, 0, tensor.dtype, shape)
            for piece in self.source.pieces[number][-2:] if entry.has_bias else ():
                found |= {self.name_of[each.file, each.start]: each for each in piece.tensors}
        ordered = dict(sorted(found.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        header = header_of(ordered)
        end = len(header)
        for name, entry_of in ordered.items():
            ordered[name] = replace(entry_of, file=path, start=end)
            end += entry_of.size
        return header, ordered

    def _matrices(self, number: int) -> tuple[Piece, ...]:
        return self.source.pieces[number][: -2 if self.source.layers[number].has_bias else None]

    def _is_stacked(self, number: int) -> bool:
        return any(piece.stacked for piece in self._matrices(number))

    def _parts(self, number: int) -> int:
        """Of gate_up: gate and up are tensors of their own where experts are."""
        return 1 if self._is_stacked(number) else len(self._matrices(number)) - 1

    @functools.cache  # noqa: B019  it lives as long as the job
    def _module(self, number: int) -> ExpertsModule:
        return described(experts_modules(self.model)[self.source.layers[number].name])

    def _named_expert(self, number: int, expert: int, up: QuantisedMatrix, down: QuantisedMatrix) -> dict[str, Tensor]:
        """By the names of the checkpoint's own where it has one for each expert."""
        pieces, parts = self._matrices(number), up.parts
        if self._is_stacked(number):
            name = self.source.layers[number].name
            return self._named(f"{name}.{self._module(number).up_name}", up) | self._named(f"{name}.down_proj", down)
        names = [self.name_of[each.tensors[expert].file, each.tensors[expert].start] for each in pieces]
        found: dict[str, Tensor] = {}
        for name, data, scales in zip(names[:parts], up.data.chunk(parts), up.scales.chunk(parts), strict=True):
            found |= self._named(name, QuantisedMatrix(data, scales, up.format, up.columns, 1, up.matrix_scale))
        return found | self._named(names[-1], down)

    def _named(self, name: str, matrix: QuantisedMatrix) -> dict[str, Tensor]:
        if self._method() == "mxfp4":
            return {name + BLOCKS: matrix.data.unflatten(-1, (-1, 16)), name + SCALES: matrix.scales}
        data = matrix.data.unsqueeze(-1) if self._method() == OURS else matrix.data.view(torch.float8_e4m3fn)
        found = {name: data, name + SCALE_INV: matrix.scales}
        return found if matrix.matrix_scale is None else found | {name + MATRIX_SCALE: matrix.matrix_scale}

    def _check_finite(self, matrices: tuple[Piece, ...], expert: int, blob: Tensor) -> None:
        """Codes and scales of a block with a NaN or an infinity would pass for those of numbers, here or elsewhere."""
        for piece in matrices:
            if not piece.numbers(blob).isfinite().all():
                tensor = piece.tensors[0 if piece.stacked else expert]
                name = self.name_of[tensor.file, tensor.start]
                found = f"a NaN or an infinity in {name}" + (f", expert {expert}" if piece.stacked else "")
                raise bad_value("MODEL", f"finite numbers, which {self.name} can hold", found, "correct the checkpoint")

    def _check_plain(self, entry: LayerEntry, pieces: tuple[Piece, ...]) -> None:
        if any(piece.stacked for piece in pieces):
            return
        plain = all(len(piece.shape) == 2 and piece.stride == (piece.shape[1], 1) for piece in pieces)
        if not plain or any(len(piece.tensors) != entry.experts for piece in pieces):
            expected = "experts stored one by one as gate, up and down, or all in one tensor"
            remedy = "convert the checkpoint to one of these"
            raise bad_value("MODEL", expected, f"another layout ({entry.name})", remedy)

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
        """Linears outside the experts, by the ends of their names: transformers would take them for quantised ones."""
        linears = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        # of parts that are copied and not loaded here, such as a vision part
        linears += [name.removesuffix(".weight") for name in self.source.left_out if name.endswith(".weight")]
        return sorted({".".join(name.split(".")[-2:]) for name in linears if ".experts." not in f".{name}."})

    def _write_index(self) -> int:
        found = {file: tensors_of(self.out / file) for file in self.files}
        sizes = [entry.size for tensors in found.values() for entry in tensors.values()]
        weight_map = {name: file for file, tensors in found.items() for name in tensors}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        write_whole(self.out / SHARDS, json.dumps(index, indent=1))
        experts = (e for file in self.files[:-1] for name, e in found[file].items() if not name.endswith("bias"))
        return sum(entry.size for entry in experts)


def _numbers(entry: LayerEntry) -> tuple[int, int]:
    return entry.activation.width(entry.intermediate) * entry.hidden, entry.hidden * entry.intermediate


def _read(entry: TensorEntry) -> Tensor:
    data = torch.empty(entry.size, dtype=torch.uint8, device="cpu")
    with open(entry.file, "rb") as file:
        file.seek(entry.start)
        file.readinto(data.numpy().data)
    return data.view(entry.dtype).view(entry.shape)


def _whole_files(written: Generator[_Item, None, None]) -> Iterator[int]:
    with closing(written):
        for item in written:
            if item.last:
                yield item.file


def _device(layers: Sequence[LayerEntry]) -> torch.device:
    """A GPU, if the numbers of two experts and what becomes of them fit into what is free there."""
    needed = max(2 * _COPIES * 4 * sum(_numbers(entry)) for entry in layers)
    fits = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > needed
    return torch.device("cuda" if fits else "cpu")


@functools.cache
def _core() -> Quantise | None:
    try:
        return load_quantise()
    except CoreUnavailable as error:
        logger.info("experts are quantised with torch, which is slower: %s", error)
        return None
