"""What a run reports while it trains: metrics.jsonl, TensorBoard events, and lines on the console.

trainer.add_callback(RunLog(folder, settings, console, model, tokens_per_row))
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from amoeba.core.errors import counted
from amoeba.core.log import logger
from amoeba.jobs.model_cost import measured_ceiling, training_flops_per_token
from amoeba.jobs.settings import RunSettings
from amoeba.observe.router_watch import RouterWatch
from amoeba.parallel.rank_zero import RankZero
from amoeba.precision.recipes import UNCHANGED
from amoeba.routing.router import update_selection_bias_
from amoeba.system.files import finite, write_whole
from amoeba.system.machine import peak_memory


class NotFinite(ArithmeticError):
    """A loss or a gradient is NaN or infinite: what follows would be worthless."""


class RunLog(TrainerCallback):
    """Writes metrics.jsonl and TensorBoard events, tells the console, shifts selection biases, stops when asked, and
    stops with NotFinite when numbers are not: on a GPU they are looked at where they are read anyway, at a line, an
    evaluation and a checkpoint. Of several ranks the first writes, with the numbers of all."""

    def __init__(
        self, folder: Path, settings: RunSettings, console: Any, model: Any, tokens_per_row: float, rank_zero: RankZero
    ) -> None:
        self.settings, self.console, self.path = settings, console, folder / "metrics.jsonl"
        self.rank_zero = rank_zero
        self.watch = RouterWatch(model)
        if rank_zero.count > 1:
            self.watch.share(lambda counts: rank_zero.add_up(counts, "statistics of the routers"))
        pull = settings.aux_loss_coefficient if settings.balance == "aux" else 0.0
        self.watch.balance(pull / settings.accumulation, settings.z_loss_coefficient / settings.accumulation)
        self.stopped_by: int | None = None  # the signal that asks for an end
        self.trained = False  # a step was done
        self.dead_experts, self.tokens_per_second = 0, 0.0
        self.losses: list[Tensor] = []  # of the passes of this step
        self.tokens: list[Tensor] = []  # in the passes since the last line
        self.gradient_norm = torch.zeros((), dtype=torch.float32, device="cpu")  # before it was clipped
        self._step_losses: list[Tensor] = []  # of the steps since the last line
        self._step_norms: list[Tensor] = []
        self._tokens_before = 0
        self.learning_rate = 0.0
        self.last_evaluation: tuple[int, float] | None = None  # step, held-out loss
        self._began = self._since = time.monotonic()
        self._loads: Tensor | None = None
        self.trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = next(model.parameters()).device
        self._flops_per_token = training_flops_per_token(model, tokens_per_row)
        self._ceiling = measured_ceiling(self._device)
        self._writer = _tensorboard(folder) if rank_zero.here else None

    def write(self, line: dict[str, Any]) -> None:
        if not self.rank_zero.here:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(finite(line, lambda _: None)) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops what an interrupted run logged after the checkpoint that it goes on from."""
        if not self.rank_zero.here:
            return
        kept, torn = [], 0
        if not self.path.exists():
            self.console.say(f"{self.path} is missing: earlier log lines are lost, but the training continues")
        for text in self.path.read_text(errors="replace").splitlines() if self.path.exists() else []:
            try:
                line = json.loads(text)
                if line["step"] > step or line["kind"] == "final":
                    continue
            except (ValueError, TypeError, KeyError):
                torn += 1
                continue
            kept.append(text + "\n")
            if line["kind"] == "train":
                self.dead_experts = line.get("dead_experts", 0)
                self.tokens_per_second = line.get("tokens_per_second") or 0.0
        if torn:
            self.console.say(f"{self.path}: {counted(torn, 'incomplete line')} skipped")
        write_whole(self.path, "".join(kept))

    def evaluations(self) -> list[tuple[int, float]]:
        """Steps and held-out losses that are in the log."""

        def read() -> list[tuple[int, float]]:
            lines = map(json.loads, self.path.read_text().splitlines() if self.path.exists() else [])
            kept = (line for line in lines if line["kind"] == "eval" and line["loss"] is not None)
            return [(line["step"], line["loss"]) for line in kept]

        return [(step, loss) for step, loss in self.rank_zero.tell(read)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.monotonic()
        # a resumed run has these from its checkpoint, and they may have been changed since
        state.eval_steps, state.save_steps = args.eval_steps, args.save_steps
        self._tokens_before = state.num_input_tokens_seen  # up to the checkpoint

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.trained:
            self.watch.check_balanced()
            logger.info("the first step is launched")
        self.trained = True
        self._step_losses.append(torch.stack(self.losses).sum())
        self._step_norms.append(self.gradient_norm)
        self.losses.clear()
        if self.settings.balance == "bias":
            self._shift_biases()
        if state.global_step % self.settings.log_every == 0 or state.global_step == state.max_steps:
            self._log(state)
        if state.global_step == state.max_steps:
            control.should_evaluate = True  # before the last checkpoint, which is not written where it is not finite
        # whichever rank was asked first, all stop after the same step
        self.stopped_by = self.rank_zero.highest(self.stopped_by or 0, "whether to stop") or None
        if self.stopped_by is not None:
            control.should_save = control.should_training_stop = True
        if control.should_save:
            state.num_input_tokens_seen = self._tokens_before + self._tokens_since()

    def _losses_and_norms(self) -> tuple[list[float], list[float]]:
        """Of the steps since the last line; one read for all, which waits for the device."""
        if not self._step_losses:
            return [], []
        both = self._step_losses, self._step_norms
        losses, norms = (torch.stack([each.to(self._device).float() for each in numbers]) for numbers in both)
        losses = self.rank_zero.add_up(losses, "losses")  # a rank's is its tokens' part; a norm is of all already
        return losses.tolist(), norms.tolist()

    def _tokens_since(self) -> int:
        return int(self.rank_zero.add_up(torch.stack(self.tokens).sum(), "numbers of tokens")) if self.tokens else 0

    def check_finite(self, step: int, losses_and_norms: tuple[list[float], list[float]] | None = None) -> None:
        """NotFinite for the first of the steps since the last line, of which `step` is the last, that is not finite."""
        losses, norms = losses_and_norms or self._losses_and_norms()
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=step - len(losses) + 1):
            for name, value in (("loss", loss), ("norm of the gradient", norm)):
                if not math.isfinite(value):
                    raise NotFinite(f"the {name} of step {number} is {value}")

    def _log(self, state: Any) -> None:
        losses, norms = self._losses_and_norms()
        tokens = self._tokens_since()
        self._step_losses.clear()
        self._step_norms.clear()
        self.tokens.clear()
        now = time.monotonic()
        self.tokens_per_second = tokens / max(now - self._since, 1e-9)
        self._tokens_before += tokens
        self._since = now
        layers = self.watch.take()
        self._loads = None
        self.dead_experts = sum(layer["dead_experts"] for layer in layers)
        line = {
            "kind": "train",
            "step": state.global_step,
            "time": now - self._began,
            "loss": sum(losses) / len(losses),
            "step_losses": losses,
            "step_norms": norms,
            "lr": self.learning_rate,
            "tokens_per_second": self.tokens_per_second,
            "tokens": self._tokens_before,
            "share_of_peak": self.tokens_per_second * self._flops_per_token / self._ceiling,
            "memory_bytes": peak_memory(self._device),
            "max_violation": max((layer["max_violation"] for layer in layers), default=0.0),
            "dead_experts": self.dead_experts,
            "drop_rate": max((layer["drop_rate"] for layer in layers), default=0.0),
        }
        if (precision := getattr(self.settings, "precision", UNCHANGED)) != UNCHANGED:
            line["precision"] = precision
        self.write(line)
        self.write({"kind": "router", "step": state.global_step, "layers": layers})
        self._events(line, layers)
        self.console.step(line, state.max_steps)
        self.check_finite(state.global_step, (losses, norms))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        loss = metrics["eval_loss"]
        self.last_evaluation = (state.global_step, loss)
        line = {"kind": "eval", "step": state.global_step, "time": time.monotonic() - self._began}
        self.write(line | {"loss": loss, "perplexity": math.exp(min(loss, 50.0))})
        self.console.say(f"step {state.global_step}: held-out loss {loss:.3f}")
        if self._writer:
            self._writer.add_scalar("held_out/loss", loss, state.global_step)
        if not math.isfinite(loss):
            raise NotFinite(f"the held-out loss of step {state.global_step} is {loss}")
        self._since = time.monotonic()

    def finish(self, report: Any) -> None:
        step = report.steps
        if self.trained:  # otherwise what was counted before is in the log already
            self.write({"kind": "coactivation", "step": step, "layers": self.watch.take_coactivation()})
        self.write({"kind": "final", "step": step, "loss": report.final_loss, **asdict(report)})
        self.close()

    def close(self) -> None:
        self.watch.close()
        if self._writer:
            self._writer.close()

    def _shift_biases(self) -> None:
        loads = self.watch.loads()
        since = loads if self._loads is None else loads - self._loads
        for bias_E, load_E in zip(self.watch.selection_biases, since, strict=True):
            if bias_E is not None:
                update_selection_bias_(bias_E, load_E[: len(bias_E)], self.settings.bias_rate)
        self._loads = loads

    def _events(self, line: dict[str, Any], layers: list[dict[str, Any]]) -> None:
        if not self._writer:
            return
        step = line["step"]
        for name in ("loss", "lr", "tokens_per_second", "max_violation", "dead_experts", "drop_rate"):
            self._writer.add_scalar(f"train/{name}", line[name], step)
        for layer in layers:
            prefix = f"layer_{layer['layer']:02d}"
            for name in ("entropy", "max_violation", "dead_experts", "drop_rate"):
                if layer[name] is not None:
                    self._writer.add_scalar(f"{prefix}/{name}", layer[name], step)
            total = max(sum(layer["load"]), 1)
            for expert, load in enumerate(layer["load"]):
                self._writer.add_scalar(f"{prefix}/load/{expert:03d}", load / total, step)


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
