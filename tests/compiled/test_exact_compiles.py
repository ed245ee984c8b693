"""Exact mode's kernels compile to the same products for one row and for thousands, aligned or not: matrix instructions
with the same steps along the reduction, whatever the tile.

It runs in a process of its own, this file as a program, since Triton's interpreter cannot compile.
"""

import json
import re
from typing import Any

import pytest
from compiling import compile_for, compiled_by

pytestmark = pytest.mark.thorough

INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync)[.\w]*")
COLUMNS = re.compile(r"(?<=m64)n\d+(?=k)")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, list[list[str]]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("name", ["product", "product of batches", "experts", "mxfp4 experts", "attention"])
def test_every_number_of_rows_has_the_same_instructions(kernels, name):
    first, *others = kernels[name]
    assert others and all(found == first for found in others)
    assert first and all("wgmma" in instruction and "k16" in instruction for instruction in first)


def main() -> None:
    import torch

    from amoeba.kernels import exact, exact_attention, grouped_gemm, launch, tile_sizes, weight_only_gemm
    from amoeba.kernels.lora.epilogue import Addend
    from amoeba.precision import MXFP4
    from amoeba.precision.quantised import QuantisedMatrix, block_counts

    tile_sizes.capability_of = lambda device: (9, 0)
    found: dict[str, list[list[str]]] = {}

    class Recorder:
        def launch(self, start: Any, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
            for divisible in (True, False):
                code = compile_for(kernel, arguments, constants, divisible=divisible).asm["ptx"]
                if instructions := {COLUMNS.sub("", each) for each in INSTRUCTION.findall(code)}:
                    found.setdefault(name, []).append(sorted(instructions))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    launch.listening.recorder = Recorder()  # type: ignore[assignment]
    E, H, J = 64, 2048, 1536
    codes = empty(E, J, H // 2, dtype=torch.uint8), empty(E, *block_counts(J, H, MXFP4), dtype=torch.uint8)
    for rows in (1, 64, 70, 4096):
        name, offs = "product", empty(E, dtype=torch.int32)
        exact.product(empty(1, rows, H), empty(1, J, H).mT)
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
        exact_attention.attention(q, k, v, None, seen, exact_attention.seen_bounds(seen), 0.1, 0.0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
