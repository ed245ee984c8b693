"""What is measured: layers with names, the suites made of them, and how a user writes one.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank

    parse_shape("qwen3_30b")            # by name
    parse_shape("512,512,256,32,4")     # as T,H,I,E,K
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from amoeba.core.errors import bad_value
from amoeba.system.machine import available_memory


@dataclass(frozen=True)
class Shape:
    """One layer and the tokens that it gets.

    skew:         exponent of a Zipf law for the experts' popularity; 0 is an even draw.
    forward_only: a decoding step; training it would say nothing.
    rank:         LoRA factors of this rank on all three projections of frozen experts; 0: the experts are trained.
                  Such layers are measured in bf16, whichever dtype is asked for.
    """

    name: str
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    skew: float = 0.0
    forward_only: bool = False
    rank: int = 0

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def least_bytes(self, device: torch.device, dtype: torch.dtype, training: bool) -> int:
        """What the inputs, the reference and one pass take together at the very least."""
        weights, wide = 3 * self.experts * self.hidden * self.intermediate, 8 if device.type == "cpu" else 4
        of_reference = (
            weights + weights * 2 // 3 if training and not self.rank else 0
        )  # the larger stack is joined last
        of_tokens = self.tokens * self.hidden * (2 * dtype.itemsize + 2 * wide) + self.tokens * self.experts * 16
        of_rows = self.rows * (self.hidden + 2 * self.intermediate) * dtype.itemsize
        return weights * dtype.itemsize + of_reference * wide + of_tokens + of_rows


#            name             T      H      I    E   K
_TABLE = (
    Shape("small", 512, 512, 256, 32, 4),
    Shape("decode", 1, 512, 256, 32, 4, forward_only=True),
    Shape("decode8", 8, 512, 256, 32, 4, forward_only=True),
    Shape("decode64", 64, 512, 256, 32, 4, forward_only=True),
    Shape("qwen3_30b", 32768, 2048, 768, 128, 8),
    Shape("qwen3_small", 8192, 2048, 768, 128, 8),
    Shape("qwen3_128", 128, 2048, 768, 128, 8),
    # the busiest expert gets about 15 times the mean
    Shape("qwen3_zipf", 32768, 2048, 768, 128, 8, skew=1.2),
    Shape("qwen3_decode1", 1, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode8", 8, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode", 64, 2048, 768, 128, 8, forward_only=True),
    Shape("qwen3_decode_zipf", 64, 2048, 768, 128, 8, skew=1.2, forward_only=True),
    Shape("sonic_a", 24576, 1536, 256, 128, 8),
    Shape("sonic_a_1024", 1024, 1536, 256, 128, 8),
    Shape("sonic_b", 32768, 4096, 256, 256, 16),
    Shape("sonic_c", 32768, 4096, 1024, 128, 8),
    Shape("mixtral", 8192, 4096, 14336, 8, 2),
    Shape("olmoe", 32768, 2048, 1024, 64, 8),
    Shape("dsv3", 8192, 7168, 2048, 32, 8),
    Shape("lora_small", 512, 512, 256, 32, 4, rank=8),
    Shape("lora_decode", 1, 512, 256, 32, 4, forward_only=True, rank=8),
    Shape("lora_qwen3_512", 512, 2048, 768, 128, 8, rank=8),
    Shape("lora_qwen3_2048", 2048, 2048, 768, 128, 8, rank=8),
    Shape("lora_qwen3_8192", 8192, 2048, 768, 128, 8, rank=16),
    Shape("lora_gpt_oss_4096", 4096, 2880, 2880, 32, 4, rank=16),  # without its biases and clamps
    Shape("lora_dsv2lite_512", 512, 2048, 1408, 64, 6, rank=8),
    Shape("lora_dsv2lite_2048", 2048, 2048, 1408, 64, 6, rank=8),
    Shape("lora_dsv3_512", 512, 7168, 2048, 64, 8, rank=16),
    Shape("lora_qwen3_decode1", 1, 2048, 768, 128, 8, forward_only=True, rank=8),
    Shape("lora_qwen3_decode16", 16, 2048, 768, 128, 8, forward_only=True, rank=8),
)
SHAPES = {shape.name: shape for shape in _TABLE}

SUITES: dict[str, tuple[str, ...]] = {
    "small": ("small", "decode"),
    "cpu": (
        "small",
        "decode",
        "decode8",
        "decode64",
        "lora_small",
        "lora_decode",
        "lora_qwen3_512",
        "lora_qwen3_2048",
        "lora_dsv2lite_512",
        "lora_dsv2lite_2048",
        "lora_dsv3_512",
        "lora_qwen3_decode1",
        "lora_qwen3_decode16",
    ),
    "gpu": (
        "qwen3_30b",
        "qwen3_small",
        "qwen3_zipf",
        "sonic_a",
        "sonic_b",
        "sonic_c",
        "mixtral",
        "olmoe",
        "dsv3",
        "qwen3_decode1",
        "qwen3_decode8",
        "qwen3_decode",
    ),
}
# Suites that are in the repository's benchmarks/, by the names that --suite had for them.
_MOVED = {"model": "models", "models": "models", "stream": "stream", "ranks": "ranks", "products": "products"}


def check_memory(problems: Iterable[tuple[torch.dtype, Shape]], device: torch.device, training: bool) -> None:
    """Before anything is allocated: a shape that cannot fit would take minutes to fail, or the machine with it."""
    free = available_memory(device)
    for dtype, shape in problems:
        needed = shape.least_bytes(device, dtype, training and not shape.forward_only)
        if free is not None and needed > free:
            raise bad_value(
                "--shape",
                f"one that fits into the {free / 2**30:.1f} GiB that are free on {device.type}",
                f"{shape.name}, which takes {_gib(needed)} at least",
                "lower T, H, I or E" + (", or measure --pass forward alone" if training else ""),
            )


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.1f} GiB" if gib < 1e6 else f"{gib:.1e} GiB"


def default_suite(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else "small"


def parse_suite(name: str) -> list[Shape]:
    if name not in SUITES:
        remedy = "see the names in docs/reference/bench.md"
        if (moved := _MOVED.get(name)) is not None:
            remedy = f"in a checkout of the repository, run: python -m benchmarks {moved}"
        raise bad_value("--suite", f"one of {', '.join(SUITES)}", repr(name), remedy)
    return [SHAPES[shape] for shape in SUITES[name]]


def parse_shape(text: str) -> Shape:
    if text in SHAPES:
        return SHAPES[text]
    expected = f"a name ({', '.join(SHAPES)}) or five positive integers T,H,I,E,K"
    remedy = "write for example --shape small or --shape 512,512,256,32,4"
    try:
        tokens, hidden, intermediate, experts, top_k = (int(part) for part in text.split(","))
    except ValueError:
        raise bad_value("--shape", expected, repr(text), remedy) from None
    if min(tokens, hidden, intermediate, experts, top_k) < 1:
        raise bad_value("--shape", expected, repr(text), remedy)
    if top_k > experts:
        raise bad_value("--shape", f"K at most E ({experts})", f"K = {top_k} in {text!r}", "lower K or raise E")
    return Shape(text, tokens, hidden, intermediate, experts, top_k)
