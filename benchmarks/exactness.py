"""`python -m benchmarks exactness`: generation and training compared, with and without exact mode, and its cost.

    gap = gap_of(model, lengths=[(1,), (63, 500)], new_tokens=8)
    gap.log_probability, gap.choices        # 0.0 and 0.0 in exact mode

Texts are generated token by token with a cache, in batches padded on the left; on a GPU by captured steps, and some of
them again by plain ones; in exact mode on a CPU once more by the core's own steps, where it knows the model. A training
pass then reads each text
alone, all of a batch with padding on the left, and its halves with padding on the right. Compared are the
log-probabilities of the new tokens, and for each token and layer the experts that the router chose. Models are small
and random.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import amoeba
from amoeba import lora, replay
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import counted
from amoeba.decoding import Decoder, Sampling
from amoeba.decoding.decoder import NativeModel, native_steps
from amoeba.integrations.exact_mode import exact, is_exact, log_probabilities
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.train.trainer import CapturedStep, on_stream

CPU = torch.device("cpu")
BATCH_OF_64 = tuple(1 + 37 * place % 67 for place in range(64))  # tokens of each prompt
LENGTHS: Sequence[tuple[int, ...]] = (
    (1,),
    (63,),
    (64,),
    (65,),
    (500,),
    (1, 64, 500),
    (63, 64, 65, 1, 500, 17, 300, 2),
    BATCH_OF_64,
)
SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096,
    "max_position_embeddings": 1024, "num_experts": 32, "num_local_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"intermediate_size": 128, "sliding_window": 128, "layer_types": None, "rope_parameters": None},
    "deepseek_v3": {
        "n_routed_experts": 32, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "n_group": 4,
        "topk_group": 2, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1,
    },
}  # fmt: skip
PLAIN: Sequence[tuple[int, ...]] = (1, 64, 500), BATCH_OF_64  # without capture, where there is one
COST: dict[str, Any] = {  # Qwen3-30B's layers, two of them
    **SMALL, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8192, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


@dataclass
class Gap:
    """log_probability: the largest difference. choices: share of (token, layer) pairs with other experts."""

    log_probability: float = 0.0
    choices: float = 0.0
    steps: float = -1.0  # of the core\'s own ones in exact mode; -1 where there are none
    tokens: int = 0
    pairs: int = 0


@dataclass
class ExactnessRow:
    model: str
    dtype: str
    without: Gap
    exact: Gap


@dataclass
class Cost:
    """Milliseconds of each round, wall clock and CPU."""

    name: str
    dtype: str
    without: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    without_cpu: list[float] = field(default_factory=list)
    exact_cpu: list[float] = field(default_factory=list)


def build(family: str, dtype: torch.dtype, sizes: dict[str, Any] = SMALL, device: torch.device = CPU) -> Any:
    changes = {name: value for name, value in {**sizes, **FAMILIES[family]}.items() if value is not None}
    amoeba.register()
    config = AutoConfig.for_model(family, **changes)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, experts_implementation="amoeba").to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def gap_of(model: Any, lengths: Sequence[tuple[int, ...]], new_tokens: int) -> Gap:
    gap, others = Gap(), 0
    runs: list[tuple[tuple[int, ...], bool | None]] = [(each, None) for each in lengths]
    runs += [(each, False) for each in lengths if each in PLAIN and model.device.type == "cuda"]
    for each, capture in runs:
        texts, rollout, chosen = _generated(model, each, new_tokens, capture)
        native = _native(model) if is_exact(model) else None
        if native is not None:
            prompts = [text[:-new_tokens] for text in texts]
            own_texts, own = _rolled_out(model, prompts, new_tokens, native=native)
            gap.steps = max(gap.steps, *(float((a - b).abs().max()) for a, b in zip(own, rollout, strict=True)))
            gap.steps = gap.steps if own_texts == texts else float("inf")
            gap.log_probability = max(gap.log_probability, gap.steps)
        everyone = list(range(len(texts)))
        batches = [([place], "left") for place in everyone]
        if len(texts) > 1:
            batches += [(everyone, "left"), (everyone[::2], "right"), (everyone[1::2], "right")]
        for places, side in batches:
            read, records = _read([texts[place] for place in places], model, new_tokens, side)
            for place, found, record in zip(places, read, records, strict=True):
                gap.log_probability = max(gap.log_probability, float((found - rollout[place]).abs().max()))
                gap.tokens += new_tokens
                first, second = (one[: len(texts[place]) - 1].sort(-1).values for one in (chosen[place], record))
                others += int((first != second).any(-1).sum())
                gap.pairs += first.shape[0] * first.shape[1]
    gap.choices = others / max(1, gap.pairs)
    return gap


def _generated(
    model: Any, lengths: tuple[int, ...], new_tokens: int, capture: bool | None
) -> tuple[list[list[int]], list[Tensor], list[Tensor]]:
    vocabulary, generator = model.config.vocab_size, torch.Generator("cpu").manual_seed(sum(lengths))
    prompts = [
        torch.randint(3, vocabulary, (length,), generator=generator, dtype=torch.int64, device="cpu").tolist()
        for length in lengths
    ]
    most = max(lengths) + new_tokens
    with replay.recording(model, rows=len(prompts), length=most) as recorder:
        texts, found = _rolled_out(model, prompts, new_tokens, capture=capture)
    return texts, found, [record.expert_NLK for record in recorder.take(texts)]


def _rolled_out(
    model: Any, prompts: list[list[int]], new_tokens: int, **options: Any
) -> tuple[list[list[int]], list[Tensor]]:
    """Texts, and the log-probabilities of their new tokens."""
    most, sampling = max(map(len, prompts)) + new_tokens, Sampling(do_sample=True)
    decoder = Decoder(model, batch=len(prompts), length=most, sampling=sampling, return_logprobs=True, **options)
    steps = list(decoder.generate(prompts, new_tokens, seed=sum(map(len, prompts))))
    texts = [prompt + [tokens[row] for tokens in steps] for row, prompt in enumerate(prompts)]
    return texts, list(decoder.logprobs(new_tokens))


def _native(model: Any) -> NativeModel | None:
    found = native_steps(model) if model.device.type == "cpu" else ""
    return None if isinstance(found, str) else found


def _read(texts: list[list[int]], model: Any, new_tokens: int, side: str) -> tuple[list[Tensor], list[Tensor]]:
    """A training pass over texts that are padded."""
    most = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), most, dtype=torch.int64, device="cpu")
    ends = [most if side == "left" else len(text) for text in texts]
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        ids[row, end - len(text) : end], mask[row, end - len(text) : end] = torch.tensor(text), 1
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    model.train()
    ids, mask, position = (each.to(model.device) for each in (ids, mask, position))
    with replay.recording(model, rows=len(texts), length=most) as recorder:
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits.detach()
    model.eval()
    last = [
        (logits[row, end - 1 - new_tokens : end - 1], ids[row, end - new_tokens : end]) for row, end in enumerate(ends)
    ]
    found = log_probabilities(*(torch.stack(part) for part in zip(*last, strict=True))).cpu()
    return list(found), [record.expert_NLK for record in recorder.take(texts)]


def with_lora(
    family: str, dtype: torch.dtype, placement: str, sizes: dict[str, Any] = SMALL, device: torch.device = CPU
) -> Any:
    model = build(family, dtype, sizes, device)
    if placement != "resident":
        place_experts(model, placement)
    lora.attach(model, 8, 16, ["experts", "o_proj"])
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def models(device: torch.device = CPU) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            yield family, name, partial(build, family, dtype, device=device)
            for placement in ("mxfp4-weights", "fp8-weights"):
                made = partial(with_lora, family, dtype, placement, device=device)
                yield f"{family}, {placement}, LoRA", name, made


def cost_of(dtype: torch.dtype, rounds: int, sizes: dict[str, Any] = COST, device: torch.device = CPU) -> list[Cost]:
    """Of decode steps behind 64 tokens and of LoRA steps, several in a row as in a run, alternating. On a GPU a token
    is generated by captured steps, and training is captured, too, as commands do it, or launches one kernel after
    another, as TRL's trainers do."""
    model = with_lora("qwen3_moe", dtype, "resident", sizes, device)
    on_gpu = device.type == "cuda"
    tokens, batches, new, row = (2048, (1, 8, 64), 65, 5) if on_gpu else (256, (1,), 17, 1)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), dtype=torch.int64, device="cpu").to(device)
    prompt = ids[0, :64].tolist()
    decoders: dict[tuple[bool, int], Decoder] = {}  # steps are captured in one mode
    captured: dict[bool, CapturedStep] = {}
    inputs, predicted = {"input_ids": ids, "labels": ids}, torch.ones((), device=device)

    def now() -> tuple[float, float]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter(), time.process_time()

    def since(began: tuple[float, float], count: int) -> tuple[float, ...]:
        return tuple((end - begin) / count for begin, end in zip(began, now(), strict=True))

    def decode(in_exact_mode: bool, batch: int) -> tuple[float, ...]:
        if (in_exact_mode, batch) not in decoders:
            decoders[in_exact_mode, batch] = Decoder(model, batch=batch, length=64 + new, native=_native(model))
        steps = decoders[in_exact_mode, batch].generate([prompt] * batch, new)
        next(steps)
        began = now()
        list(steps)
        return since(began, new - 1)

    def step(inputs: dict[str, Any], predicted: Tensor) -> Tensor:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def train(in_exact_mode: bool, capture: bool = False) -> tuple[float, ...]:
        model.train()
        if capture and in_exact_mode not in captured:
            stream = torch.cuda.Stream()
            with on_stream(stream):
                step(inputs, predicted)
            model.zero_grad()
            captured[in_exact_mode] = CapturedStep(step, inputs, predicted, model.parameters(), stream)
        run = captured[in_exact_mode] if capture else step
        began = now()
        for _ in range(row):
            run(inputs, predicted)
            model.zero_grad()
        taken = since(began, row)
        model.eval()
        return taken

    names: dict[str, Callable[[bool], tuple[float, ...]]] = {
        f"decode, {counted(batch, 'token')}": partial(decode, batch=batch) for batch in batches
    }
    names[f"training step, {tokens} tokens"] = train
    if on_gpu:
        names[f"captured training step, {tokens} tokens"] = partial(train, capture=True)
    found = [Cost(name, str(dtype).removeprefix("torch.")) for name in names]
    for turn in range(rounds + 1):  # the first compiles and warms up
        for in_exact_mode in (False, True):
            with exact(model) if in_exact_mode else contextlib.nullcontext():
                for cost, run in zip(found, names.values(), strict=True):
                    wall, cpu = (round(each * 1e3, 3) for each in run(in_exact_mode))
                    if turn:
                        (cost.exact if in_exact_mode else cost.without).append(wall)
                        (cost.exact_cpu if in_exact_mode else cost.without_cpu).append(cpu)
    return found


def run(
    new_tokens: int, rounds: int, path: Any, output: Output, device: torch.device = CPU, seconds: float = 1e9
) -> tuple[dict[str, Any], bool]:
    """Prints two tables; returns the document, and False where exact mode is not exact. seconds: after which no model
    is begun."""
    command = f"python -m benchmarks exactness --new-tokens {new_tokens} --repeats {rounds}"
    measured, rows, costs, began = BenchRun(command, "exactness", path, output), [], [], time.monotonic()
    on_gpu = device.type == "cuda"
    for each in ((torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16)) if rounds else ():
        measured.progress(f"cost in {each}")
        costs += cost_of(each, rounds, device=device)
    for cost in costs:
        measured.keep(cost)
    shown = [
        [cost.name, cost.dtype, *(three_digits(min(each)) for each in (cost.without, cost.exact)),
         three_digits(min(cost.exact) / min(cost.without)), three_digits(min(cost.exact_cpu) / min(cost.without_cpu))]
        for cost in costs
    ]  # fmt: skip
    output.table("cost, ms", ["", "", "without", "exact", "times", "times the CPU time"], shown)
    for name, dtype, make in models(device):
        if time.monotonic() - began > seconds:
            measured.progress(f"{name} in {dtype}: not begun, {seconds:g} s are over")
            continue
        measured.progress(f"{name} in {dtype}")
        model = make()
        without = gap_of(model, LENGTHS, new_tokens)
        with exact(model):
            row = ExactnessRow(name, dtype, without, gap_of(model, LENGTHS, new_tokens))
        rows.append(row)
        measured.keep(row)
    title = "largest difference of log-probabilities, and share of other choices of experts"
    shown = [
        [row.model, row.dtype, f"{row.without.log_probability:.1e}", f"{row.without.choices:.2%}",
         f"{row.exact.log_probability:g}", f"{row.exact.choices:g}"] for row in rows
    ]  # fmt: skip
    output.table(title, ["", "", "without", "choices", "exact", "choices"], shown)
    return measured.finish(), all(row.exact.log_probability == row.exact.choices == 0 for row in rows)
