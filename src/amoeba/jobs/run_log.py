"""What a run tells while it goes: metrics.jsonl, TensorBoard events, and lines on the console.

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

from amoeba.files import finite, write_whole
from amoeba.jobs.model_cost import measured_ceiling, training_flops_per_token
from amoeba.jobs.settings import RunSettings
from amoeba.machine import peak_memory
from amoeba.observe.router_watch import RouterWatch
from amoeba.routing import update_selection_bias_


class RunLog(TrainerCallback):
    """Writes metrics.jsonl and TensorBoard events, tells the console, shifts selection biases, stops when asked."""

    def __init__(self, folder: Path, settings: RunSettings, console: Any, model: Any, tokens_per_row: float) -> None:
        self.settings, self.console, self.path = settings, console, folder / "metrics.jsonl"
        self.watch = RouterWatch(model)
        self.stop_asked = False
        self.dead_experts, self.tokens_per_second = 0, 0.0
        self.losses: list[Tensor] = []  # of the passes of this step
        self.tokens: list[Tensor] = []  # in the passes since the last line
        self._step_losses: list[Tensor] = []  # of the steps since the last line
        self._tokens_before = 0
        self.learning_rate = 0.0
        self.last_evaluation: tuple[int, float] | None = None  # step, held-out loss
        self._began = self._since = time.monotonic()
        self._loads: list[Tensor] | None = None
        self._device = next(model.parameters()).device
        self._flops_per_token = training_flops_per_token(model, tokens_per_row)
        self._ceiling = measured_ceiling(self._device)
        self._writer = _tensorboard(folder)

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(finite(line, lambda _: None)) + "\n")

    def forget_after(self, step: int) -> None:
        """Drops what an interrupted run logged after the checkpoint that it goes on from."""
        kept = []
        for text in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                line = json.loads(text)
            except ValueError:
                continue  # torn by a kill
            if line.get("step", 0) <= step and line.get("kind") not in ("final", "coactivation"):
                kept.append(text + "\n")
                self._tokens_before = line.get("tokens", self._tokens_before)
        write_whole(self.path, "".join(kept))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step_losses.append(torch.stack(self.losses).sum())
        self.losses.clear()
        if self.settings.balance == "bias":
            self._shift_biases()
        if state.global_step % self.settings.log_every == 0 or state.global_step == state.max_steps:
            self._log(state)
        if self.stop_asked:
            control.should_save = control.should_training_stop = True

    def _log(self, state: Any) -> None:
        losses = torch.stack(self._step_losses).tolist()
        tokens = int(torch.stack(self.tokens).sum())
        self._step_losses.clear()
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
            "lr": self.learning_rate,
            "tokens_per_second": self.tokens_per_second,
            "tokens": self._tokens_before,
            "share_of_peak": self.tokens_per_second * self._flops_per_token / self._ceiling,
            "memory_bytes": peak_memory(self._device),
            "max_violation": max((layer["max_violation"] for layer in layers), default=0.0),
            "dead_experts": self.dead_experts,
            "drop_rate": max((layer["drop_rate"] for layer in layers), default=0.0),
        }
        self.write(line)
        self.write({"kind": "router", "step": state.global_step, "layers": layers})
        self._events(line, layers)
        self.console.step(line, state.max_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        loss = metrics["eval_loss"]
        self.last_evaluation = (state.global_step, loss)
        line = {
            "kind": "eval",
            "step": state.global_step,
            "time": time.monotonic() - self._began,
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
        }
        self.write(line)
        self.console.say(f"step {state.global_step}: held-out loss {loss:.3f}")
        if self._writer:
            self._writer.add_scalar("held_out/loss", loss, state.global_step)
        self._since = time.monotonic()

    def finish(self, report: Any) -> None:
        step = report.steps
        self.write({"kind": "coactivation", "step": step, "layers": self.watch.take_coactivation()})
        self.write({"kind": "final", "step": step, "loss": report.final_loss, **asdict(report)})
        self.watch.close()
        if self._writer:
            self._writer.close()

    def _shift_biases(self) -> None:
        loads = [statistics.load_E.clone() for statistics in self.watch.statistics]
        before = self._loads or [torch.zeros_like(load) for load in loads]
        for bias_E, load_E, earlier_E in zip(self.watch.selection_biases, loads, before, strict=True):
            if bias_E is not None:
                update_selection_bias_(bias_E, load_E - earlier_E, self.settings.bias_rate)
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
