"""The training step of `amoeba train` on a GPU, without the run around it.

step = our_step("float32", problem)
loss = step()
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from amoeba.bench.models.candidate import Step
from amoeba.bench.models.problem import Problem
from amoeba.bench.models.training import LEARNING_RATE, MOST_NORM
from amoeba.data.token_rows import document_arguments
from amoeba.integrations.compiled_layers import CompiledLayers
from amoeba.integrations.fused_loss import fused_loss
from amoeba.integrations.fused_routers import fused_routers
from amoeba.jobs.captured_step import CapturedStep
from amoeba.observe.router_watch import RouterWatch
from amoeba.optim import AdamW

BALANCE = 0.01


def why_not(problem: Problem) -> str | None:
    return None if problem.device.type == "cuda" else "is measured on a GPU"


def our_step(states: Literal["float32", "bfloat16"], problem: Problem) -> Step:
    """states: dtype of AdamW's moments."""
    from amoeba.integrations.attention import NAME

    model: Any = problem.model("amoeba", torch.bfloat16).train()
    model.set_attn_implementation(NAME)
    until_the_end = ExitStack()  # of the process
    until_the_end.enter_context(fused_routers(model))
    watch = RouterWatch(model)
    watch.balance(BALANCE, 0.0)
    reason = until_the_end.enter_context(fused_loss(model))
    if reason is not None:
        raise RuntimeError(f"the loss from hidden states: {reason}")
    CompiledLayers(model).begin()
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, states=states)
    ids = problem.ids(problem.batch.rows)
    ends = document_arguments({"input_ids": ids.cpu()}, 1, ids.shape[1])
    inputs = {name: value.to(ids.device) if isinstance(value, Tensor) else value for name, value in ends.items()}
    inputs |= {"input_ids": ids, "labels": ids}
    predicted = torch.tensor(ids.shape[0] * (ids.shape[1] - 1), dtype=torch.int64, device=ids.device)
    captured: list[CapturedStep] = []

    def run(inputs: dict[str, Any], predicted: Tensor) -> Tensor:
        loss = model(**inputs, num_items_in_batch=predicted).loss
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        if optimizer.state and not captured:  # the first one compiled it
            captured.append(CapturedStep(run, inputs, predicted, model.parameters()))
            optimizer.zero_grad()
        loss = captured[0](inputs, predicted) if captured else run(inputs, predicted)
        optimizer.note_clipping(MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step.until_the_end = until_the_end  # type: ignore[attr-defined]
    return step
