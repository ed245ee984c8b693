"""transformers.Trainer with a run log, watched routers, and checkpoints that appear whole or not at all.

trainer = make_trainer(run, model, tokenizer, rows, steps, ...)
report, kept_in = run_to_end(trainer, folder, earlier=None)
"""

from __future__ import annotations

import errno
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerState

from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.data.token_rows import NO_LABEL
from amoeba.integrations.exact_mode import exact
from amoeba.integrations.experts_module import LORA, has_placed_experts
from amoeba.integrations.fused_routers import fused_routers
from amoeba.integrations.text_model import draws_random_numbers
from amoeba.jobs.train.fast_paths import fast_paths
from amoeba.jobs.train.manifest import Artifact, seal
from amoeba.jobs.train.metrics import NotFinite, RunLog
from amoeba.jobs.train.optimizer_files import SCHEDULER, load_optimizer, save_optimizer
from amoeba.jobs.train.resume import Earlier
from amoeba.jobs.train.run import Run
from amoeba.jobs.train.run_folder import (
    RunReport,
    checkpoints,
    set_aside,
    staged_result,
    step_of,
    unfinished_checkpoint,
)
from amoeba.jobs.train.time_budget import TimeBudget
from amoeba.jobs.train.trainer import FastTrainer, Rows
from amoeba.parallel.launcher import hosts
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.rank_zero import ALONE
from amoeba.parallel.shards import local_part
from amoeba.system.files import replace_folder, shell_command, shell_words
from amoeba.system.machine import peak_memory

CHECKPOINTS_KEPT = 2


class WatchedTrainer(FastTrainer):
    run_log: RunLog
    kept: Artifact
    command: str  # that goes on with this run
    folder: Path  # of the run
    budget: TimeBudget | None = None
    lr_scheduler: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The language model's loss. What keeps the routers even joins their gradients, see `RouterWatch.balance`."""
        if not model.training:
            num_items_in_batch = None  # so that it is the mean of the batch, in every version of transformers
        with self.as_compiled(inputs):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            self.note_pass(inputs, loss.detach())
        else:
            self._evaluated.append(((inputs["labels"][:, 1:] != NO_LABEL).sum(), loss.detach()))
        return (loss, outputs) if return_outputs else loss

    def note_pass(self, inputs: Any, loss: Tensor) -> None:
        log = self.run_log
        log.losses.append(loss)
        ids = inputs["input_ids"][:0] if self.watch.ledger.idle else inputs["input_ids"]
        if "attention_mask" in inputs and not self.watch.ledger.idle:
            log.tokens.append(inputs["attention_mask"].sum())
        else:
            log.tokens.append(torch.tensor(ids.numel(), dtype=torch.int64, device="cpu"))
        log.learning_rate = float(self.lr_scheduler.get_last_lr()[0]) if self.lr_scheduler else 0.0

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """The loss is the mean over all tokens that are predicted. Trainer's would be that of the batches' means, in
        which a short answer's tokens count more than a long one's and the size of a batch shows."""
        self._evaluated: list[tuple[Tensor, Tensor]] = []  # tokens and mean loss of each batch
        output = super().evaluation_loop(*args, **options)
        counts = torch.stack([count for count, _ in self._evaluated]).double()
        losses = torch.stack([loss for _, loss in self._evaluated]).double()
        # of a batch in which this rank has no row the mean is NaN
        sums = torch.stack((torch.where(counts > 0, counts * losses, 0.0).sum(), counts.sum()))
        sums = self.rank_zero.add_up(sums, "held-out losses")
        total, predicted = self.accelerator.reduce(sums, "sum").tolist()
        assert output.metrics is not None
        output.metrics["eval_loss"] = total / predicted
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.kept.load(self.model if model is None else model, Path(resume_from_checkpoint))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        self.kept.save(self.model, folder)
        if self.rank_zero.here:
            self.processing_class.save_pretrained(folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_finite()
        staging = unfinished_checkpoint(self.folder)
        output_dir = self.args.output_dir
        self.args.output_dir = str(staging)
        name = f"checkpoint-{self.state.global_step}"
        what = f"the checkpoint of step {self.state.global_step}"
        try:
            with self._staged(staging / name, self.folder / "checkpoints" / name, what):
                if self.rank_zero.here:
                    super()._save_checkpoint(model, trial)
                else:
                    self._save(str(staging / name))
                    self._save_optimizer_and_scheduler(str(staging / name))
        finally:
            self.args.output_dir = output_dir
            if self.rank_zero.here:
                shutil.rmtree(staging, ignore_errors=True)
        for old in checkpoints(self.folder)[:-CHECKPOINTS_KEPT] if self.rank_zero.here else []:
            shutil.rmtree(old)

    @contextmanager
    def _staged(self, staging: Path, target: Path, what: str) -> Iterator[None]:
        """Inside, each rank writes its part of what is kept into a temporary folder, which gets its name when it is
        whole and on the disk, or not at all."""
        rank_zero, first = self.rank_zero, self.rank_zero.here
        self.kept.gather(self.model)
        try:
            with rank_zero.all_or_none(what):
                if first:
                    shutil.rmtree(staging, ignore_errors=True)
                    staging.mkdir(parents=True)
            with rank_zero.all_or_none(what):
                yield
            with rank_zero.all_or_none(what):
                if first:
                    self.kept.finish(staging)
                    seal(staging)
                    replace_folder(staging, target)
        except Exception as error:
            raise self._not_written(what, error) from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.mesh is None and not self.rank_zero.here:
            return
        save_optimizer(self.optimizer, self.model, Path(output_dir), ALONE if self.mesh is None else self.rank_zero)
        if self.rank_zero.here:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_optimizer(self.optimizer, self.model, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _check_finite(self) -> None:
        """Before a checkpoint pushes an older one out. Its own step may have gone astray without a NaN yet: then the
        next one is refused, and the one before it is still there, since two are kept."""
        self.run_log.check_finite(self.state.global_step)
        # a rank without experts has empty ones
        model: Any = self.model
        trained = [local_part(parameter) for parameter in model.parameters() if parameter.requires_grad]
        trained = [parameter for parameter in trained if parameter.numel()]
        # the largest number is a NaN or an infinity if any is; of a rank that has none it is 0
        norm = torch.nn.utils.get_total_norm(trained, math.inf).double()
        largest = float(self.rank_zero.add_up(norm, "the largest parameters"))
        if not math.isfinite(largest):
            raise NotFinite(f"a parameter is {largest} after step {self.state.global_step}")

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.budget is not None and self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, self.budget.plan)
            self._created_lr_scheduler = True  # as Trainer's own, it is made anew by the next train()
        return super().create_scheduler(num_training_steps, optimizer)

    def _not_written(self, what: str, error: Exception) -> Exception:
        if not isinstance(error, OSError) and "No space left" not in str(error):
            return error
        whole = checkpoints(self.folder)
        then = f"continues from step {step_of(whole[-1])}" if whole else "starts over: there is no complete checkpoint"
        remedy = f"free some space, then: {shell_command(self.command, '--resume', self.folder)} ({then})"
        return bad_value(what, f"enough space in {self.folder}", str(error), remedy)

    def _diverged(self, error: NotFinite) -> ValueError:
        whole = checkpoints(self.folder)
        kept = ", ".join(path.name for path in whole)
        remedy = f"lower --learning-rate (it is {self.args.learning_rate:g}) in a run with another --out"
        if self.state.global_step == 0:
            remedy = "check the model and its dtype: this is the first step"
        elif whole and self.command == "amoeba train":  # the older: the last may be of the step that went astray
            remedy += f"; it can start from {shell_words('--model', whole[0])}"
        expected = f"finite numbers (stopped at step {self.state.global_step}; "
        expected += f"checkpoints kept: {kept})" if whole else "there was no checkpoint yet)"
        return bad_value("training", expected, str(error), remedy)

    def save_final(self) -> Path:
        target = self.folder / self.kept.name
        staging = staged_result(target)
        try:
            with self._staged(staging, target, str(target)):
                self._save(str(staging))
        finally:
            if self.rank_zero.here:
                shutil.rmtree(staging, ignore_errors=True)
        return target


def make_trainer(
    run: Run,
    model: Any,
    tokenizer: Any,
    rows: Rows,
    steps: int,
    autocast: torch.dtype,
    kept: Artifact,
    mesh: RankMesh | None = None,
) -> WatchedTrainer:
    """mesh: how the ranks share the model; None where each has all of it."""
    settings, folder, console, rank_zero = run.settings, run.folder, run.console, run.rank_zero
    own_gpu = torch.cuda.current_device() if torch.cuda.is_available() and rank_zero.ranks is not None else None
    known = TrainingArguments.__dataclass_fields__  # transformers 5.23 renamed it
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    # the reentrant kind needs inputs with a gradient; random states are read from the device, which no graph can hold
    repeats = {"use_reentrant": False, "preserve_rng_state": draws_random_numbers(model)}
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
        **{name: settings.gradient_checkpointing, f"{name}_kwargs": repeats},
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it waits for the device in every pass, to hide a NaN
        report_to=[],
        disable_tqdm=True,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=autocast == torch.bfloat16 and not settings.exact and _trains_in_another_dtype(model, autocast),
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=0,
        accelerator_config={"non_blocking": torch.cuda.is_available()},  # a batch is copied while the GPU works
        remove_unused_columns=False,
        prediction_loss_only=True,
    )
    if arguments.device.type == "cuda" and (rank_zero.ranks is not None or has_placed_experts(model)):
        arguments._n_gpu = 1  # a rank has one, however many it sees; and placed experts serve one
    if own_gpu is not None:  # transformers takes the first in each process
        torch.cuda.set_device(own_gpu)
        arguments.__dict__["_setup_devices"] = torch.device("cuda", own_gpu)
    told = {"train_dataset": rows.train, "eval_dataset": rows.held_out, "data_collator": rows.collate}
    trainer = WatchedTrainer(model=model, args=arguments, processing_class=tokenizer, **told)
    if settings.exact:
        trainer.while_it_runs.enter_context(exact(trainer.model))
        console.say("exact mode: the forward pass has the bits of generation with --exact")
    elif trainer.args.device.type == "cuda":
        found = trainer.while_it_runs.enter_context(fused_routers(trainer.model))  # beneath the log's watch over them
        logger.info("our kernels compute %d routers", found)
    trainer.data_collator = trainer.collate
    trainer.kept, trainer.command, trainer.folder, trainer.rows = kept, run.command, folder, rows
    trainer.rank_zero, trainer.mesh = rank_zero, mesh
    trainer.run_log = log = RunLog(folder, settings, console, trainer.model, rows.tokens_per_row, rank_zero)
    trainer.watch, trainer.optimizer_states = log.watch, settings.optimizer_states
    clip = trainer.clipping()

    def clip_and_note(*arguments: Any, **options: Any) -> Any:  # every version of Trainer clips through this one
        log.gradient_norm = clip(*arguments, **options)
        return log.gradient_norm

    trainer.accelerator.clip_grad_norm_ = clip_and_note
    if settings.minutes is not None:
        trainer.budget = TimeBudget(trainer, settings, console.say)
        trainer.add_callback(trainer.budget)  # before the log, which writes at the last step
    trainer.add_callback(trainer.run_log)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _trains_in_another_dtype(model: Any, dtype: torch.dtype) -> bool:
    """Whether torch's own products meet such parameters. The experts' factors they do not: our operators round them."""
    trained = (name for name, p in model.named_parameters() if p.requires_grad and p.dtype != dtype)
    return any(LORA not in name.split(".") for name in trained)


def run_to_end(trainer: WatchedTrainer, folder: Path, earlier: Earlier | None) -> tuple[RunReport, str]:
    """Trains, or goes on from a whole checkpoint, and saves what is kept; a signal ends it earlier.

    The report, and the folder of what was kept, or the last checkpoint where the run was interrupted.
    """
    log = trainer.run_log
    try:
        fast = fast_paths(trainer, log.settings.compile, log.console.say, exact=log.settings.exact)
        with trainer.while_it_runs, fast:
            trainer.shard()
            with trainer.lost_ranks_told():
                return _run_to_end(trainer, folder, earlier)
    except NotFinite as error:
        raise trainer._diverged(error) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise trainer._not_written(f"the log of step {trainer.state.global_step}", error) from error


def _run_to_end(trainer: WatchedTrainer, folder: Path, earlier: Earlier | None) -> tuple[RunReport, str]:
    log, say = trainer.run_log, trainer.run_log.console.say
    began = time.monotonic()
    last = earlier.checkpoint if earlier else None
    if earlier is not None:
        with trainer.rank_zero.all_or_none("setting later checkpoints aside"):
            for later in checkpoints(folder) if trainer.rank_zero.here else []:
                if last is not None and step_of(later) > step_of(last):
                    set_aside(later)
                    say(f"moved {later.name} to {later.parent}")
        log.forget_after(step_of(last) if last else -1)
        say(f"resuming from {last.name}" if last else "there is no complete checkpoint: starting over")
    if trainer.budget is not None and last is not None:
        trainer.budget.plan.total = TrainerState.load_from_json(str(last / "trainer_state.json")).max_steps
    losses = log.evaluations()  # steps and losses until now, that of step 0 first
    if not losses or losses[0][0] != 0:
        losses.insert(0, (0, trainer.evaluate()["eval_loss"]))
    planned = trainer.args.max_steps if trainer.budget is None else trainer.budget.plan.total
    if last is not None and step_of(last) >= planned:
        trainer._load_from_checkpoint(str(last))  # nothing but the end is missing
        trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
    else:
        # inside: who tells of a lost rank asks the others first, and the launcher's signal is not to end that
        with stop_at_signals(log), trainer.lost_ranks_told():
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    if log.stopped_by is not None:
        again = shell_command(trainer.command, "--resume", folder)
        if trainer.rank_zero.count > 1:
            many = f"--nnodes {hosts()} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " if hosts() > 1 else ""
            many += f"--nproc-per-node {trainer.rank_zero.count // hosts()}"
            again = f"torchrun {many} -m {again}, or with any other number of ranks"
        say(f"stopped at step {trainer.state.global_step}; continue with: {again}")
        final_step, final = log.last_evaluation or losses[-1]
        result = checkpoints(folder)[-1]
    else:
        final_step, final = log.last_evaluation or (-1, 0.0)
        if final_step != trainer.state.global_step:
            final_step, final = trainer.state.global_step, trainer.evaluate()["eval_loss"]
        result = trainer.save_final()
    report = RunReport(
        folder=str(folder),
        steps=trainer.state.global_step,
        start_loss=losses[0][1],
        final_loss=final,
        final_loss_step=final_step,
        perplexity=math.exp(min(final, 50.0)),
        dead_experts=log.dead_experts,
        tokens_per_second=log.tokens_per_second,
        seconds=time.monotonic() - began,
        interrupted=log.stopped_by is not None,
        exit_code=0 if log.stopped_by is None else 128 + log.stopped_by,
        peak_memory_bytes=peak_memory(trainer.args.device),
    )
    return report, str(result)


STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_at_signals(run_log: RunLog) -> Iterator[None]:
    came = False  # to this process: another rank may have asked for the end already

    def ask(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)
        came = True
        if run_log.stopped_by is not None:
            return
        run_log.stopped_by = number
        with suppress(RuntimeError):  # the signal may have come in the middle of another line
            run_log.console.say("stopping after this step; press Ctrl-C again to stop now")

    before = {}
    try:
        for number in STOPPING:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, ask)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
