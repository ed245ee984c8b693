"""Training steps in CUDA graphs that are none: on a CPU what is captured runs again, or no capture succeeds.

captures_run_again(monkeypatch)
captures_fail(monkeypatch)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from amoeba.jobs.train import trainer as fast_trainer
from amoeba.jobs.train.trainer import CapturedStep


def captures_run_again(patch: pytest.MonkeyPatch, note: Callable[[str], None] = lambda what: None) -> None:
    """note: is told of each pass on another stream, capture and replay, before it happens."""

    @contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        note("beside")
        yield

    def capture(step: Any, run: Any, inputs: Any, predicted: Any, parameters: Any, stream: str) -> None:
        assert stream == "stream" and all(parameter.grad is None for parameter in parameters)
        note("capture")
        step.run = run

    def replay(step: Any, *given: Any) -> Any:
        note("replay")
        return step.run(*given)

    patch.setattr(torch.cuda, "Stream", lambda: "stream")
    patch.setattr(fast_trainer, "on_stream", on_stream)
    for name, stand_in in {"__init__": capture, "__call__": replay, "fits": lambda step, inputs: True}.items():
        patch.setattr(CapturedStep, name, stand_in)


def captures_fail(patch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("no")

    patch.setattr(CapturedStep, "__init__", fail)
