"""LoRA's kernels compile for Hopper, here without one: rows come by asynchronous copies and are multiplied twice from
shared memory by the matrix unit, without spills. Anything else would be as right and several times as slow.

It runs in a process of its own, this file as a program, since Triton's interpreter cannot compile.
"""

import json
import sys

import pytest
from compiling import SHARED_BYTES, compile_as, compiled_by, figures

pytestmark = pytest.mark.thorough  # what it sees costs speed alone; sums and factors: test_low_rank.py

HOT, OTHERS = ("dy, rank 16", "dh, rank 32"), ("dh, rank 64", "dh, rank 128", "dh in fp32, rank 32")


@pytest.mark.parametrize("names", [HOT, OTHERS], ids=str)
def test_rows_are_copied_once_and_multiplied_twice_without_spills(names, tmp_path):
    found = compiled_by(__file__, tmp_path, *names)
    assert found.keys() == set(names)
    for name, figure in found.items():
        assert figure["local_accesses"] == figure["stack_bytes"] == 0, name
        assert figure["shared"] <= SHARED_BYTES, name
        assert figure["async_copies"] > 0, name
        if name in HOT:
            assert figure["wgmma"] > 0, name
            assert figure["transposed"] > 0, "the second product reads the same copy the other way round"
    for name in set(names) & {"dh, rank 32"}:  # rank 16 has a narrow tile, which was measured to be faster
        assert found[name]["shared"] > SHARED_BYTES // 2, "so many stages as fit"


def compile_all(wanted: list[str]) -> dict[str, dict[str, int]]:
    import torch

    from amoeba.kernels.constants import Group
    from amoeba.kernels.lora import lora_backward as lora_backward
    from amoeba.kernels.tiles import tile_constants

    kernel = lora_backward._lora_backward.kernel
    names = kernel.arg_names
    found = {}
    for name, rank, dtype, gathered in (
        ("dy, rank 16", 16, torch.bfloat16, True),
        ("dh, rank 32", 32, torch.bfloat16, False),
        ("dh, rank 64", 64, torch.bfloat16, False),
        ("dh, rank 128", 128, torch.bfloat16, False),
        ("dh in fp32, rank 32", 32, torch.float32, False),
    ):
        if name not in wanted:
            continue
        chosen = lora_backward.configuration(1 << 17, 64, rank, dtype, (9, 0))
        of_rows = "*bf16" if dtype == torch.bfloat16 else "*fp32"
        types = (of_rows, of_rows, of_rows, "*i32", of_rows, "*i32", of_rows, "*fp32", "fp32")
        constants = {
            "OF": Group(STRIDE_ROW=1024, STRIDE_LOW=rank, WIDTH=1024, PADDED=rank, TOP_K=8),
            "TILES": Group(**tile_constants(1 << 17, 64, chosen)),
            "BLOCK_W": chosen.block_n,
            "BLOCK_R": rank,
        }
        constants |= {} if gathered else {"order": None, "weight": None}
        signature = {name: of for name, of in zip(names, types, strict=False) if name not in constants}
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        compiled = compile_as(kernel, signature, constants, **options)
        found[name] = figures(compiled) | {
            "async_copies": compiled.asm["ttgir"].count("async_copy_global_to_local"),
            "transposed": compiled.asm["ttgir"].count("memdesc_trans"),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1:])))
