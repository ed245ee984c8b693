"""Layers whose experts are streamed, without a model around them: sizes by name, and the numbers that they get.

problem = choose_problem(["qwen3_30b"], None, torch.device("cuda"))
problem.resident(2)          # random experts of the first two layers
problem.trace(24, 200)       # expert ids of 200 tokens, as often repeated as a model does
problem.routes(trace)        # the same as tensors, (layers, 1, K) each
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.errors import bad_value
from amoeba.core.weights import ExpertWeights
from amoeba.cpu.pointers import CPU
from amoeba.precision.formats import Format, format_named
from amoeba.precision.quantised_experts import quantise_experts
from amoeba.stream.cache.trace import LayerShape, Trace
from amoeba.stream.sizes import show_size
from amoeba.stream.store.layers import LayerEntry, StoredExperts, layer_entry
from amoeba.system.machine import available_memory
from benchmarks.stream.synthetic import Locality, synthetic_trace

Part = Literal["decode", "disk", "lora"]
PARTS: tuple[Part, ...] = ("decode", "disk", "lora")


@dataclass(frozen=True)
class StreamSize:
    """
    layers:      of a token; disk_layers: of those that are read from the disk as well.
    lora_layers, lora_tokens, rank: of the fine-tuning step.
    format:      in which experts are codes; None: they are bf16 on a GPU, fp32 elsewhere.
    """

    name: str
    layers: int
    disk_layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    lora_layers: int
    lora_tokens: int
    rank: int = 16
    format: str | None = None


SIZES = {
    size.name: size
    for size in (
        StreamSize("tiny", 2, 2, 16, 2, 32, 16, lora_layers=2, lora_tokens=9, rank=2),
        StreamSize("small", 4, 4, 32, 4, 512, 256, lora_layers=2, lora_tokens=256),
        StreamSize("qwen3_30b", 16, 6, 128, 8, 2048, 768, lora_layers=8, lora_tokens=4096),
        # 29 GB on the disk, and as much again pinned where all parts are measured
        StreamSize("qwen3_30b_24", 24, 24, 128, 8, 2048, 768, lora_layers=8, lora_tokens=4096),
        StreamSize("qwen3_30b_fp8", 16, 6, 128, 8, 2048, 768, lora_layers=8, lora_tokens=4096, format="fp8-128"),
        StreamSize("qwen3_30b_mxfp4", 16, 6, 128, 8, 2048, 768, lora_layers=8, lora_tokens=4096, format="mxfp4"),
        StreamSize("qwen3_30b_nvfp4", 16, 6, 128, 8, 2048, 768, lora_layers=8, lora_tokens=4096, format="nvfp4"),
    )
}


@dataclass(frozen=True)
class StreamProblem:
    size: StreamSize
    device: torch.device
    parts: tuple[Part, ...] = PARTS

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def entry(self) -> LayerEntry:
        size, format = self.size, self.format
        sizes = size.experts, size.hidden, size.intermediate
        row_parts = 1 if format is None else 2  # gate and up have blocks of their own
        return layer_entry("experts", *sizes, Activation(), self.dtype, False, format, row_parts)

    @property
    def format(self) -> Format | None:
        return None if self.size.format is None else format_named(self.size.format)

    def resident(self, layers: int) -> list[StoredExperts]:
        size, format = self.size, self.format
        found: list[StoredExperts] = []
        for layer in range(layers):
            generator = torch.Generator(self.device).manual_seed(layer)
            gate_up_EJH = torch.empty(
                size.experts, 2 * size.intermediate, size.hidden, device=self.device, dtype=self.dtype
            )
            down_EHI = torch.empty(size.experts, size.hidden, size.intermediate, device=self.device, dtype=self.dtype)
            for matrix in (gate_up_EJH, down_EHI):
                matrix.normal_(0, matrix.shape[2] ** -0.5, generator=generator)
            weights = ExpertWeights(gate_up_EJH, down_EHI, activation=Activation())
            found.append(weights if format is None else quantise_experts(weights, format))
        return found

    def trace(self, layers: int, tokens: int, seed: int = 0) -> Trace:
        size = self.size
        return synthetic_trace(Locality(), [LayerShape(size.experts, size.top_k, 1)] * layers, tokens, seed)

    def routes(self, trace: Trace) -> list[Tensor]:
        shape = len(trace.layers), 1, self.size.top_k
        return [
            torch.tensor(list(each.ids), dtype=torch.int64, device="cpu").view(shape).to(self.device)
            for each in trace.passes
        ]


def check_room(problem: StreamProblem, folder: Path | None = None) -> None:
    """Refuses what cannot fit: resident experts and slots on the device, as much again pinned on the host, files in
    the folder that they are written to."""
    size, of_layer = problem.size, problem.size.experts * problem.entry.expert_bytes
    has_link = problem.device.type == "cuda"
    of_part = {"decode": size.layers if has_link else size.disk_layers, "disk": size.disk_layers}
    layers = max(of_part.get(part, size.lora_layers) for part in problem.parts)
    needs = {"memory on the device": (2 * layers * of_layer, available_memory(problem.device))}
    if has_link:
        needs["memory on the host"] = layers * of_layer, available_memory(CPU)
    if "disk" in problem.parts or not has_link:
        files = Path(tempfile.gettempdir()) if folder is None else folder
        needs[f"room on the disk ({files})"] = size.disk_layers * of_layer, shutil.disk_usage(files).free
    for where, (needed, free) in needs.items():
        if free is not None and needed > free:
            expected = f"{show_size(needed)} of {where} for {size.name}"
            raise bad_value("--shape", expected, f"{show_size(free)} free", "--shape small needs a few hundred MiB")


def choose_problem(shapes: Sequence[str], passes: str | None, device: torch.device) -> StreamProblem:
    name = shapes[0] if shapes else "qwen3_30b" if device.type == "cuda" else "small"
    if len(shapes) > 1 or name not in SIZES:
        raise bad_value("--shape", f"one of {', '.join(SIZES)}", ", ".join(shapes), "give one name")
    parts = [part for part in PARTS if passes in (None, part)]
    if not parts:
        raise bad_value("--pass", f"one of {', '.join(PARTS)}", repr(passes), "leave it out for all")
    problem = StreamProblem(SIZES[name], device, tuple(parts))
    check_room(problem)
    return problem
