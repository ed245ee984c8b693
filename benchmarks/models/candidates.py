"""Who takes part in a measurement of whole models. To add one, write a function that prepares it and a line below.

    def my_recipe(problem: Problem, stage: Stage) -> Step:     # builds the model, the optimizer, ...
        stage.enter_context(whatever_is_to_be_undone())
        return step                                            # () -> the loss of one whole step, not waited for

    def my_decoder(problem: Problem, stage: Stage) -> Decode:
        return decode                                          # (prompts (B, S), n) -> n new tokens (B, n), greedy

Steps of our own commands are in `as_commands`, decodes in `decoding`. Here: a training step as it is usually written
(loss, backward, clipped gradients, AdamW), factors on all experts of a frozen model, ours and PEFT's, and what the
frozen model itself costs.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from amoeba import lora
from benchmarks.models.as_commands import finetune_step, train_step
from benchmarks.models.decoding import by_generate, by_our_steps
from benchmarks.models.problem import (
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    MOST_NORM,
    Decode,
    Kind,
    Problem,
    Stage,
    Step,
)

# Bytes of a trained parameter: itself, its gradient and Adam's two moments; with ours also the rest of its fp32 value.
_FP32_TRAINED, _BF16_TRAINED, _FROZEN = 16.0, 8.0, 2.0
_OURS_TRAINED = {"float32": 14.0, "bfloat16": 10.0}
# Compiled, it breaks into many graphs, since PEFT changes the modules in every forward: stopped if that takes long.
_PEFT_SECONDS = 90.0


@dataclass(frozen=True)
class Candidate:
    """family:  whose process it may share on a GPU, one after another, see `run`.
    bytes_per_parameter: what it holds at least of the model, its gradients and its optimizer.
    against: the name of the candidate that its time is given as a multiple of.
    limit_seconds: from its beginning to its last figure; it is stopped there, and that is its result.
    gpu_only: is not measured on a CPU; own_gpu: takes the GPU of the machine where there is one.
    package: that it needs."""

    name: str
    ours: bool
    kind: Kind
    about: str
    prepare: Callable[[Problem, Stage], Step] | Callable[[Problem, Stage], Decode]
    family: str
    bytes_per_parameter: float
    against: str | None = None
    gpu_only: bool = False
    own_gpu: bool = False
    package: str | None = None
    limit_seconds: float = 240.0

    def why_not(self, problem: Problem) -> str | None:
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed: pip install {self.package}"
        if problem.device.type == "cpu" and self.gpu_only:
            return "is measured on a GPU"
        if problem.device.type == "cpu" and self.own_gpu and torch.cuda.is_available():
            return "takes the GPU of this machine"
        return None


def who_computes(experts: str, *how: str | None) -> str:
    """experts: as transformers calls an implementation of them ("amoeba", "grouped_mm", "eager", ...)."""
    who = "amoeba" if experts == "amoeba" else f"transformers {experts}"
    return ", ".join([who, *filter(None, how)])


def optimizer_step(model: Any, compiled: bool, problem: Problem) -> Step:
    """Of the parameters that require a gradient; where some of these are fp32 on a GPU, under autocast."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gpu = problem.device.type == "cuda"
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=gpu)
    ids = problem.ids(problem.batch.rows)
    mixed = gpu and any(parameter.dtype == torch.float32 for parameter in trained)

    def step() -> Tensor:
        with torch.autocast(problem.device.type, torch.bfloat16, enabled=mixed):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def frozen_step(experts: str, compiled: bool, problem: Problem, stage: Stage) -> Step:
    """Forward and the gradient of what the first layer gets: no adapter's step can be shorter."""
    model = problem.model(experts, problem.dtype).train().requires_grad_(False)
    run = torch.compile(model) if compiled else model
    ids = problem.ids(problem.batch.rows)
    embedded = model.get_input_embeddings()(ids).requires_grad_()

    def step() -> Tensor:
        loss = run(inputs_embeds=embedded, labels=ids).loss
        torch.autograd.grad(loss, [embedded])
        return loss.detach()

    return step


def our_factors(problem: Problem, stage: Stage) -> Step:
    """The factors of `amoeba finetune` in a step as it is usually written."""
    model = problem.model("amoeba", problem.dtype).train()
    lora.attach(model, LORA_RANK, LORA_ALPHA)
    return optimizer_step(model, False, problem)


def peft_factors(experts: str, compiled: bool, problem: Problem, stage: Stage) -> Step:
    """PEFT's own way: it adds the update to the weights of all experts in every forward."""
    from peft import LoraConfig, get_peft_model

    model = problem.model(experts, problem.dtype).train()
    stacks = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    config = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=[], target_parameters=stacks, task_type="CAUSAL_LM"
    )
    return optimizer_step(get_peft_model(model, config), compiled, problem)


def _as_it_trains(states: Literal["float32", "bfloat16"]) -> Candidate:
    name = f"amoeba as it trains, {'fp32' if states == 'float32' else 'bf16'} moments"
    about = "the step of amoeba train: its trainer, optimizer and fast paths"
    prepare, on_gpu = functools.partial(train_step, states), states == "bfloat16"
    return Candidate(
        name, True, "training", about, prepare, "amoeba", _OURS_TRAINED[states], gpu_only=on_gpu, own_gpu=True
    )


def _training(experts: str, parameters: Literal["float32", "bfloat16"], compiled: bool = False) -> Candidate:
    """parameters: "float32" is computed in bf16 by autocast on a GPU; "bfloat16" is trained with bf16 moments.
    compiled: by torch.compile, the whole model at once."""
    in_fp32 = parameters == "float32"
    name = who_computes(experts, "fp32 + autocast" if in_fp32 else "bf16", "compiled" if compiled else None)

    def prepare(problem: Problem, stage: Stage) -> Step:
        return optimizer_step(problem.model(experts, getattr(torch, parameters)).train(), compiled, problem)

    size, about = _FP32_TRAINED if in_fp32 else _BF16_TRAINED, "AdamW, clipped gradients, transformers' own loss"
    return Candidate(name, experts == "amoeba", "training", about, prepare, experts, size, gpu_only=not in_fp32)


def _as_it_finetunes() -> list[Candidate]:
    frozen = Candidate(
        "amoeba as it finetunes, frozen: forward and dx",
        True,
        "lora",
        "no adapter, all else as amoeba finetune has it: what its step is compared with",
        functools.partial(finetune_step, factors=False),
        "amoeba",
        _FROZEN,
        own_gpu=True,
    )
    about = "the step of amoeba finetune: fp32 factors on all experts, its trainer, optimizer and fast paths"
    name = "amoeba as it finetunes"
    found = [Candidate(name, True, "lora", about, finetune_step, "amoeba", _FROZEN, frozen.name, own_gpu=True), frozen]
    for format in ("fp8", "mxfp4", "nvfp4"):
        step = functools.partial(finetune_step, experts=f"{format}-weights")
        quantised = f"{about}, experts in {format}"
        found.append(
            Candidate(f"{name}, {format}", True, "lora", quantised, step, "amoeba", _FROZEN, name, own_gpu=True)
        )
    step = functools.partial(finetune_step, exact=True)
    in_exact_mode = f"{about}, in exact mode"
    found.append(Candidate(f"{name}, exact", True, "lora", in_exact_mode, step, "amoeba", _FROZEN, name, own_gpu=True))
    return found


def _our_lora() -> Candidate:
    about = "fp32 factors on all experts, in a step as it is usually written"
    against = _frozen("amoeba").name
    return Candidate("amoeba, factors", True, "lora", about, our_factors, "amoeba", _FROZEN, against)


def _peft(experts: str, compiled: bool = False) -> Candidate:
    return Candidate(
        f"PEFT on {who_computes(experts, 'compiled' if compiled else None)}",
        False,
        "lora",
        "fp32 factors on all experts by PEFT's target_parameters",
        functools.partial(peft_factors, experts, compiled),
        "PEFT",
        _FROZEN,
        _frozen(experts, compiled).name,
        gpu_only=compiled,
        package="peft",
        limit_seconds=_PEFT_SECONDS,
    )


def _frozen(experts: str, compiled: bool = False) -> Candidate:
    name = who_computes(experts, "compiled" if compiled else None, "frozen: forward and dx")
    about = "no adapter: what an adapter's step is compared with"
    prepare = functools.partial(frozen_step, experts, compiled)
    return Candidate(name, experts == "amoeba", "lora", about, prepare, experts, _FROZEN, gpu_only=compiled)


def _decode(experts: str, static_cache: bool = False, adapter: bool = False) -> Candidate:
    """static_cache: of a fixed length, with which transformers compiles the step by itself (on a GPU)."""
    plain = who_computes(experts, "static cache, compiled" if static_cache else "plain generate")
    prepare = functools.partial(by_generate, experts, static_cache, adapter)
    about = "transformers' generate, greedy"
    return _maybe_adapted(plain, adapter, experts == "amoeba", about, prepare, experts, static_cache)


def _our_decode(compiled: bool = False, adapter: bool = False) -> Candidate:
    """The steps that `amoeba generate` makes on a GPU: captured in CUDA graphs, their layers compiled or not."""
    plain = f"amoeba generate, steps {'compiled' if compiled else 'captured'}"
    prepare = functools.partial(by_our_steps, compiled, adapter)
    return _maybe_adapted(plain, adapter, True, "the steps of amoeba generate, greedy", prepare, "amoeba", True)


def _maybe_adapted(
    plain: str,
    adapter: bool,
    ours: bool,
    about: str,
    prepare: Callable[[Problem, Stage], Decode],
    family: str,
    gpu_only: bool,
) -> Candidate:
    """adapter: factors of ours on all experts."""
    name, against = (f"{plain}, adapter", plain) if adapter else (plain, None)
    return Candidate(name, ours, "decode", about, prepare, family, _FROZEN, against, gpu_only)


# Of one family, those that need the same model follow each other.
CANDIDATES = (
    _as_it_trains("float32"),
    _as_it_trains("bfloat16"),
    _training("amoeba", "float32"),
    _training("amoeba", "bfloat16"),
    _training("amoeba", "bfloat16", compiled=True),
    _training("grouped_mm", "float32"),
    _training("grouped_mm", "bfloat16"),
    _training("grouped_mm", "bfloat16", compiled=True),
    _training("eager", "bfloat16"),
    *_as_it_finetunes(),
    _our_lora(),
    _frozen("amoeba"),
    _frozen("grouped_mm"),
    _frozen("grouped_mm", compiled=True),
    _peft("grouped_mm"),
    _peft("grouped_mm", compiled=True),
    _decode("amoeba"),
    _our_decode(),
    _our_decode(compiled=True),
    _decode("amoeba", adapter=True),
    _our_decode(adapter=True),
    _our_decode(compiled=True, adapter=True),
    _decode("amoeba", static_cache=True),
    _decode("grouped_mm"),
    _decode("grouped_mm", static_cache=True),
    _decode("eager"),
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
