"""LoRA steps: factors on all experts of a frozen model, ours and PEFT's, and what the frozen model itself costs.

step = our_factors(Frozen("amoeba"), problem, stage)
step = peft_factors(Frozen("grouped_mm"), problem, stage)
step = frozen_step(Frozen("grouped_mm", compiled=True), problem, stage)
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from amoeba import lora
from benchmarks.models.candidate import Stage, Step, who_computes
from benchmarks.models.problem import LORA_ALPHA, LORA_RANK, Problem
from benchmarks.models.training import optimizer_step


@dataclass(frozen=True)
class Frozen:
    """A model that is not trained itself, its experts computed as transformers calls it."""

    experts: str
    compiled: bool = False

    @property
    def name(self) -> str:
        return who_computes(self.experts) + (", compiled" if self.compiled else "")

    def why_not(self, problem: Problem) -> str | None:
        return "is measured on a GPU" if self.compiled and problem.device.type == "cpu" else None


def our_factors(frozen: Frozen, problem: Problem, stage: Stage) -> Step:
    """The factors of `amoeba finetune` in a step as it is usually written."""
    model = problem.model(frozen.experts, problem.dtype).train()
    lora.attach(model, LORA_RANK, LORA_ALPHA)
    return optimizer_step(model, frozen.compiled, problem)


def why_not_peft(frozen: Frozen, problem: Problem) -> str | None:
    if importlib.util.find_spec("peft") is None:
        return "peft is not installed: pip install peft"
    return frozen.why_not(problem)


def peft_factors(frozen: Frozen, problem: Problem, stage: Stage) -> Step:
    """PEFT's own way: it adds the update to the weights of all experts in every forward."""
    from peft import LoraConfig, get_peft_model

    model = problem.model(frozen.experts, problem.dtype).train()
    stacks = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    config = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=[], target_parameters=stacks, task_type="CAUSAL_LM"
    )
    return optimizer_step(get_peft_model(model, config), frozen.compiled, problem)


def frozen_step(frozen: Frozen, problem: Problem, stage: Stage) -> Step:
    """Forward and the gradient of what the first layer gets: no adapter's step can be shorter."""
    model = problem.model(frozen.experts, problem.dtype).train().requires_grad_(False)
    run = torch.compile(model) if frozen.compiled else model
    ids = problem.ids(problem.batch.rows)
    embedded = model.get_input_embeddings()(ids).requires_grad_()

    def step() -> Tensor:
        loss = run(inputs_embeds=embedded, labels=ids).loss
        torch.autograd.grad(loss, [embedded])
        return loss.detach()

    return step
