"""Who takes part. To add one, write a function that prepares it (see `candidate`) and a line here.

ours = candidates_for(problem)[0]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from amoeba.bench.models.candidate import Candidate
from amoeba.bench.models.decoding import Decoding, by_generate
from amoeba.bench.models.low_rank import Frozen, frozen_step, our_factors, peft_factors
from amoeba.bench.models.problem import Problem
from amoeba.bench.models.recipe import our_step
from amoeba.bench.models.recipe import why_not as why_not_ours
from amoeba.bench.models.training import Recipe, training_step

# Bytes of a trained parameter: itself, its gradient and Adam's two moments.
_FP32_TRAINED, _BF16_TRAINED, _FROZEN = 16.0, 8.0, 2.0
# It had not finished its first steps after 100 s on the 1.27B model.
_PEFT_SECONDS = 90.0


def _training(recipe: Recipe) -> Candidate:
    return Candidate(
        recipe.name,
        recipe.experts == "amoeba",
        "training",
        "AdamW, clipped gradients, transformers' own loss",
        functools.partial(training_step, recipe),
        _FP32_TRAINED if recipe.parameters == "float32" else _BF16_TRAINED,
        recipe.why_not,
    )


def _as_it_trains(states: Literal["float32", "bfloat16"]) -> Candidate:
    return Candidate(
        f"amoeba as it trains, {'fp32' if states == 'float32' else 'bf16'} moments",
        True,
        "training",
        "bf16 with fp32 masters, layers compiled, loss from hidden states, routers balanced, passes captured",
        functools.partial(our_step, states),
        14.0 if states == "float32" else 10.0,
        why_not_ours,
    )


def _our_lora(frozen: Frozen) -> Candidate:
    return Candidate(
        f"{frozen.name}, factors",
        True,
        "lora",
        "fp32 factors on all experts, as amoeba finetune puts them there",
        functools.partial(our_factors, frozen),
        _FROZEN,
        frozen.why_not,
    )


def _peft(frozen: Frozen) -> Candidate:
    return Candidate(
        f"PEFT on {frozen.name}",
        False,
        "lora",
        "fp32 factors on all experts by PEFT's target_parameters",
        functools.partial(peft_factors, frozen),
        _FROZEN,
        frozen.why_not,
        _PEFT_SECONDS,
    )


def _frozen(frozen: Frozen) -> Candidate:
    return Candidate(
        f"{frozen.name}, frozen: forward and dx",
        frozen.experts == "amoeba",
        "lora",
        "no adapter: what an adapter's step is compared with",
        functools.partial(frozen_step, frozen),
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
        _FROZEN,
        decoding.why_not,
    )


CANDIDATES = (
    _training(Recipe("amoeba", "float32")),
    _training(Recipe("amoeba", "bfloat16")),
    _training(Recipe("amoeba", "bfloat16", compiled=True)),
    _as_it_trains("float32"),
    _as_it_trains("bfloat16"),
    _training(Recipe("grouped_mm", "float32")),
    _training(Recipe("grouped_mm", "bfloat16")),
    _training(Recipe("grouped_mm", "bfloat16", compiled=True)),
    _training(Recipe("eager", "bfloat16")),
    _our_lora(Frozen("amoeba")),
    _our_lora(Frozen("amoeba", compiled=True)),
    _frozen(Frozen("amoeba")),
    _frozen(Frozen("amoeba", compiled=True)),
    _frozen(Frozen("grouped_mm")),
    _frozen(Frozen("grouped_mm", compiled=True)),
    _peft(Frozen("grouped_mm")),
    _decode(Decoding("amoeba")),
    _decode(Decoding("amoeba", static_cache=True)),
    _decode(Decoding("grouped_mm")),
    _decode(Decoding("grouped_mm", static_cache=True)),
    _decode(Decoding("eager")),
)


def candidates_for(
    problem: Problem, ours: Sequence[str] | None = None, peers: Sequence[str] | None = None
) -> list[Candidate]:
    """ours, peers: parts of the names of those that are wanted; None: all."""
    return [
        candidate
        for candidate in CANDIDATES
        if candidate.kind == problem.kind and _is_wanted(candidate.name, ours if candidate.ours else peers)
    ]


def _is_wanted(name: str, parts: Sequence[str] | None) -> bool:
    return parts is None or any(part in name for part in parts)
