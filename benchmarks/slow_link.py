"""Streamed decoding over a slow link: what misses that the CPU computes gain.

    python benchmarks/slow_link.py                  # on a GPU: Qwen3-30B's sizes, 4 layers, 3 of 4 experts in slots
    python benchmarks/slow_link.py --tiny           # on a CPU: that the script runs

Each way to serve misses decodes the same model with copies to the GPU as they are and capped at 12 GB/s, in turns. The
last line is one JSON document: tokens/s of each. A copy is capped by repeating parts of it, so that it occupies the
link for as long as a slow one would. Tokens are sampled from a model of random weights, whose routing has no locality:
hits are those of favourites of the routers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import amoeba
from amoeba.decoding import Decoder, Sampling
from amoeba.stream.gpu import device as gpu_device
from amoeba.stream.gpu.device import Driver, open_driver

CAP = 12e9  # bytes/s
SHIM = """
#include <stdint.h>
typedef int (*copy_t)(uint64_t, uint64_t, uint64_t, uint64_t);
static copy_t real;
static double times = 1;
void amoeba_cap(copy_t copy, double factor) { if (copy) real = copy; times = factor; }
int amoeba_capped(uint64_t target, uint64_t source, uint64_t size, uint64_t stream) {
  uint64_t left = (uint64_t)(size * times);
  int code = 0;
  while (left > 0 && !code) {
    uint64_t now = left < size ? left : size;
    code = real(target, source, now, stream);
    left -= now;
  }
  return code;
}
"""


@dataclass(frozen=True)
class Sizes:
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    prompt: int
    tokens: int  # of each round that is timed
    rounds: int
    share: float = 0.75  # of the experts that have slots


QWEN3_30B = Sizes(4, 128, 8, 2048, 768, 32, 8192, prompt=128, tokens=96, rounds=3)
TINY = Sizes(2, 8, 2, 64, 32, 4, 96, prompt=5, tokens=4, rounds=1)


class Cap:
    """The call that copies to the device, made slower at will."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "cap.c", folder / "cap.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.amoeba_cap.argtypes = [c_void_p, c_double]
        self.copy: Any = self._library.amoeba_capped
        self.copy.argtypes, self.copy.restype = [c_uint64] * 4, c_int

    def over(self, copy: Any) -> None:
        """copy: the function that it calls."""
        self._library.amoeba_cap(ctypes.cast(copy, c_void_p), 1.0)

    def slow_down(self, times: float) -> None:
        """Each copy takes that many times as long; 1: as it is."""
        self._library.amoeba_cap(None, max(1.0, times))


class _CappedLibrary:
    """CUDA's driver, but for copies to the device."""

    cuMemcpyBatchAsync_v2 = None  # so that all copies go by the other call

    def __init__(self, library: Any, cap: Cap) -> None:
        self._library, self.cuMemcpyHtoDAsync_v2 = library, cap.copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


@contextmanager
def capped_copies(cap: Cap) -> Iterator[None]:
    """Devices that are opened inside copy by the cap."""

    def opened(device: torch.device) -> Driver | None:
        if open_driver(device) is None:
            return None
        library, quick = ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1")
        cap.over(library.cuMemcpyHtoDAsync_v2)
        return Driver(_CappedLibrary(library, cap), device.index or 0, _CappedLibrary(quick, cap))

    before = gpu_device.open_driver
    gpu_device.open_driver = opened
    try:
        yield
    finally:
        gpu_device.open_driver = before


def write_model(sizes: Sizes, folder: Path, device: torch.device) -> int:
    """Random weights; bytes of what is no expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=max(1, sizes.heads // 8),
        head_dim=sizes.hidden // sizes.heads * 2,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.intermediate,
        intermediate_size=sizes.intermediate,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return sum(each.nbytes for name, each in model.named_parameters() if ".experts." not in name)


def measure(sizes: Sizes, folder: Path, budget: dict[str, Any], cap: Cap, link: float | None) -> dict[str, Any]:
    """Tokens/s as it is and, over a link, capped; hit rates of all of it."""
    found: dict[str, list[float]] = {"as it is": []}
    if link is not None:
        found["capped"] = []
    with capped_copies(cap), amoeba.stream.attach(folder, **budget) as streamed:
        prompt = [[number % sizes.vocabulary for number in range(1, sizes.prompt + 1)]]
        warm = sizes.tokens // 2
        decoder = Decoder(streamed.model, length=sizes.prompt + warm + sizes.tokens, sampling=Sampling(do_sample=True))
        for number in range(sizes.rounds + 1):  # the first fills both tiers
            for name, times in found.items():
                slow = name == "capped" and link is not None
                cap.slow_down(link / CAP if slow and link is not None else 1.0)
                if link is not None and (computing := streamed.memory.computing) is not None:
                    computing._compute.move_seconds = 1 / min(link, CAP if slow else link)  # what `auto` begins with
                steps = decoder.generate(prompt, 1 + warm + sizes.tokens, seed=number)
                for _ in range(1 + warm):
                    next(steps)
                began = time.perf_counter()
                tokens = sum(1 for _ in steps)
                if number:
                    times.append(tokens / (time.perf_counter() - began))
        cap.slow_down(1.0)
        report = streamed.report()
    rates: dict[str, Any] = {name: round(statistics.median(times), 2) for name, times in found.items()}
    computed = report.computed / max(1, report.requested)
    return rates | {
        "hit_rate": round(report.hit_rate, 3),
        "computed": round(computed, 3),
    }


def run(sizes: Sizes, folder: Path, device: torch.device, log: Any) -> dict[str, Any]:
    began = time.perf_counter()
    rest = write_model(sizes, folder / "model", device)
    log(f"model written, {time.perf_counter() - began:.0f} s")
    expert_bytes = 3 * sizes.hidden * sizes.intermediate * 2
    budget = rest + int(sizes.share * sizes.experts) * sizes.layers * expert_bytes
    cap, link = Cap(folder), None
    ways: dict[str, dict[str, Any]] = {"move": {"ram": budget + 32 * expert_bytes}}
    if device.type == "cuda":
        from amoeba.stream.gpu.host_compute import MISSES

        link = gpu_device.copy_rate(gpu_device.CudaDevice(device)).bytes_per_second
        ways = {miss: {"vram": budget, "miss": miss} for miss in MISSES}
    found: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            found[name] = measure(sizes, folder / "model", way, cap, link)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        log(f"{name}: {found[name]}, {time.perf_counter() - began:.0f} s")
    return {
        "document": "slow_link",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "link_bytes_per_second": link,
        "cap_bytes_per_second": CAP,
        "layers": sizes.layers,
        "slots": int(sizes.share * sizes.experts),
        "experts": sizes.experts,
        "tokens_per_second": found,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="Tiny sizes, on a CPU as well.")
    parser.add_argument("--folder", type=Path, help="For the model's files; default /dev/shm where there is room.")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not given.tiny:
        parser.error("expected a GPU; without one --tiny runs")
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 24 * 2**30
    with tempfile.TemporaryDirectory(dir=given.folder or (shared if roomy and not given.tiny else None)) as name:
        log = partial(print, flush=True)
        document = run(TINY if given.tiny else QWEN3_30B, Path(name), device, log)
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
