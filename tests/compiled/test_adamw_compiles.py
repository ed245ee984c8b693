"""AdamW's kernel compiles for a GPU, here without one: 16 bytes at a time, each operation rounded by itself.

Scalar accesses would be as right and several times as slow, and no other test would see them. It runs in a process of
its own, this file as a program, since Triton's interpreter cannot compile.
"""

import json
import re
from collections import Counter

import pytest
from compiling import compile_as, compiled_by

pytestmark = pytest.mark.thorough  # speed, and bits that tests/optim/test_adamw_gpu.py compares where they are computed

ACCESSES = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


def test_states_in_fp32_are_read_and_written_16_bytes_at_a_time_and_bf16_8(kernels):
    """4 elements a thread: the 8 bytes of bf16 of a warp are whole cache lines, too."""
    counts = kernels["states in fp32"]
    assert counts["ld.global.v4.b32"] == counts["st.global.v4.b32"] == 2  # the averages
    assert counts["ld.global.v2.b32"] == 3 and counts["st.global.v2.b32"] == 2  # parameter, remainder; gradient


def test_states_in_bf16_are_read_and_written_like_the_parameter(kernels):
    counts = kernels["states in bf16"]
    assert counts["ld.global.v2.b32"] == 5 and counts["st.global.v2.b32"] == 4


def test_gradients_are_read_16_bytes_at_a_time_for_their_norm(kernels):
    assert kernels["norm"]["ld.global.v4.b32"] >= 16


def test_no_operation_is_fused_with_another(kernels):
    assert kernels["states in fp32"]["fma"] == kernels["states in bf16"]["fma"] == 0


def compiled(kernel, types: dict[str, str], constants: dict[str, object], **options) -> dict[str, int]:
    code = compile_as(kernel.kernel, types, constants, **options).asm["ptx"]
    return Counter(ACCESSES.findall(code)) | Counter(fma=len(re.findall(r"\bfma\.", code)))


def main() -> None:
    from amoeba.kernels import adamw
    from amoeba.optim.torch_step import Coefficients

    scalars = dict.fromkeys(adamw._update.kernel.arg_names[3:10], "fp32")
    assert len(scalars) + 1 == len(Coefficients._fields)
    tables = {"rows": "*i64", "chunks": "*i32"}
    found = {}
    for states in (False, True):
        found["states in bf16" if states else "states in fp32"] = compiled(
            adamw._update,
            tables | {"scale": "*fp32", "key": "i32"} | scalars,
            {"SPLIT": True, "GRADIENT_BF16": True, "STATES_BF16": states}
            | {"COLUMNS": adamw.COLUMNS, "CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK},
            num_warps=adamw.WARPS,
            enable_fp_fusion=False,
        )
    found["norm"] = compiled(
        adamw._sum_of_squares,
        tables | {"partial": "*fp32"},
        {"BF16": True, "CHUNK": adamw.CHUNK, "BLOCK": adamw.SQUARES_BLOCK},
        num_warps=adamw.SQUARES_WARPS,
        enable_fp_fusion=True,
    )
    print(json.dumps({name: dict(counts) | {"fma": counts["fma"]} for name, counts in found.items()}))


if __name__ == "__main__":
    main()
