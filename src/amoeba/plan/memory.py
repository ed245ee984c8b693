"""How much memory a run takes, line by line, before anything is allocated.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

    lines = memory_of(facts, Choice("resident", "cuda"), work)
    total(lines, "cuda"), total(lines, "cpu")

What is exact (weights, slots, the KV cache, factors, optimizer) is asked of the code that allocates it. What a pass
needs on top (activations, workspaces) is an upper estimate whose constants were set by measurements, see below.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from amoeba.core.cost import code_bytes, factor_numbers, row_map_bytes
from amoeba.core.placement import Load
from amoeba.cpu.placements import packed_plans
from amoeba.decoding.decoder import PIECE, cache_length
from amoeba.ops.language_loss import PART_BYTES
from amoeba.plan.model import ModelFacts
from amoeba.precision.formats import FP8_TRAINING
from amoeba.stream.attaching import Budgets, passing_bytes
from amoeba.stream.gpu.tiers import LayerTiers

Purpose = Literal["generate", "serve", "finetune", "train"]
When = Literal["always", "loading", "running"]
CUDA, HOST = "cuda", "cpu"

# Measured with `python -m benchmarks plan` on a 2-core Neoverse-N1: a process with torch, transformers and a tokenizer,
# and what allocator and threads keep on top of what is asked for.
_PROCESS_BYTES, _TRAINER_BYTES = 464 << 20, 32 << 20
# What torch's products keep on x86 in training: without it, peaks were up to 36 MiB above the plan in bf16 on a Xeon
# with AMX, and up to 56 MiB in fp32 on one without.
_X86_PRODUCTS = 0 if platform.machine().lower() in ("aarch64", "arm64") else 64 << 20
_CPU_SLACK, CPU_SLACK_SHARE = 16 << 20, 0.05
# Passes over streamed experts were 10 MiB above the plan without these, with 192 MiB of slots; training steps differ by
# 28 MiB from run to run, and were 12 MiB above it with 1.2 GiB of slots.
_STREAMED_STEP, _STREAMED_STEP_SHARE, SLOTS_SHARE = 32 << 20, 1 / 32, 1 / 16
# Of a rank: without it, peaks of two and four ranks were 6 to 56 MiB above the plan (gloo).
_EXCHANGE = 64 << 20
# On a GPU: cuBLAS and the buffers of our kernels, and what graphs keep of their own; the last are absent where experts
# are on the CPU, and streamed ones have buffers of their own (33 MiB above the plan without them).
_GPU_WORKSPACE, _GPU_PLAIN, _GPU_STREAMED = 96 << 20, 44 << 20, 48 << 20


_PROCESS = "Python and libraries"


class Line(NamedTuple):
    """where: "cuda" or "cpu". when: a run holds what is "always" there, and the larger of the two others."""

    name: str
    bytes: int
    where: str
    when: When = "always"


@dataclass(frozen=True)
class Work:
    """What is asked of a model.

    context: tokens of a row: a prompt with its answer, or a row to train on.
    batch:   rows at a time, on each rank.
    rank:    of LoRA factors on all experts; finetune alone.
    moments: bytes of AdamW's two moments, per number.
    prompt:  tokens of it that are read before the first new one; None: half of the context.
    checkpointing: of activations in training; None to choose.
    precision: of experts that train, see `amoeba.precision.recipes`.
    """

    purpose: Purpose
    context: int
    batch: int
    rank: int = 16
    moments: int = 8
    prompt: int | None = None
    checkpointing: bool | None = None
    precision: str = "bf16"
    ranks: int = 1
    nodes: int = 1

    @property
    def trains(self) -> bool:
        return self.purpose in ("finetune", "train")

    @property
    def tokens(self) -> int:
        """Of a training pass, or of the largest piece of a prompt."""
        return self.batch * self.context if self.trains else min(PIECE, self.batch * self.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context // 2) if self.prompt is None else self.prompt


@dataclass(frozen=True)
class Choice:
    """One way to run it.

    placement: of the experts: resident, a name of `amoeba.placements`, streamed, or ranks.
    device:    where everything but the experts is.
    dtype:     in which the model computes, where that is not the checkpoint's.
    moments:   bytes of AdamW's two moments, where that is not what was asked for.
    budgets:   of streamed experts on a GPU; slots: of streamed ones on a CPU.
    """

    placement: str
    device: str
    dtype: torch.dtype | None = None
    checkpointing: bool = False
    moments: int | None = None
    budgets: Budgets | None = None
    slots: tuple[int, ...] = field(default=())


def total(lines: tuple[Line, ...], where: str) -> int:
    found = {when: sum(line.bytes for line in lines if (line.where, line.when) == (where, when)) for when in _WHENS}
    return found["always"] + max(found["loading"], found["running"])


_WHENS: tuple[When, ...] = ("always", "loading", "running")


def memory_of(facts: ModelFacts, choice: Choice, work: Work) -> tuple[Line, ...]:
    dtype = choice.dtype or facts.dtype
    here, share = choice.device, work.ranks if choice.placement == "ranks" else 1
    rest = facts.rest_numbers * dtype.itemsize
    process = _PROCESS_BYTES + (_TRAINER_BYTES if work.trains else 0)
    process += _X86_PRODUCTS if work.trains and here == HOST else 0
    lines = [Line("weights", rest, here), Line(_PROCESS, process, HOST)]
    lines += _experts(facts, choice, work, dtype, share)
    if not work.trains:
        length = cache_length(work.context) if here == CUDA else work.context
        rows = work.batch + (work.purpose == "serve")  # and one in which prompts are read
        lines.append(Line("KV cache", rows * length * facts.kv_numbers * dtype.itemsize, here, "running"))
        lines.append(Line("recurrent states", rows * facts.state_bytes, here, "running"))
        lines.append(Line("activations", _forward_bytes(facts, work, dtype, choice), here, "running"))
        if here == HOST:
            lines.append(Line("weights as decode steps read them", _step_copies(facts, dtype), here, "running"))
    else:
        lines += _training(facts, choice, work, dtype, share)
    held = sum(line.bytes for line in lines if line.when != "running" and line.name != _PROCESS)
    workspace = _CPU_SLACK + int(CPU_SLACK_SHARE * held)
    if here == CUDA:
        plain = choice.placement.startswith("cpu-") and not work.trains
        workspace = _GPU_PLAIN if plain else _GPU_WORKSPACE + _GPU_STREAMED * (choice.placement == "streamed")
    return tuple(line for line in (*lines, Line("workspace", workspace, here)) if line.bytes)


def _experts(facts: ModelFacts, choice: Choice, work: Work, dtype: torch.dtype, share: int) -> list[Line]:
    if not facts.entries:
        return []
    layer = facts.entries[0]
    numbers = layer.experts * facts.one_expert("resident", dtype)
    as_stored = layer.experts * facts.one_expert("resident")
    if choice.placement == "streamed":
        if choice.budgets is not None:
            budgets, entries = choice.budgets, facts.entries
            slots = sum(n * LayerTiers.slot_bytes(each) for n, each in zip(budgets.slots, entries, strict=True))
            pinned = sum(n * each.expert_bytes for n, each in zip(budgets.host_slots, entries, strict=True))
            reads = passing_bytes(entries, budgets.slots, facts.scratch_bytes)
            return [Line("slots", slots, CUDA), Line("pinned experts", pinned, HOST), Line("reads", reads, HOST)]
        slots = sum(count * each.expert_bytes for count, each in zip(choice.slots, facts.entries, strict=True))
        more = _STREAMED_STEP + int(_STREAMED_STEP_SHARE * slots) if work.trains else int(SLOTS_SHARE * slots)
        reads = facts.scratch_bytes + more
        return [Line("slots", slots, HOST), Line("reads", reads, HOST)]
    if choice.placement == "ranks":
        experts = -(-facts.expert_bytes("resident", dtype) // share)
        return [Line("experts", experts, choice.device), Line("exchange", _EXCHANGE, HOST)]
    if choice.placement.startswith("cpu-"):
        load = Load(work.tokens, work.rank if work.trains else 0, facts.top_k, choice.checkpointing)
        plans = packed_plans(choice.placement, facts.sizes, load, training=work.trains)
        names = {"packed W": "experts", "packed Wᵀ": "experts, transposed", "stored W": "experts, for backward"}
        found = [
            Line(names.get(item.name, item.name), item.bytes, HOST, "always" if item.name in names else "running")
            for each in plans
            for item in each.items
        ]
        # an allocator may keep it: mimalloc, of torch's builds for ARM, does
        return [*found, Line("a layer while it is packed", as_stored, HOST, "always" if work.trains else "loading")]
    held = facts.expert_bytes(choice.placement, dtype)
    placed = Line("experts", held, choice.device)
    if choice.placement == "resident":
        return [placed]
    # quantised one layer after another, on the CPU
    codes = layer.experts * facts.one_expert(choice.placement)
    return [placed, Line("a layer while it is quantised", numbers + codes, HOST, "loading")]


def _step_copies(facts: ModelFacts, dtype: torch.dtype) -> int:
    """What the C++ core's decode step keeps in addition (decoding/cpu_step.py): of a bf16 checkpoint that is computed
    in fp32, everything but the experts in bf16; else the projections to queries, keys and values as one matrix."""
    if dtype == torch.float32 and facts.dtype == torch.bfloat16:
        return (facts.rest_numbers - facts.embedding_numbers) * torch.bfloat16.itemsize
    width = facts.decoder_layers * facts.attention_width + facts.kv_numbers
    return min(facts.rest_numbers, width * facts.hidden) * dtype.itemsize


def _forward_bytes(facts: ModelFacts, work: Work, dtype: torch.dtype, choice: Choice) -> int:
    """Of one layer in a pass without gradients; layers take turns."""
    size, tokens = dtype.itemsize, work.tokens
    kv = facts.kv_numbers // max(1, facts.decoder_layers)
    attention = tokens * (3 * facts.hidden + 2 * facts.attention_width + 2 * kv) * size
    if choice.device == HOST:  # scores of one row's heads, in blocks of queries
        attention += min(tokens, 512) * work.prompt_tokens * 4
    experts = 0
    if facts.entries and not choice.placement.startswith("cpu-"):
        layer = facts.entries[0]
        rows, width = tokens * facts.top_k, layer.activation.width(layer.intermediate)
        experts = rows * (width + layer.intermediate + layer.hidden) * size + 3 * tokens * layer.hidden * size
        experts += row_map_bytes(rows=rows, experts=layer.experts)
    logits = work.batch * facts.vocabulary * (size + 4 + 4)
    return max(attention, experts) + 2 * tokens * facts.hidden * size + logits


# Of what a training pass keeps per token and layer in addition to the experts' x and h, in numbers of H: the residual
# twice, two norms, attention's output, and statistics.
_KEPT_OF_ATTENTION = 3.5
# Of a layer's N·J numbers, those that its backward adds; and of the gradients, what is there while most activations
# still are. With these, the peaks of whole models on an H200 (docs/benchmarks.md: 26.2, 21.4, 16.9, 71.3 and with LoRA
# 9.3 GiB) are 94 to 99 % of the plan.
_BACKWARD_ROWS, _EARLY_GRADIENTS = 2, 0.25
# With streamed experts, rows of x, y and their gradients are there for all groups, in numbers of J and of H.
_BACKWARD_STREAMED = 2.5, 4.5
# On a CPU, in numbers of J and of H: rows of x, y and their gradients are written out. Without these, peaks of steps
# with 1024 tokens were up to 8 % above the plan (365 KB a token where 239 were planned).
_CPU_BACKWARD, _CPU_BACKWARD_STREAMED, _CPU_BACKWARD_PACKED = (5, 5), (3, 4), (2, 3)


def _training(facts: ModelFacts, choice: Choice, work: Work, dtype: torch.dtype, share: int) -> list[Line]:
    here, tokens, size = choice.device, work.tokens, dtype.itemsize
    lines = _trained(facts, choice, work, dtype, share)
    layers = facts.decoder_layers
    kv = facts.kv_numbers // max(1, layers)
    of_attention = int(tokens * (_KEPT_OF_ATTENTION * facts.hidden + 2 * facts.attention_width + kv) * size)
    of_experts, working = 0, 0
    if facts.entries:
        layer = facts.entries[0]
        rows, width = tokens * facts.top_k, layer.activation.width(layer.intermediate)
        # streamed and packed experts keep nothing here: they compute h again, or have caches of their own
        keeps_h = choice.placement not in ("streamed",) and not choice.placement.startswith("cpu-")
        of_experts = tokens * layer.hidden * size + (rows * width * size if keeps_h else 0)
        of_experts += row_map_bytes(rows=rows, experts=layer.experts)
        of_width, of_hidden = _rows_of_backward(choice)
        working = int(rows * (of_width * width + of_hidden * layer.hidden)) * size
    kept = of_attention + of_experts
    saved = layers * tokens * facts.hidden * size + kept if choice.checkpointing else layers * kept
    lines.append(Line("saved activations", saved, here, "running"))
    lines.append(Line("one layer's backward", working + (of_attention if here == HOST else 0), here, "running"))
    if work.purpose == "train" and here == CUDA and share == 1:
        lines = [_early(line, saved) if line.name == "gradients" else line for line in lines]
    logits = min(tokens * facts.vocabulary * size, PART_BYTES) + tokens * facts.hidden * size
    if here == HOST:  # transformers' own loss: all logits, in fp32 too, and their gradient
        logits = tokens * facts.vocabulary * 3 * 4
    lines.append(Line("logits", logits, here, "running"))
    return lines


def _rows_of_backward(choice: Choice) -> tuple[float, float]:
    """Numbers of J and of H for each routed row, in one layer's backward."""
    if choice.placement.startswith("cpu-"):
        return _CPU_BACKWARD_PACKED if choice.device == HOST else (0, 0)
    if choice.device == CUDA:
        return _BACKWARD_STREAMED if choice.placement == "streamed" else (_BACKWARD_ROWS, 0)
    return _CPU_BACKWARD_STREAMED if choice.placement == "streamed" else _CPU_BACKWARD


def _early(gradients: Line, saved: int) -> Line:
    """Activations go while gradients come: both are never there as a whole."""
    return gradients._replace(bytes=int(_EARLY_GRADIENTS * gradients.bytes) + max(0, gradients.bytes - saved))


def _trained(facts: ModelFacts, choice: Choice, work: Work, dtype: torch.dtype, share: int) -> list[Line]:
    here, moments = choice.device, choice.moments or work.moments
    if work.purpose == "train":
        numbers = facts.rest_numbers + -(-facts.expert_numbers // share)
        # on a GPU parameters are bf16, and the optimizer keeps the lower half of their fp32
        rounding = numbers * 2 if here == CUDA else 0
        lines = [Line("gradients", numbers * dtype.itemsize, here, "running")]
        lines.append(Line("optimizer", numbers * moments + rounding, here, "running"))
        if work.ranks > 1:  # DistributedDataParallel's buckets, and a gradient while it is copied there
            between = 2 * facts.rest_numbers * dtype.itemsize
            lines.append(Line("gradients between ranks", between, here, "running"))
        if work.precision != "bf16":
            lines.append(Line("experts in fp8", _fp8_copies(facts) // share, here, "running"))
        return lines
    factors = 0
    for each in facts.entries:
        sizes: Any = {"hidden": each.hidden, "intermediate": each.intermediate, "gated": each.activation.gated}
        factors += each.experts * factor_numbers(**sizes, rank=work.rank)
    factors //= share
    return [
        Line("LoRA factors", 4 * factors, here, "running"),
        Line("gradients", 4 * factors, here, "running"),
        Line("optimizer", moments * factors, here, "running"),
    ]


def _fp8_copies(facts: ModelFacts) -> int:
    found = 0
    for each in facts.entries:
        sizes: Any = {"hidden": each.hidden, "intermediate": each.intermediate, "gated": each.activation.gated}
        found += code_bytes(**sizes, experts=each.experts, format=FP8_TRAINING)
    return found
