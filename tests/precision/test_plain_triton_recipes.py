"""Experts that train in fp8, mxfp8 and nvfp4 by plain Triton: against plain torch and fp64, and where it serves.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import pytest
import torch
from test_fp8_kernels import gradients, sentinels

from amoeba import Activation, ExpertWeights, Request, Routing, with_precision
from amoeba.backends import fp8_choice, fp8_triton
from amoeba.backends.fp8_kernel_rows import PLAIN_ROWS
from amoeba.core.problem import Problem
from amoeba.precision.recipes import SUMMARIES
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case
from amoeba.proof.conformance import STAGES, stage_errors, verify_case
from selection import each_value_once, quick
from small_layer import Layer

by_recipe = pytest.mark.parametrize("recipe", PLAIN_ROWS)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes fp32 for no recipe")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has fp8 and is not Hopper."""
    monkeypatch.setattr(fp8_triton, "takes_plain_triton", lambda device, recipe: True)
    monkeypatch.setattr(fp8_triton.BACKEND, "why_not", lambda request: None, raising=False)


@without_gpu
@quick(lambda activation, recipe: activation is SILU and recipe in ("fp8", "nvfp4"))  # whose kernels the others take
@each_value_once()
@pytest.mark.parametrize("sizes", [(128, 64), (64, 192), (40, 72)], ids=str)
@pytest.mark.parametrize("activation", [SILU, PLAIN_RELU2, CLAMPED_SWIGLU], ids=str)
@by_recipe
def test_output_and_every_gradient_are_those_of_plain_torch(recipe, activation, sizes, plain):
    if recipe not in ("mxfp8", "nvfp4") and (activation.interleaved or sizes[1] % 64):
        pytest.skip("fp8 has kernels that ask for whole halves of blocks, and refuses other sizes")
    layer = Layer(activation, tokens=13, hidden=sizes[0], inner=sizes[1], expert_TK=sentinels(13))
    expected = gradients(layer, recipe, "eager")
    for options in ({}, {"recompute": True}):
        found = gradients(layer, recipe, "triton", **options)
        for name, right in expected.items():  # a number next to the middle of two codes may fall to the other one
            assert (found[name] - right).norm() <= (5e-3 if recipe == "nvfp4" else 2e-3) * right.norm(), name


@without_gpu
@quick(lambda recipe: recipe in ("fp8", "mxfp8", "nvfp4"))  # the others have the products of fp8
@by_recipe
def test_each_product_alone_agrees_with_fp64_on_its_own_operands(recipe: str, plain: None) -> None:
    layer = Layer(tokens=9, hidden=128, inner=128, expert_TK=sentinels(9))
    named = {name: tensor.detach() for name, tensor in layer.tensors.items()}
    problem = Problem(named["x"], layer.expert_TK, named["weight"], with_precision(layer.weights(named), recipe))
    errors = stage_errors(problem, PLAIN_ROWS[recipe], layer.dy_TH)
    assert set(errors) == set(STAGES) and max(errors.values()) <= 1e-5, errors


def bf16_layer(recipe: str) -> ExpertWeights:
    activation = Activation()
    shapes = (2, activation.width(128), 128), (2, 128, 128)
    return with_precision(ExpertWeights(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)), recipe)


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 0), ()),
        ((8, 9), tuple(PLAIN_ROWS)),
        ((9, 0), ("fp8", "fp8-ste", "fp8-saved", "fp8-all")),
        ((10, 0), tuple(PLAIN_ROWS)),
        ((12, 0), tuple(PLAIN_ROWS)),
    ],
)
def test_gpus_with_fp8_have_kernels_for_these_recipes(capability, served, gpu_of):
    gpu_of(*capability)
    cuda = torch.device("cuda")
    reasons = {recipe: fp8_triton.why_not_on(cuda, bf16_layer(recipe), recipe) for recipe in SUMMARIES}
    assert tuple(recipe for recipe, reason in reasons.items() if reason is None) == served
    for recipe, reason in reasons.items():
        if reason is not None:
            lacks = "needs a Hopper GPU" if recipe == "fp8-all" else "needs a GPU with fp8"
            assert reason.startswith("is not proven for" if capability == (9, 0) else f"{lacks} (compute capability")
        assert fp8_triton.takes_plain_triton(cuda, recipe) == (capability[0] != 9 or recipe in ("mxfp8", "nvfp4"))


def test_auto_takes_fp8_only_where_it_was_measured(gpu_of, monkeypatch):
    monkeypatch.setattr(fp8_triton.BACKEND, "why_not", lambda request: None, raising=False)
    monkeypatch.setattr(fp8_choice, "LEAST_SIZE", 1)
    weights = bf16_layer("auto")
    monkeypatch.setattr(type(weights), "device", torch.device("cuda"))
    routing = Routing(torch.zeros(4096, 1, dtype=torch.int64), torch.ones(4096, 1))
    request = Request(torch.zeros(4096, 128, dtype=torch.bfloat16), routing, weights)
    gpu_of(9, 0)
    assert fp8_choice.why_not(request) is None
    gpu_of(12, 0)
    assert fp8_choice.why_not(request) == "fp8 was measured on Hopper GPUs alone; ask for it by name on others"


GPU_CASES = [
    Case(333, 2, SILU, True, "sentinels", 256, 384),
    Case(333, 1, PLAIN_RELU2, False, "all_on_one", 128, 320, storage="transposed"),
    Case(63, 8, Activation("gelu_tanh", limit=0.75), True, "random", 192, 64, recompute=True),
    Case(0, 2, SILU, True, "random", 64, 192),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_on_a_gpu_output_every_gradient_and_every_product_agree_with_fp64(recipe: str, case: Case, monkeypatch) -> None:
    """On Hopper, where users do not get them yet, the products are emulated in bf16, which holds both operands."""
    if torch.cuda.get_device_capability() < fp8_triton.FIRST_WITH_FP8:
        pytest.skip("needs a GPU with fp8")
    monkeypatch.setattr(fp8_triton, "why_not_there", lambda *given: None)
    result = verify_case(case, recipe, torch.device("cuda"), torch.bfloat16)
    assert result.ok and result.refused is None, result


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("recipe", ["fp8", "fp8-ste", "fp8-saved"])
def test_on_a_gpu_fp8_by_plain_triton_agrees_with_fp64(recipe: str, case: Case, monkeypatch) -> None:
    if torch.cuda.get_device_capability() < fp8_triton.FIRST_WITH_FP8:
        pytest.skip("needs a GPU with fp8")
    monkeypatch.setattr(fp8_triton, "takes_plain_triton", lambda device, recipe: True)
    result = verify_case(case, recipe, torch.device("cuda"), torch.bfloat16)
    assert result.ok and result.refused is None, result


def test_products_that_write_no_scales_of_da_are_given_none() -> None:
    """In bf16, which the interpreter does not multiply."""
    for rows in PLAIN_ROWS.values():
        assert rows._new_scales(None, torch.empty(2, 2, dtype=torch.bfloat16)) is None  # type: ignore[arg-type]
