"""Greedy decoding after prompts of equal length: by transformers' own `generate`, and by the steps of ours.

    decode = by_generate(Decoding("grouped_mm"), problem, stage)
    decode = by_our_steps(OurSteps(compiled=False, adapter=True), problem, stage)
    new_ids = decode(ids, 64)

Tens of gigabytes of weights are made once for all candidates of a process, which change nothing but the adapter.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amoeba import lora
from amoeba.jobs.generate.token_steps import choose_steps
from benchmarks.models.candidate import Decode, Stage, who_computes
from benchmarks.models.greedy import compare
from benchmarks.models.problem import LORA_ALPHA, LORA_RANK, Problem

_ADAPTED = ", adapter"


@dataclass(frozen=True)
class Decoding:
    """static_cache: a cache of a fixed length, with which transformers compiles the step by itself (on a GPU).
    adapter: factors of ours on all experts."""

    experts: str
    static_cache: bool = False
    adapter: bool = False

    @property
    def name(self) -> str:
        how = "static cache, compiled" if self.static_cache else "plain generate"
        return f"{who_computes(self.experts)}, {how}{_ADAPTED if self.adapter else ''}"

    def why_not(self, problem: Problem) -> str | None:
        return "is measured on a GPU" if self.static_cache and problem.device.type == "cpu" else None


@dataclass(frozen=True)
class OurSteps:
    """The steps that `amoeba generate` makes on a GPU: captured in CUDA graphs, their layers compiled or not."""

    compiled: bool = False
    adapter: bool = False

    @property
    def name(self) -> str:
        how = "steps compiled" if self.compiled else "steps captured"
        return "amoeba generate, " + how + (_ADAPTED if self.adapter else "")

    def why_not(self, problem: Problem) -> str | None:
        return "is measured on a GPU" if problem.device.type == "cpu" else None


@dataclass
class _Held:
    """A model of this process, and the tokens of its plain loop by (adapter, prompts)."""

    of: tuple[str, str, str]
    model: Any
    adapter: bool = False
    plain: dict[tuple[bool, int, int], Tensor] = field(default_factory=dict)


_held: _Held | None = None


def by_generate(decoding: Decoding, problem: Problem, stage: Stage) -> Decode:
    held = _hold(decoding.experts, decoding.adapter, problem)

    def decode(ids: Tensor, new_tokens: int) -> Tensor:
        made = _generate(held.model, ids, new_tokens, decoding.static_cache)
        if not decoding.static_cache:
            held.plain[decoding.adapter, ids.shape[0], new_tokens] = made
        return made

    return decode


def by_our_steps(steps: OurSteps, problem: Problem, stage: Stage) -> Decode:
    held = _hold("amoeba", steps.adapter, problem)
    wanted = "compiled" if steps.compiled else "captured"
    decoders: dict[int, Any] = {}
    stage.callback(decoders.clear)

    def decode(ids: Tensor, new_tokens: int) -> Tensor:
        rows, length = ids.shape
        if rows not in decoders:
            decoders.clear()
            made = choose_steps(
                held.model,
                {},  # greedy
                batch=rows,
                prompt_tokens=length,
                new_tokens=problem.batch.new_tokens,
                compile=steps.compiled,
            )
            if made.kind != wanted:
                raise RuntimeError(f"steps are {made.kind}: {made.reason}")
            decoders[rows] = made.decoder
        tokens = list(decoders[rows].generate(ids.tolist(), new_tokens))
        return torch.tensor(tokens, dtype=torch.int64, device="cpu").T

    def compare_with_plain(ids: Tensor, made: Tensor) -> Any:
        key = steps.adapter, *made.shape
        if key not in held.plain:
            held.plain[key] = _generate(held.model, ids, made.shape[1], static_cache=False)
        return compare(held.model, ids, made, held.plain[key])

    stage.compare = compare_with_plain
    return decode


def _hold(experts: str, adapter: bool, problem: Problem) -> _Held:
    global _held
    of = problem.size.name, problem.device.type, experts
    if _held is None or _held.of != of:
        _held = None
        gc.collect()
        _held = _Held(of, problem.model(experts, problem.dtype).eval())
    if adapter != _held.adapter:
        if adapter:
            _attach(_held.model)
        else:
            lora.detach(_held.model)
        _held.adapter = adapter
    return _held


def _attach(model: Any) -> None:
    """With factors that change the tokens: fresh ones are zero on one side."""
    lora.attach(model, LORA_RANK, LORA_ALPHA)
    generator = torch.Generator(model.device).manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.02, generator=generator)
    model.requires_grad_(False).eval()


def _generate(model: Any, ids: Tensor, new_tokens: int, static_cache: bool) -> Tensor:
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,  # random weights may say anything, also that they are done
        pad_token_id=0,
        **({"cache_implementation": "static"} if static_cache else {}),
    )
    return made[:, ids.shape[1] :]
