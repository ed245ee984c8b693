"""The cost model against counted operations and measured sizes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from amoeba import Activation, ExpertWeights, Routing, experts, with_precision
from amoeba.backends import fp8_saved
from amoeba.bench.timing import watch_saved
from amoeba.core import cost
from amoeba.precision import FP8_128, MXFP4, MXFP8, NVFP4
from amoeba.precision.quantised_experts import quantise_experts
from amoeba.precision.recipes import operand_formats
from amoeba.precision.weight_cache import quantised_weight
from amoeba.proof.reference.experts import experts_forward

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 63, 3, 5, 24, 40
ROWS = TOKENS * TOP_K


@pytest.mark.parametrize(("gated", "factor"), [(True, 6), (False, 4)])
def test_flops_follow_the_formula(gated, factor):
    forward = cost.forward_flops(rows=ROWS, hidden=HIDDEN, intermediate=INTERMEDIATE, gated=gated)
    assert forward == factor * ROWS * HIDDEN * INTERMEDIATE
    assert cost.backward_flops(rows=ROWS, hidden=HIDDEN, intermediate=INTERMEDIATE, gated=gated) == 2 * forward


@pytest.mark.parametrize("gated", [True, False])
def test_flops_are_those_that_torch_counts(gated):
    width = 2 * INTERMEDIATE if gated else INTERMEDIATE
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weights = ExpertWeights(
        torch.randn(EXPERTS, width, HIDDEN, requires_grad=True),
        torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, requires_grad=True),
        activation=Activation("silu", gated=gated),
    )
    expert = torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K]
    with FlopCounterMode(display=False) as forward:
        y = experts_forward(x, expert, torch.rand(TOKENS, TOP_K), weights)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    sizes = {"rows": ROWS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "gated": gated}
    assert forward.get_total_flops() == cost.forward_flops(**sizes)
    assert backward.get_total_flops() == cost.backward_flops(**sizes)


def test_kept_bytes_are_x_and_h():
    sizes = {"tokens": TOKENS, "rows": ROWS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "itemsize": 2}
    x, h = 2 * TOKENS * HIDDEN, 2 * ROWS * 2 * INTERMEDIATE
    assert cost.kept_bytes(**sizes) == x + h
    assert cost.kept_bytes(**sizes, gated=False) == x + h // 2
    assert cost.kept_bytes(**sizes, recompute=True) == x


def test_row_maps_are_three_ids_and_a_weight_per_row():
    assert cost.row_map_bytes(rows=ROWS, experts=EXPERTS) == ROWS * (3 * 8 + 4) + EXPERTS * 4
    assert cost.row_map_bytes(rows=ROWS, experts=EXPERTS, map_itemsize=4) == ROWS * (8 + 2 * 4 + 4) + EXPERTS * 4
    assert cost.row_map_bytes(rows=ROWS, experts=EXPERTS, weight_itemsize=2) == ROWS * (3 * 8 + 2) + EXPERTS * 4


@pytest.mark.parametrize("gated", [True, False])
def test_weight_bytes_are_those_of_the_tensors(gated):
    width = 2 * INTERMEDIATE if gated else INTERMEDIATE
    gate_up = torch.empty(EXPERTS, width, HIDDEN, dtype=torch.bfloat16)
    down = torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16)
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "itemsize": 2, "gated": gated}
    assert cost.weight_bytes(experts=EXPERTS, **sizes) == gate_up.nbytes + down.nbytes
    assert cost.expert_bytes(**sizes) == gate_up[0].nbytes + down[0].nbytes


@pytest.mark.parametrize("format", [FP8_128, MXFP8, MXFP4, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("activation", [Activation(), Activation(interleaved=True), Activation(gated=False)])
@pytest.mark.parametrize(("hidden", "intermediate"), [(24, 40), (256, 128), (199, 200)])
def test_weights_in_a_format_have_the_bytes_of_codes_and_scales(format, activation, hidden, intermediate):
    gate_up = torch.randn(2, activation.width(intermediate), hidden)
    held = quantise_experts(ExpertWeights(gate_up, torch.randn(2, hidden, intermediate), activation=activation), format)
    sizes = {"hidden": hidden, "intermediate": intermediate, "gated": activation.gated, "format": format}
    assert 2 * cost.expert_bytes(**sizes, interleaved=activation.interleaved) == held.nbytes


@pytest.mark.parametrize(("rows", "intermediate"), [(0, 40), (63, 40), (256, 64), (199, 200)])
def test_fp8_saved_keeps_h_in_e4m3(rows, intermediate):
    sizes = {"tokens": TOKENS, "rows": rows, "hidden": HIDDEN, "intermediate": intermediate, "itemsize": 2}
    x = 2 * TOKENS * HIDDEN
    assert cost.kept_bytes(**sizes, precision="fp8-saved") == x + fp8_saved.bytes_of(rows, 2 * intermediate)
    assert cost.kept_bytes(**sizes, precision="fp8-saved", recompute=True) == x
    assert cost.kept_bytes(**sizes, precision="fp8") == cost.kept_bytes(**sizes)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4"])
def test_kept_bytes_are_those_that_autograd_saves(precision):
    gate_up, down = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)
    leaves = [each.bfloat16().requires_grad_() for each in (torch.randn(TOKENS, HIDDEN), gate_up, down)]
    routing = Routing(torch.randint(0, EXPERTS, (TOKENS, TOP_K)), torch.rand(TOKENS, TOP_K).bfloat16().requires_grad_())
    with watch_saved() as saved:
        experts(leaves[0], routing, with_precision(ExpertWeights(*leaves[1:]), precision), backend="eager")
    sizes = {"tokens": TOKENS, "rows": ROWS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "itemsize": 2}
    maps = cost.row_map_bytes(rows=ROWS, experts=EXPERTS, weight_itemsize=2)
    assert saved.bytes_without(leaves[1:]) == cost.kept_bytes(**sizes, precision=precision) + maps


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
def test_training_with_a_recipe_keeps_codes_in_both_orientations(recipe):
    format = operand_formats(recipe)[1]
    weights = [torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE)]
    cached = [quantised_weight(weight, format) for weight in weights]
    kept = sum(matrix.nbytes for each in cached for matrix in (each.matrix, each.transposed()))
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    shared = sum(each.matrix.matrix_scale.nbytes for each in cached) if recipe == "nvfp4" else 0  # by both
    assert cost.code_bytes(**sizes, format=format) - shared <= kept <= cost.code_bytes(**sizes, format=format)


def test_nothing_costs_nothing():
    assert cost.forward_flops(rows=0, hidden=HIDDEN, intermediate=INTERMEDIATE) == 0
    assert cost.weight_bytes(experts=0, hidden=HIDDEN, intermediate=INTERMEDIATE, itemsize=4) == 0
