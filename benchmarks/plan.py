"""`python -m benchmarks plan`: what `amoeba plan` predicts, next to what the commands measure.

    cells = choose_cells(["qwen3_30b"], ["generate"], ["resident", "streamed"])
    for found in measure(cells, folder): ...

A cell is a model, a purpose, a budget and one candidate of its plan, which the command then runs with the options that
the plan gives. Peak memory must not be above the plan, nor 8 % below it; speeds within 25 %. What the plan chooses must
be at most 10 % slower than the fastest cell that rounds nothing. Of streamed experts, new tokens are compared with the
plan at the hit rate that the run had: random weights repeat their experts in another way than trained ones.

With `--cpu-time`, one thread's CPU time takes the place of the clock, for rates and commands: other programs then
change little. With `--ranks`, experts are spread over processes, and the link between them is measured first.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from amoeba.commands.bench_run import three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.parallel.processes import LocalRanks, first_processes
from amoeba.plan.machine import Machine, measured_machine
from amoeba.plan.memory import Choice, Work, memory_of, total
from amoeba.plan.model import ModelFacts, read_facts
from amoeba.plan.plan import RANKS, STREAMED, Candidate, make_plan
from amoeba.plan.speed import speed_of
from amoeba.plan.taking import Taken
from amoeba.stream.attaching import Budgets, share, slots_in_memory
from amoeba.stream.sizes import parse_size
from amoeba.stream.store import open_store
from benchmarks.random_models import write_checkpoint
from benchmarks.roads import SIZES, Size, run_command, write_texts

MOST_BELOW, MOST_SLOWER = 0.08, 0.25  # of the peak, and of a speed
MOST_BEHIND = 0.1  # what the plan chooses, behind the fastest that fits and rounds nothing
NO_TIME = "not run: the time was over"
# Of a prompt: a token each, nearly. Few words, repeated, would ask for few experts.
_LETTERS = string.ascii_letters + string.digits + string.punctuation.replace("-", "")
_MIDDLE = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512, "num_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 4,
}  # fmt: skip
_TINY, _QWEN3 = SIZES["tiny"], SIZES["qwen3_30b"]
_1B = _MIDDLE | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 12}
_24_LAYERS = {**_QWEN3.config, "num_hidden_layers": 24}  # 27 GiB of experts: more than three of the budgets below
_SIZES = (
    _TINY,
    replace(_TINY, name="middle", config=_MIDDLE, texts=200),
    replace(_TINY, name="1b", config=_1B, texts=900),
    replace(_QWEN3, config={**_QWEN3.config, "num_hidden_layers": 4}),
    replace(_QWEN3, name="qwen3_30b_24", config=_24_LAYERS),
)
MODELS = {size.name: size for size in _SIZES}
BUDGETS = ("8GiB", "16GiB", "24GiB")
PLACES = ("resident", "streamed", "mxfp4-weights", "fp8-weights", "cpu-bf16", "cpu-int8")
# Modules that wait with the clock have their own reference to it by then.
_CPU_TIME = """import asyncio, queue, subprocess, sys, threading, time
time.perf_counter = time.monotonic = time.process_time
time.perf_counter_ns = time.process_time_ns
"""
_ROWS, _ROW = 100, 6000  # to fine-tune on, and characters of each: more tokens than a sequence has
_LINK_BYTES = 16 << 20  # that a rank sends to find out how fast the others receive


@dataclass(frozen=True)
class Cell:
    """share: of the experts, that the budget has room for, where they are streamed. budget: as a user gives it, alone;
    None: one with room for that share. prompt: characters, a token each, nearly."""

    model: str
    purpose: str
    place: str
    share: float = 0.5
    budget: str | None = None
    prompt: int = 1024
    new_tokens: int = 64
    batch: int = 4
    length: int = 1024
    steps: int = 20
    checkpointing: bool = False
    ranks: int = 1

    @property
    def name(self) -> str:
        more = f" {self.budget or f'{100 * self.share:.0f} %'}" if self.place == STREAMED else ""
        size = str(self.prompt) if self.purpose == "generate" else f"{self.batch} x {self.length}"
        more += f" of {self.ranks}" if self.ranks > 1 else ""
        return f"{self.model} {self.purpose} {self.place}{more} {size}{' checkpointing' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Found:
    """rounds: the checkpoint's numbers. is_chosen: by the plan, where nothing but the machine limits it."""

    cell: Cell
    predicted: dict[str, Any]
    measured: dict[str, Any]
    error: str | None = None
    seconds: float = 0.0
    rounds: bool = False
    is_chosen: bool = False

    @property
    def score(self) -> float:
        """More is better: new tokens, or tokens of a step, per second."""
        of = "generation_tokens_per_second" if self.cell.purpose == "generate" else "tokens_per_second"
        return float(self.measured.get(of) or 0.0)

    def ratio(self, name: str) -> float | None:
        """Measured over predicted."""
        planned, seen = self.predicted.get(name), self.measured.get(name)
        return seen / planned if planned and seen else None

    @property
    def is_right(self) -> bool:
        peak = self.ratio("peak_memory_bytes")
        return self.error is None and peak is not None and 1 - MOST_BELOW <= peak <= 1


def choose_cells(
    models: Sequence[str], purposes: Sequence[str], places: Sequence[str], gpu: bool, ranks: Sequence[int] = ()
) -> list[Cell]:
    """The most telling ones first, where time is short."""
    for option, given, known in (
        ("--shape", models, (*MODELS,)),
        ("--pass", purposes, ("generate", "finetune", "train")),
        ("--place", places, PLACES),
    ):
        if unknown := [each for each in given if each not in known]:
            raise bad_value(option, f"one of {', '.join(known)}", ", ".join(unknown), "leave it out for all")
    small: dict[str, Any] = {} if gpu else {"prompt": 208, "batch": 2, "length": 128, "steps": 3}
    chosen = models or (["qwen3_30b", "1b", "qwen3_30b_24"] if gpu else ["middle"])
    if ranks:
        training = [each for each in purposes or ("finetune", "train") if each != "generate"]
        return [
            Cell(model, each, RANKS, ranks=count, **small | {"batch": 2 * count})
            for model in chosen
            for each in training
            for count in ranks
        ]
    few = {"steps": 10} if gpu else {}
    cells = [
        Cell(model, purpose, place, **(small | few if place.startswith("cpu-") and purpose != "generate" else small))
        for model in chosen
        for place in PLACES
        for purpose in purposes or ("generate", "finetune")
        if model != "qwen3_30b_24" and (purpose != "train" or place == "resident")
    ]
    cells += _more_on_gpu() if gpu else []
    wanted = [each for each in cells if each.model in chosen and each.place in (places or PLACES)]
    return [each for each in wanted if each.purpose in (purposes or ("generate", "finetune", "train"))]


def not_in(document: Path, cells: Sequence[Cell]) -> list[Cell]:
    """Those that this document did not measure."""
    try:
        there = {str(each["cell"]) for each in json.loads(document.read_text())["cells"] if each["error"] is None}
    except (ValueError, KeyError, TypeError):
        wanted = "a document of python -m benchmarks plan"
        raise bad_value("--after", wanted, str(document), "give one that --out has written") from None
    return [each for each in cells if str(asdict(each)) not in there]


def _more_on_gpu() -> list[Cell]:
    budgets = [Cell("qwen3_30b_24", "generate", STREAMED, budget=each) for each in BUDGETS]
    long = [Cell("qwen3_30b", "generate", "resident", prompt=3500)]
    checkpointing = [Cell(name, "finetune", "resident", checkpointing=True) for name in ("qwen3_30b", "1b")]
    quarter = [Cell("qwen3_30b", each, STREAMED, share=0.25) for each in ("generate", "finetune")]
    return [*budgets, *long, *checkpointing, *quarter]


def _telling_first(cells: Sequence[Cell]) -> list[Cell]:
    """One of each kind, in the larger model, ahead of the others."""
    first = [
        Cell("qwen3_30b", "generate", "resident"),
        *(Cell("qwen3_30b", "generate", place) for place in ("cpu-bf16", "mxfp4-weights", "fp8-weights", STREAMED)),
        *(Cell("qwen3_30b", "finetune", place) for place in ("resident", STREAMED, "mxfp4-weights")),
        *(Cell("1b", "generate", place) for place in ("resident", STREAMED)),
        Cell("1b", "finetune", "resident"),
        *_more_on_gpu(),
    ]
    return [*(each for each in first if each in cells), *(each for each in cells if each not in first)]


def measure(
    cells: Sequence[Cell], folder: Path, gpu: bool, seconds: float = 1e9, cpu_time: bool = False
) -> Iterator[Found]:
    """In this process on a GPU, in one each on a CPU, whose peak is that of a process."""
    ends = time.monotonic() + seconds
    machine = _cpu_time_machine() if cpu_time else measured_machine(gpu=gpu)
    links = {count: _link_between(count, cpu_time) for count in sorted({cell.ranks for cell in cells} - {1})}
    ordered = _telling_first(cells)
    compiled: set[tuple[str, str, str]] = set()
    for cell in ordered:
        if time.monotonic() >= ends:
            yield Found(cell, {}, {}, NO_TIME)
            continue
        _write_model(folder / cell.model, MODELS[cell.model])
        start = time.monotonic()
        here = replace(machine, peer=links.get(cell.ranks))
        kernels = cell.model, cell.purpose, cell.place
        twice = gpu and cell.purpose == "generate" and kernels not in compiled  # of a long run, the last steps count
        found = _measured(cell, folder / cell.model, here, gpu, cpu_time, twice)
        compiled.add(kernels)
        yield replace(found, seconds=time.monotonic() - start)


def _write_model(folder: Path, size: Size) -> None:
    """Unless it is there; and rows to fine-tune on that fill every sequence."""
    if not (folder / "bf16" / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder / "bf16", write_texts(folder, size))
    drawn = random.Random(1)
    rows = [{"prompt": "a", "completion": "".join(drawn.choices(_LETTERS, k=_ROW))} for _ in range(_ROWS)]
    (folder / "finetune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _cpu_time_machine() -> Machine:
    """Its rates for one thread, by CPU time."""
    program = (
        f"{_CPU_TIME}import dataclasses, json; from amoeba.plan import machine as here; here.kept = lambda *_: None\n"
    )
    program += "here.keep = lambda *_: None; print(json.dumps(dataclasses.asdict(here.measured_machine(gpu=False))))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=_one_thread()
    )
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def _one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def _link_between(ranks: int, cpu_time: bool) -> float:
    """Bytes per second that each of these processes sends to all others while it receives as many."""
    processes = LocalRanks(ranks)
    try:
        return _LINK_BYTES * (ranks - 1) / ranks / max(processes.run(_send, [(ranks, cpu_time)] * ranks))
    finally:
        processes.close()


def _send(ranks: int, cpu_time: bool) -> float:
    """Seconds: the least of a few."""
    clock = time.process_time if cpu_time else time.perf_counter
    group = first_processes(ranks)
    sent = torch.ones(_LINK_BYTES // 4, dtype=torch.float32, device="cpu")
    received, seconds = torch.empty_like(sent), []
    for _ in range(5):
        began = clock()
        dist.all_to_all_single(received, sent, group=group)
        seconds.append(clock() - began)
    return min(seconds)


def _measured(
    cell: Cell, folder: Path, machine: Machine, gpu: bool, cpu_time: bool = False, twice: bool = False
) -> Found:
    """twice: the second run counts, which compiles nothing."""
    facts = read_facts(str(folder / "bf16"))
    work = _work(cell)
    if gpu:
        machine = replace(machine, vram_free=torch.cuda.mem_get_info()[0])
    candidate = _planned(cell, facts, machine, work)
    if candidate is None or (candidate.rejected and cell.place == STREAMED):
        return Found(cell, {}, {}, "no such candidate" if candidate is None else candidate.rejected)
    if twice:
        _run(_words(cell, folder, candidate), gpu)
    if gpu:
        torch._C._cuda_clearCublasWorkspaces()  # of streams that earlier runs had: a process that begins has none
    held = torch.cuda.memory_allocated() if gpu else None
    code, document, said = _run(_words(cell, folder, candidate), gpu, cell.ranks, cpu_time)
    if code != 0:
        return Found(cell, {}, {}, said.strip().splitlines()[-1] if said.strip() else f"exit {code}")
    if cell.purpose == "generate":
        work = replace(work, prompt=document["prompt_tokens"], context=document["prompt_tokens"] + cell.new_tokens)
    machine = replace(machine, assumed=[])
    compared = Taken(candidate=candidate, facts=facts, machine=machine, work=work).compared(document)
    assert compared is not None and candidate.choice is not None
    predicted, measured = compared["predicted"] | {"hit_rate": candidate.speed.hit_rate}, compared["measured"]
    if streaming := document.get("streaming"):
        hits = _decode_hits(streaming)
        measured |= {"hit_rate": hits, "streaming": streaming}
        predicted["as_assumed"] = dict(predicted)
        again = speed_of(facts, candidate.choice, work, machine, hits=hits)
        if cell.purpose == "generate":
            predicted["generation_tokens_per_second"] = again.decode
    steps = {"steps": document.get("steps"), "held_before_bytes": held, "rates": machine.rates}
    lines = [line._asdict() for line in memory_of(facts, candidate.choice, work)]
    best = make_plan(facts, machine, work, helps=False).best
    is_chosen = best is not None and (best.placement, best.checkpointing) == (cell.place, cell.checkpointing)
    return Found(cell, predicted | {"lines": lines}, measured | steps, rounds=candidate.error > 0, is_chosen=is_chosen)


def choices(found: Sequence[Found]) -> list[tuple[Found, Found]]:
    """What the plan chose, and the fastest of the cells with the same work that round nothing."""
    groups: dict[tuple, list[Found]] = {}
    for each in found:
        if each.error is None and not each.rounds:
            cell = each.cell
            groups.setdefault((cell.model, cell.purpose, cell.prompt, cell.batch, cell.length), []).append(each)
    chosen = ((next((each for each in group if each.is_chosen), None), group) for group in groups.values())
    return [(one, max(group, key=lambda each: each.score)) for one, group in chosen if one and len(group) > 1]


def _planned(cell: Cell, facts: ModelFacts, machine: Machine, work: Work) -> Candidate | None:
    if cell.budget is not None:
        return _within(cell.budget, facts, machine, work)
    if cell.place == STREAMED:
        machine = _with_share(facts, machine, work, cell.share)
    return _candidate(make_plan(facts, machine, work, helps=False).candidates, cell)


def _within(budget: str, facts: ModelFacts, machine: Machine, work: Work) -> Candidate:
    """What a command does with this budget and no other option: on a GPU all experts that have no slot are in host
    memory, if they have room."""
    name = "ram" if machine.gpu is None else "vram"
    base = next(each.choice for each in make_plan(facts, machine, work, helps=False).candidates if each.choice)
    with open_store(facts.name, direct=False) as store:
        if machine.gpu is None:
            rest = facts.rest_numbers * (base.dtype or facts.dtype).itemsize
            slots = slots_in_memory(store.layers, rest, facts.scratch_bytes, parse_size(name, budget))
            choice = Choice(STREAMED, base.device, base.dtype, slots=tuple(slots))
        else:
            budgets = share(store, store.rest_bytes, budget, "auto", torch.device("cuda"))
            choice = Choice(STREAMED, base.device, base.dtype, budgets=budgets)
    lines, speed = memory_of(facts, choice, work), speed_of(facts, choice, work, machine)
    return Candidate(STREAMED, facts.numbers, base.device, {name: budget}, lines, speed, choice=choice)


def _decode_hits(streaming: dict[str, Any]) -> float:
    parts = [part for part in streaming["parts"] if part["name"] == "decode"] or [streaming]
    return float(parts[0]["hit_rate"])


def _work(cell: Cell) -> Work:
    if cell.purpose == "generate":
        return Work("generate", cell.prompt + cell.new_tokens, 1, prompt=cell.prompt)
    batch, purpose = cell.batch // cell.ranks, cell.purpose
    return Work(purpose, cell.length, batch, rank=8, checkpointing=cell.checkpointing, ranks=cell.ranks)  # type: ignore[arg-type]


def _with_share(facts: Any, machine: Machine, work: Work, share: float) -> Machine:
    """With a budget in which this share of the experts has a slot."""
    none = [0] * len(facts.entries)
    resident = next(each for each in make_plan(facts, machine, work, helps=False).candidates if each.choice is not None)
    assert resident.choice is not None
    empty = replace(resident.choice, placement=STREAMED, slots=tuple(none), checkpointing=bool(work.checkpointing))
    if machine.gpu is not None:
        empty = replace(empty, budgets=Budgets(0, 0, none, none))
    needed = total(memory_of(facts, empty, work), empty.device) + int(share * facts.expert_bytes("resident"))
    if machine.gpu is None:
        return machine.within(None, int((needed + 0.05 * share * facts.expert_bytes("resident")) / 0.9))
    return machine.within(int(needed / 0.97), None)


def _candidate(candidates: Sequence[Candidate], cell: Cell) -> Candidate | None:
    fit = (each for each in candidates if each.placement == cell.place and each.checkpointing == cell.checkpointing)
    return next((each for each in fit if each.first is None and "optimizer_states" not in each.options), None)


def _words(cell: Cell, folder: Path, candidate: Candidate) -> list[str]:
    options = ["--experts", cell.place] if cell.place != STREAMED else []
    for name in ("vram", "ram"):
        options += [f"--{name}", candidate.options[name]] if name in candidate.options else []
    options += ["--gradient-checkpointing"] if cell.checkpointing else []
    if cell.purpose == "generate":
        prompt = "".join(random.Random(0).choices(_LETTERS, k=cell.prompt))
        # drawn: the likeliest tokens of random weights soon repeat, and with them the experts
        most = ["--max-new-tokens", str(cell.new_tokens), "--temperature", "1", "--top-k", "0", "--seed", "1"]
        return ["generate", str(folder / "bf16"), prompt, *most, *options, "--json"]
    out = folder / "runs" / cell.name.replace(" ", "-").replace("/", "-").replace("%", "")
    shutil.rmtree(out, ignore_errors=True)
    trains = cell.purpose == "train"
    begin = ["train", "--model"] if trains else ["finetune", "--lora-rank", "8"]
    sizes = {
        "--data": folder / f"{cell.purpose}.jsonl",
        "--out": out,
        "--steps": cell.steps,
        "--batch-size": cell.batch,
        "--sequence-length": cell.length,
        "--save-every": 1000,
        "--eval-every": 1000,
        "--log-every": 5 if cell.steps > 5 else 2,
        "--held-out": 0.02,
    }
    return [*begin, str(folder / "bf16"), *(str(word) for pair in sizes.items() for word in pair), *options, "--json"]


def _run(words: list[str], gpu: bool, ranks: int = 1, cpu_time: bool = False) -> tuple[int, dict[str, Any], str]:
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return run_command(words, 1)
    # a shell in between: the peak of a process begins with what its parent holds
    program = [sys.executable, "-m", "amoeba"]
    with tempfile.TemporaryDirectory() as folder:
        if ranks > 1 or cpu_time:  # torchrun starts a file
            path = Path(folder) / "command.py"
            begin = _CPU_TIME if cpu_time else ""
            path.write_text(f"{begin}from amoeba.__main__ import main\nif __name__ == '__main__':\n    main()\n")
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            program = [sys.executable, *(torchrun if ranks > 1 else []), str(path)]
        command = shlex.join([*program, *words]) + "; exit $?"
        environment = _one_thread() if ranks > 1 or cpu_time else None
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    try:
        document = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        document = {}
    return done.returncode, document, done.stderr


def run(
    cells: Sequence[Cell],
    folder: Path | None,
    seconds: float,
    path: Path | None,
    output: Output,
    cpu_time: bool = False,
) -> tuple[dict[str, Any], bool]:
    gpu = torch.cuda.is_available()
    rows, found = [], []
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for each in measure(cells, folder or Path(temporary), gpu, seconds, cpu_time):
            found.append(each)
            if each.error != NO_TIME:
                rows.append(_row(each))
                output.progress("  ".join(rows[-1]))
            document = {"document": "benchmarks plan", "cpu_time": cpu_time, "cells": [asdict(one) for one in found]}
            if path is not None:
                path.write_text(json.dumps(document, indent=1) + "\n")
    columns = ["cell", "peak MiB", "planned", "ratio", "prompt or step /s", "ratio", "decode /s", "ratio", "hits", "s"]
    output.table("the plan against what was measured", columns, rows)
    pairs = choices(found)
    shown = [
        [
            one.cell.name,
            three_digits(one.score),
            best.cell.name,
            three_digits(best.score),
            f"{one.score / best.score:.2f}",
        ]
        for one, best in pairs
    ]
    output.table("what the plan chooses, and the fastest", ["chosen", "/s", "fastest", "/s", "ratio"], shown)
    left = [each.cell.name for each in found if each.error == NO_TIME]
    output.line(f"{len(found) - len(left)} cells run" + (f"; no time for {', '.join(left)}" if left else ""))
    fast = all(one.score >= (1 - MOST_BEHIND) * best.score for one, best in pairs)
    return document, fast and all(each.is_right for each in found if each.error != NO_TIME)


def _row(found: Found) -> list[str]:
    if found.error is not None:
        return [found.cell.name, "-", "-", "-", "-", "-", "-", "-", found.error[:60], f"{found.seconds:.1f}"]

    def pair(name: str) -> list[str]:
        ratio, seen = found.ratio(name), found.measured.get(name)
        return ["-" if seen is None else three_digits(seen), "-" if ratio is None else f"{ratio:.2f}"]

    peak, planned = (each["peak_memory_bytes"] / 2**20 for each in (found.measured, found.predicted))
    first = "prompt_tokens_per_second" if found.cell.purpose == "generate" else "tokens_per_second"
    hits = found.measured.get("hit_rate"), found.predicted.get("hit_rate")
    shown = "-" if None in hits else f"{hits[0]:.2f} ({hits[1]:.2f})"
    memory = [f"{peak:.0f}", f"{planned:.0f}", f"{peak / planned:.3f}"]
    speeds = [*pair(first), *pair("generation_tokens_per_second")]
    return [found.cell.name, *memory, *speeds, shown, f"{found.seconds:.1f}"]
