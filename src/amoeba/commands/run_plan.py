"""How `train` and `finetune` take a plan, and end with what it predicted next to what the run took."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from amoeba.commands.exits import finish
from amoeba.commands.options import RunOptions, launched_processes, speaks
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.system.fast_imports import loading

if TYPE_CHECKING:
    from amoeba.jobs.settings import RunSettings
    from amoeba.jobs.train.run_folder import RunReport
    from amoeba.plan.memory import Purpose
    from amoeba.plan.taking import Taken

    Settings = TypeVar("Settings", bound=RunSettings)
else:
    Settings = TypeVar("Settings")

# Settings that say where experts go, and what they are where nothing is said.
_DEFAULTS = {"experts": ("auto", "resident"), "ram": (None,), "vram": (None,)}


def with_plan(
    purpose: Purpose, settings: Settings, shared: RunOptions, output: Output
) -> tuple[Settings, Taken | None]:
    """The settings with the best of the plan, unless they say where experts go. A run that is resumed keeps its own."""
    with loading():
        from amoeba.jobs.presets import PRESETS
        from amoeba.plan.memory import Work
        from amoeba.plan.taking import take_plan

    if shared.resume is not None and shared.plan is not None:
        raise bad_value("--plan", "a new run", "--resume", "leave it out: the run keeps its placement")
    if settings.exact and shared.plan is not None:
        raise bad_value("--plan", "a run without --exact", "both", "leave it out: exact mode keeps experts resident")
    if shared.resume is not None or settings.exact or launched_processes() > 1:
        return settings, None
    told = {name: getattr(settings, name, None) for name in (*_DEFAULTS, "vocab_size")}
    given = {name: told[name] for name in _DEFAULTS if told[name] not in (*_DEFAULTS[name], None)}
    if getattr(settings, "gradient_checkpointing", False):
        given |= {"gradient_checkpointing": True} if shared.plan is not None else {}
    work = Work(
        purpose,
        context=settings.sequence_length,
        batch=settings.batch_size,
        rank=getattr(settings, "r", 0) if "experts" in getattr(settings, "targets", ()) else 0,
        moments=8 if settings.optimizer_states == "float32" else 4,
        checkpointing=True if settings.gradient_checkpointing else None,
        precision=getattr(settings, "precision", "bf16"),
    )
    preset = PRESETS.get(settings.model) if purpose == "train" else None  # which has no folder
    config = None if preset is None else preset.build(told["vocab_size"] or 0, settings.sequence_length)
    options: dict[str, Any] = {"file": shared.plan, "given": given, "config": config}
    taken = take_plan(settings.model, work, trust_remote_code=shared.trust_remote_code, **options)
    if taken.words is not None:
        output.say(taken.words)
    options = dict(taken.options)
    if "accumulation" in options:
        options["accumulation"] *= settings.accumulation
    return replace(settings, **options), taken


def finish_run(report: RunReport, taken: Taken | None, output: Output, json: bool) -> None:
    document = asdict(report)
    if taken is not None:
        document["plan"] = _compared(taken, document, output)
    finish(output, document, True, json and speaks())
    if document["exit_code"]:
        raise typer.Exit(document["exit_code"])


def _compared(taken: Taken, document: dict[str, Any], output: Output) -> dict[str, Any] | None:
    found = None if not document.get("steps") else taken.compared(document)
    if found is not None and "tokens_per_second" in found["predicted"]:
        predicted, measured = found["predicted"], found["measured"]
        peak = "" if not measured["peak_memory_bytes"] else f", peak {measured['peak_memory_bytes'] / 2**30:.2f} GiB"
        planned = f"{predicted['tokens_per_second']:,.0f} tokens/s, {predicted['peak_memory_bytes'] / 2**30:.2f} GiB"
        output.facts([("planned", f"{planned}; measured {measured['tokens_per_second']:,.0f}{peak}")])
    return found
