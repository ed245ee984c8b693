"""`python -m benchmarks decode`: steps of `amoeba generate` with experts in each format, next to the bytes they read.

    cells = choose_cells("qwen3_30b", 6, ["bf16", "q4_k"], [1, 8, 64])
    for found in measure(cells, device, bandwidth): ...

A model of a real one's sizes, with random weights and some of its layers, decodes greedily behind a prompt: the time to
the first token, and of each further step. The floor is the time in which the device reads, once, what a step needs: all
weights that are no experts, and of each layer the experts that rows of independent choices ask for on average. With
--plain transformers' own loop decodes in bf16 as well. Formats are those of --precision and those of GGUF files.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import amoeba
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value, one_line
from amoeba.integrations.experts_module import experts_modules
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.generate.token_steps import Steps, choose_steps
from amoeba.placements import all_placements
from benchmarks.random_models import QWEN3_30B, TINY

BF16, PLAIN = "bf16", "bf16, transformers' loop"
FORMATS = (BF16, "fp8", "mxfp8", "mxfp4", "nvfp4", "q8_0", "q6_k", "q5_k", "q4_k", "q4_0")
DEFAULT = (BF16, "fp8", "mxfp4", "nvfp4")
ROWS = (1, 8, 64)
PLAIN_TOKENS = 16  # of transformers' loop, which is slow
_COMMON = {"norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 8192}
_QWEN3_NEXT: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10,
    **_COMMON,
}  # fmt: skip
_TINY = TINY | {"shared_expert_intermediate_size": 64, "vocab_size": 512}
_TINY_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_30b": ("qwen3_moe", QWEN3_30B | _COMMON),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT),
    "tiny": ("qwen3_moe", QWEN3_30B | _COMMON | _TINY),
    "tiny_next": ("qwen3_next", _QWEN3_NEXT | _TINY | _TINY_LINEAR),
}


@dataclass(frozen=True)
class Cell:
    model: str
    layers: int
    format: str
    rows: int
    prompt: int = 128
    new_tokens: int = 64


@dataclass
class Found:
    """kind, reason: of the steps. seconds: to prepare them. floor_ms: of a step; None where the device has no known
    bandwidth. samples_ms: of single rounds."""

    cell: Cell
    kind: str = ""
    reason: str = ""
    error: str | None = None
    seconds: float = 0.0
    first_token_ms: float | None = None
    step_ms: float | None = None
    floor_ms: float | None = None
    bytes_read: int = 0
    peak_bytes: int = 0
    samples_ms: list[float] = field(default_factory=list)


def choose_cells(
    model: str, layers: int, formats: Sequence[str], rows: Sequence[int], prompt: int = 128, plain: bool = False
) -> list[Cell]:
    """In the order in which they are measured: a format at a time."""
    if unknown := [each for each in formats if each not in FORMATS]:
        raise bad_value("--format", f"one of {', '.join(FORMATS)}", ", ".join(unknown), f"leave it out for {DEFAULT}")
    if model not in MODELS:
        raise bad_value("--shape", f"one of {', '.join(MODELS)}", repr(model), "leave it out")
    if layers < 1 or prompt < 1 or min(rows) < 1:
        raise bad_value("--layers, --rows and --prompt", "1 or more", f"{layers}, {min(rows)} and {prompt}", "raise it")
    named = [*([PLAIN] if plain else []), *(formats or DEFAULT)]
    return [Cell(model, layers, format, each, prompt) for format in named for each in rows]


def build(cell: Cell, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[cell.model]
    amoeba.register()
    sizes = sizes | {"num_hidden_layers": cell.layers, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="amoeba").eval()
    model.generation_config.eos_token_id = None
    if cell.format == PLAIN:
        model.set_experts_implementation("grouped_mm" if device.type == "cuda" else "eager")
    elif cell.format != BF16:
        place_experts(model, next(each.name for each in all_placements() if each.name == f"{cell.format}-weights"))
    return model


def bytes_of_a_step(model: Any, rows: int) -> int:
    """That rows of independent choices read on average, each byte once; caches are left out."""
    experts = experts_modules(model)
    in_experts = {id(tensor) for module in experts.values() for tensor in (*module.parameters(), *module.buffers())}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    dense = {id(each): each for each in model.parameters()}
    total = sum(each.nbytes for key, each in dense.items() if key not in in_experts | tables)
    if head is not None and id(head.weight) in tables:
        total += head.weight.nbytes
    for module in experts.values():
        of_all = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        count, chosen = model.config.num_experts, model.config.num_experts_per_tok
        total += round(of_all * (1 - (1 - chosen / count) ** rows))
    return total


def measure(
    cells: Sequence[Cell], device: torch.device, bandwidth: float | None, rounds: int = 3, seconds: float = 1e9
) -> Iterator[Found]:
    """What fails says so, and the rest goes on. seconds: after which no cell is begun."""
    began, model, of = time.monotonic(), None, None
    for cell in cells:
        found = Found(cell)
        if time.monotonic() - began > seconds:
            found.error = f"not begun: {seconds:g} s were over"
            yield found
            continue
        try:
            if model is None or of != cell.format:
                model, of = None, None
                _free()
                model, of = build(cell, device), cell.format
            _measure(model, found, device, rounds)
            found.bytes_read = bytes_of_a_step(model, cell.rows)
            found.floor_ms = None if bandwidth is None else found.bytes_read / bandwidth * 1e3
        except Exception as error:  # of a kernel, the compiler, memory: the other cells are measured all the same
            found.error = f"{type(error).__name__}: {one_line(error)}"
            _free()
        yield found


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _measure(model: Any, found: Found, device: torch.device, rounds: int) -> None:
    cell = found.cell
    generator = torch.Generator("cpu").manual_seed(0)
    size = cell.rows, cell.prompt
    ids = torch.randint(3, model.config.vocab_size, size, generator=generator, dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if cell.format == PLAIN:
        _by_transformers(model, found, ids.to(device), rounds)
    else:
        steps = choose_steps(
            model, {}, batch=cell.rows, prompt_tokens=cell.prompt, new_tokens=cell.new_tokens, compile=False
        )
        found.kind, found.reason, found.seconds = steps.kind, steps.reason, round(steps.seconds, 2)
        if steps.decoder is None:
            _by_transformers(model, found, ids.to(device), rounds)
        else:
            _by_steps(steps, found, ids.tolist(), rounds, device)
    if device.type == "cuda":
        found.peak_bytes = torch.cuda.max_memory_allocated(device)


def _by_steps(steps: Steps, found: Found, prompts: list[list[int]], rounds: int, device: torch.device) -> None:
    first, count = [], found.cell.new_tokens - 1
    for turn in range(rounds + 1):  # the first warms up
        began = _now(device)
        tokens = steps.decoder.generate(prompts, 1)
        list(tokens)
        read = _now(device)
        tokens = steps.decoder.generate(prompts, found.cell.new_tokens)
        list(tokens)
        taken = _now(device) - read - (read - began)
        if turn:
            first.append((read - began) * 1e3)
            found.samples_ms.append(round(taken / count * 1e3, 4))
    found.first_token_ms, found.step_ms = round(min(first), 3), min(found.samples_ms)


def _by_transformers(model: Any, found: Found, ids_BL: Tensor, rounds: int) -> None:
    found.kind = found.kind or "plain"
    mask, times = torch.ones_like(ids_BL), dict[int, list[float]]()
    for count in (1, PLAIN_TOKENS):
        for _ in range(rounds):
            began = _now(ids_BL.device)
            model.generate(input_ids=ids_BL, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
            times.setdefault(count, []).append(_now(ids_BL.device) - began)
    first = min(times[1])
    found.samples_ms = [round((each - first) / (PLAIN_TOKENS - 1) * 1e3, 4) for each in times[PLAIN_TOKENS]]
    found.first_token_ms, found.step_ms = round(first * 1e3, 3), min(found.samples_ms)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def run(
    cells: Sequence[Cell], device: torch.device, rounds: int, seconds: float, path: Any, output: Output
) -> tuple[dict[str, Any], bool]:
    """Prints a table; returns the document, and False where a cell failed or a GPU's steps are not captured."""
    rows = dict.fromkeys(cell.rows for cell in cells)
    words = f"--shape {cells[0].model} --layers {cells[0].layers} --prompt {cells[0].prompt}"
    measured = BenchRun(f"python -m benchmarks decode {words}", "decode", path, output)
    bandwidth = (
        measured.measure_ceilings(device, [torch.bfloat16]).copy_bytes_per_second if device.type == "cuda" else None
    )
    found: dict[tuple[str, int], Found] = {}
    for each in measure(cells, device, bandwidth, rounds, seconds):
        found[each.cell.format, each.cell.rows] = each
        measured.progress(f"{each.cell.format}, {each.cell.rows} rows: {_shown(each)}")
        measured.keep(each)
    table = [
        [name, *(_shown(found[name, each]) if (name, each) in found else "" for each in rows)]
        for name in dict.fromkeys(cell.format for cell in cells)
    ]
    title = f"{words}: ms of a step (of the floor), of the first token"
    output.table(title, ["experts", *(f"{each} rows" for each in rows)], table)
    slow = [each for each in found.values() if device.type == "cuda" and each.kind == "plain"]
    wrong = [each for each in found.values() if each.error is not None]
    wrong += [each for each in slow if each.cell.format != PLAIN]
    for each in wrong:
        output.line(f"  {each.cell.format}, {each.cell.rows} rows: {each.error or each.reason}", style="bold red")
    return measured.finish(), not wrong


def _shown(found: Found) -> str:
    if found.error is not None or found.step_ms is None or found.first_token_ms is None:
        return "failed"
    of_floor = "" if found.floor_ms is None else f" ({found.step_ms / found.floor_ms:.2f}x)"
    return f"{three_digits(found.step_ms)}{of_floor}, {three_digits(found.first_token_ms)} {found.kind}"
