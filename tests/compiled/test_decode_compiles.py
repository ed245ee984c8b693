"""The kernels for few tokens compile for Hopper with LoRA factors, here without one: all in registers.

A spill would be as right and much slower, and no other test would see it. It runs in a process of its own, this file as
a program, since Triton's interpreter cannot compile.

    TRITON_CACHE_DIR=cubins python tests/compiled/test_decode_compiles.py      # a line of JSON
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import compile_for, compiled_by, figures

pytestmark = pytest.mark.thorough  # compiles for twenty seconds; those of training are compiled in every run


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[str, dict[str, int]]:
    return compiled_by(__file__, tmp_path_factory.mktemp("cubins"))


def test_nothing_is_spilled(kernels):
    assert len(kernels) == 7
    assert all(found["local_accesses"] == found["stack_bytes"] == 0 for found in kernels.values()), kernels


def test_lanes_that_hold_one_sum_hold_the_same_bits(kernels):
    assert all(found["products_in_exchanges"] == 0 for found in kernels.values()), kernels


def test_the_factors_of_shared_experts_go_through_the_tensor_cores(kernels):
    assert kernels["up_by_expert"]["wgmma"] > 0
    assert kernels["down_by_expert"]["wgmma"] > 0


class CompileOnly:
    """Stands for a kernel: a launch compiles it for what it is launched with, and runs nothing."""

    def __init__(self, kernel: Any, found: dict[str, Any]) -> None:
        self.kernel, self.found = kernel.kernel, found

    def fixed(self, grid: tuple[int, ...], numbers: tuple, **constants: Any) -> Callable[..., None]:
        return lambda *tensors: self.compile((*tensors, *numbers), constants)

    def compile(self, arguments: tuple, constants: dict[str, Any]) -> None:
        made = compile_for(self.kernel, arguments, constants)
        self.keep(f"{self.kernel.__name__.strip('_')}{' of a' * constants.get('AFTER_ROWS', False)}", made)

    def keep(self, name: str, made: Any) -> None:
        self.found[name] = figures(made) | {"products_in_exchanges": products_in_exchanges(made.asm["ptx"])}


def products_in_exchanges(ptx: str) -> int:
    """Additions across lanes that take a product in, each lane its own one: then lanes that hold one sum differ in its
    last bit, and which of them is stored is nobody's choice."""
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    return sum(
        bool(exchanged & set(re.findall(r"%\w+", line)[1:])) for line in ptx.splitlines() if "fma.rn.f32" in line
    )


def main() -> dict[str, dict[str, int]]:
    """With fp32 factors on all projections of Qwen3-30B's layers, by slot and by expert."""
    from amoeba.core.problem import Problem
    from amoeba.core.weights import ExpertWeights, LoraFactors
    from amoeba.kernels.decode import by_expert, by_slot, decode, low_rank
    from amoeba.kernels.decode.configuration import Layer, configuration

    E, K, H, I, R = 128, 8, 2048, 768, 16
    found: dict[str, dict[str, int]] = {}
    for module, names in (
        (low_rank, ("_low",)),
        (by_slot, ("_up_by_slot", "_down_by_token")),
        (by_expert, ("_up_by_expert", "_down_by_expert", "_sum_of_slots")),
    ):
        for name in names:
            setattr(module, name, CompileOnly(getattr(module, name), found))
    with torch.device("meta"):
        a, down_a = torch.empty(E, R, H), torch.empty(E, R, I)
        b, down_b = torch.empty(E, I, R), torch.empty(E, H, R)
        weights = ExpertWeights(
            torch.empty(E, 2 * I, H, dtype=torch.bfloat16), torch.empty(E, H, I, dtype=torch.bfloat16)
        )
        for tokens in (1, 8):
            problem = Problem(
                torch.empty(tokens, H, dtype=torch.bfloat16),
                torch.empty(tokens, K, dtype=torch.int64),
                torch.empty(tokens, K),
                weights,
                LoraFactors(a, b, a, b, down_a, down_b, scaling=2.0),
            )
            chosen = configuration(Layer(tokens, K, E, H, I, gated=True, itemsize=2, overlap=True))
            decode(problem, configuration=chosen)
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
