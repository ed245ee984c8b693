"""Every kernel as it is launched by default fits on the GPUs that are not here: Ampere, Ada, Hopper, Blackwell.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I

A launch that asks for more shared memory than a block may have fails on the user's machine and nowhere else. Compiled
for each kind of GPU in each dtype, without one, in a process of its own: Triton's interpreter cannot compile.

    TRITON_CACHE_DIR=cubins python tests/compiled/test_other_gpus.py 86 float32 [name ...]      # a line of JSON
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_launches
import torch
from compiling import compile_for, compiled_by, resources

# What a block may have, by NVIDIA's table of compute capabilities.
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
DTYPES = ("bfloat16", "float16", "float32")


# Bytes of a thread's stack that are no spill: a slot for what the compiler cannot keep otherwise.
MOST_STACK = 128
# Exact attention's tiles are the same on every GPU, as its sums are: where registers are short, it puts numbers aside.
MOST_STACK_EXACT = 4096
# In bf16 on a Hopper GPU products with codes and what writes codes have none at all, but for this one by Triton 3.6.
OF_CODES = ("fp8", "mxfp", "nvfp", "quantise", "turn_", "activate_backward in fp8")
BLOCKS = ("q8_0", "q4_k", "q6_k", "nf4")
SPILLED = {"fp8-128 8: multiply": 8}
MOST_BYTES = 8  # that a thread reads one by one
# Where each thread reads a quarter of a tile's scales, all for itself, by Triton 3.9 on sm_120. Codes are copied there.
MOST_SCALES = {"mxfp8 transposed 2000: multiply": 32} | {
    f"{name} transposed 2000: multiply": most
    for name, most in (("q8_0", 16), ("q6_k", 12))  # two bytes each
}
HOT = ("multiply 2000", "weight_gradient 2000", "decode 64", "decode mxfp4 64", "nvfp4 transposed 2000")


@pytest.mark.thorough
def test_the_largest_tiles_fit_where_shared_memory_is_smallest(tmp_path: Path) -> None:
    check(86, compiled_by(__file__, tmp_path, "86", "float16", *HOT))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_fits(capability: int, dtype: str, tmp_path: Path) -> None:
    found = compiled_by(__file__, tmp_path, str(capability), dtype)
    check(capability, found, exact=(capability, dtype) == (90, "bfloat16"))
    if dtype == "bfloat16" and capability >= 89:
        names = {name.rpartition(": ")[2] for name in found}
        assert kernels_of_the_source() - names == set(), "these are compiled for no GPU but the one that they ran on"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_candidate_of_a_search_fits_with_factors_too(dtype: str, tmp_path: Path) -> None:
    """They are searched without; a layer gets LoRA factors later. Such a tile may be slow, but it has to run."""
    found = compiled_by(__file__, tmp_path, "86", dtype, "candidates")
    assert len(found) > 10
    for name, figures in found.items():
        assert figures["shared"] <= SHARED_BYTES[86], name


def kernels_of_the_source() -> set[str]:
    """All that are launched and are not for Hopper alone."""
    source = Path(__file__).parents[2] / "src" / "amoeba"
    found: set[str] = set()
    for path in source.rglob("*.py"):
        if "hopper" not in str(path.relative_to(source)):
            found.update(re.findall(r"^@quick\n(?:@.*\n)+def _?(\w+)\(", path.read_text(), re.MULTILINE))
    return found - {"make_list"}  # of Hopper's tasks


def check(capability: int, found: dict[str, dict[str, int]], exact: bool = False) -> None:
    """exact: products with codes and what writes codes put nothing aside."""
    assert found
    for name, figures in found.items():
        assert figures["shared"] <= SHARED_BYTES[capability], f"{name} does not fit on sm_{capability}"
        most = 0 if exact and name.startswith(OF_CODES) else MOST_STACK
        most = MOST_STACK_EXACT if name.startswith("exact attention") else most
        most = max(most, SPILLED.get(name, 0))
        assert figures["stack"] <= most, f"{name} does not keep all in registers on sm_{capability}"
        if (
            name.startswith(("decode", "fp8", "mxfp", "nvfp", *BLOCKS)) and "attention" not in name
        ):  # as many as there are scales
            most = MOST_SCALES.get(name, MOST_BYTES)
            assert figures["bytes"] <= most, f"{name} reads codes byte by byte on sm_{capability}"


# From here on: the program.


def launches(dtype: torch.dtype, capability: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Calls of the launchers as the backend makes them, by name; numbers are rows per expert, tokens or head sizes."""
    from amoeba.core.config import Activation, RouterConfig
    from amoeba.core.problem import Problem
    from amoeba.core.weights import ExpertWeights, LoraFactors
    from amoeba.kernels import (
        activate,
        attention,
        combine,
        cross_entropy,
        expert_sums,
        quantise,
        router_balance,
        sort,
        weight_only_gemm,
    )
    from amoeba.kernels.decode import Like, decode
    from amoeba.kernels.decode import attention as decode_attention
    from amoeba.kernels.decode.quantised_configuration import by_expert as quantised_by_expert
    from amoeba.kernels.dequantise import dequantise
    from amoeba.kernels.down_backward import down_backward
    from amoeba.kernels.grouped_gemm import multiply_rows, multiply_rows_activated
    from amoeba.kernels.lora.epilogue import Addend
    from amoeba.kernels.weight_gradient import weight_gradient
    from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format
    from amoeba.precision.formats import OF_BLOCKS
    from amoeba.precision.quantised import QuantisedMatrix, block_counts
    from amoeba.precision.quantised_experts import quantise_experts
    from amoeba.stream.store.layers import layer_entry
    from amoeba.tasks.triton.backward import scheduled_backward
    from amoeba.tasks.triton.bias_tasks import BiasTasks
    from amoeba.tasks.triton.router_tasks import RouterTasks

    E, K, H, I, R = 64, 8, 2048, 1024, 16
    activation, plain = Activation(), Activation("gelu", gated=False)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    gate_up, down, offs, biases = empty(E, 2 * I, H), empty(E, H, I), empty(E, dtype=torch.int32), empty(E, 2 * I)
    found: dict[str, Callable[[], Any]] = {}

    def of_rows(per_expert: int) -> dict[str, Callable[[], Any]]:
        N = E * per_expert
        x, y, h, a, order = empty(N // K, H), empty(N, H), empty(N, 2 * I), empty(N, I), empty(N, dtype=torch.int32)
        scale, odd = empty(N // K, K, dtype=torch.float32), empty(N, 2 * I - 3)
        low = Addend(empty(N, 128), empty(E, 2 * I, 128), 128)  # of the deepest step
        options = {"order_N": order, "top_k": K}
        return {
            "multiply": lambda: multiply_rows(a, down.mT, offs, y),
            "multiply transposed": lambda: multiply_rows(h, gate_up, offs, y),
            "multiply unaligned": lambda: multiply_rows(odd, empty(E, 2 * I - 3, H), offs, y),
            "up": lambda: multiply_rows_activated(x, gate_up, offs, activation, h, a, **options),
            "up with factors": lambda: multiply_rows_activated(
                x, gate_up, offs, activation, h, a, addend=low, bias_EJ=biases, **options
            ),
            "down_backward": lambda: down_backward(x, down, offs, h, scale, activation, h, a, order, top_k=K),
            "weight_gradient": lambda: weight_gradient(h, x, offs, gate_up, right_order_N=order, top_k=K),
        }

    def scheduled(per_expert: int, arrival: Any = None, whole: bool = False) -> None:
        """whole: with biases and the router."""
        N = E * per_expert
        x, h, order = empty(N // K, H), empty(N, 2 * I), empty(N, dtype=torch.int32)
        ids, scale = empty(N // K, K, dtype=torch.int64), empty(N // K, K, dtype=torch.float32)
        options: dict[str, Any] = {"arrival": arrival}
        if whole:
            options["biases"] = BiasTasks(biases, empty(E, H))
            options["router"] = RouterTasks(
                RouterConfig(E, K, renormalize=False), empty(E, H), ids, scale, empty(N // K, E, dtype=torch.float32)
            )
        scheduled_backward(x, x, h, ids, scale, gate_up, down, activation, (order, order, offs), **options)

    for per_expert in (100, 2000):
        found[f"scheduled_backward {per_expert}"] = partial(scheduled, per_expert)
    found["scheduled_backward whole"] = partial(scheduled, 100, whole=True)
    found["scheduled_backward over ranks"] = partial(scheduled, 100, _arrival(empty(400, H)))
    for per_expert in (8, 24, 100, 2000):
        found |= {f"{name} {per_expert}": launch for name, launch in of_rows(per_expert).items()}

    def block_scaled(per_expert: int, format: Format) -> dict[str, Callable[[], Any]]:
        N = E * per_expert
        x, h, order = empty(N // K, H), empty(N, 2 * I), empty(N, dtype=torch.int32)
        low = Addend(empty(N, 128), empty(E, 2 * I, 128), 128)
        scales = empty(
            E, *block_counts(2 * I, H, format, 2), dtype=torch.float32 if format.scale == "fp32" else torch.uint8
        )
        data = empty(E, 2 * I, format.stored_columns(H), dtype=torch.uint8)
        matrix_scale = empty(E, dtype=torch.float32) if format.has_matrix_scale else None
        matrix = QuantisedMatrix(data, scales, format, H, 2, matrix_scale)
        ways: dict[str, Callable[[], Any]] = {
            "": lambda: weight_only_gemm.multiply_rows(
                x, matrix, offs, h, order_N=order, top_k=K, addend=low, bias_EO=biases
            ),
            " transposed": lambda: weight_only_gemm.multiply_rows(h, matrix, offs, empty(N, H), transposed=True),
        }
        if capability >= (8, 9) and per_expert > 8:  # for Hopper's products with many rows; e4m3 by an instruction
            ways[" to numbers"] = lambda: dequantise(matrix, 8, 24, empty(16, 2 * I, H))
        return ways

    in_blocks = [(2000, OF_BLOCKS[name]) for name in BLOCKS]
    for per_expert, format in (*itertools.product((8, 2000), (FP8_128, MXFP8, MXFP4, NVFP4)), *in_blocks):
        found |= {
            f"{format.name}{way} {per_expert}": launch for way, launch in block_scaled(per_expert, format).items()
        }

    N = E * 2000
    x, h, a, order = empty(N // K, H), empty(N, 2 * I), empty(N, I), empty(N, dtype=torch.int32)
    scale, slots = empty(N // K, K, dtype=torch.float32), empty(N // K, K, dtype=torch.int32)
    found |= {
        "activate": lambda: activate.activate(h, activation, a, offs),
        "activate_backward": lambda: activate.activate_backward(a, h, scale, order, activation, h, a, offs),
        "combine": lambda: combine.combine(empty(N, H), slots, scale, x),
        "sum_per_expert": lambda: expert_sums.sum_per_expert(h, offs, biases),
        "bias_dot": lambda: expert_sums.bias_dot(x, empty(E, H), slots),
        "sort": lambda: sort.sort_rows(slots, E),
        "sort few": lambda: sort.sort_rows(slots[:200], E),
        "cross_entropy": lambda: cross_entropy.cross_entropy_(
            empty(64, 32768), empty(64, dtype=torch.int64), empty(64, dtype=torch.float32), gradient=True
        ),
        "router_balance": lambda: router_balance.balance_gradient(
            empty(1024, E), empty(E, dtype=torch.int64), 1.0, 0.1
        ),
    }

    table = empty(4 + 4 * (N // 128 + E), dtype=torch.int32)
    if capability >= (8, 9):  # before, nothing converts to e4m3
        found |= {
            "quantise_rows": lambda: quantise.quantise_rows(x),
            "quantise_weights": lambda: quantise.quantise_weights(
                gate_up, quantise.empty_weights(E, 2 * I, H, x.device), quantise.empty_weights(E, H, 2 * I, x.device)
            ),
            "activate_backward in fp8": lambda: activate.activate_backward(
                a, h, scale, order, activation, h, a, offs,
                quantised_dh=quantise.empty_rows(N, 2 * I, x.device),
            ),
            "transpose_rows": lambda: quantise.transpose_rows(
                h, quantise.row_blocks(offs, table)
            ),
            "transpose_tokens": lambda: quantise.transpose_tokens(
                x, order, K, quantise.RowBlocks(table, offs)
            ),
        }  # fmt: skip

    def decoding_block_scaled(format: Format, tokens: int, rank: int = 0) -> None:
        weights = quantise_experts(ExpertWeights(gate_up[:1], down[:1]), format)
        ids, scale = empty(tokens, K, dtype=torch.int64), empty(tokens, K, dtype=torch.float32)
        shapes = [(1, rank, H), (1, I, rank)] * 2 + [(1, rank, I), (1, H, rank)]
        factors = [empty(*shape, dtype=torch.float32) for shape in shapes]
        lora = LoraFactors(*factors, scaling=2.0) if rank else None
        decode(Problem(empty(tokens, H), ids, scale, weights, lora))

    for tokens, format in itertools.product((1, 64), (FP8_128, MXFP8, MXFP4, NVFP4)):
        found[f"decode {format.name} {tokens}"] = partial(decoding_block_scaled, format, tokens)

    for tokens, format, rank in ((1, FP8_128, 16), (64, FP8_128, 64), (1, NVFP4, 64), (64, MXFP4, 16)):
        found[f"decode {format.name} with factors {tokens}"] = partial(decoding_block_scaled, format, tokens, rank)

    def decoding_in_slots(tokens: int) -> None:
        """Of a store: each expert's parts, the scale of its matrix too, in one piece of memory."""
        entry = layer_entry("experts", E, H, I, activation, dtype, False, NVFP4, 2)
        weights = entry.weights(empty(8, entry.expert_bytes, dtype=torch.uint8))
        ids, scale = empty(tokens, K, dtype=torch.int64), empty(tokens, K, dtype=torch.float32)
        decode(Problem(empty(tokens, H), ids, scale, weights), like=Like(tokens, E))

    for tokens in (1, 64):
        found[f"decode nvfp4 in slots {tokens}"] = partial(decoding_in_slots, tokens)

    def decoding_in_long_steps(tokens: int, listed: bool) -> None:
        weights = quantise_experts(ExpertWeights(gate_up, down), MXFP4)
        ids, scale = empty(tokens, K, dtype=torch.int64), empty(tokens, K, dtype=torch.float32)
        problem = Problem(empty(tokens, H), ids, scale, weights)
        chosen = quantised_by_expert(problem)._replace(listed=listed)
        decode(problem, configuration=chosen)

    # Four slots an expert, and half of one: then tiles are half as high, by half of the warps.
    found["decode mxfp4 listed 32"] = partial(decoding_in_long_steps, 4 * E // K, True)
    found["decode mxfp4 by expert"] = partial(decoding_in_long_steps, E // K // 2, False)

    def decoding(tokens: int, activation: Activation, lora: bool) -> None:
        first = gate_up if activation.gated else gate_up[:, :I]
        factors = [empty(E, R, H), empty(E, I, R)] * 2 + [empty(E, R, I), empty(E, H, R)] if lora else None
        if factors and not activation.gated:
            factors[:2] = [None, None]
        decode(
            Problem(
                empty(tokens, H), empty(tokens, K, dtype=torch.int64), empty(tokens, K, dtype=torch.float32),
                ExpertWeights(first, down, activation=activation),
                LoraFactors(*factors, scaling=2.0) if factors else None,
            )
        )  # fmt: skip

    for tokens in (1, 4, 16, 64):
        found[f"decode {tokens}"] = lambda tokens=tokens: decoding(tokens, activation, False)
    found["decode plain 64"] = lambda: decoding(64, plain, False)
    found["decode with factors 64"] = lambda: decoding(64, activation, True)
    found["decode with factors 1"] = lambda: decoding(1, activation, True)
    for size in (64, 128, 256):
        cache = empty(4, 4, 4096, size)
        live = empty(4, 4096, dtype=torch.bool)
        found[f"decode attention {size}"] = lambda size=size, cache=cache, live=live: decode_attention.attention(
            empty(4, 32, size), cache, cache, live, 0.1
        )
    if dtype != torch.float32:
        for size in attention.HEAD_SIZES:
            q, k, ends = empty(4096, 32, size), empty(4096, 4, size), empty(9, dtype=torch.int32)
            saved = empty(32, 4096, dtype=torch.float32)
            found[f"attention {size}"] = lambda q=q, k=k, ends=ends: attention.forward(q, k, k, ends, 0.1, -1)
            found[f"attention backward {size}"] = lambda q=q, k=k, ends=ends, saved=saved: attention.backward(
                q, q, k, k, q, saved, ends, 0.1, -1
            )
    if dtype == torch.bfloat16 and capability >= (8, 9):
        found |= {f"operands in {name}": launch for name, launch in small_launches.of_recipes().items()}
    return found | small_launches.launches(dtype)


def _arrival(dy_TH: torch.Tensor) -> Any:
    """Of rank 0 of two, on a GPU."""
    from amoeba.kernels.peer_context import PeerContext, Plan, heap_layout
    from amoeba.tasks.triton.arrivals import Arrival

    class OnGpu(Arrival):
        def constants(self) -> dict[str, Any]:
            return super().constants() | {"ON_GPU": True}

    numbers = [torch.empty(1, dtype=torch.int64, device="meta") for _ in range(4)]
    at, sizes, _ = heap_layout(2, len(dy_TH), 8, dy_TH[0].nbytes)
    peers = PeerContext(*numbers, at, sizes, tokens=len(dy_TH), rank=0, count=2, seconds=600.0)
    goes_WT = torch.empty((2, len(dy_TH)), dtype=torch.uint8, device="meta")
    plan = Plan(numbers[0], numbers[0], len(dy_TH), 2 * len(dy_TH))
    return OnGpu(peers, plan, dy_TH, goes_WT, goes_WT.view(-1), lambda own_TH: own_TH)


def candidate_launches(dtype: torch.dtype, capability: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """The up projection with factors of the deepest step, in every configuration that a search may choose."""
    from amoeba.core.config import Activation
    from amoeba.kernels.grouped_gemm import multiply_rows_activated
    from amoeba.kernels.lora.epilogue import Addend
    from amoeba.kernels.tile_sizes import Product, candidates

    E, H, I, R = 64, 2048, 1024, 128
    offs = torch.empty(E, dtype=torch.int32, device="meta")

    def launch(rows: int, chosen: Any) -> None:
        shapes = (rows, H), (E, 2 * I, H), (rows, 2 * I), (rows, I), (rows, R), (E, 2 * I, R)
        x, gate_up, h, a, low, factor = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        multiply_rows_activated(
            x, gate_up, offs, Activation(), h, a, addend=Addend(low, factor, low.shape[1]), configuration=chosen
        )

    found: dict[str, Callable[[], Any]] = {}
    for rows in (E * 24, E * 2000):
        for chosen in candidates("up", Product(rows, E, H, 2 * I, dtype), capability):
            found[f"{rows} {chosen}"] = partial(launch, rows, chosen)
    return found


class Compiler:
    """Takes the place of launching: what would be launched is compiled for a GPU, and its figures are noted."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.figures: dict[str, dict[str, int]] = {}
        self.launch_name = ""

    def compile(self, kernel: Any, arguments: tuple, constants: dict[str, Any]) -> None:
        if "ON_GPU" in constants:  # which tensors without a device deny
            constants = constants | {"ON_GPU": True}
        made = compile_for(kernel, arguments, constants, self.capability)
        # the driver reserves 1 KB of each block's for itself, which these limits leave out
        self.figures[f"{self.launch_name}: {kernel.__name__.strip('_')}"] = {
            "shared": made.metadata.shared,
            "bytes": made.asm["ptx"].count("ld.global.b8") + made.asm["ptx"].count("ld.global.u8"),
            **resources(made),
        }


def main(capability: str, dtype: str, *wanted: str) -> dict[str, dict[str, int]]:
    from amoeba.kernels import launch, tile_sizes

    compiler = Compiler(int(capability))
    launch.Quick._launch = lambda self, grid, arguments, constants: compiler.compile(
        self.kernel, arguments, constants or self._constants
    )
    launch._Fixed.__call__ = lambda self, *tensors: compiler.compile(
        self._kernel.kernel, (*tensors, *self._numbers), self._constants
    )
    tile_sizes.capability_of = lambda device: divmod(int(capability), 10)  # before the kernels import it
    every = candidate_launches if wanted == ("candidates",) else launches
    for name, launched in every(getattr(torch, dtype), divmod(int(capability), 10)).items():
        if not wanted or wanted == ("candidates",) or name in wanted:
            compiler.launch_name = name
            launched()
    return compiler.figures


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
