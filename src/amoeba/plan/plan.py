"""Which ways there are to run a model on a machine, what each takes, and which is best.

    plan = make_plan(read_facts("models/qwen3"), measured_machine(), Work("generate", context=4096, batch=1))
    plan.best.options                  # {"vram": "...", "ram": "..."}: what a command is to be told

What keeps the checkpoint's numbers comes before what rounds them, and what the commands do by default before other
ways, if it fits; then the faster one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, get_args

import torch

from amoeba.core.errors import bad_value, one_line
from amoeba.core.placement import Situation
from amoeba.placements import RESIDENT, all_placements, placement_named
from amoeba.plan.machine import Machine
from amoeba.plan.memory import CPU_SLACK_SHARE, CUDA, HOST, SLOTS_SHARE, Choice, Line, Purpose, Work, memory_of, total
from amoeba.plan.model import ModelFacts
from amoeba.plan.speed import Speed, speed_of
from amoeba.precision.formats import FP8_128, MXFP4, MXFP8, NVFP4, Format
from amoeba.stream.attaching import Budgets, passing_bytes, slots_in_memory, slots_on_gpu, slots_on_host
from amoeba.stream.sizes import show_size
from amoeba.system.cpu_features import has_bf16_instructions
from amoeba.system.files import shell_command, shell_words, write_whole

DOCUMENT = "amoeba plan"
STREAMED, RANKS = "streamed", "ranks"
# Relative error in the L2 norm: of weights (docs/reference/formats.md), and for int8 of an expert's output, the worst
# of `amoeba verify` (cpu/placements.py).
ERRORS = {"fp8": 0.026, "mxfp8": 0.029, "mxfp4": 0.115, "nvfp4": 0.095, "int8": 0.027}
WRITTEN_ERRORS = ERRORS | {"mxfp4": 0.112, "nvfp4": 0.081}  # by `amoeba quantise`, which looks for the best scales
FORMATS: dict[str, Format] = {"fp8": FP8_128, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
# Of the free memory, left for what an allocator cannot use and for other programs.
_SPARE = {CUDA: 0.03, HOST: 0.1}
# What would help is said where it makes a run this many times as fast.
_WORTH_SAYING = 1.15
_GIB = 1 << 30
# GiB, and GPUs, that are tried where nothing fits.
_MORE, _RANKS = (4, 8, 16, 24, 32, 64, 128, 256, 512, 1024), (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    """
    placement: as --experts names it, or streamed.
    numbers:   in which the experts are kept.
    options:   what a command is to be told, by the names of its settings.
    lines:     of memory.
    micro_batches: into which a batch is divided, whose gradients are added up.
    error:     of the numbers against the checkpoint's; 0: they are the same.
    is_default: what the command does without a plan, where that fits.
    rejected:  why it cannot run, or None. first: a command that has to run before.
    """

    placement: str
    numbers: str
    device: str
    options: dict[str, Any]
    lines: tuple[Line, ...]
    speed: Speed
    error: float = 0.0
    checkpointing: bool = False
    slots: str | None = None
    micro_batches: int = 1
    is_default: bool = False
    rejected: str | None = None
    first: str | None = None
    choice: Choice | None = None

    @property
    def gpu_bytes(self) -> int:
        return total(self.lines, CUDA)

    @property
    def host_bytes(self) -> int:
        return total(self.lines, HOST)

    @property
    def peak_bytes(self) -> int:
        """What a run reports as its peak: of the GPU, or of the process where there is none."""
        return self.gpu_bytes if self.device == CUDA else self.host_bytes

    def __str__(self) -> str:
        what = self.placement if self.slots is None else f"{self.placement} ({self.slots})"
        parts = f", {self.micro_batches} parts of a batch" if self.micro_batches > 1 else ""
        return f"experts {what} in {self.numbers}{', with checkpointing' if self.checkpointing else ''}{parts}"


@dataclass(frozen=True)
class Plan:
    model: str
    family: str
    machine: Machine
    work: Work
    candidates: tuple[Candidate, ...]  # the best first, those that were rejected last
    helps: tuple[tuple[str, float | None], ...] = ()  # what would help, and how many times; None: it fits

    @property
    def best(self) -> Candidate | None:
        return next((each for each in self.candidates if each.rejected is None), None)


def make_plan(
    facts: ModelFacts,
    machine: Machine,
    work: Work,
    *,
    dtype: torch.dtype | None = None,
    helps: bool = True,
    whole: bool = True,
) -> Plan:
    """dtype: in which the model is to compute; None to choose it as the commands do.
    whole: False to look at no other candidate once the default is the best one; others may need a compiler first."""
    found = []
    for candidate in chain(_candidates(facts, machine, work, dtype), _in_parts(facts, machine, work, dtype)):
        found.append(candidate)
        if not whole and not any(_order(candidate)[:3]):
            break
    plan = Plan(facts.name, facts.family, machine, work, tuple(sorted(found, key=_order)))
    return replace(plan, helps=tuple(_what_helps(facts, plan))) if helps else plan


def _order(candidate: Candidate) -> tuple:
    rounds = candidate.error > 0 or "optimizer_states" in candidate.options
    return candidate.rejected is not None, rounds, not candidate.is_default, -candidate.speed.score


def _candidates(facts: ModelFacts, machine: Machine, work: Work, dtype: torch.dtype | None) -> Iterator[Candidate]:
    device, dtype = machine.device, dtype or _computed_in(facts, machine, work)
    default = _default_placement(facts, machine, work)
    either = (False, True) if work.checkpointing is None else (work.checkpointing,)
    for checkpointing in either if work.trains else (False,):
        base = Choice(RESIDENT, device, dtype, checkpointing)
        if work.ranks > 1:
            yield _judged(facts, replace(base, placement=RANKS), machine, work, {"experts": RANKS}, is_default=True)
            continue
        if not facts.packed:
            yield from _resident(facts, base, machine, work, default)
        if work.purpose != "train" and facts.entries:
            yield from _streamed(facts, base, machine, work)
            for name in () if facts.is_quantised else ("fp8", "mxfp4"):
                coded = facts.quantised(FORMATS[name])
                for after in _streamed(coded, base, machine, work):
                    yield _converted(facts, coded, after, name, machine)


def _in_parts(facts: ModelFacts, machine: Machine, work: Work, dtype: torch.dtype | None) -> Iterator[Candidate]:
    """A training batch in halves, quarters, ...: each of them by the first way that then fits and rounds nothing."""
    parts = 2
    while work.trains and work.ranks == 1 and work.batch % parts == 0:
        part = replace(work, batch=work.batch // parts)
        fit = [each for each in _candidates(facts, machine, part, dtype) if each.rejected is None and not each.error]
        for each in sorted((each for each in fit if "optimizer_states" not in each.options), key=_order)[:1]:
            options = each.options | {"batch_size": part.batch, "accumulation": parts}
            seconds = parts * (each.speed.step_seconds or 0.0)
            speed = replace(each.speed, step_seconds=seconds)
            yield replace(each, options=options, speed=speed, micro_batches=parts, is_default=False)
        parts *= 2


def _converted(facts: ModelFacts, coded: ModelFacts, after: Candidate, name: str, machine: Machine) -> Candidate:
    """What could run once the model is quantised on disk."""
    first, size = f"amoeba quantise {facts.name} --format {name}", coded.expert_bytes(RESIDENT) + facts.rest_bytes
    why = after.rejected or f"needs a quantised checkpoint: {first}"
    if size > machine.disk_free:
        why = f"a quantised checkpoint needs {show_size(size)} on disk; {show_size(machine.disk_free)} are free"
    return replace(after, error=WRITTEN_ERRORS[name], numbers=name, rejected=why, first=first)


def _resident(facts: ModelFacts, base: Choice, machine: Machine, work: Work, default: str) -> Iterator[Candidate]:
    plain = facts.entries and not facts.is_quantised and work.purpose != "train"
    names = [RESIDENT]
    if plain:
        names += ["cpu-bf16", "cpu-int8", *(f"{name}-weights" for name in FORMATS)]
    for name in names:
        options = {} if name == default else {"experts": name}
        yield _judged(facts, replace(base, placement=name), machine, work, options, is_default=name == default)
    if work.purpose == "train" and base.device == CUDA and work.moments == 8:
        choice = replace(base, placement=RESIDENT, moments=4)
        yield _judged(facts, choice, machine, work, {"optimizer_states": "bfloat16"})


def _computed_in(facts: ModelFacts, machine: Machine, work: Work) -> torch.dtype | None:
    """As `jobs.cpu_dtype.dtype_to_load` chooses it, None for the checkpoint's own; parameters that train are bf16 on a
    GPU and fp32 on a CPU."""
    if work.purpose == "train":
        return torch.bfloat16 if machine.device == CUDA else torch.float32
    if machine.device != "cpu" or facts.dtype not in (torch.bfloat16, torch.float16):
        return None
    return torch.float32 if machine.source == "measured" and not has_bf16_instructions() else None


def _default_placement(facts: ModelFacts, machine: Machine, work: Work) -> str:
    """What `auto` takes where it fits: on a GPU the checkpoint's experts as they are; on a CPU the placements say."""
    if not facts.entries or facts.is_quantised or machine.device == CUDA or work.purpose == "train":
        return RESIDENT
    held = facts.expert_bytes(RESIDENT)
    situation = Situation(torch.device("cpu"), work.trains, facts.entries[0].dtype, held, held + facts.rest_bytes, None)
    return next((each.name for each in all_placements() if each.chosen(situation)[0]), RESIDENT)


def _judged(
    facts: ModelFacts,
    choice: Choice,
    machine: Machine,
    work: Work,
    options: dict[str, Any],
    *,
    is_default: bool = False,
    slots: str | None = None,
) -> Candidate:
    code = choice.placement.removesuffix("-weights").removeprefix("cpu-")
    numbers, error = facts.numbers, 0.0
    if choice.placement not in (RESIDENT, STREAMED, RANKS):
        numbers, error = code, ERRORS.get(code, 0.0)
        if code == "bf16" and facts.dtype == torch.float32:
            error = 0.0023  # of rounding normally distributed numbers to bf16
    if choice.placement == RESIDENT and choice.dtype is not None:
        numbers = str(choice.dtype).removeprefix("torch.")
    if choice.checkpointing:
        options = options | {"gradient_checkpointing": True}
    lines: tuple[Line, ...] = ()
    rejected = _why_not(choice.placement)
    if rejected is None:
        lines = memory_of(facts, choice, work)
        rejected = _too_large(lines, machine)
    return Candidate(
        placement=choice.placement,
        numbers=numbers,
        device=choice.device,
        options=options,
        lines=lines,
        speed=speed_of(facts, choice, work, machine),
        error=error,
        checkpointing=choice.checkpointing,
        slots=slots,
        is_default=is_default and choice.checkpointing == bool(work.checkpointing),
        rejected=rejected,
        choice=choice,
    )


def _why_not(placement: str) -> str | None:
    if placement in (RESIDENT, STREAMED, RANKS):
        return None
    try:
        placement_named(placement)
    except ValueError as error:
        return one_line(error)
    return None


def _too_large(lines: tuple[Line, ...], machine: Machine) -> str | None:
    for where, free, name in ((CUDA, machine.vram_free, "on the GPU"), (HOST, machine.ram_free, "of host memory")):
        needed = total(lines, where)
        if needed > _usable(free, where):
            return f"needs {show_size(needed)} {name}; {show_size(_usable(free, where))} can be used"
    return None


def _usable(free: int, where: str) -> int:
    return int(free * (1 - _SPARE[where]))


def _streamed(facts: ModelFacts, base: Choice, machine: Machine, work: Work) -> Iterator[Candidate]:
    """With as many slots as what a pass needs leaves room for; none where there is room for all experts, which are
    resident then."""
    none = [0] * len(facts.entries)
    empty = replace(base, placement=STREAMED, slots=tuple(none))
    if base.device == CUDA:
        empty = replace(empty, budgets=Budgets(0, 0, none, none))
    if facts.why_not_streamed is not None:
        yield replace(_judged(facts, empty, machine, work, {}), lines=(), rejected=facts.why_not_streamed)
        return
    try:
        choice, options = _with_slots(facts, empty, machine, memory_of(facts, empty, work))
    except ValueError as error:
        words, one = f"1 of {facts.entries[0].experts} slots", [1] * len(none)
        by = replace(empty, slots=tuple(one))
        if empty.budgets is not None:
            by = replace(empty, budgets=Budgets(0, 0, one, none))
        least = _judged(facts, by, machine, work, {}, slots=words, is_default=facts.packed)
        yield replace(least, rejected=least.rejected or one_line(error))
        return
    slots = choice.slots if choice.budgets is None else tuple(choice.budgets.slots)
    if facts.packed or any(count < each.experts for count, each in zip(slots, facts.entries, strict=True)):
        words = f"{min(slots)} of {facts.entries[0].experts} slots"
        found = _judged(facts, choice, machine, work, options, slots=words, is_default=facts.packed)
        if facts.files_here:
            yield found
            return
        # streaming reads files of a folder; of a folder with a config.json alone the name on the hub is not known
        name, is_folder = facts.name, Path(facts.name).expanduser().is_dir()
        model, folder = ("NAME", name) if is_folder else (name, Path(name).name)
        yield replace(found, first=shell_words("hf", "download", model, "--local-dir", folder))


def _with_slots(
    facts: ModelFacts, empty: Choice, machine: Machine, without: tuple[Line, ...]
) -> tuple[Choice, dict[str, Any]]:
    """without: the memory of a run that has no slots. ValueError where there is no room for any."""
    entries, scratch = facts.entries, facts.scratch_bytes
    rest = facts.rest_numbers * (empty.dtype or facts.dtype).itemsize
    free = {where: _usable(size, where) for where, size in ((CUDA, machine.vram_free), (HOST, machine.ram_free))}
    if empty.budgets is None:
        everything = rest + scratch + sum(each.experts * each.expert_bytes for each in entries)
        others = total(without, HOST) - rest - scratch
        budget = min(everything, int(max(0, free[HOST] - others) / ((1 + CPU_SLACK_SHARE) * (1 + SLOTS_SHARE))))
        slots = tuple(slots_in_memory(entries, rest, scratch, budget))
        return replace(empty, slots=slots), {"ram": str(budget)}
    vram = max(0, free[CUDA] - (total(without, CUDA) - rest))
    on_gpu = slots_on_gpu(entries, rest, vram)
    least = passing_bytes(entries, on_gpu, scratch)
    below = sum(e.experts * e.expert_bytes for e, count in zip(entries, on_gpu, strict=True) if count < e.experts)
    ram = min(least + below, max(least, free[HOST] - (total(without, HOST) - least)))
    on_host = slots_on_host(entries, on_gpu, scratch, ram)
    return replace(empty, budgets=Budgets(vram, ram, on_gpu, on_host)), {"vram": str(vram), "ram": str(ram)}


def _what_helps(facts: ModelFacts, plan: Plan) -> Iterator[tuple[str, float | None]]:
    """Changes of the machine, and formats: how many times as fast the best would then be; the largest first."""
    machine, best, work = plan.machine, plan.best, plan.work
    now = best.speed.score if best is not None else 0.0
    found: list[tuple[str, float | None]] = []
    for words, other, done in _fitting(facts, plan) if best is None else _changes(machine, work):
        then = make_plan(facts, other, done, helps=False).best
        if then is not None and (best is None or then.error <= best.error):
            found.append((words, then.speed.score / now if now else None))
    for each in plan.candidates:
        usable = each.rejected is None or each.first is not None
        if each.error and usable and each.lines and not _too_large(each.lines, machine):
            how = each.first or f"--precision {each.numbers}" if each.numbers != "int8" else "--experts cpu-int8"
            words = f"{how} (rounds the experts by {100 * each.error:.3g} %)"
            found.append((words, each.speed.score / now if now else None))
    said: dict[str, float | None] = {}
    for words, times in found:
        if times is None or times >= _WORTH_SAYING:
            said.setdefault(words, times)
    return iter(sorted(said.items(), key=lambda item: -(item[1] or 1e9))[:4])


def _changes(machine: Machine, work: Work) -> Iterator[tuple[str, Machine, Work]]:
    yield from ((words, other, work) for words, other in _more_memory(machine, "ram_free", "host", (8, 32)))
    if machine.device == CUDA:
        yield from ((words, other, work) for words, other in _more_memory(machine, "vram_free", "GPU", (4, 8, 24)))
        yield "a link that is twice as fast", replace(machine, link=2 * machine.link), work
    yield "a disk that is twice as fast", replace(machine, disk=2 * machine.disk), work


def _more_memory(machine: Machine, field: str, whose: str, amounts: Iterable[int]) -> Iterator[tuple[str, Machine]]:
    for more in amounts:
        changed: Any = {field: getattr(machine, field) + more * _GIB}
        yield f"{more} GiB more {whose} memory", replace(machine, **changed)


def _fitting(facts: ModelFacts, plan: Plan) -> Iterator[tuple[str, Machine, Work]]:
    """Of each kind of change the least that makes something fit."""
    machine, work = plan.machine, plan.work
    kinds = [[(words, other, work) for words, other in _more_memory(machine, "ram_free", "host", _MORE)]]
    if machine.device == CUDA:
        kinds.append([(words, other, work) for words, other in _more_memory(machine, "vram_free", "GPU", _MORE)])
        kinds.append([("--device cpu", machine.within(0, None), work)])
        if work.ranks == 1 and work.purpose != "serve" and facts.entries and not (facts.packed or facts.is_quantised):
            most = min(each.experts for each in facts.entries)
            ranks, words = [n for n in _RANKS if n <= most], "{0} such GPUs that share the experts (--ranks {0})"
            kinds.append([(words.format(n), machine, replace(work, ranks=n)) for n in ranks])
    for kind in kinds:
        yield from islice((each for each in kind if make_plan(facts, *each[1:], helps=False).best is not None), 1)


def as_document(plan: Plan) -> dict[str, Any]:
    best, candidates = plan.best, []
    for each in plan.candidates:
        lines = {"lines": [line._asdict() for line in each.lines]}
        sizes = {"gpu_bytes": each.gpu_bytes, "host_bytes": each.host_bytes}
        candidates.append(asdict(replace(each, choice=None)) | lines | sizes)
    document = {"document": DOCUMENT, "model": plan.model, "family": plan.family, "for": plan.work.purpose}
    return document | {
        "work": asdict(plan.work),
        "machine": asdict(plan.machine),
        "best": None if best is None else plan.candidates.index(best),
        "candidates": candidates,
        "what_helps": [{"change": words, "times": times} for words, times in plan.helps],
    }


def predicted(peak: int, speed: Speed | None) -> dict[str, Any]:
    """What a report compares with what was measured, by the names that it has for them. speed: None if unknown."""
    found: dict[str, Any] = {"peak_memory_bytes": peak}
    if speed is not None:
        found |= {"prompt_tokens_per_second": speed.prefill, "generation_tokens_per_second": speed.decode}
        found["tokens_per_second"] = speed.step_tokens_per_second
    return {name: value for name, value in found.items() if value is not None}


def predicted_words(candidate: Candidate, *, speeds: bool = True) -> str:
    speed, words = candidate.speed if speeds else Speed(), [str(candidate), f"{show_size(candidate.peak_bytes)}"]
    if speed.decode is not None:
        words.append(f"{three_digits(speed.decode)} tokens/s")
    if speed.step_seconds is not None:
        words.append(f"{three_digits(speed.step_seconds)} s per step")
    if candidate.error:
        words.append(f"rounds the experts by {100 * candidate.error:.3g} %")
    return ", ".join(words)


def three_digits(number: float) -> str:
    return f"{number:,.3g}" if number < 100 else f"{number:,.0f}"


def write_plan(path: Path, plan: Plan) -> None:
    write_whole(path, json.dumps(as_document(plan), indent=1) + "\n")


_WRITE_ONE = "run amoeba plan MODEL --out plan.json"


def read_plan(path: Path, purpose: Purpose) -> dict[str, Any]:
    """The best candidate of a file that `amoeba plan` wrote: its `options`, its `work`, and what is `predicted`."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise bad_value("--plan", "a file that amoeba plan wrote", f"{path} ({one_line(error)})", _WRITE_ONE) from error
    if not isinstance(found, dict) or found.get("document") != DOCUMENT or found.get("for") not in get_args(Purpose):
        raise bad_value("--plan", "a file that amoeba plan wrote", str(path), _WRITE_ONE)
    made_for = "generate" if found["for"] == "serve" else found["for"]
    if made_for != ("generate" if purpose == "serve" else purpose):
        remedy = f"run {shell_command('plan', 'MODEL', '--for', purpose, '--out', path)}"
        raise bad_value("--plan", f"a plan for {purpose}", f"one for {found['for']}", remedy)
    if found["best"] is None:
        remedy = "plan with a smaller --context or --batch, or for another machine"
        raise bad_value("--plan", "a plan in which something fits", f"{path}, in which nothing does", remedy)
    best: dict[str, Any] = found["candidates"][found["best"]]
    peak = best["gpu_bytes"] if best["device"] == CUDA else best["host_bytes"]
    known = found["machine"]["source"] == "measured" and not found["machine"]["assumed"]
    return best | {"work": found["work"], "predicted": predicted(peak, Speed(**best["speed"]) if known else None)}
