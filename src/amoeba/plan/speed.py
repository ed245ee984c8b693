"""How fast a run will be, from bytes, operations and rates.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W ranks

    speed_of(facts, choice, work, machine)        # Speed(prefill, decode, step seconds, ...)

Constants are shares of what a machine reaches in a copy and in a dense product, from the measurements that they name.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from amoeba.plan.machine import Machine
from amoeba.plan.memory import CUDA, Choice, Work
from amoeba.plan.model import ModelFacts

# New tokens and prompts of commands on an H200 (2026-11-19): 4, 12 and 24 layers, prompts of 1024 tokens. Bytes take
# this share of a copy, operations this share of a dense product. A captured layer costs some time of its own, more with
# a long cache, and each token is drawn and read; the layers of a prompt are launched kernel by kernel.
_GPU_READS, _GPU_PRODUCTS, _GPU_LAYER, _GPU_CACHED = 0.9, 0.8, 18e-6, 3.5e-12
_GPU_LONG, _GPU_TOKEN, _GPU_PROMPT_LAYER = 1024, 35e-6, 165e-6
# Of kernels that read codes, against those of bf16 (docs/benchmarks.md, one layer of 8 and of 64 tokens), and their
# products in a prompt (of 1024 tokens, 64 rows an expert) and in a training step.
_CODE_READS = {"fp8": 0.75, "mxfp8": 0.7, "mxfp4": 0.45, "nvfp4": 0.45, "w8a8": 0.75}
_CODE_PRODUCTS = {"fp8": 0.36, "mxfp8": 0.36, "w8a8": 0.6}
_BLOCK_PRODUCTS, _CODE_STEP = 0.27, 0.65
# Copies reach this share of the link: 24 layers with 27, 56 and 86 % of the experts in slots take the time of resident
# ones and that of the bytes that miss, within 5 %.
_LINK = 0.98
# Layers that are launched kernel by kernel: of a pass, while the host waits for experts on the CPU, and of a training
# step with experts there or streamed.
_PLAIN_LAYER, _PLAIN_STEP_LAYER = 2.1e-3, 5e-3
# A training step reaches this share of a dense product (1.27B, 0.67B and 6.9B parameters: 52, 47 and 56 %). If a
# thousand of them are worth compiling the layers (`jobs.train.fast_paths`), each costs this much in training and with
# LoRA; else more, and some for each token (4 and 12 layers with LoRA, 4096 and 16384 tokens).
_STEP_PRODUCTS, _STEP_LAYER = 0.55, {"train": 150e-6, "finetune": 0.9e-3}
_LONG_RUN, _WORTH_COMPILING = 1000, 1e16
_LAUNCHED_LAYER, _LAUNCHED_TOKEN = 1.1e-3, 0.1e-6
# On a CPU, of CPU time on one core of a Cascade Lake (dev/log/plan.md): prompts of 26, 208 and 1300 tokens, new tokens
# after each, and LoRA steps of 256 and 1024 tokens. An expert's numbers are read once and multiplied by all its rows.
_CPU_PRODUCTS = 0.7  # dense ones
_CPU_EXPERTS = {"plain": 0.63, "int8": 1.6, "codes": 0.57, "whole": 1.1}  # products of experts
# Codes are read at this share of a copy; for few rows each is unpacked again (operations of fp32 per number and row),
# for more rows once.
_CODES_READ, _CODES_FEW, _CODES_UNPACK = 0.55, 17, 90
# A decode step reads everything else, and keys and values, at these shares of a copy, and its layers take this long
# within the C++ core; those of a prompt run in Python.
_CPU_DENSE_READ, _CPU_CACHE_READ, _CPU_LAYER, _CPU_PROMPT_LAYER = 0.7, 0.45, 0.1e-3, 1e-3
# Of products in fp32, even where bf16 is faster: an expert has few rows. Codes are unpacked in each pass. Each expert
# takes some time of its own in each pass, however few rows it has.
_CPU_STEP, _CPU_STEP_LAYER, _CPU_STEP_EXPERT = 0.58, 2e-3, 0.5e-3
# Packed experts on a CPU with matrix units, in prompts and training: of its products in bf16, while weights are read
# (docs/benchmarks_cpu.md).
_CPU_TILES = {"bf16": 1.4, "int8": 1.85}
_CPU_STEP_EXPERTS = {"plain": 0.58, "bf16": 0.79, "int8": 1.6, "codes": 0.58}
# Of streamed experts there, by CPU time as well. Where many rows meet an expert in bf16 that is computed in fp32, each
# number costs as much as copying this many bytes (0.72 ns at 11.1 GB/s); in a training step it happens three times.
_WIDENED, _MANY_ROWS = 8, 8
# Each byte that is read from a folder: through whole blocks in scratch memory into a slot, by Python's threads (0.55 s
# a GB). An expert that comes after the others is computed by itself, which takes Python a millisecond, and two in each
# pass of a training step.
_READ_MOVES, _APART = 5, 1e-3
# Reads of a run reach this share of the best of a few; and each expert takes some time of its own.
_DISK, _READ_EXPERT = 0.78, 0.2e-3
# Hits of a cache with slots for so many times the experts of a token, where 45 % of the choices repeat at the next
# token and 80 % within eight (Qwen3-30B; `python -m benchmarks cache --synthetic qwen3-30b`); then a
# curve up to all experts, through 88.8 % with half of them and 94.8 % with three quarters.
_HITS = ((0.0, 0.0), (1.0, 0.40), (1.5, 0.558), (2.4, 0.685), (4.0, 0.81))
_BEYOND = 0.8


@dataclass(frozen=True)
class Speed:
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


def speed_of(facts: ModelFacts, choice: Choice, work: Work, machine: Machine, *, hits: float | None = None) -> Speed:
    """hits: of a new token's streamed experts, the share that is in a slot, where it is known; None to assume it."""
    hits = _hit_rate(facts, choice) if hits is None else hits
    if work.trains:
        seconds, exchange = _step(facts, choice, work, machine)
        tokens = work.tokens * work.ranks
        return Speed(None, None, seconds, tokens / seconds, hits, exchange if work.ranks > 1 else None)
    decode = _pass(facts, choice, work, machine, tokens=work.batch, cached=work.context, hits=hits)
    prompt = work.batch * work.prompt_tokens
    prefill = _pass(facts, choice, work, machine, tokens=prompt, cached=work.prompt_tokens)
    return Speed(prompt / prefill, work.batch / decode, hit_rate=hits)


def _hit_rate(facts: ModelFacts, choice: Choice) -> float | None:
    if choice.placement != "streamed" or not facts.entries:
        return None
    slots = choice.slots if choice.budgets is None else choice.budgets.slots
    pairs = zip(slots, facts.entries, strict=True)
    return sum(hit_rate(count, each.experts, facts.top_k) for count, each in pairs) / len(facts.entries)


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


def _pass(
    facts: ModelFacts,
    choice: Choice,
    work: Work,
    machine: Machine,
    *,
    tokens: int,
    cached: int,
    hits: float | None = None,
) -> float:
    """Seconds of a pass without gradients. cached: tokens of a row that attention reads. hits: of streamed experts, in
    a decode step; None for a prompt."""
    on_gpu = choice.device == CUDA
    dtype = choice.dtype or facts.dtype
    ranks = work.ranks if choice.placement == "ranks" else 1
    cpu_experts = not on_gpu or choice.placement.startswith("cpu-")
    is_step = tokens == work.batch
    dense = facts.rest_numbers - facts.embedding_numbers
    kv = work.batch * cached * facts.kv_numbers * dtype.itemsize
    if on_gpu:
        products = machine.gpu_flops * _GPU_PRODUCTS
        seconds = (dense * dtype.itemsize + kv) / (machine.gpu_bandwidth * _GPU_READS)
        step_layer = _GPU_LAYER + _GPU_CACHED * min(cached, _GPU_LONG) * facts.attention_width
        layer = step_layer if is_step else _GPU_PROMPT_LAYER
        layer = _PLAIN_LAYER if cpu_experts or ranks > 1 else layer
        seconds += _GPU_TOKEN if is_step else 0.0
    else:
        products = machine.cpu_flops * _CPU_PRODUCTS
        size = min(dtype.itemsize, facts.dtype.itemsize) if is_step else dtype.itemsize  # steps read bf16 as it is
        seconds = dense * size / (machine.cpu_bandwidth * _CPU_DENSE_READ)
        seconds += kv / (machine.cpu_bandwidth * _CPU_CACHE_READ)
        layer = _CPU_LAYER if is_step else _CPU_PROMPT_LAYER
    seconds += 2 * tokens * (dense - facts.head_numbers) / products + 2 * work.batch * facts.head_numbers / products
    seconds += 2 * tokens * cached * facts.attention_width * facts.decoder_layers / products
    seconds += facts.decoder_layers * layer
    streams, whole = choice.placement == "streamed", choice.placement in ("streamed", "ranks")
    for place, entry in enumerate(facts.entries):
        touched = _touched(entry.experts, facts.top_k, tokens) / ranks
        each = facts.of_layer(entry, "resident" if whole else choice.placement, None if streams else dtype)
        if choice.placement.startswith("cpu-"):
            each = entry.hidden * entry.intermediate * 3 * (1 if choice.placement == "cpu-int8" else 2)
        numbers = (3 if entry.activation.gated else 2) * entry.hidden * entry.intermediate
        rows = tokens * facts.top_k / ranks
        code = _code(facts, choice)
        if choice.placement.startswith("cpu-") and machine.has_matrix_units:
            multiplying = 2 * rows * numbers / (machine.cpu_flops * _CPU_TILES[code or "bf16"])
            computing = max(touched * each / machine.cpu_bandwidth, multiplying)
        else:
            by = _experts_on_cpu if cpu_experts else _experts_on_gpu
            computing = by(code, machine, touched * each, touched * numbers, rows * numbers)
        if streams and not on_gpu and rows > _MANY_ROWS * touched and _widens(facts, choice):
            computing += touched * numbers * _WIDENED / machine.cpu_bandwidth
        if streams:
            missed = None if hits is None else touched * (1 - hits)
            computing = _streamed(facts, choice, work, machine, place, touched, missed, computing)
        seconds += computing
        if ranks > 1:  # every rank has the same tokens: one sum of rows over all of them
            seconds += 2 * tokens * entry.hidden * dtype.itemsize / _between(machine, work) + 30e-6
    return seconds


def _code(facts: ModelFacts, choice: Choice) -> str | None:
    """The format of the experts' codes as they are computed; None for numbers, and int8 of the CPU core's own."""
    if choice.placement == "cpu-int8":
        return "int8"
    if choice.placement.startswith("cpu-"):
        return None
    code = choice.placement.removesuffix("-weights")
    return code if code in _CODE_READS else facts.numbers.split("-")[0] if facts.is_quantised else None


def _experts_on_gpu(code: str | None, machine: Machine, read: float, numbers: float, products: float) -> float:
    """read: bytes of the experts that a layer needs; numbers: of theirs; products: numbers times rows."""
    reads, rate = _GPU_READS, _GPU_PRODUCTS
    if code is not None:
        reads, rate = _CODE_READS.get(code, 0.6), _CODE_PRODUCTS.get(code, _BLOCK_PRODUCTS)
    return read / (machine.gpu_bandwidth * reads) + 2 * products / (machine.gpu_flops * rate)


def _experts_on_cpu(code: str | None, machine: Machine, read: float, numbers: float, products: float) -> float:
    """As `_experts_on_gpu`."""
    if code is None or code == "int8":
        return read / machine.cpu_bandwidth + 2 * products / (machine.cpu_flops * _CPU_EXPERTS[code or "plain"])
    few = _CODES_FEW * max(0.0, products - numbers) / machine.vector_flops
    if machine.whole_numbers and code in ("mxfp4", "nvfp4"):
        many = 2 * products / (machine.vector_flops * _CPU_EXPERTS["whole"])
    else:
        many = 2 * products / (machine.cpu_flops * _CPU_EXPERTS["codes"])
        many += _CODES_UNPACK * numbers / machine.vector_flops
    return read / (machine.cpu_bandwidth * _CODES_READ) + min(few, many)


def _widens(facts: ModelFacts, choice: Choice) -> bool:
    return not facts.is_quantised and choice.dtype is not None and choice.dtype.itemsize > facts.dtype.itemsize


def _reading(facts: ModelFacts, machine: Machine) -> float:
    return 0.0 if facts.packed else _READ_MOVES / machine.cpu_bandwidth


def _touched(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts of a layer that tokens ask for, each choosing evenly."""
    return experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)


def _streamed(
    facts: ModelFacts,
    choice: Choice,
    work: Work,
    machine: Machine,
    place: int,
    touched: float,
    missed: float | None,
    computing: float,
) -> float:
    """Of one layer: what is not in a slot is copied, and what is not in host memory is read.

    missed: experts that a decode step does not find in slots; None for a prompt, which asks for nearly all of them and
    streams them in order. The prompt of a command that generates is the first one: all is still on the disk."""
    entry, budgets = facts.entries[place], choice.budgets
    slots = choice.slots[place] if budgets is None else budgets.slots[place]
    is_first = work.purpose == "generate"
    away = (touched if is_first else max(0.0, touched - slots)) if missed is None else missed
    disk = entry.expert_bytes / (machine.disk * _DISK) + (_READ_EXPERT if budgets is not None else 0.0)
    if budgets is None:
        moving = entry.expert_bytes * _reading(facts, machine)
        if missed is None:
            return max(away * disk, computing + away * (moving + _APART))
        return computing + away * (disk + moving)
    below = min(1.0, budgets.host_slots[place] / max(1, entry.experts - slots))
    link = away * entry.expert_bytes / (machine.link * _LINK)
    if missed is None:
        return max(computing, link, away * disk * (1 if is_first else 1 - below))
    return computing + max(link, away * disk * (1 - below))


def _step(facts: ModelFacts, choice: Choice, work: Work, machine: Machine) -> tuple[float, float]:
    """Seconds of an optimizer step of one batch, and of them for exchanges between ranks."""
    on_gpu, tokens = choice.device == CUDA, work.tokens
    per_number = (6 if work.purpose == "train" else 4) + (2 if choice.checkpointing else 0)
    products = machine.gpu_flops * _STEP_PRODUCTS if on_gpu else machine.vector_flops * _CPU_STEP
    compiles = _LONG_RUN * tokens * per_number * facts.active_numbers >= _WORTH_COMPILING
    layer = _STEP_LAYER[work.purpose] if compiles else _LAUNCHED_LAYER + _LAUNCHED_TOKEN * tokens
    dense = facts.rest_numbers - facts.embedding_numbers
    of_experts = facts.active_numbers - dense
    attention = 6 * facts.decoder_layers * facts.attention_width * work.context
    seconds = tokens * (per_number * dense + attention) / products
    expert_products, reading, own, tiles, code = products, 0.0, 0.0, False, _code(facts, choice)
    if not on_gpu or choice.placement.startswith("cpu-"):
        layer = _PLAIN_STEP_LAYER
        kind = "bf16" if choice.placement == "cpu-bf16" else code or "plain"
        expert_products = machine.vector_flops * _CPU_STEP_EXPERTS.get(kind, _CPU_STEP_EXPERTS["codes"])
        reading = per_number / 2 * _read_on_cpu(facts, choice, machine, kind)
        own = per_number / 2 * _CPU_STEP_EXPERT * sum(each.experts for each in facts.entries) / machine.cores
        if tiles := machine.has_matrix_units and choice.placement.startswith("cpu-"):
            expert_products = machine.cpu_flops * _CPU_TILES.get(kind, _CPU_TILES["bf16"])
    elif code is not None:
        expert_products *= _CODE_STEP
    multiplying = tokens * per_number * of_experts / expert_products
    computing = own + (max(multiplying, reading) if tiles else multiplying + reading)
    if choice.placement == "streamed":
        passes = 3 if choice.checkpointing else 2
        slots = choice.slots if choice.budgets is None else choice.budgets.slots
        away = sum((each.experts - n) * each.expert_bytes for each, n in zip(facts.entries, slots, strict=True))
        rate = machine.disk * _DISK if choice.budgets is None else machine.link * _LINK
        if choice.budgets is None:
            computing += passes * (away * _reading(facts, machine) + 2 * _APART * sum(e.experts for e in facts.entries))
            if _widens(facts, choice):
                computing += 1.5 * passes * facts.expert_numbers * _WIDENED / machine.cpu_bandwidth
        computing = max(computing, passes * away / rate)
        if choice.budgets is not None:
            layer = _PLAIN_STEP_LAYER
            below = sum(
                max(0, each.experts - n - host) * each.expert_bytes
                for each, n, host in zip(facts.entries, slots, choice.budgets.host_slots, strict=True)
            )
            computing = max(computing, passes * below / (machine.disk * _DISK))
    trained = facts.rest_numbers + facts.expert_numbers if work.purpose == "train" else 0
    memory = machine.gpu_bandwidth if on_gpu else machine.cpu_bandwidth
    # AdamW reads and writes parameters, moments and gradients
    seconds += 2 * trained / max(1, work.ranks) * (6 + work.moments) / memory
    seconds += computing + facts.decoder_layers * (layer if on_gpu else _CPU_STEP_LAYER)
    exchange = _exchanged(facts, work, machine) if choice.placement == "ranks" else 0.0
    return seconds + exchange, exchange


def _read_on_cpu(facts: ModelFacts, choice: Choice, machine: Machine, kind: str) -> float:
    """Seconds in which a pass reads all experts once, and unpacks them if they are codes."""
    if choice.placement.startswith("cpu-"):
        return facts.expert_numbers * (1 if kind == "int8" else 2) / machine.cpu_bandwidth
    is_code = kind not in _CPU_STEP_EXPERTS
    placement = choice.placement if choice.placement.endswith("-weights") else "resident"
    dtype = None if choice.placement == "streamed" else choice.dtype
    unpacking = _CODES_UNPACK * facts.expert_numbers / machine.vector_flops if is_code else 0.0
    return facts.expert_bytes(placement, dtype) / machine.cpu_bandwidth + unpacking


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
