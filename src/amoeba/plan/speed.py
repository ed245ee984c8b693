"""How fast a run will be, from bytes, operations and rates.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W ranks

    speed_of(facts, choice, work, machine)        # Speed(prefill, decode, step seconds, ...)

A pass reads its weights and computes; each layer costs some time of its own. Constants are shares of what a machine
reaches in a copy and in a dense product, from the measurements that they name.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from amoeba.plan.machine import Machine
from amoeba.plan.memory import CUDA, Choice, Work
from amoeba.plan.model import ModelFacts

# Captured steps and prompts on an H200, six layers of Qwen3-30B's sizes (2026-11-18): steps of 1, 8 and 64 rows take
# 606, 1253 and 2375 us where their bytes take 304, 882 and 1873; prompts of 128, 512, 2048 and 4096 tokens 2.47, 2.82,
# 4.68 and 7.95 ms where bytes take 1.9 and operations 0.11, 0.45, 2.0 and 4.5. Bytes by 0.9, operations by 0.8 and
# 45 us a layer give each within 5 %.
_GPU_READS, _GPU_PRODUCTS, _GPU_LAYER = 0.9, 0.8, 38e-6
# Of kernels that read codes, against those of bf16 (docs/benchmarks.md, one layer of 8 and of 64 tokens), and their
# products in a prompt.
_CODE_READS = {"fp8": 0.75, "mxfp8": 0.7, "mxfp4": 0.55, "nvfp4": 0.5, "w8a8": 0.75}
_CODE_PRODUCTS = 0.6
# A layer whose experts miss waits at least this long, and copies reach this share of the link (the same page).
_MISS, _LINK = 25e-6, 0.92
# Plain steps, launched one by one: 70 ms for 48 layers (the same page). With experts on the CPU, the host waits.
_PLAIN_LAYER = 1.4e-3
# A training step reaches this share of a dense product (1.27B, 0.67B and 6.9B parameters: 52, 47 and 56 %; LoRA 47 %),
# and its layers cost this much.
_STEP_PRODUCTS, _STEP_LAYER = 0.55, 150e-6
# Two layers of Qwen3-30B's sizes on two cores (Neoverse-N1): 55 new tokens/s and 197 of a prompt.
_CPU_READS, _CPU_PRODUCTS, _CPU_LAYER = 1.1, 0.7, 0.4e-3
_CPU_INT8 = 1.9  # times as fast as bf16 in a prompt (the same)
_CPU_CODES = 0.6
_CPU_STEP = 0.5
_DISK = 0.85
# Hits of a cache with slots for so many times the experts of a token, where 45 % of the choices repeat at the next
# token and 80 % within eight (Qwen3-30B; `python -m benchmarks cache --synthetic qwen3-30b`); then a
# curve up to all experts, through 88.8 % with half of them and 94.8 % with three quarters.
_HITS = ((0.0, 0.0), (1.0, 0.40), (1.5, 0.558), (2.4, 0.685), (4.0, 0.81))
_BEYOND = 0.8
# Tokens above which a pass asks for nearly all experts of a layer, and streams them in order.
_FEW_TOKENS = 64


@dataclass(frozen=True)
class Speed:
    """Tokens per second of a prompt and of new ones, of all rows; or seconds of an optimizer step."""

    prefill: float | None = None
    decode: float | None = None
    step_seconds: float | None = None
    step_tokens_per_second: float | None = None
    hit_rate: float | None = None  # assumed, of streamed experts
    exchange_seconds: float | None = None  # of a step over ranks

    @property
    def score(self) -> float:
        """More is better, whatever is asked for."""
        return (self.decode or 0.0) + (self.step_tokens_per_second or 0.0)


def speed_of(facts: ModelFacts, choice: Choice, work: Work, machine: Machine) -> Speed:
    hits = _hit_rate(facts, choice)
    if work.trains:
        seconds, exchange = _step(facts, choice, work, machine)
        tokens = work.tokens * work.ranks
        return Speed(None, None, seconds, tokens / seconds, hits, exchange if work.ranks > 1 else None)
    decode = _pass(facts, choice, work, machine, tokens=work.batch, cached=work.context)
    prompt = work.batch * work.prompt_tokens
    prefill = _pass(facts, choice, work, machine, tokens=prompt, cached=work.prompt_tokens)
    return Speed(prompt / prefill, work.batch / decode, hit_rate=hits)


def _hit_rate(facts: ModelFacts, choice: Choice) -> float | None:
    if choice.placement != "streamed" or not facts.entries:
        return None
    slots = choice.slots if choice.budgets is None else choice.budgets.slots
    return sum(
        hit_rate(count, each.experts, facts.top_k) for count, each in zip(slots, facts.entries, strict=True)
    ) / len(facts.entries)


def hit_rate(slots: int, experts: int, top_k: int) -> float:
    """Of a token's experts, those that a layer with so many slots has already."""
    if slots >= experts:
        return 1.0
    times, last = slots / top_k, _HITS[-1]
    if times >= last[0]:
        beyond = (slots - last[0] * top_k) / max(1, experts - last[0] * top_k)
        return last[1] + (1 - last[1]) * beyond**_BEYOND
    place = bisect_right(_HITS, (times, 2.0)) - 1
    (low, of_low), (high, of_high) = _HITS[place], _HITS[place + 1]
    return max(of_low + (of_high - of_low) * (times - low) / (high - low), slots / experts)


def _pass(facts: ModelFacts, choice: Choice, work: Work, machine: Machine, *, tokens: int, cached: int) -> float:
    """Seconds of a pass without gradients. cached: tokens of a row that attention reads."""
    on_gpu = choice.device == CUDA
    dtype = choice.dtype or facts.dtype
    ranks = work.ranks if choice.placement == "ranks" else 1
    cpu_experts = choice.placement.startswith("cpu-") or (choice.placement != "streamed" and not on_gpu)
    code = choice.placement.removesuffix("-weights")
    reads, products, of_layer = (
        (machine.gpu_bandwidth * _GPU_READS, machine.gpu_flops * _GPU_PRODUCTS, _GPU_LAYER)
        if on_gpu
        else (machine.cpu_bandwidth * _CPU_READS, machine.cpu_flops * _CPU_PRODUCTS, _CPU_LAYER)
    )
    dense = facts.rest_numbers - facts.embedding_numbers
    kv = work.batch * cached * facts.kv_numbers * dtype.itemsize
    seconds = (dense * dtype.itemsize + kv) / reads
    seconds += 2 * tokens * (dense - facts.head_numbers) / products + 2 * work.batch * facts.head_numbers / products
    seconds += 2 * tokens * cached * facts.attention_width * facts.decoder_layers / products
    waits = on_gpu and (cpu_experts or ranks > 1)
    seconds += facts.decoder_layers * (_PLAIN_LAYER if waits else of_layer)
    expert_reads, expert_products = reads, products
    if cpu_experts and on_gpu:
        expert_reads, expert_products = machine.cpu_bandwidth * _CPU_READS, machine.cpu_flops * _CPU_PRODUCTS
    if facts.is_quantised or code in _CODE_READS:
        name = facts.numbers.split("-")[0] if facts.is_quantised else code
        expert_reads *= _CODE_READS.get(name, 0.6) / _GPU_READS if on_gpu and not cpu_experts else 1.0
        expert_products *= _CODE_PRODUCTS / _GPU_PRODUCTS if on_gpu and not cpu_experts else _CPU_CODES
    elif choice.placement == "cpu-int8":
        expert_products *= _CPU_INT8
    streams, whole = choice.placement == "streamed", choice.placement in ("streamed", "ranks")
    for place, entry in enumerate(facts.entries):
        touched = _touched(entry.experts, facts.top_k, tokens) / ranks
        each = facts.of_layer(entry, "resident" if whole else choice.placement, None if streams else dtype)
        if choice.placement.startswith("cpu-"):
            each = entry.hidden * entry.intermediate * 3 * (1 if choice.placement == "cpu-int8" else 2)
        numbers = 3 if entry.activation.gated else 2
        flops = 2 * tokens * facts.top_k * numbers * entry.hidden * entry.intermediate / ranks
        computing = touched * each / expert_reads + flops / expert_products
        if streams:
            computing = _streamed(facts, choice, machine, place, tokens, touched, computing)
        seconds += computing
        if ranks > 1:  # every rank has the same tokens: one sum of rows over all of them
            seconds += 2 * tokens * entry.hidden * dtype.itemsize / _between(machine, work) + 30e-6
    return seconds


def _touched(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts of a layer that tokens ask for, each choosing evenly."""
    return experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)


def _streamed(
    facts: ModelFacts, choice: Choice, machine: Machine, place: int, tokens: int, touched: float, computing: float
) -> float:
    """Of one layer: what is not in a slot is copied, and what is not in host memory is read."""
    entry = facts.entries[place]
    budgets = choice.budgets
    slots = choice.slots[place] if budgets is None else budgets.slots[place]
    missed = touched * (1 - hit_rate(slots, entry.experts, facts.top_k))
    if tokens > _FEW_TOKENS:
        missed = max(0.0, entry.experts - slots)
    if budgets is None:
        return max(computing, missed * entry.expert_bytes / (machine.disk * _DISK))
    below = min(1.0, budgets.host_slots[place] / max(1, entry.experts - slots))
    link = missed * entry.expert_bytes / (machine.link * _LINK)
    disk = missed * (1 - below) * entry.expert_bytes / (machine.disk * _DISK)
    if tokens > _FEW_TOKENS:
        return max(computing, link, disk)
    return computing + max(link, disk) + (_MISS if missed else 0.0)


def _step(facts: ModelFacts, choice: Choice, work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds of an optimizer step of one batch, and of them for exchanges between ranks."""
    on_gpu, tokens = choice.device == CUDA, work.tokens
    per_number = (6 if work.purpose == "train" else 4) + (2 if choice.checkpointing else 0)
    products = machine.gpu_flops * _STEP_PRODUCTS if on_gpu else machine.cpu_flops * _CPU_STEP
    dense = facts.rest_numbers - facts.embedding_numbers
    of_experts = facts.active_numbers - dense
    attention = 6 * facts.decoder_layers * facts.attention_width * work.context
    seconds = tokens * (per_number * dense + attention) / products
    expert_products = products
    if choice.placement.startswith("cpu-"):
        expert_products = machine.cpu_flops * _CPU_STEP * (_CPU_INT8 if "int8" in choice.placement else 1.0)
    elif facts.is_quantised or choice.placement.endswith("-weights"):
        expert_products *= _CODE_PRODUCTS / _GPU_PRODUCTS if on_gpu else _CPU_CODES
    computing = tokens * per_number * of_experts / expert_products
    if choice.placement == "streamed":
        passes, slots = (
            (3 if choice.checkpointing else 2),
            choice.slots if choice.budgets is None else choice.budgets.slots,
        )
        away = sum((each.experts - n) * each.expert_bytes for each, n in zip(facts.entries, slots, strict=True))
        rate = machine.disk * _DISK if choice.budgets is None else machine.link * _LINK
        computing = max(computing, passes * away / rate)
        if choice.budgets is not None:
            below = sum(
                max(0, each.experts - n - host) * each.expert_bytes
                for each, n, host in zip(facts.entries, slots, choice.budgets.host_slots, strict=True)
            )
            computing = max(computing, passes * below / (machine.disk * _DISK))
    trained = facts.rest_numbers + facts.expert_numbers if work.purpose == "train" else 0
    memory = machine.gpu_bandwidth if on_gpu else machine.cpu_bandwidth
    # AdamW reads and writes parameters, moments and gradients
    seconds += 2 * trained / max(1, work.ranks) * (6 + work.moments) / memory
    seconds += computing + facts.decoder_layers * (_STEP_LAYER if on_gpu else 4 * _CPU_LAYER)
    exchange = _exchanged(facts, work, machine) if choice.placement == "ranks" else 0.0
    return seconds + exchange, exchange


def _exchanged(facts: ModelFacts, work: Work, machine: Machine) -> float:
    """Rows to the owners of their experts and back, in both passes; and the gradients of everything else.

    A token's row goes once to each rank that owns one of its experts (docs/parallel.md). Between machines it takes the
    network, and both ways are busy at the same time."""
    ranks, nodes, size = work.ranks, max(1, work.nodes), facts.dtype.itemsize
    per_node = max(1, ranks // nodes)
    peers = ranks * (1 - (1 - 1 / ranks) ** facts.top_k)  # ranks that a token visits, by chance
    remote = peers * (ranks - per_node) / ranks
    near = peers * (per_node - 1) / ranks
    peer, network = machine.peer or machine.link or 10e9, machine.network or 10e9
    rows = 4 * len(facts.entries) * work.tokens * facts.hidden * size
    exchange = max(rows * near / peer, rows * remote / network if nodes > 1 else 0.0)
    shared = 0 if work.purpose == "finetune" else facts.rest_numbers * size
    return exchange + 2 * shared * (ranks - 1) / ranks / _between(machine, work)


def _between(machine: Machine, work: Work) -> float:
    """Of a sum over all ranks: the slowest link on its way."""
    peer = machine.peer or machine.link or 10e9
    return min(peer, machine.network or 10e9) if work.nodes > 1 else peer
