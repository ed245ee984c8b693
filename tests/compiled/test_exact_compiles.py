"""Exact mode's kernels compile to products of the same steps for one row and for thousands, aligned or not: matrix
instructions that add up 16 numbers, in fp32, whatever the tile.

It runs in a process of its own, this file as a program, since Triton's interpreter cannot compile.
"""

import json
import re
from typing import Any

import pytest
from compiling import compile_for, compiled_by

pytestmark = pytest.mark.thorough

INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)[.\w]*")
FUSED = re.compile(r"\bfma\.rn\.b?f16")
COLUMNS = re.compile(r"(?<=m64)n\d+(?=k)")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, list[list[str]]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("name", ["product", "linears", "product of batches", "experts", "mxfp4 experts", "attention"])
def test_every_number_of_rows_has_the_same_steps(kernels, name):
    """A Hopper gives few rows mma and many wgmma, which round alike (tests/integrations/test_exact_on_gpu.py)."""
    assert len(kernels[name]) > 1
    for found in kernels[name]:
        assert found and all("k16" in instruction and ".f32.bf16.bf16" in instruction for instruction in found)


def test_attention_and_its_backward_compile_in_fp32(kernels):
    """Which have no matrix instructions."""
    assert kernels["attention in fp32"] and not any(kernels["attention in fp32"])


def test_products_of_rotations_are_rounded_before_their_sum(kernels):
    """As transformers rounds them."""
    assert len(kernels["rotations"]) == 4
    assert not any(kernels["rotations"])


def main() -> None:
    import torch

    from amoeba.kernels import (
        exact,
        exact_attention,
        exact_linear,
        grouped_gemm,
        launch,
        rotate,
        tile_sizes,
        weight_only_gemm,
    )
    from amoeba.kernels.exact_attention_backward import attention_backward
    from amoeba.kernels.lora.epilogue import Addend
    from amoeba.precision import MXFP4
    from amoeba.precision.quantised import QuantisedMatrix, block_counts

    tile_sizes.capability_of = lambda device: (9, 0)
    found: dict[str, list[list[str]]] = {}

    class Recorder:
        def launch(self, start: Any, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
            for divisible in (True, False):
                code = compile_for(kernel, arguments, constants, divisible=divisible).asm["ptx"]
                if name == "rotations":
                    found.setdefault(name, []).append(FUSED.findall(code))
                    continue
                instructions = {COLUMNS.sub("", each) for each in INSTRUCTION.findall(code)}
                if instructions or name == "attention in fp32":
                    found.setdefault(name, []).append(sorted(instructions))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    launch.listening.recorder = Recorder()  # type: ignore[assignment]
    E, H, J = 64, 2048, 1536
    fp32 = torch.float32
    b_of_lora = empty(4096, 8, dtype=fp32)
    codes = empty(E, J, H // 2, dtype=torch.uint8), empty(E, *block_counts(J, H, MXFP4), dtype=torch.uint8)
    name = "rotations"
    for backward in (False, True):
        heads, angles = (empty(1, count, 7, 128) for count in (32, 4)), empty(1, 7, 128)
        rotate.rotate(*heads, angles, angles, backward=backward)
    for rows in (1, 64, 70, 4096):
        name, offs = "product", empty(E, dtype=torch.int32)
        exact.product(empty(1, rows, H), empty(1, J, H).mT)
        name = "linears"
        weights = [empty(width, H) for width in (4096, 512, 512)]
        exact_linear.linears(empty(rows, H), weights)
        exact_linear.linear_with_factors(empty(rows, H), weights[0], empty(rows, 8, dtype=fp32), b_of_lora, 2.0)
        name = "product of batches"
        exact.product(empty(8, 16, H), empty(8, H, rows))
        low = Addend(empty(rows, 16), empty(E, J, 16), 16)
        with tile_sizes.any_rows():
            name = "experts"
            grouped_gemm.multiply_rows(empty(rows, H), empty(E, J, H).mT, offs, empty(rows, J), addend=low)
            name = "mxfp4 experts"
            matrix = QuantisedMatrix(*codes, MXFP4, H)
            weight_only_gemm.multiply_rows(empty(rows, H), matrix, offs, empty(rows, J))
        name = "attention"
        q, k, v = (empty(1, heads, tokens, 128) for heads, tokens in ((32, rows), (4, rows + 7), (4, rows + 7)))
        seen = empty(1, 1, rows, rows + 7, dtype=torch.bool)
        bounds = exact_attention.seen_bounds(seen)
        y, logsumexp = exact_attention.attention(q, k, v, None, seen, bounds, 0.1, 0.0)
        attention_backward(y, q, k, v, y, logsumexp, seen, bounds, 0.1, 0.0)
    name = "attention in fp32"
    q, k, v = q.float(), k.float(), v.float()
    y, logsumexp = exact_attention.attention(q, k, v, None, seen, bounds, 0.1, 0.0)
    attention_backward(y, q, k, v, y, logsumexp, seen, bounds, 0.1, 0.0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
