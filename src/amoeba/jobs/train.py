"""`amoeba train`: a mixture-of-experts language model on the Hugging Face stack, with our experts.

    report = train(TrainSettings(model="demo"), Console())

transformers.Trainer runs the loop; what is added here: experts_implementation="amoeba", a watch over the routers, a run
folder that the report page reads, checkpoints that are renamed into place when they are whole, and a resume that gives
the same losses as a run that was never interrupted.

    RUN/config.json environment.json metrics.jsonl tensorboard/ checkpoints/ model/
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from amoeba.jobs.data import load_corpus
from amoeba.jobs.packing import PackedDataset, stack
from amoeba.jobs.presets import PRESETS, find_preset
from amoeba.jobs.run_folder import Console, RunReport, describe_run, prepare_folder
from amoeba.jobs.settings import TrainSettings
from amoeba.jobs.tokenizer import load_or_train_tokenizer
from amoeba.observe.router_watch import check_balance


@dataclass(frozen=True)
class TrainReport(RunReport):
    model: str


def train(settings: TrainSettings, console: Console, *, resume: bool = False) -> TrainReport:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import amoeba
    from amoeba.integrations.coverage import check_coverage
    from amoeba.jobs.training_loop import Rows, WholeModel, make_trainer, run_to_end

    amoeba.register()
    transformers_logging.disable_progress_bar()  # the run has one of its own
    if settings.model not in PRESETS and not (Path(settings.model) / "config.json").is_file():
        find_preset(settings.model)  # says which there are
    folder = prepare_folder(settings.out, resume)
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
    covered = check_coverage(model, "--model", f"choose another, or a preset: {', '.join(PRESETS)}")
    console.say(
        f"model: {model.config.model_type}, {parameters / 1e6:.1f}M parameters; {device}, {dtype}, experts by {covered}"
    )
    check_balance(model, settings.balance, settings.z_loss_coefficient)
    describe_run(folder, settings.as_dict(), model.config.to_dict())
    rows = Rows(train_rows, held_out_rows, stack, settings.sequence_length)
    trainer = make_trainer(
        model, tokenizer, rows, settings, settings.steps, folder, console, dtype, WholeModel(), "amoeba train"
    )
    ended, kept_in = run_to_end(trainer, folder, resume)
    report = TrainReport(**asdict(ended), model=kept_in)
    trainer.run_log.finish(report)
    return report


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
