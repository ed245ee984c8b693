"""LoRA steps of a model whose experts are on the CPU and the rest on a GPU: its shared experts before and meanwhile.

    PYTHONPATH=src python benchmarks/cpu_overlap.py              # 128, 512 and 2048 tokens of DeepSeek-V2-Lite's sizes
    PYTHONPATH=src python benchmarks/cpu_overlap.py --tokens 512 --layers 4 --experts 64 --rounds 20

Both kinds of step alternate in one process; times are medians. The timeline is one step with hooks: how long the GPU
computes shared experts, and how much of that while the CPU computes routed ones. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.initialization import no_init_weights

from amoeba import lora, place_experts
from amoeba.backends import packed
from amoeba.integrations import experts_module

VOCABULARY = 4096
Span = tuple[float, float]  # milliseconds


def make_model(layers: int, experts: int, placement: str) -> Any:
    config = DeepseekV3Config(
        hidden_size=2048, moe_intermediate_size=1408, intermediate_size=1408, n_routed_experts=experts,
        num_experts_per_tok=6, n_shared_experts=2, num_hidden_layers=layers, first_k_dense_replace=0, n_group=1,
        topk_group=1, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, vocab_size=VOCABULARY,
    )  # fmt: skip
    torch.manual_seed(0)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    some = 0.02 * torch.randn(1 << 20)
    with torch.no_grad():
        for parameter in model.parameters():  # the same numbers again and again, which takes no time
            flat = parameter.view(-1)
            flat.copy_(some.repeat(-(-len(flat) // len(some)))[: len(flat)] if parameter.dim() > 1 else torch.ones(()))
    place_experts(model, placement)
    model.cuda()
    lora.attach(model, 8, 16, ["experts", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    return model.train()


def step(model: Any, ids: torch.Tensor) -> None:
    if not model.training:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
        return
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None


def seconds_of(model: Any, ids: torch.Tensor) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(model, ids)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def compare(model: Any, ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    own = experts_module.runs_alongside
    times: dict[str, list[float]] = {"before": [], "meanwhile": []}
    try:
        for number in range(rounds + 2):
            for name, found in times.items():
                experts_module.runs_alongside = (lambda x: True) if name == "meanwhile" else (lambda x: False)
                seconds = seconds_of(model, ids)
                found += [1e3 * seconds] if number > 1 else []
    finally:
        experts_module.runs_alongside = own
    return times


def timeline(model: Any, ids: torch.Tensor) -> tuple[list[Span], list[Span]]:
    """When the CPU computed routed experts and when the GPU computed shared ones, in one step."""
    on_cpu: list[Span] = []
    events: list[torch.cuda.Event] = []

    def mark(*_: Any) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    def timed(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            on_cpu.append((1e3 * (began - zero), 1e3 * (time.perf_counter() - zero)))
            return result

        return run

    hooks, own = [], (packed.forward, packed.backward)
    for module in model.modules():
        shared: Any = getattr(module, "shared_experts", None)
        if shared is not None:
            first, last = shared.gate_proj, shared.down_proj
            hooks += [first.register_forward_pre_hook(mark), last.register_forward_hook(mark)]
            hooks += [last.register_full_backward_pre_hook(mark), first.register_full_backward_hook(mark)]
    packed.forward, packed.backward = map(timed, own)
    try:
        torch.cuda.synchronize()
        base = torch.cuda.Event(enable_timing=True)
        base.record()
        base.synchronize()
        zero = time.perf_counter()
        step(model, ids)
        torch.cuda.synchronize()
    finally:
        packed.forward, packed.backward = own
        for hook in hooks:
            hook.remove()
    at = [base.elapsed_time(event) for event in events]
    return on_cpu, list(zip(at[::2], at[1::2], strict=True))


def shared_time(one: list[Span], other: list[Span]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--placement", default="cpu-int8")
    parser.add_argument("--forward", type=int, nargs="*", default=[1, 16], help="tokens of forwards without gradients")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    results = measure(make_model(given.layers, given.experts, given.placement), given)
    print(json.dumps({"document": "benchmarks cpu_overlap", "options": vars(given), "results": results}))


def measure(model: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    document = []
    for tokens, trains in [*((each, True) for each in given.tokens), *((each, False) for each in given.forward)]:
        model.train(trains)
        ids = torch.randint(VOCABULARY, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        times = compare(model, ids, given.rounds)
        on_cpu, shared = timeline(model, ids)
        before, meanwhile = (statistics.median(found) for found in times.values())
        length, hidden = sum(end - begin for begin, end in shared), shared_time(shared, on_cpu)
        of_cpu = sum(end - begin for begin, end in on_cpu)
        print(
            f"{tokens} tokens: {'step' if trains else 'forward'} {before:.2f} ms, with shared experts meanwhile "
            f"{meanwhile:.2f} ms ({before / meanwhile - 1:+.1%}); routed on the CPU {of_cpu:.2f} ms; shared on the GPU "
            f"{length:.2f} ms, {hidden / length:.0%} of it meanwhile",
            flush=True,
        )
        document.append({"tokens": tokens, "trains": trains, **times, "on_cpu": on_cpu, "shared": shared})
    return document


if __name__ == "__main__":
    main()
