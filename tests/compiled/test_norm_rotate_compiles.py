"""The kernels that norm and rotate compile for a GPU, here without one: many bytes at a time, and none of them twice.

Narrower accesses would be as right and slower, and no other test would see them. It runs in a process of its own, this
file as a program, since Triton's interpreter cannot compile.
"""

import json
import re
from collections import Counter

import pytest
from compiling import compile_as, compiled_by

pytestmark = pytest.mark.thorough

ACCESSES = re.compile(r"\b(?:ld|st)\.(?:global|local|shared)(?:\.\w+)*")
# weights and rotations of queries and of keys, rows, gradients: each in two halves
LOADS = {"forward": 12, "backward": 20, "frozen": 20}
# 16 bytes a thread forward; backward the tile that was measured to be the fastest has 8
ACCESS = {"forward": "v4", "backward": "v2", "frozen": "v2"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("kernel", LOADS)
def test_rows_are_read_and_written_once_and_many_bytes_at_a_time(kernels, kernel, size):
    counts, access = kernels[f"{kernel} {size}"], ACCESS[kernel]
    assert counts[f"ld.global.{access}.b32"] == LOADS[kernel] and counts[f"st.global.{access}.b32"] == 4
    loads = {name: count for name, count in counts.items() if name.startswith("ld.global")}
    assert sum(loads.values()) == LOADS[kernel]
    assert not any(".local" in name for name in counts)


@pytest.mark.parametrize("kernel", ["forward", "frozen"])
def test_without_sums_nothing_goes_through_shared_memory(kernels, kernel):
    assert not any(".shared" in name for name in kernels[f"{kernel} 64"])


def main() -> None:
    from amoeba.kernels import norm_rotate as kernels

    scalars = {"tokens": "i32", "num_rotations": "i32", "eps": "fp32", "sums": "*fp32"}
    found = {}
    for size in (64, 128):
        for name in LOADS:
            kernel = kernels._norm_rotate if name == "forward" else kernels._norm_rotate_backward
            tile = kernels.FORWARD if name == "forward" else kernels.BACKWARD
            constants = kernels._constants(tile, 16, 4, size) | {"STRIDE": 24 * size}
            warps = constants.pop("num_warps")
            if name != "forward":
                constants |= {"D_STRIDE": 24 * size, "OF_WEIGHTS": name == "backward", "REPEATS": tile.repeats}
            types = {each: scalars.get(each, "*bf16") for each in kernel.kernel.arg_names if each not in constants}
            code = compile_as(kernel.kernel, types, constants, num_warps=warps).asm["ptx"]
            found[f"{name} {size}"] = Counter(ACCESSES.findall(code))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
