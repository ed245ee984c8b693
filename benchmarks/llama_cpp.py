"""Decoding and prompts on a CPU next to llama.cpp, of a model of the same sizes, in alternating rounds of one process.

    python -m benchmarks.llama_cpp --llama-bench build/bin/llama-bench --model FOLDER \\
        --pair bf16=cpu-bf16,auto,bf16.gguf --pair int8=cpu-int8,int8,q8_0.gguf --threads 2 --out benchmarks/results

`benchmarks.gguf_models` makes such files. A pair is NAME=EXPERTS,DENSE,GGUF: what `amoeba generate --experts` and
`--dense` would be, and the file for llama.cpp. With "gguf" for EXPERTS both sides read that file:

    python -m benchmarks.llama_cpp --llama-bench build/bin/llama-bench --pair q4_k=gguf,int8,q4_k.gguf

A sample of decoding is the mean of --tokens tokens of one sequence. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from amoeba.integrations.gguf_files import EXPERTS, read_header

PROMPT = 512
GGUF = "gguf"


def samples_of_peer(given: argparse.Namespace, file: str, prompt: int, tokens: int) -> dict[str, list[float]]:
    """Seconds per token of each repetition of what is not 0."""
    words = [given.llama_bench, "-m", file, "-t", given.threads, "-p", prompt, "-n", tokens, "-r", 3, "-o", "json"]
    words += given.prompt_options.split() if prompt else []
    found = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True, check=True)
    runs = {"prefill" if run["n_prompt"] else "decode": run for run in json.loads(found.stdout)}
    counts = {"prefill": prompt, "decode": tokens}
    return {name: [each / 1e9 / counts[name] for each in run["samples_ns"]] for name, run in runs.items()}


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ours(folder: Path, experts: str, dense: str, file: str, length: int) -> Any:
    """A decoder of native steps; ValueError where the core does not know the model."""
    from amoeba.integrations import norms
    from amoeba.jobs.cpu_dtype import DtypeChoice
    from amoeba.jobs.generate.token_steps import choose_steps
    from amoeba.jobs.placed_model import load_placed
    from amoeba.system.cpu_features import compute_dtype

    name, placement = (file, "auto") if experts == GGUF else (str(folder), experts)
    cpu = torch.device("cpu")
    choice = DtypeChoice(compute_dtype(torch.bfloat16, cpu), None, "as generate's")
    model, _ = load_placed(name, choice, placement, trains=False, device=cpu, rest_in_blocks=True)
    norms.by_core(model)
    steps = choose_steps(model, {}, batch=1, prompt_tokens=PROMPT, new_tokens=length, dense=dense)
    if steps.kind != "native":
        raise ValueError(steps.reason)
    return steps.decoder


def bytes_per_token(config: Any, experts: str, dense: str, file: str) -> float:
    """Of weights that a step reads, without scales unless they lie among the numbers."""
    of = {"resident": 2.0, "cpu-bf16": 2.0, "cpu-int8": 1.0, "mxfp4-weights": 4.25 / 8, "nvfp4-weights": 4.5 / 8}
    if experts == GGUF:
        found = [tensor for name, tensor in read_header(file).tensors.items() if EXPERTS.fullmatch(name)]
        of[GGUF] = sum(each.size for each in found) / sum(math.prod(each.shape) for each in found)
    size, heads = config.hidden_size, (config.num_attention_heads + config.num_key_value_heads) * 2 * config.head_dim
    layer = config.num_experts_per_tok * 3 * size * config.moe_intermediate_size * of[experts]
    layer += (size * heads + size * config.num_experts) * (1.0 if dense == "int8" else 2.0)
    return config.num_hidden_layers * layer + config.vocab_size * size * (1.0 if dense == "int8" else 2.0)


def plain_read(threads: int) -> float:
    """GB/s, the best of ten."""
    numbers = torch.ones(2**26, dtype=torch.int64)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(10)) / 1e9


def compare(pair: str, given: argparse.Namespace) -> dict[str, Any]:
    _, _, words = pair.partition("=")
    experts, dense, file = words.split(",")
    decoder = ours(given.model, experts, dense, file, 2 * given.tokens)
    vocabulary = decoder.model.config.vocab_size
    found: dict[str, dict[str, list[float]]] = {"amoeba": {}, "llama.cpp": {}}

    def prompt(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,)).tolist()

    for _ in range(given.rounds):
        for _ in range(3):
            tokens = decoder.generate([prompt(1)], max_new_tokens=given.tokens + 1)
            next(tokens)
            spent = seconds(functools.partial(list, tokens))
            found["amoeba"].setdefault("decode", []).append(spent / given.tokens)
            spent = seconds(lambda: next(decoder.generate([prompt(PROMPT)], max_new_tokens=2)))
            found["amoeba"].setdefault("prefill", []).append(spent / PROMPT)
        apart = given.prompt_options != ""
        for sizes in [(0, given.tokens), (PROMPT, 0)] if apart else [(PROMPT, given.tokens)]:
            for name, samples in samples_of_peer(given, file, *sizes).items():
                found["llama.cpp"].setdefault(name, []).extend(samples)
    read = bytes_per_token(decoder.model.config, experts, dense, file)
    result: dict[str, Any] = {"experts": experts, "dense": dense, "file": Path(file).name, "bytes_per_token": read}
    for side, passes in found.items():
        for name, each in passes.items():
            best, middle = 1 / min(each), 1 / statistics.median(each)
            result[f"{side} {name}"] = {"best": best, "median": middle, "seconds_per_token": each}
    result["GB/s"] = read * result["amoeba decode"]["best"] / 1e9
    for name in ("decode", "prefill"):
        for kind in ("best", "median"):
            ratio = result[f"amoeba {name}"][kind] / result[f"llama.cpp {name}"][kind]
            result[f"{name}, {kind}: amoeba / llama.cpp"] = ratio
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="A transformers folder or a GGUF file of the same sizes.")
    parser.add_argument("--pair", action="append", required=True)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-options", default="", help="Of llama-bench where it reads prompts: --repack 0, ...")
    parser.add_argument("--out", type=Path, help="Folder for the JSON document.")
    given = parser.parse_args()
    from amoeba.commands.bench_run import result_path
    from amoeba.system.machine import commit, machine, versions

    torch.set_num_threads(given.threads)
    path = None if given.out is None else result_path(given.out)
    document: dict[str, Any] = {"document": "llama-cpp", "commit": commit(), "machine": machine()}
    document |= {"versions": versions(), "threads": given.threads}
    document |= {"prompt_options": given.prompt_options, "pairs": {}}
    for pair in given.pair:
        name = pair.partition("=")[0]
        load = os.getloadavg()[0]
        document["pairs"][name] = found = compare(pair, given) | {"plain read GB/s": plain_read(given.threads)}
        found["load"] = load, os.getloadavg()[0]
        print(name, {key: value for key, value in found.items() if not isinstance(value, dict)}, flush=True)
        if path is not None:
            path.write_text(json.dumps(document) + "\n")
        gc.collect()
    print(json.dumps(document))


if __name__ == "__main__":
    main()
