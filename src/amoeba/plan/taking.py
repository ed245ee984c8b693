"""How commands and Python programs take a plan.

    taken = take_plan("models/qwen3", Work("generate", context=700, batch=1))
    options = dataclasses.replace(options, **taken.options); say(taken.words)
    streamed_or_model = adapt("models/qwen3", vram="8GiB")

A model that fits as the command would load it anyway is loaded so, and nothing is measured or said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.integrations.model_folder import load_config
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.cpu_dtype import dtype_to_load
from amoeba.jobs.placed_model import attach_in, load_placed
from amoeba.plan.machine import Machine, measured_machine
from amoeba.plan.memory import Work, memory_of, total
from amoeba.plan.model import ModelFacts, read_facts
from amoeba.plan.plan import Candidate, Plan, make_plan, predicted, predicted_words, read_plan
from amoeba.plan.speed import speed_of
from amoeba.stream.attaching import Streamed, attach
from amoeba.stream.sizes import parse_size


@dataclass(frozen=True)
class Taken:
    """
    options: what the command is to be told, by the names of its settings.
    words:   a line for people; None where everything is as without a plan.
    promised: what a file predicts, for its own `work`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    words: str | None = None
    candidate: Candidate | None = None
    facts: ModelFacts | None = None
    machine: Machine | None = None
    work: Work | None = None
    promised: dict[str, Any] | None = None

    @property
    def chosen(self) -> str | None:
        """In words, with the speed where the machine's is known; None without a plan."""
        if self.candidate is None or self.machine is None:
            return self.words
        return predicted_words(self.candidate, speeds=self.machine.is_measured)

    def compared(self, measured: Mapping[str, Any], **work: Any) -> dict[str, Any] | None:
        """For a report: `predicted` and `measured` by the same names. Speeds only where the machine's are known.
        work: what is known by now, as the tokens of the prompt."""
        if self.promised is not None:
            return _compared(str(self.words), self.promised, measured)
        if self.candidate is None or self.candidate.choice is None:
            return None
        assert self.facts is not None and self.machine is not None and self.work is not None
        batch = self.work.batch // self.candidate.micro_batches
        done, choice = replace(self.work, **{"batch": batch} | work), self.candidate.choice
        lines = memory_of(self.facts, choice, done)
        speed = speed_of(self.facts, choice, done, self.machine) if self.machine.is_measured else None
        return _compared(str(self.candidate), predicted(total(lines, choice.device), speed), measured)


def _compared(candidate: str, promised: dict[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: measured.get(name) for name in promised}
    return {"candidate": candidate, "predicted": promised, "measured": found}


def take_plan(
    model: str,
    work: Work,
    *,
    file: Path | None = None,
    given: Mapping[str, Any] | None = None,
    gpu: bool = True,
    dtype: torch.dtype | None = None,
    config: Any = None,
    trust_remote_code: bool = False,
) -> Taken:
    """file: that `amoeba plan` wrote. given: placement options of the user, which win over those of a plan; with any of
    them, nothing is planned here. gpu: False for a run on the CPU."""
    if file is not None:
        found, given = read_plan(file, work.purpose), given or {}
        options = {name: value for name, value in found["options"].items() if name not in given}
        placed = "experts" in given or given.get("precision", "bf16") != "bf16"
        dropped = ("ram", "vram", "experts") if placed else ("experts",) if given.keys() & {"ram", "vram"} else ()
        options = {name: value for name, value in options.items() if name not in dropped}
        told = ", ".join(f"{name} {value}" for name, value in options.items())
        words = f"plan {file}: experts {found['placement']} in {found['numbers']} ({told or 'as the model is'})"
        if given:
            own = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            words = f"plan {file}: {told or 'nothing of it'}, with {own} as given"
        return Taken(options, words, work=Work(**found["work"]), promised=None if given else found["predicted"])
    if given or (config is None and not Path(model).expanduser().exists()):  # the hub's files are not here yet
        return Taken()
    try:
        facts = read_facts(model, config=config, trust_remote_code=trust_remote_code)
        machine = measured_machine(measure=False, gpu=gpu)
        plan = make_plan(facts, machine, work, dtype=dtype, helps=False, whole=False)
        best = plan.best
        if best is not None and not best.is_default and not machine.is_measured:
            machine = measured_machine(gpu=gpu)
            plan = make_plan(facts, machine, work, dtype=dtype, helps=False)
    except Exception as error:  # a model may be odd in many ways; the command itself says what is wrong with it
        logger.info("no plan", exc_info=error)
        return Taken()
    return _taken(facts, machine, work, plan)


def _taken(facts: ModelFacts, machine: Machine, work: Work, plan: Plan) -> Taken:
    best = plan.best
    default = next((each for each in plan.candidates if each.is_default), plan.candidates[0])
    if best is None:
        said = f"the plan finds no way that fits ({default.rejected}); trying {default}; see amoeba plan {plan.model}"
        return Taken({}, said, default, facts, machine, work)
    logger.info("plan: %s", predicted_words(best))
    words: str | None = None
    if not best.is_default:
        why = f" ({default.placement} {default.rejected})" if default.rejected else ""
        words = f"plan: {predicted_words(best)}{why}"
    return Taken(best.options, words, best, facts, machine, work)


def adapt(
    model: Any,
    *,
    vram: str | int | None = None,
    ram: str | int | None = None,
    context: int = 4096,
    batch: int = 1,
    trains: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """A model placed as its plan says: on the GPU or the CPU, with all experts in memory or streamed.

    model: a folder, a store, or a transformers model that was loaded from one, whose experts are then moved.
    vram, ram: memory to use, as 8GiB or bytes; None for what is free. vram=0: without the GPU.
    trains: to train LoRA factors on frozen experts; else to generate.

    Returns the model. If its experts are streamed, `model.amoeba_streamed` closes and reports them.
    """
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    sizes = {"vram": vram, "ram": ram}
    asked = {key: parse_size(key, size) if isinstance(size, str) else size for key, size in sizes.items()}
    facts = read_facts(str(name), trust_remote_code=trust_remote_code)
    machine = measured_machine(measure=False, gpu=asked["vram"] != 0).within(asked["vram"], asked["ram"])
    work = Work("finetune" if trains else "generate", context, batch)
    plan = make_plan(facts, machine, work, helps=False)
    best = plan.best
    if best is None:
        got = f"{plan.candidates[0]}, which {plan.candidates[0].rejected}"
        raise bad_value("memory", "a way that fits", got, f"see what would help: amoeba plan {name}")
    logger.info("plan: %s", predicted_words(best))
    device = torch.device(best.device)
    if isinstance(model, str | Path):
        return _loaded(str(model), best, device, trains, trust_remote_code)
    if best.placement == "streamed":
        return _kept_open(attach(model, **_budgets(best)))
    place_experts(model, best.placement, trains=trains, device=device)
    return model.to(device)


def _loaded(name: str, best: Candidate, device: torch.device, trains: bool, trust_remote_code: bool) -> Any:
    config = load_config(name, trust_remote_code=trust_remote_code)
    choice = dtype_to_load(None, name, config, device)
    if best.placement == "streamed":
        streamed, _ = attach_in(choice, name, trust_remote_code=trust_remote_code, **_budgets(best))
        return _kept_open(streamed)
    loaded, _ = load_placed(
        name, choice, best.placement, trains=trains, device=device, trust_remote_code=trust_remote_code
    )
    return loaded.to(device)


def _budgets(best: Candidate) -> dict[str, Any]:
    return {name: int(size) for name, size in best.options.items() if name in ("vram", "ram")}


def _kept_open(streamed: Streamed) -> Any:
    streamed.model.amoeba_streamed = streamed
    return streamed.model
