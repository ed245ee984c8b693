"""Every operation of the compiled core on awkward sizes and layouts, and on tensors that it has to refuse.

A program of its own: it raises where a result is wrong. tests/cpu/test_sanitizers.py runs it without our asserts and
under sanitizers.

    python core_operations.py /folder/of/amoeba/src [sanitized]

Under sanitizers its last act is a read past the end of a tensor, which one of them has to see.
"""

import sys

import without_asserts

if __name__ == "__main__":
    without_asserts.install(sys.argv[1])

import guarded_memory
import torch

from amoeba import Activation
from amoeba.core.weights import LoraFactors
from amoeba.cpu import build, core, pointers
from amoeba.cpu.core import load_core
from amoeba.cpu.node_passes import NodeExperts, NodeFactors, forward
from amoeba.cpu.node_passes import combine as combine_rows
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import PackedWeights, ScaledCodes
from laid_layer import LAYOUTS, SENTINELS, TOLERANCE, Laid, check, contiguous

FORMATS = ("fp8-16x32", "mxfp8", "mxfp4", "nvfp4")  # several blocks, some of them cut
WAYS = {
    "cpu": torch.float32,
    "cpu in bf16": torch.bfloat16,
    "cpu fused in bf16": torch.bfloat16,
    "packed in bf16": torch.bfloat16,
    "packed in int8": torch.bfloat16,
    **{f"codes of {format} by cpu": torch.float32 for format in FORMATS},
    **{f"codes of {format} by cpu-fused": torch.bfloat16 for format in FORMATS},
}
INTERLEAVED = Activation(alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True)
# what is left of vectors, tiles and panels, and less than one of them
SIZES = [
    {"tokens": 0},
    {"tokens": 1, "hidden": 1, "inner": 1},
    {"tokens": 5, "hidden": 33, "inner": 65},
    {"tokens": 19, "hidden": 31, "inner": 64},
    {"tokens": 5, "hidden": 16, "inner": 24, "expert_TK": SENTINELS},
    {"tokens": 70, "hidden": 96, "inner": 32, "bias": False, "rank": 0},
    {"tokens": 6, "hidden": 48, "inner": 40, "activation": Activation("gelu", gated=False)},
    {
        "tokens": 6,
        "hidden": 40,
        "inner": 48,
        "activation": Activation(alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True),
    },
]


def compute() -> int:
    count = 0
    for way, dtype in WAYS.items():
        for size in SIZES:
            for layout in (contiguous, *LAYOUTS) if size == SIZES[2] else (contiguous,):  # the others: test_strides.py
                laid = Laid(layout, dtype, size)
                tolerance = 0.2 if "int8" in way else TOLERANCE[dtype]  # such weights have lost a few per cent
                try:
                    check(laid.found(way), laid.truth(way), tolerance)
                except Exception as error:
                    error.add_note(f"in {way}, {size}, {layout.__name__}")
                    raise
                count += 1
    return count


def combine() -> int:
    """The sums alone, where experts came in several calls: rows with strides, sentinels, more rows than slots."""
    core, pool, count = load_core(), WorkerPool(threads=2), 0
    for tokens, top_k, hidden in ((1, 1, 1), (3, 2, 33), (5, 4, 96)):
        rows, ids = torch.randn(tokens * top_k + 1, 2 * hidden), torch.randint(-1, 4, (tokens, top_k))
        weight, slots = torch.rand(tokens, top_k), tokens * top_k
        owned = (ids >= 0) & (ids < 3)
        halves, slot_row = rows[:, :hidden].bfloat16(), torch.arange(slots, dtype=torch.int32).view_as(ids)
        for y, added in (
            (core.sum_decoded(rows[:slots, :hidden], ids, weight, 3), rows[:slots, :hidden]),
            (combine_rows(halves, slot_row.masked_fill(~owned, -1), weight, pool), halves[:slots].float()),
        ):
            shares = added.view(tokens, top_k, hidden) * weight[..., None]
            torch.testing.assert_close(y, shares.masked_fill(~owned[..., None], 0).sum(1))
            count += 1
    return count


def refuse() -> None:
    core, pool = load_core(), WorkerPool(threads=1)
    offs, rows, matrix, out = (
        torch.tensor([2], dtype=torch.int32),
        torch.randn(2, 8),
        torch.randn(1, 8, 4),
        torch.empty(2, 4),
    )
    node = NodeExperts(
        PackedWeights.pack(torch.randn(2, 64, 48)), PackedWeights.pack(torch.randn(2, 48, 32)), None, None, Activation()
    )
    x, ids, weight = torch.randn(3, 48).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    codes = ScaledCodes(torch.zeros(2, 40, 48, dtype=torch.uint8), torch.ones(2, 3, 2), (16, 32))
    narrow, freed = torch.zeros(2, 1, 31), torch.randn(2, 8)
    freed.untyped_storage().resize_(0)
    for wrong in (
        lambda: core.multiply_rows(offs, rows.double(), matrix, out=out),
        lambda: core.multiply_rows(offs.long(), rows, matrix, out=out),
        lambda: core.multiply_rows(offs, rows[:1], matrix, out=out),
        lambda: core.multiply_rows(offs, rows.to("meta"), matrix, out=out),
        lambda: core.multiply_rows(offs, torch.randn(8, 2).t(), matrix, out=out),
        lambda: core.multiply_rows(offs, rows, torch.randn(1, 16, 8)[:, ::2, ::2], out=out),
        lambda: core.multiply_rows(offs, rows, matrix, out=torch.empty(1, 4).expand(2, 4)),
        lambda: core.multiply_rows(offs, freed, matrix, out=out),
        lambda: core.multiply_rows(offs, torch._neg_view(rows), matrix, out=out),
        lambda: core.weight_gradient(offs, rows, rows, out=torch.empty(1, 8, 16)[:, :, ::2]),
        lambda: core.activate(torch.randn(2, 16), torch.randn(3), Activation(), out=torch.empty(2, 8)),
        lambda: core.activate(torch.randn(2, 6), torch.randn(2), Activation(), out=torch.empty(2, 3)),
        lambda: core.sum_decoded(rows[:1], ids[:2], weight[:2], 1),
        lambda: core.sum_decoded(rows.double(), ids[:2], weight[:2], 1),
        lambda: core.decode(
            rows, ids[:2], weight[:2], matrix.mT, matrix, None, None, Activation("relu", gated=False), None, ids
        ),
        lambda: combine_rows(x, torch.tensor([[3]], dtype=torch.int32), weight[:1], pool),
        lambda: forward(node, None, x.float(), ids, weight, pool, save="nothing"),
        lambda: forward(node, None, x[:, :47], ids, weight, pool, save="nothing"),
        lambda: forward(node, None, x, ids[:2], weight, pool, save="nothing"),
        lambda: forward(node, None, x, ids, weight.double(), pool, save="nothing"),
        lambda: NodeExperts(node.gate_up, node.down, torch.zeros(2, 63), None, Activation()),
        lambda: NodeFactors.pack(node, LoraFactors(down_lora_a=narrow, down_lora_b=torch.zeros(2, 48, 1)), pool),
        lambda: NodeFactors.pack(node, LoraFactors(down_lora_a=torch.zeros(2, 1, 32)), pool),
        lambda: PackedWeights.pack(torch.full((1, 2, 2), torch.nan), "int8"),
        lambda: core.dequantise(codes, 2, out=torch.empty(40, 48)),
        lambda: core.dequantise(codes, 1, out=torch.empty(40, 47)),
        lambda: core.dequantise(codes, 1, out=torch.empty(40, 48).half()),
        lambda: ScaledCodes(codes.code_EOI, codes.scale[:, 1:].contiguous(), codes.block).coding(),
        lambda: ScaledCodes(codes.code_EOI, codes.scale, (16, 8)),
        lambda: ScaledCodes(codes.code_EOI, codes.scale, (12, 16)),
        lambda: ScaledCodes(codes.code_EOI[:, :39], codes.scale, codes.block, parts=2),
        lambda: ScaledCodes(codes.code_EOI, codes.scale, codes.block, element="e2m1", columns=97),
        lambda: ScaledCodes(codes.code_EOI, codes.scale, codes.block, scale_values=torch.ones(256)).coding(),
        lambda: ScaledCodes(codes.code_EOI, codes.scale.byte(), codes.block, scale_values=torch.ones(255)).coding(),
        lambda: ScaledCodes(codes.code_EOI, codes.scale, codes.block, matrix_scale_E=torch.ones(1)).coding(),
        lambda: core.decode(rows, ids[:2], weight[:2], codes, codes, None, None, Activation(gated=False)),
        lambda: core.decode(rows, ids[:2], weight[:2], codes, matrix, None, None, Activation()),
    ):  # fmt: skip
        try:
            wrong()
        except ValueError as error:
            if "expected" not in str(error):
                raise
        else:
            raise AssertionError("a tensor that does not fit was taken")


def read_past_the_end() -> None:
    core.address = lambda name, tensor, dtype, shape: pointers._start(name, tensor)  # as if nobody checked
    load_core().activate(torch.randn(4, 64), torch.randn(3), Activation(), out=torch.empty(4, 32))


if __name__ == "__main__":
    torch.set_num_threads(2)
    sanitized = sys.argv[2:] == ["sanitized"]
    if sanitized:
        build._FLAGS = guarded_memory.SANITIZED_FLAGS
        guarded_memory.guard_all_calls()
    count = compute() + combine()
    refuse()
    print(f"{count} cases: all right, {len(without_asserts.loaded)} modules without asserts", flush=True)
    if sanitized:
        read_past_the_end()
