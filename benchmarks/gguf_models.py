"""GGUF files of random weights with Qwen3-30B's dimensions, for `benchmarks.llama_cpp`: one for each type.

    python -m benchmarks.gguf_models FOLDER --layers 6 --kinds bf16 q8_0 q4_k

Numbers are random bits with scales that make weights of an ordinary size, so that a file takes as long as its writing.
MXFP4 is the type of experts, and what else is in the file is Q8_0; with Q4_K, the output head is Q6_K.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from amoeba.integrations.gguf_files import KINDS

HIDDEN, EXPERTS, CHOSEN, INTERMEDIATE, HEADS, KEY_HEADS, HEAD = 2048, 128, 8, 768, 32, 4, 128
ALIGNMENT = 4096
POOL = 2**24  # numbers or more, of which tensors are repeats
NUMBERS = {name: number for number, (name, _, _) in KINDS.items()}
# Of a block: where scales in fp16 are, and their values. The standard deviation of the weights is about 0.02 to 0.08.
SCALES = {
    "Q8_0": {0: 3e-4}, "Q4_0": {0: 5e-3}, "Q4_1": {0: 5e-3, 2: -4e-2}, "Q5_0": {0: 2e-3}, "Q5_1": {0: 2e-3, 2: -3e-2},
    "Q4_K": {0: 2e-4, 2: 1.5e-3}, "Q5_K": {0: 1e-4, 2: 1.5e-3}, "Q6_K": {208: 7e-5},
}  # fmt: skip


def tensors(layers: int, vocabulary: int, kind: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape, rows first."""
    rest = "Q8_0" if kind == "MXFP4" else kind
    yield "token_embd.weight", rest, (vocabulary, HIDDEN)
    yield "output_norm.weight", "F32", (HIDDEN,)
    yield "output.weight", "Q6_K" if kind == "Q4_K" else rest, (vocabulary, HIDDEN)
    for layer in range(layers):
        name = f"blk.{layer}."
        for norm, size in {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": HEAD, "attn_k_norm": HEAD}.items():
            yield f"{name}{norm}.weight", "F32", (size,)
        yield f"{name}attn_q.weight", rest, (HEADS * HEAD, HIDDEN)
        yield f"{name}attn_k.weight", rest, (KEY_HEADS * HEAD, HIDDEN)
        yield f"{name}attn_v.weight", rest, (KEY_HEADS * HEAD, HIDDEN)
        yield f"{name}attn_output.weight", rest, (HIDDEN, HEADS * HEAD)
        yield f"{name}ffn_gate_inp.weight", "F32", (EXPERTS, HIDDEN)
        yield f"{name}ffn_gate_exps.weight", kind, (EXPERTS, INTERMEDIATE, HIDDEN)
        yield f"{name}ffn_up_exps.weight", kind, (EXPERTS, INTERMEDIATE, HIDDEN)
        yield f"{name}ffn_down_exps.weight", kind, (EXPERTS, HIDDEN, INTERMEDIATE)


def random_bytes(kind: str, numbers: int) -> np.ndarray:
    _, block, size = KINDS[NUMBERS[kind]]
    random = np.random.default_rng(0)
    if kind == "F32":
        return (random.standard_normal(numbers, np.float32) * np.float32(0.05)).view(np.uint8)
    if kind == "BF16":  # exponents of 2^-7 and 2^-6
        return (random.integers(0, 2**16, numbers, np.uint16) & 0x80FF | 0x3C00).view(np.uint8)
    found = random.integers(0, 256, (numbers // block, size), np.uint8)
    if kind == "MXFP4":
        found[:, 0] = 121
    for place, scale in SCALES.get(kind, {}).items():
        found[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return found.reshape(-1)


def metadata(layers: int, vocabulary: int) -> dict[str, int | float | str]:
    own: dict[str, int | float] = {
        "context_length": 4096, "block_count": layers, "embedding_length": HIDDEN, "feed_forward_length": INTERMEDIATE,
        "attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": INTERMEDIATE,
        "vocab_size": vocabulary,
    }  # fmt: skip
    found: dict[str, int | float | str] = {f"qwen3moe.{key}": value for key, value in own.items()}
    found |= {"general.architecture": "qwen3moe", "general.alignment": ALIGNMENT, "tokenizer.ggml.model": "none"}
    return found


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def value_of(found: int | float | str) -> bytes:
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    return struct.pack("<II", 4, found) if isinstance(found, int) else struct.pack("<If", 6, found)


def write(path: Path, layers: int, vocabulary: int, kind: str) -> Path:
    listed, data = list(tensors(layers, vocabulary, kind)), metadata(layers, vocabulary)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(data))
    head += b"".join(text(key) + value_of(found) for key, found in data.items())
    start, sizes = 0, []
    for name, of, shape in listed:
        _, block, size = KINDS[NUMBERS[of]]
        sizes.append(math.prod(shape) // block * size)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", NUMBERS[of], start)
        start += -(-sizes[-1] // ALIGNMENT) * ALIGNMENT
    pools = {of: random_bytes(of, POOL) for _, of, shape in listed if len(shape) > 1}
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for (_, of, shape), size in zip(listed, sizes, strict=True):
            bits = pools[of] if len(shape) > 1 else np.ones(shape, np.float32).view(np.uint8)
            whole, left = divmod(size, len(bits))
            for _ in range(whole):
                file.write(bits.data)
            file.write(bits[:left].data)
            file.write(bytes(-size % ALIGNMENT))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--kinds", nargs="+", default=["bf16", "q8_0", "mxfp4", "q4_k", "q6_k"])
    given = parser.parse_args()
    with concurrent.futures.ProcessPoolExecutor(len(given.kinds)) as pool:
        files = [given.folder / f"{kind}.gguf" for kind in given.kinds]
        sizes = [given.layers] * len(files), [given.vocabulary] * len(files)
        for path in pool.map(write, files, *sizes, [kind.upper() for kind in given.kinds]):
            print(path, f"{path.stat().st_size / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
