"""Ranks with differing settings under the same fuzzer: every difference is found, named with its ranks, on all of them.

Settings are drawn field by field from the dataclasses of the commands, without their checks: a rank may be told
anything. The truth is a comparison of the drawn values, which shares no code with the ranks' own.
"""

import copy
import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from amoeba.jobs.generate.options import GenerationOptions
from amoeba.jobs.same_on_ranks import BY_CONTENT, job_facts
from amoeba.jobs.settings import FinetuneSettings, TrainSettings

from .attempt import OUR_FORM, Outcome, verdict_on
from .fake_ranks import compare

COMMANDS: dict[str, Any] = {
    "train": TrainSettings(),
    "finetune": FinetuneSettings(model="owner/name"),
    "generate": GenerationOptions(),
}
TEXTS = ("", "é", "a b", 'quote"', "x" * 300, "null", "1", "; got 3 on rank 0", "line\nbreak", "\U0001f9ec", "{}", "%s")
NUMBERS = (0, -1, 1, 2**31, 2**63, 0.1, 1e-300, 1e300, 0.1 + 2**-55, -0.5, 3.5)


@dataclass(frozen=True)
class RanksCase:
    seed: int
    device: str = "cpu"
    command: str = "train"
    ranks: int = 2
    differing: tuple[tuple[int, str, Any], ...] = ()  # rank, field, its value there

    @property
    def row(self) -> str:
        return f"{self.command} over {self.ranks} ranks, {min(len(self.differing), 3)} differences"


def draw(seed: int, device: str = "cpu") -> RanksCase:
    rng = random.Random(seed)
    command, ranks = rng.choice(list(COMMANDS)), rng.choice((2, 2, 3, 4, 8, 16))
    fields = [field.name for field in dataclasses.fields(COMMANDS[command])]
    differing = tuple(
        (rng.randrange(ranks), rng.choice(fields), _value(rng)) for _ in range(rng.choice((0, 1, 1, 1, 2, 5, 20)))
    )
    return RanksCase(seed, device, command, ranks, differing)


def _value(rng: random.Random) -> Any:
    texts = (None, True, False, *TEXTS, *NUMBERS)
    return tuple(rng.choice(texts) for _ in range(3)) if rng.random() < 0.1 else rng.choice(texts)


def attempt(case: RanksCase) -> Outcome:
    told = [copy.copy(COMMANDS[case.command]) for _ in range(case.ranks)]
    for rank, field, value in case.differing:
        object.__setattr__(told[rank], field, value)
    try:
        facts = [job_facts(case.command, each, {}, model="owner/name") for each in told]
        said = compare(facts)
    except Exception as error:
        return verdict_on(error)
    faults = _faults(case, told, said)
    if faults:
        return Outcome("failed", "; ".join(faults))
    return Outcome("refused", said[0]) if said[0] else Outcome("passed")


def _faults(case: RanksCase, told: list[Any], said: list[str]) -> list[str]:
    if len(set(said)) > 1:
        return [f"ranks say different things: {sorted(set(said))}"]
    different = [field.name for field in dataclasses.fields(told[0]) if _is_different(field.name, told)]
    if not different:
        return [f"nothing differs, and they say {said[0]}"] if said[0] else []
    if not said[0]:
        return [f"nobody noticed {', '.join(different)}"]
    faults = [] if OUR_FORM.fullmatch(said[0]) else [f"not in our form: {said[0]}"]
    if f"{len(different) - 1} more: expected" not in said[0] and len(different) > 1:
        faults.append(f"{len(different)} fields differ: {said[0]}")
    names = [f"--{name.replace('_', '-')}" for name in different]
    faults += [f"{name} is not named: {said[0]}" for name in names[:4] if name not in said[0]]
    if len(different) == 1:
        odd = [rank for rank, each in enumerate(told) if getattr(each, different[0]) != getattr(told[0], different[0])]
        faults += [f"rank {rank} is not named: {said[0]}" for rank in odd if not _mentions(rank, said[0])]
    return faults


def _is_different(name: str, told: list[Any]) -> bool:
    if name == "model":  # which is given to `job_facts` apart, and is the same here
        return False
    values = [getattr(each, name) for each in told]
    if name in BY_CONTENT:  # of these a share is a number, and all else a name of something
        values = [value if isinstance(value, float) else None for value in values]
    return any(value != values[0] for value in values)


def _mentions(rank: int, said: str) -> bool:
    return any(
        str(rank) in part.partition(". ")[0].replace(",", " ").split()
        for word in (" on rank ", " on ranks ")
        for part in said.split(word)[1:]
    )
