"""`python -m benchmarks quality MODEL`: what a model loses in each format of its experts, on text it has not seen.

    rows = compared(Path("runs/demo/model"), held_out_rows, None)

The model runs in float32; only its experts are rounded. Of every token that is predicted: the loss, whether the most
likely token is the one of the unrounded model (greedy tokens), and the divergence (KL) from its distribution. With an
adapter: the same on the answers that it was trained for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba import lora, place_experts
from amoeba.commands.bench_run import BenchRun
from amoeba.commands.output import Output
from amoeba.data.corpus import load_corpus
from amoeba.data.sft_dataset import PLAIN_TEMPLATE, SftDataset, check_answers, pad_rows
from amoeba.data.token_rows import NO_LABEL, PackedDataset, stack
from amoeba.integrations.experts_module import experts_modules, hand_over, resident
from amoeba.integrations.model_folder import find_adapter, load_model, load_tokenizer
from amoeba.jobs.convert.quantise import FORMATS
from amoeba.placements import placement_named
from amoeba.precision.quantised_experts import dequantise_experts, quantise_experts
from benchmarks import command

_AT_ONCE = 16  # rows


@dataclass(frozen=True)
class Quality:
    """error: of the experts' weights, relative L2; None where they are packed. agreement: share of greedy tokens."""

    experts: str
    adapter: bool
    tokens: int
    loss: float
    agreement: float
    divergence: float
    error: float | None = None


def _round(model: Any, way: str) -> float | None:
    """way: float32, bfloat16, a placement's name, or a format as `amoeba quantise` writes it."""
    if way.startswith("cpu-"):
        place_experts(model, way)
        return None
    wrong = size = 0.0
    for module in experts_modules(model).values():
        weights = resident(module)
        own = [each.detach().clone() for each in (weights.gate_up_EJH, weights.down_EHI)]
        if way in ("float32", "bfloat16"):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(getattr(torch, way)).float()
            found = resident(module)
        else:
            format = way.removesuffix("-weights")
            placed = quantise_experts(weights, FORMATS[format], closest=not way.endswith("-weights"))
            found = dequantise_experts(placed)
            hand_over(module, placed, placement_named(f"{format}-weights"))
        for before, after in zip(own, (found.gate_up_EJH, found.down_EHI), strict=True):
            wrong += float((after - before).square().sum())
            size += float(before.square().sum())
    return (wrong / size) ** 0.5


@torch.no_grad()
def _predicted(model: Any, batches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all predicted tokens, and those tokens."""
    scores, labels = [], []
    for batch in batches:
        inputs = {name: each for name, each in batch.items() if name != "labels"}
        logits, wanted = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        scores.append(logits[wanted != NO_LABEL].double().log_softmax(-1))
        labels.append(wanted[wanted != NO_LABEL])
    return torch.cat(scores), torch.cat(labels)


def compared(
    model: Path, batches: list[dict[str, Tensor]], adapter: Path | None, ways: list[str], told: Callable[[str], object]
) -> list[Quality]:
    found: list[Quality] = []
    expected: Tensor | None = None
    for way in ways:
        told(f"{way}{'' if adapter is None else ', with the adapter'}")
        loaded = load_model(str(model), torch.float32)
        error = _round(loaded, way)
        if adapter is not None:
            lora.load(loaded, adapter)
        scores, labels = _predicted(loaded, batches)
        expected = scores if expected is None else expected
        divergence = (expected.exp() * (expected - scores)).sum(-1).mean()
        same = (scores.argmax(-1) == expected.argmax(-1)).double().mean()
        loss = float(F.nll_loss(scores, labels))
        found.append(Quality(way, adapter is not None, len(labels), loss, float(same), float(divergence), error))
    return found


def run(
    model: Path, data: str | None, adapter: str | None, answers: str | None, path: Path | None, output: Output
) -> tuple[dict[str, Any], bool]:
    """data: what the model was trained on by `amoeba train` with its defaults, whose held-out part is taken; answers:
    the same of `amoeba finetune --held-out 0.1`."""
    ways = ["float32", "bfloat16", "cpu-int8", "fp8", "mxfp8", "mxfp4-weights", "mxfp4", "nvfp4-weights", "nvfp4"]
    again = command("quality", str(model), data=data, adapter=adapter, answers=answers)
    measured = BenchRun(again, "qualities", path, output)
    tokenizer = load_tokenizer(str(model))
    packed = PackedDataset(load_corpus(data, held_out=0.05, seed=0).held_out, tokenizer, 128)
    rows = [packed[number] for number in range(len(packed))]
    batches = [stack(rows[at : at + _AT_ONCE]) for at in range(0, len(rows), _AT_ONCE)]
    found = compared(model, batches, None, ways, measured.progress)
    if adapter and answers:
        tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
        asked = SftDataset(
            load_corpus(answers, held_out=0.1, seed=0, check=check_answers(tokenizer)).held_out, tokenizer, 256
        )
        rows = [asked[number] for number in range(len(asked))]
        batches = [pad_rows(rows[at : at + _AT_ONCE], 0) for at in range(0, len(rows), _AT_ONCE)]
        found += compared(model, batches, find_adapter(adapter), ways, measured.progress)
    for each in found:
        measured.keep(each)
    for of_adapter in sorted({each.adapter for each in found}):
        of = [each for each in found if each.adapter == of_adapter]
        title = f"{'with the adapter, answers' if of_adapter else 'held-out text'}: {of[0].tokens} tokens"
        columns = ["experts", "error of the weights", "loss", "same greedy token", "KL"]
        shown = [
            [
                each.experts,
                "-" if each.error is None else f"{each.error:.2%}",
                f"{each.loss:.4f}",
                f"{each.agreement:.2%}",
                f"{each.divergence:.2e}",
            ]
            for each in of
        ]
        output.table(title, columns, shown)
    return measured.finish(), True
