"""Passes captured in a CUDA graph: when that is tried, what a failure leaves behind, and the first run of a process."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amoeba.jobs.train import trainer as fast_trainer
from amoeba.jobs.train.trainer import CapturedStep, FastTrainer, on_stream
from stand_in_graphs import captures_run_again
from tiny_runs import Quiet, tiny_run, tiny_settings


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures in earnest: TestOnAGpu")
class TestWhen:
    """With a capture that is none, since there is no GPU: when it is tried, and what is said."""

    @pytest.fixture
    def order(self, monkeypatch) -> list[str]:
        """Fills with what happens; captures fail while there is one of `failures` left."""
        happened: list[str] = []

        def note(what: str) -> None:
            happened.append(what)
            if what == "capture" and self.failures:
                self.failures.pop()
                raise RuntimeError("CUDA error: not permitted\nand advice\nin many lines")

        def always(trainer: Any, *given: Any) -> Any:
            trainer.captures = trainer._tries < fast_trainer.CAPTURES
            return step(trainer, *given)

        step = FastTrainer.training_step
        monkeypatch.setattr(FastTrainer, "training_step", always)
        captures_run_again(monkeypatch, note)
        return happened

    @pytest.mark.parametrize(
        ("failing", "expected"),
        [
            (0, ["beside", "capture", "replay", "replay"]),
            (1, ["beside", "capture", "beside", "capture", "replay"]),
            (2, ["beside", "capture", "beside", "capture"]),
        ],
    )
    def test_a_pass_on_another_stream_comes_first_and_a_failure_gets_a_second_try(
        self, failing, expected, order, tmp_path, inputs, caplog
    ):
        self.failures = [0] * failing
        console = Quiet()
        tiny_run(tiny_settings("train", tmp_path / "run", inputs, steps=3, eval_every=3, save_every=3), console)
        assert order == expected
        assert sum(len(line["step_losses"]) for line in console.lines) == 3
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        warned = [line for line in warned if "CUDA graph" in line]
        assert len(warned) == (failing == 2)
        assert all("\n" not in line and "CUDA error" not in line and "-v" in line for line in warned)


@pytest.mark.gpu
class TestOnAGpu:
    def test_the_first_run_of_a_process_is_captured(self, inputs, tmp_path):
        """It has yet to compile, load and make ready what later ones find."""
        words = [
            "finetune",
            str(inputs / "base"),
            "--data",
            str(inputs / "finetune.jsonl"),
            "--out",
            str(tmp_path / "run"),
        ]
        words += ["--steps=8", "--batch-size=2", "--sequence-length=8", "--held-out=0.1", "--train-router"]
        done = subprocess.run(
            [sys.executable, "-c", COUNTS_REPLAYS, *words, "--targets=experts,q_proj", "--experts=resident"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "replayed 7 times" in done.stdout, done.stderr
        assert "launching kernels one by one" not in done.stderr and "AccumulateGrad" not in done.stderr

    def test_a_failure_tells_its_first_error_and_leaves_torch_as_it_was(self):
        weight = nn.Parameter(torch.ones(4, device="cuda"))
        given, predicted = {"x": torch.arange(4.0, device="cuda")}, torch.ones((), device="cuda")
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()

        def run(inputs: dict[str, Any], predicted: Tensor, asks: bool = False) -> Tensor:
            loss = (weight * inputs["x"] * torch.rand_like(weight)).sum() / predicted
            if asks:
                loss.item()
            loss.backward()
            return loss.detach()

        with on_stream(stream):
            run(given, predicted)
        weight.grad = None
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            CapturedStep(lambda *told: run(*told, asks=True), given, predicted, [weight], stream)
        assert torch.cuda.current_stream() == current
        torch.rand(4, device="cuda")
        weight.grad = None
        step = CapturedStep(run, given, predicted, [weight], stream)
        assert float(step(given, predicted)) > 0 and weight.grad is not None


COUNTS_REPLAYS = """
import atexit
from amoeba.cli import main
from amoeba.jobs.train.trainer import CapturedStep

calls, replay = [], CapturedStep.__call__
CapturedStep.__call__ = lambda *given: (calls.append(1), replay(*given))[1]
atexit.register(lambda: print("replayed", len(calls), "times"))
main()
"""
