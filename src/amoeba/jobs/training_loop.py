"""transformers.Trainer with a run log, watched routers, and checkpoints that appear whole or not at all.

    trainer = make_trainer(model, tokenizer, rows, settings, steps, ...)
    report, kept_in = run_to_end(trainer, folder, resume=False)

What a checkpoint holds of the model is passed in: all of it (`WholeModel`), or an adapter.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from amoeba.errors import bad_value
from amoeba.jobs.packing import NO_LABEL
from amoeba.jobs.run_folder import RunReport, last_checkpoint, remove_unfinished
from amoeba.jobs.run_log import RunLog
from amoeba.jobs.settings import RunSettings

CHECKPOINTS_KEPT = 2


class Rows(NamedTuple):
    train: Any  # datasets of {input_ids, labels}
    held_out: Any
    collate: Callable[[list[dict[str, Tensor]]], dict[str, Tensor]]
    tokens_per_row: float


class Kept(Protocol):
    """What of a model a run keeps: in each checkpoint, and at the end in the folder `name` of the run."""

    name: str

    def save(self, model: Any, folder: Path) -> None: ...

    def load(self, model: Any, folder: Path) -> None: ...


class WholeModel:
    name = "model"

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)

    def load(self, model: Any, folder: Path) -> None:
        """Through from_pretrained: on disk experts lie one by one, and only it puts them together again.

        (Trainer's own way reads the file as it is, finds no stacked experts and leaves them as initialised.)
        """
        found = json.loads((folder / "config.json").read_text()).get("model_type")
        if found != model.config.model_type:
            raise bad_value(
                "--resume", f"a checkpoint of {model.config.model_type}", found, "leave --model as the run began with"
            )
        stored = type(model).from_pretrained(folder, dtype=torch.float32)
        try:
            model.load_state_dict(stored.state_dict())
        except RuntimeError as error:
            first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
            remedy = "leave the model, the data and the vocabulary as the run began with"
            raise bad_value("--resume", "a checkpoint of the same sizes", first, remedy) from error


class WatchedTrainer(Trainer):
    """Stages each checkpoint beside its place and renames it when it is whole."""

    run_log: RunLog
    kept: Kept
    command: str  # that goes on with this run

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The language model's loss, which is logged, plus what keeps the routers even, which is not."""
        if not model.training:
            num_items_in_batch = None  # so that it is the mean of the batch, in every version of transformers
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        log = self.run_log
        balance, z_loss = log.watch.take_balance_loss(), log.watch.take_z_loss()
        if model.training:
            log.losses.append(loss.detach())
            ids = inputs["input_ids"]
            log.tokens.append(
                inputs["attention_mask"].sum()
                if "attention_mask" in inputs
                else torch.tensor(ids.numel(), dtype=torch.int64, device="cpu")
            )
            log.learning_rate = float(self.lr_scheduler.get_last_lr()[0]) if self.lr_scheduler else 0.0
            if log.settings.balance == "aux":
                balance = log.watch.must_have(balance)
                loss = loss + log.settings.aux_loss_coefficient / log.settings.accumulation * balance
            if log.settings.z_loss_coefficient:
                z_loss = log.watch.must_have(z_loss)
                loss = loss + log.settings.z_loss_coefficient / log.settings.accumulation * z_loss
        else:
            predicted = int((inputs["labels"][:, 1:] != NO_LABEL).sum())
            self._evaluated.append((predicted, float(loss)))
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """The loss is the mean over all tokens that are predicted. Trainer's would be that of the batches' means, in
        which a short answer's tokens count more than a long one's and the size of a batch shows."""
        self._evaluated: list[tuple[int, float]] = []  # tokens and mean loss of each batch
        output = super().evaluation_loop(*args, **options)
        sums = [sum(count * loss for count, loss in self._evaluated), sum(count for count, _ in self._evaluated)]
        everywhere = torch.tensor(sums, dtype=torch.float64, device=self.args.device)
        total, predicted = self.accelerator.reduce(everywhere, "sum").tolist()
        assert output.metrics is not None
        output.metrics["eval_loss"] = total / predicted
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.kept.load(self.model if model is None else model, Path(resume_from_checkpoint))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        self.kept.save(self.model, folder)
        self.processing_class.save_pretrained(folder)  # type: ignore[union-attr]

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
            f"free some space, then: {self.command} --resume {folder.parent} "
            + (f"(goes on from step {whole[0]})" if whole else "(starts anew, no checkpoint was finished)"),
        )

    def final_held_out_loss(self) -> float:
        last = self.run_log.last_evaluation
        if last is not None and last[0] == self.state.global_step:
            return last[1]
        return self.evaluate()["eval_loss"]

    def save_final(self) -> Path:
        """What is kept, and the tokenizer, in a folder that is renamed into place."""
        target = Path(str(self.args.output_dir)).parent / self.kept.name
        staging = target.with_name(f".{self.kept.name}.writing")
        shutil.rmtree(staging, ignore_errors=True)
        self._save(str(staging))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(staging, target)
        return target


def make_trainer(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    settings: RunSettings,
    steps: int,
    folder: Path,
    console: Any,
    autocast: torch.dtype,
    kept: Kept,
    command: str,
) -> WatchedTrainer:
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="cosine",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        gradient_checkpointing=settings.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},  # the other kind needs inputs that require a gradient
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=autocast == torch.bfloat16,
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
        remove_unused_columns=False,
        prediction_loss_only=True,
    )
    trainer = WatchedTrainer(
        model=model,
        args=arguments,
        train_dataset=rows.train,
        eval_dataset=rows.held_out,
        processing_class=tokenizer,
        data_collator=rows.collate,
    )
    trainer.kept, trainer.command = kept, command
    trainer.run_log = RunLog(folder, settings, console, trainer.model, rows.tokens_per_row)
    trainer.add_callback(trainer.run_log)
    trainer.remove_callback(PrinterCallback)
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


def run_to_end(trainer: WatchedTrainer, folder: Path, resume: bool) -> tuple[RunReport, str]:
    """Trains, or goes on from the last whole checkpoint, and saves what is kept; a Ctrl-C ends it earlier.

    The report, and the folder of what was kept, or the last checkpoint where the run was interrupted.
    """
    log, say = trainer.run_log, trainer.run_log.console.say
    began = time.monotonic()
    last = last_checkpoint(folder) if resume else None
    if resume:
        remove_unfinished(folder)
        log.forget_after(int(last.name.split("-")[1]) if last else -1)
        say(f"resuming from {last.name}" if last else "no checkpoint was finished: starting anew")
    start_loss = trainer.held_out_loss_at_start(resume and last is not None)
    with interrupted_flag(trainer) as interrupted:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    if interrupted():
        say(f"stopped at step {trainer.state.global_step}; go on with: {trainer.command} --resume {folder}")
        final = log.last_evaluation[1] if log.last_evaluation else start_loss
        result = last_checkpoint(folder)
    else:
        final = trainer.final_held_out_loss()
        result = trainer.save_final()
    report = RunReport(
        folder=str(folder),
        steps=trainer.state.global_step,
        start_loss=start_loss,
        final_loss=final,
        perplexity=math.exp(min(final, 50.0)),
        dead_experts=log.dead_experts,
        tokens_per_second=log.tokens_per_second,
        seconds=time.monotonic() - began,
        interrupted=interrupted(),
    )
    return report, str(result)
