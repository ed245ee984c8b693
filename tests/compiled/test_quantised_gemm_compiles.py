"""Products of quantised operands, and what quantises them, compiled for each GPU with fp8: its own instructions.

N routed rows · E experts · H hidden · I intermediate

None of these GPUs but Hopper is here, or ever was: that a kernel compiles, to the instructions that it was written for,
without a spill and within the shared memory of a block, is all that is known of it there.

    TRITON_CACHE_DIR=cubins python tests/compiled/test_quantised_gemm_compiles.py 100 [many ...]     # JSON
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from compiling import compile_for, compiled_by, resources

SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# What a product is, by format and GPU, up to the type of its accumulator.
F8, MX, NV = "fp8-128-training", "mxfp8-training", "nvfp4-training"
EMULATED = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
PRODUCTS = {
    89: {F8: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", MX: EMULATED, NV: EMULATED},
    90: {F8: r"wgmma.mma_async.+e4m3.e4m3", MX: EMULATED, NV: EMULATED},  # not wgmma: see `_EMULATED` of quantised_gemm
    100: {
        F8: r"tcgen05.mma.+kind::f8f6f4",
        MX: r"tcgen05.mma.+kind::mxf8f6f4.block_scale",
        NV: r"tcgen05.mma.+kind::mxf4nvf4.block_scale.(block16|scale_vec::4X)",
    },
    120: {
        F8: r"mma.sync.aligned.m16n8k32.+e4m3.e4m3",
        MX: r"mma.sync.+kind::mxf8f6f4.block_scale.+e4m3.e4m3.f32.ue8m0",
        NV: r"mma.sync.+kind::mxf4nvf4.block_scale.+e2m1.e2m1.f32.ue4m3",
    },
}
QUANTISING = ("quantise_rows_in_blocks", "quantise_weights_in_blocks", "largest_of_matrices")


@pytest.mark.parametrize("capability", [100, 120])
def test_blackwell_multiplies_both_formats_by_its_own_instructions(capability: int, tmp_path: Path) -> None:
    check(capability, compiled_by(__file__, tmp_path, str(capability), "many"), formats=(MX, NV))


@pytest.mark.thorough
@pytest.mark.parametrize("capability", PRODUCTS)
def test_every_gpu_with_fp8_has_these_kernels(capability: int, tmp_path: Path) -> None:
    found = compiled_by(__file__, tmp_path, str(capability))
    check(capability, found, formats=(F8, MX, NV))
    assert {name.rpartition(": ")[2] for name in found} == {"multiply_quantised", *QUANTISING}


def check(capability: int, found: dict[str, Any], formats: tuple[str, ...]) -> None:
    assert found
    for name, figures in found.items():
        assert figures["shared"] <= SHARED_BYTES[capability] and figures["stack"] <= 128, (name, figures)
        if name.endswith(QUANTISING) and "activated" not in name:  # an activation may approximate
            assert set(figures["divisions"]) <= {"div.rn.f32"}, (name, figures)
    for format in formats:
        products = found[f"{format} many: multiply_quantised"]["products"]
        assert products, format
        for each in products:
            assert re.match(PRODUCTS[capability][format], each), (format, each)


# From here on: the program.


def main(capability: str, *wanted: str) -> dict[str, Any]:
    from amoeba.kernels import tile_sizes

    tile_sizes.capability_of = lambda device: divmod(int(capability), 10)  # before the kernels import it
    from small_launches import of_recipes

    from amoeba.kernels import launch

    found: dict[str, Any] = {}
    compiled = {"name": ""}

    def compile_it(self: Any, grid: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        made = compile_for(self.kernel, arguments, constants or self._constants, int(capability))
        instruction = r"\b((?:tcgen05\.mma|mma\.sync|wgmma\.mma_async)[\w.:]*)"
        found[f"{compiled['name']}: {self.kernel.__name__.strip('_')}"] = {
            "shared": made.metadata.shared,
            "products": sorted(set(re.findall(instruction, made.asm["ptx"]))),
            "divisions": sorted(set(re.findall(r"\bdiv\.\w+\.f32", made.asm["ptx"]))),
            **resources(made),
        }

    launch.Quick._launch = compile_it  # type: ignore[method-assign]
    for name, launched in of_recipes().items():
        if not wanted or name.endswith(wanted):
            compiled["name"] = name
            launched()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
