"""`amoeba plan MODEL`: whether a model fits, how fast each way to run it will be, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from typer import Option

from amoeba.commands.exits import finish, need, usage
from amoeba.commands.options import Json, ModelArgument, TrustRemoteCode, Verbose, check_file_to_write
from amoeba.commands.start import start
from amoeba.core.errors import bad_value
from amoeba.system.fast_imports import loading

if TYPE_CHECKING:
    from amoeba.commands.output import Output
    from amoeba.plan.machine import Machine
    from amoeba.plan.memory import Work
    from amoeba.plan.model import ModelFacts
    from amoeba.plan.plan import Plan

# Rows at a time, and tokens of a row, where nothing is said: as the commands have them.
_ROWS = {"generate": 1, "serve": 8, "finetune": 8, "train": 8}
_SERVED_BY_GPU = 32
_TOKENS = {"generate": 4096, "serve": 4096, "finetune": 1024, "train": 256}


@dataclass(frozen=True)
class PlanOptions:
    purpose: Annotated[str, Option("--for", help="What to plan: generate, serve, finetune or train.")] = "generate"
    vram: Annotated[str | None, Option(help="GPU memory to use: 24GiB, ... (default: what is free); 0: no GPU.")] = None
    ram: Annotated[str | None, Option(help="Host memory to use (default: what is free).")] = None
    disk: Annotated[str | None, Option(help="Disk space for a converted checkpoint (default: what is free).")] = None
    context: Annotated[
        int | None,
        Option(
            help="Tokens per row: prompt and answer (default: 4096), or a training row (default: 1024 for finetune, "
            "256 for train)."
        ),
    ] = None
    batch: Annotated[
        int | None,
        Option(help="Rows that each rank processes together (default: 1; 8 to train or serve; 32 to serve on a GPU)."),
    ] = None
    lora_rank: Annotated[int, Option(help="With --for finetune: LoRA rank.")] = 16
    ranks: Annotated[int, Option(help="GPUs that share the experts (expert parallelism).")] = 1
    nodes: Annotated[int, Option(help="Machines that the GPUs are in.")] = 1
    machine: Annotated[
        str | None,
        Option(help="Plan for another machine: a card (4090, h100, ...) by its public figures, or a JSON file."),
    ] = None
    out: Annotated[Path | None, Option(help="Save the plan. Other commands read it with --plan.")] = None


def plan(
    model: Annotated[str, ModelArgument],
    options: PlanOptions,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show whether a model fits, and how fast each placement and format would be. Reads no weights."""
    output = start(verbose)
    with usage():
        need("safetensors", "transformers")
        if options.out is not None:
            check_file_to_write("--out", options.out, "plan.json")
        with loading():
            from amoeba.plan.plan import as_document, make_plan, write_plan

        work = _work(options)
        facts = facts_for(model, work, trust_remote_code)
        if facts.packed and (work.purpose == "train" or work.ranks > 1):
            what = "--for train" if work.purpose == "train" else "--ranks"
            remedy = "give the folder that it was packed from"
            raise bad_value("MODEL", f"a model's folder, with {what}", "a store, which streams its experts", remedy)
        if facts.is_quantised and work.ranks > 1:
            remedy = "leave --ranks out: quantised experts cannot be distributed yet"
            raise bad_value("--ranks", "an unquantised checkpoint", f"experts in {facts.numbers}", remedy)
        if facts.is_quantised and facts.files_here and work.purpose == "train":
            remedy = "plan --for finetune, or take its unquantised checkpoint"
            raise bad_value("MODEL", "parameters that can all be trained", f"experts in {facts.numbers}", remedy)
        machine = _machine(options)
        if facts.positions is not None and work.context > facts.positions:
            if options.context is not None:
                expected = f"at most {facts.positions}, the positions that the model has"
                raise bad_value("--context", expected, options.context, "take fewer tokens")
            work = replace(work, context=facts.positions)
        if work.purpose == "serve" and options.batch is None and machine.gpu:
            work = replace(work, batch=_SERVED_BY_GPU)
        found = make_plan(facts, machine, work)
        if options.out is not None:
            write_plan(options.out, found)
        show(found, output, options.out)
    finish(output, as_document(found), found.best is not None, json)


def _work(options: PlanOptions) -> Work:
    from amoeba.plan.memory import Purpose, Work

    if options.purpose not in get_args(Purpose):
        raise bad_value("--for", f"one of {', '.join(get_args(Purpose))}", repr(options.purpose), "choose one")
    counts = {"--context": options.context, "--batch": options.batch, "--ranks": options.ranks}
    counts |= {"--nodes": options.nodes, "--lora-rank": options.lora_rank}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise bad_value(name, "at least 1", count, "leave it out for the default")
    if options.ranks % options.nodes:
        remedy = "give every machine the same number of ranks"
        raise bad_value("--ranks", f"a multiple of --nodes {options.nodes}", options.ranks, remedy)
    purpose: Any = options.purpose
    if options.ranks > 1 and purpose == "serve":
        raise bad_value("--ranks", "--for generate, finetune or train", "--for serve, one process", "leave --ranks out")
    return Work(
        purpose,
        context=options.context or _TOKENS[purpose],
        batch=options.batch or _ROWS[purpose],
        rank=options.lora_rank,
        ranks=options.ranks,
        nodes=options.nodes,
    )


def facts_for(model: str, work: Work, trust_remote_code: bool) -> ModelFacts:
    from amoeba.jobs.presets import PRESETS
    from amoeba.plan.model import read_facts

    if work.purpose == "train" and model in PRESETS:
        preset = PRESETS[model]
        config = preset.build(preset.training.get("vocab_size", 4096), work.context)
        return read_facts(model, config=config)
    return read_facts(model, trust_remote_code=trust_remote_code)


def _machine(options: PlanOptions) -> Machine:
    import shutil

    import torch

    from amoeba.plan.machine import described_machine, measured_machine
    from amoeba.stream.sizes import parse_size

    sizes = {"--vram": options.vram, "--ram": options.ram, "--disk": options.disk}
    vram, ram, disk = (None if size is None else parse_size(name, size) for name, size in sizes.items())
    if options.machine is not None:
        return described_machine(options.machine).within(vram, ram, disk)
    if vram and not torch.cuda.is_available():  # before seconds of measuring
        remedy = "leave it out, or describe one: --machine 4090"
        raise bad_value("--vram", "a machine with a GPU", "none here", remedy)
    found = measured_machine(gpu=vram != 0)
    return found.within(vram, ram, shutil.disk_usage(Path()).free if disk is None else disk)


def show(plan: Plan, output: Output, written: Path | None) -> None:
    from amoeba.plan.plan import predicted_words, three_digits
    from amoeba.stream.sizes import show_size

    trains, best = plan.work.trains, plan.best
    speeds = ["step s", "tokens/s"] if trains else ["prompt tokens/s", "new tokens/s"]
    columns = ["experts", "format", *(["GPU"] if plan.machine.gpu else []), "host", *speeds, "error", ""]
    rows = []
    for each in plan.candidates:
        if each.rejected is not None and not each.lines:
            continue
        speed = each.speed
        numbers = (speed.step_seconds, speed.step_tokens_per_second) if trains else (speed.prefill, speed.decode)
        parts = f"{each.micro_batches} micro-batches" if each.micro_batches > 1 else None
        states = each.options.get("optimizer_states") and "bf16 moments"
        more = (parts, each.slots, each.checkpointing and "checkpointing", states)
        what = ", ".join([each.placement, *(word for word in more if word)])
        sizes = [*([show_size(each.gpu_bytes)] if plan.machine.gpu else []), show_size(each.host_bytes)]
        speeds_of = ("-" if number is None else three_digits(number) for number in numbers)
        error = f"{100 * each.error:.3g} %" if each.error else "0"
        rows.append([what, each.numbers, *sizes, *speeds_of, error, "best" if each is best else each.rejected or ""])
    work = plan.work
    rowed = f"{work.batch} x {work.context:,} tokens" + (f" on each of {work.ranks} ranks" if work.ranks > 1 else "")
    output.table(f"{plan.model} to {work.purpose}, {rowed}", columns, rows, text=("experts", "format", ""))
    output.heading("machine")
    output.facts(_of_machine(plan.machine))
    if best is None:
        output.heading("nothing fits")
        for each in plan.candidates:
            if not each.lines:
                output.line(f"  {each.placement}: {each.rejected}")
    else:
        output.heading(f"best: {predicted_words(best)}")
        output.facts(
            (
                line.name,
                f"{show_size(line.bytes)} {'on the GPU' if line.where == 'cuda' else 'of host memory'}"
                + (f", while {line.when}" if line.when != "always" else ""),
            )
            for line in best.lines
        )
        if best.first is not None:
            output.line(f"  first: {best.first}")
        if best.options:
            flags = {f"--{name.replace('_', '-')}": value for name, value in best.options.items()}
            told = (flag if value is True else f"{flag} {value}" for flag, value in flags.items())
            output.line(f"  options: {' '.join(told)}")
    if plan.helps:
        output.heading("what would help")
        for words, times in plan.helps:
            output.line(f"  {words}: {'then it fits' if times is None else f'{times:.1f}x'}")
    if written is not None:
        readers = work.purpose if trains else "generate, chat or serve"
        how = f": pass --plan {written} to {readers}" if best is not None else ""
        output.line(f"\nsaved to {written}{how}")


def _of_machine(machine: Machine) -> list[tuple[str, str]]:
    from amoeba.plan.machine import rates_in_words
    from amoeba.stream.sizes import show_size

    free = f"{show_size(machine.ram_free)} of host memory"
    if machine.gpu:
        free = f"{show_size(machine.vram_free)} on {machine.gpu}, {free}"
    rates = ", ".join(f"{name} {rate}" for name, rate in rates_in_words(machine.rates))
    found = [("free", free), (machine.source, rates)]
    return [*found, *([("assumed", ", ".join(machine.assumed))] if machine.assumed else [])]
