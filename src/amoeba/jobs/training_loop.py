"""transformers.Trainer with a run log, watched routers, and checkpoints that appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from amoeba.errors import bad_value
from amoeba.files import finite, write_whole
from amoeba.jobs.model_cost import measured_ceiling, training_flops_per_token
from amoeba.jobs.settings import TrainSettings
from amoeba.machine import peak_memory
from amoeba.observe.router_watch import RouterWatch
from amoeba.routing import update_selection_bias_

CHECKPOINTS_KEPT = 2


class RunLog(TrainerCallback):
    """Writes metrics.jsonl and TensorBoard events, tells the console, shifts selection biases, stops when asked."""

    def __init__(self, folder: Path, settings: TrainSettings, console: Any, model: Any) -> None:
        self.settings, self.console, self.path = settings, console, folder / "metrics.jsonl"
        self.watch = RouterWatch(model)
        self.stop_asked = False
        self.dead_experts, self.tokens_per_second = 0, 0.0
        self.losses: list[Tensor] = []
        self.learning_rate = 0.0
        self.last_evaluation: tuple[int, float] | None = None  # step, held-out loss
        self._began = self._since = time.monotonic()
        self._last_step = 0
        self._loads: list[Tensor] | None = None
        self._device = next(model.parameters()).device
        self._flops_per_token = training_flops_per_token(model, settings.sequence_length)
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
        write_whole(self.path, "".join(kept))
        self._last_step = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = time.monotonic()
        self._last_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.settings.balance == "bias":
            self._shift_biases()
        if state.global_step % self.settings.log_every == 0 or state.global_step == state.max_steps:
            self._log(state)
        if self.stop_asked:
            control.should_save = control.should_training_stop = True

    def _log(self, state: Any) -> None:
        parts = torch.stack(self.losses).view(-1, self.settings.accumulation).sum(1) if self.losses else torch.empty(0)
        losses = parts.tolist()
        self.losses.clear()
        now, steps = time.monotonic(), state.global_step - self._last_step
        settings = self.settings
        tokens = settings.batch_size * settings.accumulation * settings.sequence_length
        self.tokens_per_second = steps * tokens / max(now - self._since, 1e-9)
        self._since, self._last_step = now, state.global_step
        layers = self.watch.take()
        self._loads = None
        self.dead_experts = sum(layer["dead_experts"] for layer in layers)
        line = {
            "kind": "train",
            "step": state.global_step,
            "time": now - self._began,
            "loss": sum(losses) / max(len(losses), 1),
            "step_losses": losses,
            "lr": self.learning_rate,
            "tokens_per_second": self.tokens_per_second,
            "tokens": state.global_step * tokens,
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


class WatchedTrainer(Trainer):
    """Stages each checkpoint beside its place and renames it when it is whole."""

    run_log: RunLog

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The language model's loss, which is logged, plus what keeps the routers even, which is not."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        log = self.run_log
        balance, z_loss = log.watch.take_balance_loss(), log.watch.take_z_loss()
        if model.training:
            log.losses.append(loss.detach())
            log.learning_rate = float(self.lr_scheduler.get_last_lr()[0]) if self.lr_scheduler else 0.0
            if log.settings.balance == "aux" and balance is not None:
                loss = loss + log.settings.aux_loss_coefficient / log.settings.accumulation * balance
            if log.settings.z_loss_coefficient and z_loss is not None:
                loss = loss + log.settings.z_loss_coefficient / log.settings.accumulation * z_loss
        return (loss, outputs) if return_outputs else loss

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Through from_pretrained: on disk experts lie one by one, and only it puts them together again.

        (Trainer's own way reads the file as it is, finds no stacked experts and leaves them as initialised.)
        """
        target: Any = self.model if model is None else model
        found = json.loads((Path(resume_from_checkpoint) / "config.json").read_text()).get("model_type")
        if found != target.config.model_type:
            raise bad_value(
                "--resume", f"a checkpoint of {target.config.model_type}", found, "leave --model as the run began with"
            )
        stored = type(target).from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        try:
            target.load_state_dict(stored.state_dict())
        except RuntimeError as error:
            first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
            remedy = "leave the model, the data and the vocabulary as the run began with"
            raise bad_value("--resume", "a checkpoint of the same sizes", first, remedy) from error

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir))
        staging = folder / "writing"
        shutil.rmtree(staging, ignore_errors=True)
        self.args.output_dir = str(staging)
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise self._not_written(error, folder) from error
        finally:
            self.args.output_dir = str(folder)
        name = f"checkpoint-{self.state.global_step}"
        for path in (staging / name).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(folder / name, ignore_errors=True)
        os.replace(staging / name, folder / name)
        shutil.rmtree(staging, ignore_errors=True)
        whole = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        for old in whole[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(old)

    def held_out_loss_at_start(self, resume: bool) -> float:
        if resume:
            for text in self.run_log.path.read_text().splitlines():
                line = json.loads(text)
                if line.get("kind") == "eval":
                    return line["loss"]
        return self.evaluate()["eval_loss"]

    def _not_written(self, error: Exception, folder: Path) -> Exception:
        """A full disk, in words; any other exception as it is."""
        if not isinstance(error, OSError) and "No space left" not in str(error):
            return error
        whole = sorted((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), reverse=True)
        return bad_value(
            f"the checkpoint of step {self.state.global_step}",
            f"room for it in {folder}",
            str(error),
            f"free some space, then: amoeba train --resume {folder.parent} "
            + (f"(goes on from step {whole[0]})" if whole else "(starts anew, no checkpoint was finished)"),
        )

    def final_held_out_loss(self) -> float:
        last = self.run_log.last_evaluation
        if last is not None and last[0] == self.state.global_step:
            return last[1]
        return self.evaluate()["eval_loss"]

    def save_final(self, tokenizer: Any) -> None:
        """A standard Hugging Face folder, renamed into place."""
        model: Any = self.model
        target = Path(str(self.args.output_dir)).parent / "model"
        staging = target.with_name(".model.writing")
        shutil.rmtree(staging, ignore_errors=True)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staging, target)


def make_trainer(
    model: Any,
    tokenizer: Any,
    train_rows: Any,
    held_out_rows: Any,
    settings: TrainSettings,
    folder: Path,
    console: Any,
    dtype: torch.dtype,
) -> WatchedTrainer:
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=dtype == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
        remove_unused_columns=False,
        prediction_loss_only=True,
    )
    trainer = WatchedTrainer(
        model=model,
        args=arguments,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        processing_class=tokenizer,
        data_collator=_stack,
    )
    trainer.run_log = RunLog(folder, settings, console, trainer.model)
    trainer.add_callback(trainer.run_log)
    trainer.remove_callback(_default_printer())
    return trainer


@contextmanager
def interrupted_flag(trainer: WatchedTrainer) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks for a checkpoint and a stop, the second stops at once."""

    def ask(number: int, frame: Any) -> None:
        if trainer.run_log.stop_asked:
            raise KeyboardInterrupt
        trainer.run_log.stop_asked = True
        trainer.run_log.console.say("stopping after this step; once more to stop at once")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        before = None
    try:
        yield lambda: trainer.run_log.stop_asked
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _default_printer() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
