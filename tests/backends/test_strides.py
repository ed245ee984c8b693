"""Tensors that lie in memory in any way torch allows: every backend gives the right output and gradients, or says why
not. (The same under `python -O`, where asserts are gone: tests/cpu/test_sanitizers.py.)"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amoeba.backends.grouped import _misaligned
from laid_layer import (
    LAYOUTS,
    SIZES,
    TOLERANCE,
    WAYS,
    Laid,
    check,
    contiguous,
    every_other,
    expanded,
    first_dimension_last,
    inner_dimensions_swapped,
)
from selection import each_value_once, quick
from small_layer import kernel_device


@each_value_once("way")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_any_layout_in_memory(way: str, layout, size: str) -> None:
    if layout is expanded and size == "T=0":
        layout = contiguous
    laid = Laid(layout, WAYS[way], SIZES[size], narrow_ids=size == "plain")
    if way == "grouped" and _misaligned(laid.weights) is not None:
        with pytest.raises(ValueError, match="rows of a multiple of 16 bytes"):
            laid.found(way)
    else:
        check(laid.found(way), laid.truth(), TOLERANCE[WAYS[way]])


@pytest.mark.parametrize(
    ("layout", "size"),
    [(first_dimension_last, "H=1"), (every_other, "T=1"), (expanded, "T=1")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_any_layout_in_memory_for_the_kernels(layout, size: str) -> None:
    sizes = SIZES[size] | {"tokens": 1, "rank": 0}  # slow in Triton's interpreter
    laid = Laid(layout, torch.float32, sizes, device=kernel_device())
    check(laid.found("triton"), laid.truth(), TOLERANCE[torch.float32])


class ToldStrides(TorchDispatchMode):
    """Compares what our operators give with what their fakes tell a compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if operator.namespace == "amoeba":
            with FakeTensorMode() as mode:
                told = operator(*tree_map_only(torch.Tensor, mode.from_tensor, args))
            for real, fake in zip(tree_leaves(found), tree_leaves(told), strict=True):
                assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
            self.compared.append(operator.name())
        return found


@each_value_once()
@pytest.mark.parametrize("layout", [first_dimension_last, inner_dimensions_swapped, expanded])
@pytest.mark.parametrize("way", [*WAYS, "triton"])
def test_a_compiled_graph_is_told_the_strides_that_results_have(way: str, layout) -> None:
    device = kernel_device() if way == "triton" else "cpu"
    laid = Laid(layout, WAYS.get(way, torch.float32), {"tokens": 5, "hidden": 16, "inner": 16}, device=device)
    if way == "grouped" and _misaligned(laid.weights) is not None:
        pytest.skip("refused: test_any_layout_in_memory")
    with ToldStrides() as told:
        laid.found(way)
    assert any(name.endswith("_backward") for name in told.compared)


@quick(lambda way, tokens: way != "triton" or tokens == 1)
@pytest.mark.parametrize("way", ["cpu", "eager", "cpu fused in bf16", "packed in bf16", "triton"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_gradient_of_a_sum_which_is_one_number_expanded(way: str, tokens: int) -> None:
    dtype, device = WAYS.get(way, torch.float32), kernel_device() if way == "triton" else "cpu"
    laid = Laid(contiguous, dtype, {"tokens": tokens}, device=device)
    laid.dy_TH = torch.ones((), dtype=dtype, device=device).expand(tokens, 16)
    check(laid.found(way), laid.truth(), TOLERANCE[dtype])
