"""One token through quantised experts by the kernels for Hopper: what they serve, tiles, and on a GPU their numbers.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

from typing import Any

import pytest
import torch
import triton.language as tl

from amoeba.core.problem import Problem
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.kernels.decode import decode, low_rank, one_token, quantised_configuration
from amoeba.kernels.launch import cdiv, next_power_of_2
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4, Format, QuantisedMatrix
from amoeba.precision.formats import OF_BLOCKS, fp8_blocks
from amoeba.precision.quantised import block_counts
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU
from amoeba.proof.conformance import poisoned_memory
from amoeba.proof.reference import experts as reference
from selection import each_value_once, quick
from small_layer import E, Layer

FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4, fp8_blocks(64, 32))
by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
LAYERS = {  # E, K, H, I
    "qwen3": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "dsv3": (64, 8, 7168, 2048),
    "gpt-oss": (32, 4, 2880, 2880),
    "small": (4, 3, 160, 96),
}
by_layer = pytest.mark.parametrize("layer", LAYERS)


def matrix(format: Format, rows: int, columns: int, experts: int) -> QuantisedMatrix:
    data = torch.empty(experts, rows, format.stored_columns(columns), dtype=torch.uint8, device="meta")
    kind = torch.float32 if format.scale == "fp32" else torch.uint8
    scales = torch.empty(experts, *block_counts(rows, columns, format), dtype=kind, device="meta")
    alone = torch.empty(experts, device="meta") if format.has_matrix_scale else None
    return QuantisedMatrix(data, scales, format, columns, 1, alone)


def problem_of(format: Format, layer: tuple[int, int, int, int] = LAYERS["qwen3"], dtype=torch.bfloat16) -> Problem:
    """Without memory."""
    experts, top_k, hidden, inner = layer
    weights = QuantisedExperts.holding(
        matrix(format, 2 * inner, hidden, experts), matrix(format, hidden, inner, experts)
    )
    x_TH = torch.empty(1, hidden, dtype=dtype, device="meta")
    expert_TK = torch.empty(1, top_k, dtype=torch.int64, device="meta")
    return Problem(x_TH, expert_TK, torch.empty(1, top_k, dtype=torch.float32, device="meta"), weights, None)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What tiles are chosen on a GPU like that, whatever this machine has."""
    monkeypatch.setattr(one_token, "BY_BITS", tl.constexpr(False))
    monkeypatch.setattr(one_token, "capability_of", lambda device: (9, 0))
    return monkeypatch


def served(problem: Problem) -> tuple[bool, bool]:
    """Whether up and down are."""
    chosen = quantised_configuration.by_slot(problem)
    return chosen.up.chunks > 0, chosen.down.chunks > 0


class TestServed:
    @by_format
    def test_rows_of_whole_chunks_in_bf16(self, format, hopper):
        assert served(problem_of(format)) == (True, True)

    def test_other_values_gpus_and_rows_keep_the_other_kernels(self, hopper):
        assert served(problem_of(MXFP4, dtype=torch.float16)) == (False, False)
        assert served(problem_of(OF_BLOCKS["q8_0"])) == (False, False)
        assert served(problem_of(fp8_blocks(8, 8))) == (False, False)
        assert served(problem_of(MXFP4, (8, 2, 48, 64))) == (False, True)  # rows of 24 bytes of numbers
        assert served(problem_of(NVFP4, (8, 2, 64, 16))) == (True, False)
        assert served(problem_of(FP8_128, (8, 2, 64, 24))) == (True, False)
        assert served(problem_of(MXFP4, (0, 2, 64, 64))) == (False, False)
        for capability in (None, (8, 9)):
            hopper.setattr(one_token, "capability_of", lambda device, capability=capability: capability)
            assert served(problem_of(MXFP4)) == (False, False)

    def test_a_matrix_with_factors_keeps_the_other_kernel(self, hopper):
        problem, (experts, _, hidden, inner), rank = problem_of(MXFP4), LAYERS["qwen3"], 4
        a, b = torch.empty(experts, rank, inner, device="meta"), torch.empty(experts, hidden, rank, device="meta")
        down = LoraFactors(**dict(zip(LORA_NAMES[4:], (a, b), strict=True)))
        assert low_rank.ranks_of(down).down == rank
        assert served(problem._replace(lora=down)) == (True, False)

    def test_rows_that_begin_anywhere_keep_the_other_kernel(self, hopper):
        problem = problem_of(MXFP8, (4, 2, 64, 64))
        tensors = [None if each is None else torch.empty_like(each, device="cpu") for each in problem.weights.tensors()]
        shifted = torch.empty(tensors[0].numel() + 1, dtype=torch.uint8)[1:].view_as(tensors[0])
        x_TH = torch.zeros(1, 64, dtype=torch.bfloat16)
        for data, expected in ((tensors[0], True), (shifted, False)):
            weights = QuantisedExperts.of([data, *tensors[1:]], problem.weights.constants())
            assert served(problem._replace(x_TH=x_TH, weights=weights)) == (expected, True)
        x_TH = torch.zeros(65, dtype=torch.bfloat16)[1:].view(1, 64)
        weights = QuantisedExperts.of(tensors, problem.weights.constants())
        assert served(problem._replace(x_TH=x_TH, weights=weights)) == (False, False)


class TestTiles:
    @each_value_once()
    @by_layer
    @by_format
    def test_lanes_have_a_row_once_and_registers_hold_it(self, format, layer, hopper):
        """codes of the rows of a lane, and values: two steps of them where a row takes several."""
        problem = problem_of(format, LAYERS[layer])
        weights, chosen = problem.weights, quantised_configuration.by_slot(problem)
        slots = next_power_of_2(LAYERS[layer][1])
        for kept, tile, rows, all_slots in (
            (weights.gate_up_EJH.matrix, chosen.up, 2 * chosen.up.columns, 1),
            (weights.down_EHI.matrix, chosen.down, chosen.down.columns, slots),
        ):
            group = one_token._group(kept, tile, rows, all_slots)
            assert group.STEPS * tile.depth >= kept.columns > (group.STEPS - 1) * tile.depth
            assert tile.at_once == (group.STEPS == 1)
            lanes = all_slots * tile.chunks / one_token.LANES / tile.warps
            words = 4 * group.PIECES * (max(rows * lanes, 1) + one_token.numbers_of_chunk(kept) / 8 * max(lanes, 1))
            assert words * min(group.STEPS, 2) <= 128
            assert tile.warps <= 8
            assert (problem.weights.intermediate if all_slots == 1 else problem.weights.hidden) % tile.columns == 0

    def test_qwen3_has_what_was_fastest(self, hopper):
        found = {format: quantised_configuration.by_slot(problem_of(format)) for format in (MXFP4, FP8_128, NVFP4)}

        def figures(tile: Any, numbers: int) -> tuple[int, ...]:
            return tile.columns, tile.chunks, cdiv(tile.depth // numbers, tile.chunks), tile.warps

        assert [figures(found[MXFP4].up, 32), figures(found[MXFP4].down, 32)] == [(2, 32, 2, 1), (4, 8, 3, 4)]
        assert [figures(found[FP8_128].up, 16), figures(found[FP8_128].down, 16)] == [(2, 64, 2, 2), (4, 16, 3, 4)]
        assert figures(found[NVFP4].up, 32) == (2, 32, 2, 1)

    def test_long_rows_have_what_was_fastest(self, hopper):
        """One piece in a step, and of how many columns and chunks; fp8 of the second layer has whole rows."""
        found = {
            (layer, format): quantised_configuration.by_slot(problem_of(format, LAYERS[layer]))
            for layer in ("mixtral", "dsv3")
            for format in (MXFP4, FP8_128)
        }
        tiles = {key: [tuple(tile) for tile in chosen[1:3]] for key, chosen in found.items()}
        assert tiles["mixtral", MXFP4] == [(2, 4096, 2, 3, True, 64), (4, 2048, 4, 3, False, 64)]
        assert tiles["mixtral", FP8_128] == [(2, 4096, 4, 3, True, 128), (8, 1024, 4, 3, False, 64)]
        assert tiles["dsv3", MXFP4] == [(4, 1024, 1, 3, False, 32), (4, 512, 4, 3, False, 16)]
        assert tiles["dsv3", FP8_128] == [(2, 8192, 4, 3, True, 128), (4, 2048, 8, 3, True, 32)]

    def test_an_odd_width_has_columns_that_divide_it(self, hopper):
        problem = problem_of(FP8_128, (4, 2, 48, 80))
        tiles = quantised_configuration.by_slot(problem)
        assert (tiles.up.columns, tiles.down.columns) == (2, 4)
        assert quantised_configuration._dividing(4, 6) == 2
        assert quantised_configuration._dividing(4, 7) == 1


# H, I, K: one piece and less than a warp; a rest of chunks, and a slot that is none; long rows; whole pieces
SIZES = [(64, 32, 1), (160, 96, 3), (2880, 1440, 2), (512, 256, 3)]
ACTIVATIONS = [SILU, CLAMPED_SWIGLU, PLAIN_RELU2]


def in_steps(problem: Problem):
    """Of one piece, which holds fewer chunks than a row has."""
    chosen, weights = quantised_configuration.by_slot(problem), problem.weights

    def tile(kept: QuantisedMatrix, of: Any, slots: int) -> Any:
        chunks = max(min(32 // slots, next_power_of_2(one_token.chunks_of_row(kept)) // 2), 1)
        return one_token.tile(kept, of.columns, chunks, 1, of.warps)

    return chosen._replace(
        up=tile(weights.gate_up_EJH.matrix, chosen.up, 1),
        down=tile(weights.down_EHI.matrix, chosen.down, next_power_of_2(problem.expert_TK.shape[1])),
    )


@pytest.mark.gpu
@quick(
    lambda format, activation, sizes, way: (
        activation is ACTIVATIONS[(FORMATS.index(format) + SIZES.index(sizes) + (way is in_steps)) % 3]
    )
)
@pytest.mark.parametrize("way", [quantised_configuration.by_slot, in_steps], ids=["chosen", "in steps"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@by_format
def test_y_is_that_of_what_the_codes_stand_for(format, activation, sizes, way, device):
    """With biases, a sentinel on each side, and a token of sentinels alone."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs Hopper or newer: other GPUs keep the other kernels")
    hidden, inner, top_k = sizes
    expert_TK = torch.tensor([[0, 3, 1], [E, 2, 0], [-1, E, -1]])[:, :top_k].contiguous()
    layer = Layer(activation, tokens=3, hidden=hidden, inner=inner, expert_TK=expert_TK)
    named = {name: tensor.detach().to(device, torch.bfloat16) for name, tensor in layer.tensors.items()}
    named["weight"] = named["weight"].float()
    named["weight"][1, 0] = torch.nan  # a sentinel's
    weights = quantise_experts(layer.weights(named), format)
    expert_TK = expert_TK.to(device, torch.int32 if top_k == 1 else torch.int64)
    problem = Problem(named["x"], expert_TK, named["weight"], weights)
    chosen = way(problem)
    assert min(chosen.up.chunks, chosen.down.chunks) > 0
    with poisoned_memory():  # rows of sentinels are never written
        found = [decode(problem, configuration=chosen) for _ in range(2)]
    exact, weight = dequantise_experts(weights, torch.float64), named["weight"].nan_to_num().double()
    truth = reference.experts_forward(named["x"].double(), expert_TK, weight, exact)
    assert torch.equal(*found)
    assert (found[0].double() - truth).norm() <= 5e-3 * truth.norm()
    assert found[0][2].count_nonzero() == 0


@pytest.mark.gpu
@by_format
def test_nan_in_x_and_in_scales_is_not_hidden(format, device):
    layer = Layer(SILU, tokens=1, hidden=64, inner=32, bias=False, expert_TK=torch.tensor([[1, 2]]))
    named = {name: tensor.detach().to(device, torch.bfloat16) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"].clone(), torch.tensor([[1, 2]], device=device), named["weight"].float(), weights)
    assert torch.isfinite(decode(problem)).all()
    problem.x_TH[0, 5] = torch.nan
    assert decode(problem).isnan().all()


@pytest.mark.gpu
@by_format
def test_rows_that_begin_anywhere_are_multiplied_rightly(format, device):
    """By another kernel, where the plan of aligned ones was found before."""
    layer = Layer(SILU, tokens=1, hidden=64, inner=32, expert_TK=torch.tensor([[1, 2]]))
    named = {name: tensor.detach().to(device, torch.bfloat16) for name, tensor in layer.tensors.items()}
    weights = quantise_experts(layer.weights(named), format)
    problem = Problem(named["x"], torch.tensor([[1, 2]], device=device), named["weight"].float(), weights)
    expected = decode(problem)
    moved = torch.empty(65, dtype=torch.bfloat16, device=device)[1:].view(1, 64).copy_(named["x"])
    found = decode(problem._replace(x_TH=moved))
    assert (found.double() - expected.double()).norm() <= 5e-3 * expected.double().norm()
