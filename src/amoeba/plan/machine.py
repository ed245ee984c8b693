"""What a machine can do: memory, bandwidths and operations per second, measured once and kept, or described.

here = measured_machine()                 # takes seconds the first time; the folder for caches keeps the rates
card = described_machine("4090")          # public figures of a card, or a JSON file with figures of your own
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from amoeba.bench.timing import SIZES, measure_ceilings
from amoeba.core.errors import bad_value, one_line
from amoeba.jobs.model_cost import keep, kept
from amoeba.stream.attaching import gpu as streaming_gpu
from amoeba.stream.gpu.device import copy_rate
from amoeba.stream.sizes import parse_size
from amoeba.stream.store.buffers import Memory, aligned_buffer
from amoeba.stream.store.reading import THREADS, Range, Reader
from amoeba.system.cpu_features import cpu_flags, has_bf16_instructions
from amoeba.system.files import default_folder
from amoeba.system.machine import available_memory, cpu_model, load_average, total_memory, usable_cores

CPU = torch.device("cpu")
_GB, _TERA = 10**9, 10**12
# Read to find out how fast a disk is; a single read gave 1.9 to 4 GB/s of the same one.
_FILE_BYTES, _PIECE, _READS = 128 << 20, 4 << 20, 3
# Share of a public figure that programs reach: of an H200's 989 TFLOP/s a dense product in bf16 has 800, of its
# 4.8 TB/s a copy 4.28, of its link's 64 GB/s copies of pinned memory 55 (docs/benchmarks.md).
_REACHED = {"gpu_flops": 0.81, "gpu_bandwidth": 0.89, "link": 0.86, "peer": 0.8, "network": 0.8}


@dataclass(frozen=True)
class Machine:
    """Rates are in bytes or operations per second; None: there is no such thing, or it is not known.

    source:   "measured", "public figures" or "given".
    ram_free, vram_free: bytes that can be allocated now; of a described machine, all of it.
    disk_free: bytes for a converted checkpoint.
    peer:     between two GPUs of a machine, one way; network: between machines, for each GPU.
    """

    name: str
    source: str
    ram_bytes: int
    ram_free: int
    cores: int
    cpu_flops: float
    cpu_bandwidth: float
    disk: float
    gpu: str | None = None
    vram_bytes: int = 0
    vram_free: int = 0
    gpu_flops: float = 0.0
    gpu_bandwidth: float = 0.0
    link: float = 0.0
    peer: float | None = None
    network: float | None = None
    cpu_fp32_flops: float = 0.0  # 0: those of cpu_flops, which are of the fastest dtype
    whole_numbers: bool = False  # its CPU multiplies codes of 4 bits as they are, by VNNI
    disk_free: int = 1 << 40
    assumed: list[str] = field(default_factory=list)  # names of what was neither measured nor given

    @property
    def rates(self) -> dict[str, float]:
        names = (*_RATES["cpu"], *_RATES["cuda"], "peer", "network")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def vector_flops(self) -> float:
        """Of the CPU in fp32: what unpacks codes, and multiplies few rows."""
        return self.cpu_fp32_flops or self.cpu_flops

    @property
    def has_matrix_units(self) -> bool:
        """Whether the CPU multiplies bf16 much faster than fp32."""
        return self.cpu_flops > 1.5 * self.vector_flops

    @property
    def is_measured(self) -> bool:
        return self.source == "measured" and not {*_RATES["cpu"], *_RATES["cuda"]} & {*self.assumed}

    @property
    def device(self) -> str:
        return "cpu" if self.gpu is None else "cuda"

    def within(self, vram: int | None, ram: int | None, disk: int | None = None) -> Machine:
        """With budgets instead of what is free. vram 0: without its GPU."""
        changed = self if ram is None else replace(self, ram_free=ram, ram_bytes=max(ram, self.ram_bytes))
        changed = changed if disk is None else replace(changed, disk_free=disk)
        if vram == 0:
            return replace(changed, gpu=None, vram_bytes=0, vram_free=0)
        return changed if vram is None or self.gpu is None else replace(changed, vram_free=vram)


_NAMES = {"cpu_flops": "CPU", "cpu_fp32_flops": "CPU in fp32", "gpu_flops": "GPU", "cpu_bandwidth": "host memory"}
_NAMES |= {"gpu_bandwidth": "GPU memory", "disk": "disk", "link": "link to the GPU", "peer": "GPU to GPU"}
_NAMES |= {"network": "network per GPU"}


def rates_in_words(rates: dict[str, float]) -> list[tuple[str, str]]:
    """(what, how fast) for people."""
    return [
        (_NAMES[name], f"{rate / 1e12:.3g} TFLOP/s" if name.endswith("flops") else f"{rate / 1e9:,.4g} GB/s")
        for name, rate in rates.items()
    ]


def _card(memory: float, bandwidth: float, tera: float, link: float, peer: float | None = None) -> dict[str, Any]:
    """GB, GB/s, dense bf16 TFLOP/s with sums in fp32, GB/s one way; as the makers publish them."""
    found = {"vram_bytes": int(memory * 2**30), "gpu_bandwidth": bandwidth * _GB, "gpu_flops": tera * _TERA}
    found |= {"link": link * _GB} | ({} if peer is None else {"peer": peer * _GB})
    return found


# Public figures of cards: nobody measured them for this table. Memory in GiB as a driver reports it.
CARDS: dict[str, dict[str, Any]] = {
    "3060": _card(12, 360, 25.6, 32),
    "3090": _card(24, 936, 71, 32),
    "4060ti-16": _card(16, 288, 44, 16),
    "4070": _card(12, 504, 58, 32),
    "4080": _card(16, 717, 97.5, 32),
    "4090": _card(24, 1008, 165, 32),
    "5090": _card(32, 1792, 209, 64),
    "l4": _card(22.5, 300, 121, 32),
    "l40s": _card(45, 864, 362, 32),
    "a100-40": _card(39.5, 1555, 312, 32, 300),
    "a100-80": _card(79, 2039, 312, 32, 300),
    "h100": _card(79, 3350, 989, 64, 450),
    "h200": _card(140, 4800, 989, 64, 450),
}
# Of the machine around a described card, where nothing else is said.
_AROUND = {"ram_bytes": 64 << 30, "cores": 16, "cpu_flops": 1e12, "cpu_bandwidth": 60e9, "disk": 3e9, "network": 50e9}


def described_machine(name: str) -> Machine:
    """name: of a card in CARDS, or a JSON file with figures named as the fields of `Machine`, and `card` for others."""
    given: dict[str, Any] = {}
    source, key = "public figures", name.lower().removeprefix("rtx").strip(" -")
    if key not in CARDS:
        path = Path(name)
        if not path.is_file():
            remedy = 'or name a JSON file, such as {"card": "4090", "ram_bytes": "32GiB"}'
            raise bad_value("--machine", f"one of {', '.join(CARDS)}, or a JSON file", repr(name), remedy)
        given, source = _read(path), "given"
        key = str(given.pop("card", "")).lower()
        if key and key not in CARDS:
            raise bad_value(f"card in {path}", f"one of {', '.join(CARDS)}", repr(key), "leave it out and give figures")
    public = {what: value * _REACHED.get(what, 1.0) for what, value in CARDS.get(key, {}).items()}
    figures = _AROUND | public | given
    if figures.get("vram_bytes") and (missing := [each for each in _RATES["cuda"] if each not in figures]):
        remedy = "add them, or a card: " + ", ".join(CARDS)
        raise bad_value(f"--machine {name}", "all figures of its GPU", f"none for {', '.join(missing)}", remedy)
    memory = {"ram_free": int(figures["ram_bytes"]), "vram_free": int(figures.get("vram_bytes", 0))}
    card = figures.pop("gpu", key or ("a GPU" if figures.get("vram_bytes") else None))
    assumed = sorted(set(_AROUND) - set(given))
    whole = {what: int(value) for what, value in figures.items() if what in ("ram_bytes", "vram_bytes", "cores")}
    return Machine(name=name, source=source, gpu=card, assumed=assumed, **(memory | figures | whole))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise bad_value(f"--machine {path}", "a JSON object", one_line(error), "correct the file") from error
    own = {"name", "source", "assumed", "ram_free", "vram_free", "disk_free", "whole_numbers"}
    allowed = {each.name for each in fields(Machine)} - own
    if not isinstance(found, dict) or not set(found) <= {*allowed, "card"}:
        got = ", ".join(sorted(set(found) - allowed)) if isinstance(found, dict) else type(found).__name__
        remedy = "correct the file"
        raise bad_value(f"--machine {path}", f"an object of {', '.join(sorted(allowed))}, card", got, remedy)
    for what, value in found.items():
        if what.endswith("_bytes") and isinstance(value, str):
            found[what] = value = parse_size(f"{what} in {path}", value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if what not in ("card", "gpu") and not (is_number and 0 < value < math.inf):
            raise bad_value(f"{what} in {path}", "a number above 0", repr(value), "bytes or operations per second")
    return found


_RATES = {
    "cpu": ("cpu_flops", "cpu_fp32_flops", "cpu_bandwidth", "disk"),
    "cuda": ("gpu_flops", "gpu_bandwidth", "link"),
}


def measured_machine(*, measure: bool = True, gpu: bool = True) -> Machine:
    """This one. measure: False to take what was measured before, and assumptions for the rest, at once. gpu: False to
    plan without it."""
    device = torch.device("cuda") if gpu and torch.cuda.is_available() else CPU
    told: dict[str, Any] = {}
    assumed = ["peer", "network"] if device.type == "cuda" else []
    for each in dict.fromkeys((CPU, device)):
        rates = _rates(each, measure)
        if rates is None:
            card = CARDS["h200"] if each.type == "cuda" else _AROUND
            rates = {name: card[name] for name in _RATES[each.type] if name in card}
            assumed += rates
        told |= rates
    if device.type == "cuda":
        told |= {"gpu": torch.cuda.get_device_name(device), "vram_free": available_memory(device) or 0}
        told |= {"vram_bytes": torch.cuda.get_device_properties(device).total_memory}
        told |= {"peer": CARDS["h200"]["peer"] * _REACHED["peer"], "network": _AROUND["network"]}
    total = total_memory() or 0
    return Machine(
        name=cpu_model(),
        source="measured",
        ram_bytes=total,
        ram_free=available_memory(CPU) or total,
        cores=usable_cores(),
        whole_numbers="avx512_vnni" in cpu_flags() and not has_bf16_instructions(),
        assumed=assumed,
        **told,
    )


def _rates(device: torch.device, measure: bool) -> dict[str, float] | None:
    cpu = f"{cpu_model()}, {torch.get_num_threads()} threads"
    about: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu}
    about |= {"torch": str(torch.__version__), "host": socket.gethostname(), "size": asdict(SIZES[device.type])}
    names = _RATES[device.type]
    found = kept("machine", about) or {}
    if all(isinstance(found.get(name), float) and found[name] > 0 for name in names):
        return {name: found[name] for name in names}
    if not measure:
        return None
    ceilings = measure_ceilings(device, [torch.bfloat16])
    flops = max(each.flops_per_second for each in ceilings.matmul.values())
    last = _link_rate() if device.type == "cuda" else _disk_rate()
    fp32 = [ceilings.matmul["float32"].flops_per_second] if device.type == "cpu" else []
    rates = dict(zip(names, (flops, *fp32, ceilings.copy_bytes_per_second, last), strict=True))
    load = load_average()
    if device.type == "cuda" or load is None or load <= usable_cores():  # else other programs were measured, too
        keep("machine", about, rates)
    return rates


def _link_rate() -> float:
    device = streaming_gpu()
    try:
        return copy_rate(device).bytes_per_second
    finally:
        device.close()


def _disk_rate() -> float:
    """Of reads past the page cache in the folder for caches, of a file that is written for this."""
    folder = default_folder()
    path = folder / f".disk-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block = os.urandom(_PIECE)
        with path.open("wb") as file:
            for _ in range(_FILE_BYTES // _PIECE):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        reader = Reader(threads=THREADS, direct=True)
        try:
            buffer = aligned_buffer(_FILE_BYTES)
            memory = Memory(buffer, len(buffer))
            whole = Range(reader.file(path), 0, _FILE_BYTES, memory, 0, _FILE_BYTES)
            # threads start, and what reads is loaded or compiled: the rate with them was 0.7 GB/s instead of 2.2
            reader.read([whole._replace(needed=_PIECE, size=_PIECE)])
            buffer.fill_(0)  # has its pages then
            seconds = []
            for _ in range(_READS):
                began = time.perf_counter()
                reader.read([whole])
                seconds.append(time.perf_counter() - began)
            return _FILE_BYTES / min(seconds)
        finally:
            reader.close()
    except OSError:
        return float(_AROUND["disk"])
    finally:
        path.unlink(missing_ok=True)
