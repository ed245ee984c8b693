"""`python -m benchmarks convert`: quantise, pack and save, compared with what the disk copies.

    report = run_convert(ConvertSize(2 * 10**9), Path("."), rounds=3)
    report.of("pack").over("cp")            # 0.9: at nine tenths of cp's speed

A random qwen3_moe of Qwen3-30B's expert sizes is written to the disk that is measured, and read once, so that cp finds
it in the page cache; our jobs read past it. All but `cp` end with what they wrote on the disk: `cp, synced` is their
fair comparison. Bytes are those of the model in bfloat16, also where less is written. CPU seconds are all of the
process's own threads', for machines that others use too.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.jobs.convert.quantise import FORMATS, quantise_folder
from amoeba.jobs.train.manifest import WholeModel, seal
from amoeba.stream.store.packing import pack
from amoeba.stream.store.tensor_files import SHARDS, save_tensors
from benchmarks import command

_CHUNK = 16 * 2**20
_AT_LEAST = 0.8  # of the speed of `cp, synced`, for pack and save


@dataclass(frozen=True)
class ConvertSize:
    """Layers of `experts` experts, as many as fit into these bytes, at least one."""

    bytes: int
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    vocabulary: int = 32000

    @property
    def layers(self) -> int:
        of_layer = 2 * self.experts * 3 * self.hidden * self.intermediate
        return max(1, (self.bytes - 2 * self.vocabulary * self.hidden) // of_layer)


@dataclass
class ConvertMeasurement:
    """seconds, cpu_seconds: of each round."""

    name: str
    bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @property
    def gb_per_second(self) -> float:
        return self.bytes / 1e9 / statistics.median(self.seconds)


@dataclass
class ConvertReport:
    size: ConvertSize
    model_bytes: int
    device: str
    measurements: list[ConvertMeasurement] = field(default_factory=list)

    def of(self, name: str) -> ConvertMeasurement:
        return next(each for each in self.measurements if each.name == name)


def write_model(folder: Path, size: ConvertSize, device: torch.device) -> int:
    """Its bytes. All layers have the same numbers."""
    heads, hidden = size.hidden // 64, size.hidden
    keys = 64 * max(1, heads // 4)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "moe_intermediate_size": size.intermediate, "num_experts": size.experts,
        "num_experts_per_tok": min(8, size.experts), "num_hidden_layers": size.layers, "num_attention_heads": heads,
        "num_key_value_heads": keys // 64, "head_dim": 64, "vocab_size": size.vocabulary,
        "tie_word_embeddings": True, "dtype": "bfloat16", "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16()

    ones = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    layer = {f"{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    layer |= {f"self_attn.{name}_norm.weight": ones[:64] for name in "qk"}
    layer |= {f"self_attn.{name}_proj.weight": random(keys, hidden) for name in "kv"}
    layer |= {f"self_attn.{name}_proj.weight": random(hidden, hidden) for name in "qo"}
    layer["mlp.gate.weight"] = random(size.experts, hidden)
    for expert in range(size.experts):
        prefix = f"mlp.experts.{expert}."
        layer |= {f"{prefix}{name}_proj.weight": random(size.intermediate, hidden) for name in ("gate", "up")}
        layer[f"{prefix}down_proj.weight"] = random(hidden, size.intermediate)
    files = [{f"model.layers.{number}.{name}": each for name, each in layer.items()} for number in range(size.layers)]
    files.append({"model.embed_tokens.weight": random(size.vocabulary, hidden), "model.norm.weight": ones})
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_tensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / SHARDS).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def _timed(into: ConvertMeasurement) -> Iterator[None]:
    def cpu_seconds() -> float:
        whose = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(each.ru_utime + each.ru_stime for each in whose)

    began, cpu = time.perf_counter(), cpu_seconds()
    yield
    into.seconds.append(round(time.perf_counter() - began, 4))
    into.cpu_seconds.append(round(cpu_seconds() - cpu, 4))


def _copy_plainly(folder: Path, out: Path) -> None:
    """A loop of reads and writes, as a program has it that gives this no thought."""
    out.mkdir()
    for path in folder.iterdir():
        with path.open("rb") as source, (out / path.name).open("wb") as target:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())


def run_convert(
    size: ConvertSize,
    folder: Path,
    rounds: int,
    *,
    device: torch.device | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> ConvertReport:
    """folder: on the disk that is measured; needs room for three models. device: that quantises and holds the model."""
    from transformers import AutoModelForCausalLM

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-convert-") as place:
        model, out = Path(place) / "model", Path(place) / "out"
        told(f"writing a model of {size.layers} layers")
        bytes_ = write_model(model, size, device)
        for path in model.iterdir():
            with path.open("rb") as file:
                while file.read(_CHUNK):
                    pass
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)

        def save() -> None:
            out.mkdir()
            WholeModel().save(loaded, out)
            seal(out)

        def copy(synced: bool) -> None:
            subprocess.run(["cp", "-r", str(model), str(out)], check=True)
            if synced:
                subprocess.run(["sync", *map(str, out.iterdir())], check=True)

        jobs: dict[str, Callable[[], Any]] = {
            "cp": lambda: copy(False),
            "cp, synced": lambda: copy(True),
            "read and write": lambda: _copy_plainly(model, out),
            "pack": lambda: pack(model, out),
            "save": save,
        }
        for format in FORMATS:
            jobs[f"quantise {format}"] = functools.partial(quantise_folder, model, out, format, device=device)
        report = ConvertReport(size, bytes_, str(device), [ConvertMeasurement(name, bytes_) for name in jobs])
        for turn in range(rounds + 1):  # the first compiles and imports
            for measured, job in zip(report.measurements, jobs.values(), strict=True):
                told(f"round {turn} of {rounds}: {measured.name}")
                with _timed(measured if turn else ConvertMeasurement("", 0)):
                    job()
                shutil.rmtree(out)
    return report


def run(size: ConvertSize, folder: Path, rounds: int, path: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    """Prints one table; returns the document, and False if pack or save are slower than they have to be."""
    measured = BenchRun(command("convert", size=size.bytes, repeats=rounds), "conversions", path, output)
    report = run_convert(size, folder, rounds, told=measured.progress)
    measured.keep(report)
    reference = report.of("cp, synced").gb_per_second
    rows = [
        [
            each.name,
            f"{statistics.median(each.seconds):.2f}",
            f"{statistics.median(each.cpu_seconds):.2f}",
            three_digits(each.gb_per_second),
            f"{each.gb_per_second / report.of('cp').gb_per_second:.0%}",
            f"{each.gb_per_second / reference:.0%}",
        ]
        for each in report.measurements
    ]
    title = f"{report.model_bytes / 1e9:.2f} GB in {size.layers} layers, quantised on {report.device}"
    output.table(title, ["", "s", "CPU s", "GB/s", "of cp", "of cp, synced"], rows)
    slow = [name for name in ("pack", "save") if report.of(name).gb_per_second < _AT_LEAST * reference]
    for name in slow:
        output.line(f"  {name} is below {_AT_LEAST:.0%} of cp, synced", style="bold red")
    return measured.finish(), not slow
