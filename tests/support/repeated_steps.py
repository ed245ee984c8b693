"""A step on a GPU that comes again: on another stream and in a CUDA graph it has the bits of the first one.

check_elsewhere(step, first)
"""

from collections.abc import Callable

import torch
from torch import Tensor


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
