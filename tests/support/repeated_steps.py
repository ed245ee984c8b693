"""A step that comes again: from its list of launches, on another stream and in a CUDA graph it has the same bits.

check_repeated(step, monkeypatch)
check_elsewhere(step, first)  # on a GPU
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amoeba.backends import sorted_rows
from amoeba.kernels.launch import plan as launch_plan


def plans() -> int:
    return sum(plan not in (None, launch_plan._SEEN) for plan in launch_plan._plans.values())


def check_repeated(step: Callable[[int], dict[str, Tensor]], patch: pytest.MonkeyPatch) -> None:
    """step: with other numbers for each seed. The third has a forward and a backward that were recorded."""
    expected = step(3)
    launch_plan.forget_plans()
    for seed in range(2):
        step(seed)
    assert plans() == 2, "one of forward, one of backward"
    for name in ("forward", "backward"):
        patch.setattr(sorted_rows, name, None)  # from here on nothing is computed as it is written
    found = step(3)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].stride() == value.stride(), name


def check_elsewhere(step: Callable[[], tuple[Tensor, ...]], first: tuple[Tensor, ...]) -> None:
    """first: what a step on the current stream gave."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = step()
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(first, there, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for each in captured:
        each.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))
