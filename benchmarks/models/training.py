"""A whole training step as it is usually written: loss, backward, clipped gradients, AdamW.

step = training_step(Recipe("grouped_mm", "bfloat16", compiled=True), problem, stage)
loss = step()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.models.candidate import Stage, Step, who_computes
from benchmarks.models.problem import Problem

LEARNING_RATE = 1e-4
MOST_NORM = 1.0


@dataclass(frozen=True)
class Recipe:
    """experts:    as transformers calls an implementation of them ("amoeba", "grouped_mm", "eager", ...).
    parameters: "float32" is computed in bf16 by autocast on a GPU; "bfloat16" is trained as it is, with bf16 moments.
    compiled:   by torch.compile, the whole model at once."""

    experts: str
    parameters: Literal["float32", "bfloat16"]
    compiled: bool = False

    @property
    def name(self) -> str:
        words = [who_computes(self.experts), "fp32 + autocast" if self.parameters == "float32" else "bf16"]
        return ", ".join([*words, "compiled"] if self.compiled else words)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.parameters == "float32" else torch.bfloat16

    def why_not(self, problem: Problem) -> str | None:
        if problem.device.type == "cpu" and (self.compiled or self.parameters == "bfloat16"):
            return "is measured on a GPU"
        return None


def training_step(recipe: Recipe, problem: Problem, stage: Stage) -> Step:
    model = problem.model(recipe.experts, recipe.dtype).train()
    return optimizer_step(model, recipe.compiled, problem)


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
