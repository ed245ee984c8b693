"""Runs of `amoeba train` and `amoeba finetune` that last a second: two layers, 32 wide, on a few sentences.

told = tiny_settings("train", folder, inputs)        # inputs = make_inputs(folder): a model, and data for each
tiny_run(told, Quiet())
"""

import json
from pathlib import Path
from typing import Any

import torch

from amoeba.data.tokenizer import train_tokenizer
from amoeba.jobs.finetune.finetune import finetune
from amoeba.jobs.settings import FinetuneSettings, RunSettings, TrainSettings, load_settings
from amoeba.jobs.train.train import train
from tiny_models import build

KINDS: dict[str, type[RunSettings]] = {"train": TrainSettings, "finetune": FinetuneSettings}
KEPT = {"train": "model", "finetune": "adapter"}
WEIGHTS = {"train": "model/model.safetensors", "finetune": "adapter/adapter_model.safetensors"}
TOLD: dict[str, Any] = {
    "steps": 12,
    "batch_size": 2,
    "log_every": 3,
    "eval_every": 6,
    "save_every": 4,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "held_out": 0.2,
    "sequence_length": 32,
}


class Quiet:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, line: dict[str, Any], total: int) -> None:
        self.lines.append(line)


def make_inputs(folder: Path) -> Path:
    words = ["one", "two", "three", "many", "no"]
    rows = [f"In {a} words: {b} experts and {c} tokens make {a} sums." for a in words for b in words for c in words[:2]]
    tokenizer = train_tokenizer(rows, 300)
    torch.manual_seed(0)
    build("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pairs = [{"prompt": row[:20], "completion": row[20:]} for row in rows]
    (folder / "finetune.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def tiny_settings(command: str, folder: Path, inputs: Path, **changes: Any) -> RunSettings:
    told = TOLD | {"model": str(inputs / "base"), "data": str(inputs / f"{command}.jsonl"), "out": str(folder)}
    if command == "finetune":
        told |= {"r": 2, "alpha": 4, "accumulation": 2, "targets": ["experts", "q_proj"], "train_router": True}
    return load_settings(None, told | changes, KINDS[command])


def tiny_run(settings: RunSettings, console: Any, **options: Any) -> Any:
    run: Any = train if isinstance(settings, TrainSettings) else finetune
    return run(settings, console, **options)


def kept_weights(folder: Path, command: str) -> dict[str, Any]:
    """What a run kept, tensors bit for bit by name; safetensors writes its metadata in any order."""
    content = (folder / WEIGHTS[command]).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:end])
    for name in entries.keys() - {"__metadata__"}:
        begin, stop = entries[name].pop("data_offsets")
        entries[name]["bytes"] = content[end + begin : end + stop]
    return entries


def step_losses(folder: Path) -> list[float]:
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [loss for line in lines if line["kind"] == "train" for loss in line["step_losses"]]
