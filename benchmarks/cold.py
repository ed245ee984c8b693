"""Commands with empty caches: seconds to the first training step, to the first token, and of `amoeba verify`.

    python -m benchmarks.cold --out benchmarks/results        # on a GPU: Qwen3-30B's layers, 6 of them, random weights
    python -m benchmarks.cold --tiny                          # on a CPU: that the script runs

Each command is a process of its own, with a folder for all caches (Triton's, torch's compiler's, the driver's, ours)
that is empty at first; then once more with what the first one left there. Python's bytecode is there, as pip leaves it.
A file for each process notes which kernels it had to compile itself, in place of those that it found compiled ahead,
and when the imports of large packages began. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "norm_topk_prob": True, "max_position_embeddings": 4096, "vocab_size": 32768,
}  # fmt: skip
TINY: dict[str, Any] = SIZES | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "num_experts": 8,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
    "vocab_size": 512,
}  # fmt: skip
# Found by Python in each process: notes which kernels are compiled, and which were there; when imports began, and since
# when the GPU is in use.
NOTING = """
import os, sys, threading, time

BEGAN = time.monotonic()
MODULES = ["torch", "torch._dynamo", "torch._inductor", "triton", "transformers", "transformers.modeling_utils",
           "transformers.trainer", "accelerate", "amoeba.plan.memory", "amoeba.proof.conformance"]

def write(what, name):
    with open(os.environ["COLD_NOTES"], "a") as notes:
        notes.write(f"{os.getpid()} {what} {name}\\n")

def note(src, cache_hit, **_):
    write(int(cache_hit), getattr(getattr(src, "fn", None), "__name__", "other"))

def wait():
    heard, left = False, [*MODULES, "gpu"]
    while left or not heard:
        time.sleep(0.02)
        knobs = getattr(sys.modules.get("triton.knobs"), "compilation", None)
        if knobs is not None and not heard:
            knobs.listener, heard = note, True
        gpu = getattr(sys.modules.get("torch.cuda"), "_initialized", False)
        for name in [each for each in left if each in sys.modules or (each == "gpu" and gpu)]:
            left.remove(name)
            write(f"{time.monotonic() - BEGAN:.1f}s", name)

threading.Thread(target=wait, daemon=True).start()
"""


def run(
    words: list[str], folder: Path, has_begun: Callable[[str], bool], until_end: bool, limit: float
) -> dict[str, Any]:
    """Seconds to the first line of stdout and stderr that `has_begun`, and what the process compiled itself."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TORCHIND"))}
    caches = ("AMOEBA_CACHE", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment |= {name: str(folder / name.lower()) for name in caches}
    path = os.pathsep.join(
        (str(folder / "noting"), str(Path(__file__).parents[1] / "src"), environment.get("PYTHONPATH", ""))
    )
    environment |= {"COLD_NOTES": str(notes), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began, first, lines = time.monotonic(), None, []
    process = subprocess.Popen(
        [sys.executable, "-m", "amoeba", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    stop = threading.Timer(limit, process.kill)  # also one that says nothing more
    stop.start()
    try:
        for line in process.stdout:
            told = line.rstrip().replace(str(folder.parent), "FOLDER")
            lines.append(f"[{time.monotonic() - began:.1f} s] {told}")
            if first is None and has_begun(line):
                first = time.monotonic() - began
                if not until_end:
                    break
    finally:
        if not until_end:
            process.kill()  # nobody wants what it would save
        code = process.wait()
        stop.cancel()
    noted = [each.split() for each in notes.read_text().splitlines()] if notes.exists() else []
    began_at = {name: what for pid, what, name in noted if what.endswith("s") and int(pid) == process.pid}
    compiled = [each for each in noted if not each[1].endswith("s")]
    own = [name for pid, hit, name in compiled if int(pid) == process.pid and hit == "0"]
    found = sum(int(pid) == process.pid and hit == "1" for pid, hit, _ in compiled)
    others = sum(int(pid) != process.pid and hit == "0" for pid, hit, _ in compiled)
    return {
        "command": " ".join(("amoeba", *words)).replace(str(folder.parent), "FOLDER"),
        "seconds_to_first": first,
        "seconds": time.monotonic() - began,
        "exit_code": code,
        "kernels_compiled_by_the_command": len(own),
        "kernels_compiled_ahead": others,
        "kernels_found": found,
        "compiled_by_the_command": sorted(own),
        "imports_began": began_at,
        "output": lines[-200:],
    }


def commands(model: Path, folder: Path, tiny: bool) -> dict[str, tuple[list[str], Callable[[str], bool], bool]]:
    """By name: the words, what tells that it has begun, and whether it runs to its end."""
    rows, length = ("2", "64") if tiny else ("4", "2048")
    training = ["--model", str(model), "--steps", "100000", "--batch-size", rows, "--sequence-length", length]
    data = folder / "data.txt"
    if not data.exists():
        data.write_text("\n\n".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/*.md"))))
    return {
        "train": (
            ["train", *training, "--data", str(data), "--out", str(folder / "run"), "--log-every", "1", "-v"],
            lambda line: line.startswith("step 1/"),
            False,
        ),
        "generate": (
            ["generate", str(model), "The quick brown fox", "--max-new-tokens", "1", "-v"],
            lambda line: "first token after" in line,
            True,
        ),
        "verify": (["verify", "--json"], lambda line: line.startswith("{"), True),
    }


def save_model(folder: Path, tiny: bool) -> Path:
    """Random weights and a tokenizer, by a run of no length."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from amoeba.data.corpus import load_corpus
    from amoeba.data.tokenizer import load_or_train_tokenizer

    sizes = TINY if tiny else SIZES
    corpus = load_corpus(None, held_out=0.05, seed=0)
    tokenizer = load_or_train_tokenizer(None, corpus, sizes["vocab_size"])
    config = AutoConfig.for_model(**sizes | {"vocab_size": max(sizes["vocab_size"], len(tokenizer))})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("train", "generate", "verify"), action="append")
    parser.add_argument("--warm", action="store_true", help="Each a second time, with what the first left behind.")
    parser.add_argument("--out", type=Path, help="Folder for the JSON document.")
    parser.add_argument("--limit", type=float, default=180.0, help="Seconds of a command at most.")
    given = parser.parse_args()
    from amoeba.commands.bench_run import result_path
    from amoeba.system.machine import commit, machine, versions

    path = None if given.out is None else result_path(given.out)
    document: dict[str, Any] = {"document": "cold", "commit": commit(), "machine": machine(), "versions": versions()}
    document["runs"] = runs = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = save_model(folder / "model", given.tiny)
        for name, (words, has_begun, until_end) in commands(model, folder, given.tiny).items():
            if given.only and name not in given.only:
                continue
            caches = folder / name
            (caches / "noting").mkdir(parents=True)
            (caches / "noting" / "sitecustomize.py").write_text(NOTING)
            for state in ("cold", "warm") if given.warm else ("cold",):
                shutil.rmtree(folder / "run", ignore_errors=True)
                runs[f"{name}, {state}"] = found = run(words, caches, has_begun, until_end, given.limit)
                if found["seconds_to_first"] is None:
                    print(*found["output"][-20:], sep="\n", file=sys.stderr)
                told = {key: value for key, value in found.items() if key not in ("output", "compiled_by_the_command")}
                print(f"{name}, {state}: {json.dumps(told)}", flush=True)
                if path is not None:  # after each: a later one may be interrupted
                    path.write_text(json.dumps(document) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
