"""`amoeba train`: a mixture-of-experts language model on the Hugging Face stack, with our experts.

    report = train(TrainSettings(model="demo"), Console())

transformers.Trainer runs the loop; what is added here: experts_implementation="amoeba", a watch over the routers, a run
folder that the report page reads, checkpoints that are renamed into place when they are whole, and a resume that gives
the same losses as a run that was never interrupted.

    RUN/config.json environment.json metrics.jsonl tensorboard/ checkpoints/ model/
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from amoeba.errors import bad_value
from amoeba.files import write_whole
from amoeba.jobs.data import load_corpus
from amoeba.jobs.packing import PackedDataset
from amoeba.jobs.presets import PRESETS, find_preset
from amoeba.jobs.settings import TrainSettings
from amoeba.jobs.tokenizer import load_or_train_tokenizer
from amoeba.observe.router_watch import RouterWatch

logger = logging.getLogger("amoeba")


class Console(Protocol):
    """Where a run tells how it goes: a progress bar, plain lines, or nothing."""

    def say(self, text: str) -> None: ...

    def step(self, line: dict[str, Any], total: int) -> None: ...


@dataclass(frozen=True)
class TrainReport:
    folder: str
    model: str
    steps: int
    start_loss: float
    final_loss: float
    perplexity: float
    dead_experts: int
    tokens_per_second: float
    seconds: float
    interrupted: bool


def train(settings: TrainSettings, console: Console, *, resume: bool = False) -> TrainReport:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import amoeba
    from amoeba.jobs.training_loop import interrupted_flag, make_trainer

    amoeba.register()
    transformers_logging.disable_progress_bar()  # the run has one of its own
    if settings.model not in PRESETS and not (Path(settings.model) / "config.json").is_file():
        find_preset(settings.model)  # says which there are
    folder = _prepare_folder(settings, resume)
    torch.manual_seed(settings.seed)

    corpus = load_corpus(settings.data, held_out=settings.held_out, seed=settings.seed)
    console.say(f"data: {corpus.description}")
    checkpoint_model = None if settings.model in PRESETS else settings.model
    tokenizer = load_or_train_tokenizer(checkpoint_model, corpus, settings.vocab_size)
    train_rows = PackedDataset(corpus.train, tokenizer, settings.sequence_length)
    held_out_rows = PackedDataset(corpus.held_out, tokenizer, settings.sequence_length, keep_last=True)
    console.say(f"{len(train_rows)} rows of {settings.sequence_length} tokens, {len(held_out_rows)} held out")

    model = _build_model(settings, tokenizer, AutoModelForCausalLM)
    dtype = _compute_dtype(settings.dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parameters = sum(p.numel() for p in model.parameters())
    console.say(
        f"model: {model.config.model_type}, {parameters / 1e6:.1f}M parameters; {device}, {dtype}, experts by amoeba"
    )
    _write_json(folder / "config.json", settings.as_dict() | {"model_config": model.config.to_dict()})
    _write_json(folder / "environment.json", _environment())

    if not RouterWatch.finds_experts(model):
        raise bad_value(
            "--model",
            "a mixture-of-experts architecture of transformers",
            f"{model.config.model_type}, which has no experts",
            f"choose another, or a preset: {', '.join(PRESETS)}",
        )
    trainer = make_trainer(model, tokenizer, train_rows, held_out_rows, settings, folder, console, dtype)
    began = time.monotonic()
    last = _last_checkpoint(folder) if resume else None
    if resume:
        remove_unfinished(folder)
        trainer.run_log.forget_after(int(last.name.split("-")[1]) if last else -1)
        console.say(f"resuming from {last.name}" if last else "no checkpoint was finished: starting anew")
    start_loss = trainer.held_out_loss_at_start(resume and last is not None)
    with interrupted_flag(trainer) as interrupted:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    if interrupted():
        console.say(f"stopped at step {trainer.state.global_step}; go on with: amoeba train --resume {folder}")
        final = trainer.run_log.last_evaluation[1] if trainer.run_log.last_evaluation else start_loss
    else:
        final = trainer.final_held_out_loss()
        trainer.save_final(tokenizer)
    report = TrainReport(
        folder=str(folder),
        model=str(_last_checkpoint(folder) if interrupted() else folder / "model"),
        steps=trainer.state.global_step,
        start_loss=start_loss,
        final_loss=final,
        perplexity=math.exp(min(final, 50.0)),
        dead_experts=trainer.run_log.dead_experts,
        tokens_per_second=trainer.run_log.tokens_per_second,
        seconds=time.monotonic() - began,
        interrupted=interrupted(),
    )
    trainer.run_log.finish(report)
    return report


def _prepare_folder(settings: TrainSettings, resume: bool) -> Path:
    folder = Path(settings.out)
    if resume and not (folder / "config.json").is_file():
        raise bad_value("--resume", "a folder of an earlier run", str(folder), "check the path, or train anew")
    if not resume and (folder / "metrics.jsonl").exists():
        raise bad_value(
            "--out", "a folder that holds no run yet", str(folder), f"use --resume {folder}, or another --out"
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise bad_value("--out", "a folder that can be written", f"{folder} ({error})", "choose another") from error
    return folder


def _build_model(settings: TrainSettings, tokenizer: Any, auto: Any) -> Any:
    if settings.model in PRESETS:
        config = find_preset(settings.model).build(len(tokenizer), settings.sequence_length)
    else:
        folder = Path(settings.model)
        if any(folder.glob("*.safetensors")):
            return auto.from_pretrained(folder, experts_implementation="amoeba", dtype=torch.float32)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # our own balance loss, layer by layer, takes its place
    return auto.from_config(config, experts_implementation="amoeba", dtype=torch.float32)


def _compute_dtype(name: str) -> torch.dtype:
    """bf16 on a GPU that has it; fp32 on a CPU, where neither was clearly faster (docs/log.md)."""
    if name != "auto":
        return getattr(torch, name)
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


def _environment() -> dict[str, Any]:
    from amoeba.machine import commit, machine, versions

    return {
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit(),
    }


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint. One that was being written has another name."""
    found = [path for path in (folder / "checkpoints").glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    return max(found, key=lambda path: int(path.name.split("-")[1]), default=None)


def _write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=1, default=str) + "\n")


def remove_unfinished(folder: Path) -> None:
    """What a killed run left half-written."""
    shutil.rmtree(folder / "checkpoints" / "writing", ignore_errors=True)
