"""Who takes part. To add one, write a function that prepares it (see `candidate`) and a line here.

ours = candidates_for(problem)[0]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from benchmarks.models.as_commands import finetune_step, train_step, why_not_on_a_cpu
from benchmarks.models.as_commands import why_not as why_not_as_commands
from benchmarks.models.candidate import Candidate
from benchmarks.models.decoding import Decoding, OurSteps, by_generate, by_our_steps
from benchmarks.models.low_rank import Frozen, frozen_step, our_factors, peft_factors, why_not_peft
from benchmarks.models.problem import Problem
from benchmarks.models.training import Recipe, training_step

# Bytes of a trained parameter: itself, its gradient and Adam's two moments; with ours also the rest of its fp32 value.
_FP32_TRAINED, _BF16_TRAINED, _FROZEN = 16.0, 8.0, 2.0
_OURS_TRAINED = {"float32": 14.0, "bfloat16": 10.0}
# Compiled, it breaks into many graphs, since PEFT changes the modules in every forward: stopped if that takes long.
_PEFT_SECONDS = 90.0


def _as_it_trains(states: Literal["float32", "bfloat16"]) -> Candidate:
    return Candidate(
        f"amoeba as it trains, {'fp32' if states == 'float32' else 'bf16'} moments",
        True,
        "training",
        "the step of amoeba train: its trainer, optimizer and fast paths",
        functools.partial(train_step, states),
        "amoeba",
        _OURS_TRAINED[states],
        why_not_as_commands if states == "float32" else why_not_on_a_cpu,
    )


def _training(recipe: Recipe) -> Candidate:
    return Candidate(
        recipe.name,
        recipe.experts == "amoeba",
        "training",
        "AdamW, clipped gradients, transformers' own loss",
        functools.partial(training_step, recipe),
        recipe.experts,
        _FP32_TRAINED if recipe.parameters == "float32" else _BF16_TRAINED,
        recipe.why_not,
    )


def _as_it_finetunes() -> list[Candidate]:
    frozen = Candidate(
        "amoeba as it finetunes, frozen: forward and dx",
        True,
        "lora",
        "no adapter, all else as amoeba finetune has it: what its step is compared with",
        functools.partial(finetune_step, factors=False),
        "amoeba",
        _FROZEN,
        why_not_as_commands,
    )
    factors = Candidate(
        "amoeba as it finetunes",
        True,
        "lora",
        "the step of amoeba finetune: fp32 factors on all experts, its trainer, optimizer and fast paths",
        finetune_step,
        "amoeba",
        _FROZEN,
        why_not_as_commands,
        frozen.name,
    )
    return [factors, frozen]


def _our_lora(frozen: Frozen) -> Candidate:
    return Candidate(
        f"{frozen.name}, factors",
        True,
        "lora",
        "fp32 factors on all experts, in a step as it is usually written",
        functools.partial(our_factors, frozen),
        frozen.experts,
        _FROZEN,
        frozen.why_not,
        _frozen(frozen).name,
    )


def _peft(frozen: Frozen) -> Candidate:
    return Candidate(
        f"PEFT on {frozen.name}",
        False,
        "lora",
        "fp32 factors on all experts by PEFT's target_parameters",
        functools.partial(peft_factors, frozen),
        "PEFT",
        _FROZEN,
        functools.partial(why_not_peft, frozen),
        _frozen(frozen).name,
        _PEFT_SECONDS,
    )


def _frozen(frozen: Frozen) -> Candidate:
    return Candidate(
        f"{frozen.name}, frozen: forward and dx",
        frozen.experts == "amoeba",
        "lora",
        "no adapter: what an adapter's step is compared with",
        functools.partial(frozen_step, frozen),
        frozen.experts,
        _FROZEN,
        frozen.why_not,
    )


def _decode(decoding: Decoding) -> Candidate:
    return Candidate(
        decoding.name,
        decoding.experts == "amoeba",
        "decode",
        "transformers' generate, greedy",
        functools.partial(by_generate, decoding),
        decoding.experts,
        _FROZEN,
        decoding.why_not,
        Decoding(decoding.experts, decoding.static_cache).name if decoding.adapter else None,
    )


def _our_decode(steps: OurSteps) -> Candidate:
    return Candidate(
        steps.name,
        True,
        "decode",
        "the steps of amoeba generate, greedy",
        functools.partial(by_our_steps, steps),
        "amoeba",
        _FROZEN,
        steps.why_not,
        OurSteps(steps.compiled).name if steps.adapter else None,
    )


# Of one family, those that need the same model follow each other.
CANDIDATES = (
    _as_it_trains("float32"),
    _as_it_trains("bfloat16"),
    _training(Recipe("amoeba", "float32")),
    _training(Recipe("amoeba", "bfloat16")),
    _training(Recipe("amoeba", "bfloat16", compiled=True)),
    _training(Recipe("grouped_mm", "float32")),
    _training(Recipe("grouped_mm", "bfloat16")),
    _training(Recipe("grouped_mm", "bfloat16", compiled=True)),
    _training(Recipe("eager", "bfloat16")),
    *_as_it_finetunes(),
    _our_lora(Frozen("amoeba")),
    _frozen(Frozen("amoeba")),
    _frozen(Frozen("grouped_mm")),
    _frozen(Frozen("grouped_mm", compiled=True)),
    _peft(Frozen("grouped_mm")),
    _peft(Frozen("grouped_mm", compiled=True)),
    _decode(Decoding("amoeba")),
    _our_decode(OurSteps()),
    _our_decode(OurSteps(compiled=True)),
    _decode(Decoding("amoeba", adapter=True)),
    _our_decode(OurSteps(adapter=True)),
    _our_decode(OurSteps(compiled=True, adapter=True)),
    _decode(Decoding("amoeba", static_cache=True)),
    _decode(Decoding("grouped_mm")),
    _decode(Decoding("grouped_mm", static_cache=True)),
    _decode(Decoding("eager")),
)


def candidates_for(
    problem: Problem, ours: Sequence[str] | None = None, peers: Sequence[str] | None = None
) -> list[Candidate]:
    """ours, peers: names of those that are wanted, or parts of names; None: all."""
    return [
        candidate
        for candidate in CANDIDATES
        if candidate.kind == problem.kind and _is_wanted(candidate.name, ours if candidate.ours else peers)
    ]


def _is_wanted(name: str, wanted: Sequence[str] | None) -> bool:
    """A whole name stands for that candidate alone, and not for others that begin with it."""
    return wanted is None or any(name == each if each in _NAMES else each in name for each in wanted)


_NAMES = frozenset(candidate.name for candidate in CANDIDATES)
