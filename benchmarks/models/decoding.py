"""Greedy decoding after prompts of equal length: by transformers' own `generate`, and by the steps of ours; and whether
these chose the tokens of the plain loop, or how near a tie it was where they did not.

    decode = by_generate("grouped_mm", False, False, problem, stage)
    decode = by_our_steps(False, True, problem, stage)
    new_ids = decode(ids, 64)
    compare(model, ids_BS, made_BN, plain_BN).first_differences

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
from benchmarks.models.problem import LORA_ALPHA, LORA_RANK, Decode, Problem, Stage


@dataclass(frozen=True)
class Difference:
    """The first one of a row. margin: by how much the plain loop's token was ahead of the second there, in logits."""

    row: int
    token: int  # counted from the first new one
    margin: float


@dataclass(frozen=True)
class Agreement:
    """median_margin: of all tokens of the plain loop; a difference far below it is a tie that rounding decides."""

    same: bool
    tokens: int
    first_differences: list[Difference]
    median_margin: float | None = None


@torch.no_grad()
def compare(model: Any, ids_BS: Tensor, made_BN: Tensor, plain_BN: Tensor) -> Agreement:
    """plain_BN: what the plain loop made of the same model and prompts."""
    made_BN = made_BN.to(plain_BN.device)
    differs_BN = made_BN != plain_BN
    if not bool(differs_BN.any()):
        return Agreement(True, made_BN.numel(), [])
    count = plain_BN.shape[1]
    logits_BNV = model(input_ids=torch.cat((ids_BS, plain_BN), 1), logits_to_keep=count + 1).logits[:, :-1].float()
    best_BN2 = logits_BNV.topk(2, -1).values
    margin_BN = best_BN2[..., 0] - best_BN2[..., 1]
    first = [
        Difference(row, at := int(differs_BN[row].nonzero()[0]), float(margin_BN[row, at]))
        for row in range(len(differs_BN))
        if bool(differs_BN[row].any())
    ]
    return Agreement(False, made_BN.numel(), first, float(margin_BN.median()))


@dataclass
class _Held:
    """A model of this process, and the tokens of its plain loop by (adapter, prompts)."""

    of: tuple[str, str, str]
    model: Any
    adapter: bool = False
    plain: dict[tuple[bool, int, int], Tensor] = field(default_factory=dict)


_held: _Held | None = None


def by_generate(experts: str, static_cache: bool, adapter: bool, problem: Problem, stage: Stage) -> Decode:
    held = _hold(experts, adapter, problem)

    def decode(ids: Tensor, new_tokens: int) -> Tensor:
        made = _generate(held.model, ids, new_tokens, static_cache)
        if not static_cache:
            held.plain[adapter, ids.shape[0], new_tokens] = made
        return made

    return decode


def by_our_steps(compiled: bool, adapter: bool, problem: Problem, stage: Stage) -> Decode:
    held = _hold("amoeba", adapter, problem)
    wanted = "compiled" if compiled else "captured"
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
                compile=compiled,
            )
            if made.kind != wanted:
                raise RuntimeError(f"steps are {made.kind}: {made.reason}")
            decoders[rows] = made.decoder
        tokens = list(decoders[rows].generate(ids.tolist(), new_tokens))
        return torch.tensor(tokens, dtype=torch.int64, device="cpu").T

    def compare_with_plain(ids: Tensor, made: Tensor) -> Any:
        key = adapter, *made.shape
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
