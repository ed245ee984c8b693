"""The steps of `amoeba train` and `amoeba finetune`, by the trainer and the fast paths of these commands themselves.

    step = train_step("float32", problem, stage)
    step = finetune_step(problem, stage)
    step = finetune_step(problem, stage, factors=False)     # in the same mode: the frozen model's forward and dx
    step = finetune_step(problem, stage, experts="mxfp4-weights")
    step = finetune_step(problem, stage, exact=True)        # with the bits of generation
    loss = step()

What a run has around its steps is left out: reading data, lines of the log, evaluations, checkpoints.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from amoeba import lora, place_experts
from amoeba.data.sft_dataset import pad_rows
from amoeba.data.token_rows import stack
from amoeba.jobs.settings import FinetuneSettings, RunSettings, TrainSettings
from benchmarks.models.problem import LEARNING_RATE, LORA_ALPHA, LORA_RANK, MOST_NORM, Problem, Stage, Step

_STEPS = 1000  # of the run that the trainer is made for, which is never run to its end


def train_step(states: Literal["float32", "bfloat16"], problem: Problem, stage: Stage) -> Step:
    """states: dtype of AdamW's moments on a GPU."""
    model = problem.model("amoeba", problem.dtype).train()
    settings = TrainSettings(
        model=problem.size.name,
        batch_size=problem.batch.rows,
        sequence_length=problem.batch.length,
        learning_rate=LEARNING_RATE,
        optimizer_states=states,
    )
    place_S = torch.arange(problem.batch.length, dtype=torch.int64, device="cpu")
    rows = [row | {"position_ids": place_S} for row in _rows(problem)]
    return _step(model, rows, stack, 1, settings, problem, stage)


def finetune_step(
    problem: Problem, stage: Stage, factors: bool = True, experts: str | None = None, exact: bool = False
) -> Step:
    """factors: False for what the frozen model costs: no adapter's step can be shorter. experts: quantised to this."""
    model = problem.model("amoeba", problem.dtype).train()
    if experts is not None:
        place_experts(model, experts)
    if factors:
        lora.attach(model, LORA_RANK, LORA_ALPHA)
    else:
        model.requires_grad_(False)
        model.enable_input_require_grads()
    settings = FinetuneSettings(
        model=problem.size.name,
        batch_size=problem.batch.rows,
        sequence_length=problem.batch.length,
        learning_rate=LEARNING_RATE,
        r=LORA_RANK,
        alpha=LORA_ALPHA,
        exact=exact,
    )
    collate = functools.partial(pad_rows, padding=0, least=problem.batch.length)
    return _step(model, _rows(problem), collate, 2, settings, problem, stage)


def _rows(problem: Problem) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in problem.ids(problem.batch.rows).cpu()]


def _step(
    model: Any,
    rows: list[dict[str, Tensor]],
    collate: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]],
    documents_per_row: int,
    settings: RunSettings,
    problem: Problem,
    stage: Stage,
) -> Step:
    from amoeba.jobs.train.fast_paths import fast_paths
    from amoeba.jobs.train.manifest import WholeModel
    from amoeba.jobs.train.run import Run
    from amoeba.jobs.train.run_folder import Console
    from amoeba.jobs.train.trainer import Rows
    from amoeba.jobs.train.training_loop import make_trainer

    length = problem.batch.length
    console: Any = Console()
    console.say = stage.said.append
    run = Run("amoeba bench", replace(settings, out=stage.enter_context(tempfile.TemporaryDirectory())), console)
    of_trainer = Rows(rows, rows, collate, length, documents_per_row, length)
    trainer: Any = make_trainer(run, model, None, of_trainer, _STEPS, model.dtype, WholeModel())
    log = trainer.run_log
    stage.callback(log.close)
    stage.enter_context(trainer.while_it_runs)
    compiles = "on" if problem.device.type == "cuda" else "auto"
    stage.enter_context(fast_paths(trainer, compiles, console.say, exact=settings.exact))

    trained = log.trained_parameters
    if trained:
        trainer.create_optimizer()
    inputs = trainer._prepare_inputs(trainer.collate(rows))
    predicted = torch.tensor(len(rows) * (length - 1), dtype=torch.int64, device=problem.device)

    def step() -> Tensor:
        loss = trainer.training_step(trainer.model, inputs, predicted)
        log.losses.clear()  # what a line of the log would be made of
        log.tokens.clear()
        if trained:
            trainer.accelerator.clip_grad_norm_(trained, MOST_NORM)
            trainer.optimizer.step()
            trainer.model.zero_grad()
        return loss

    return step
