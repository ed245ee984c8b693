"""Variants of Hopper's weight gradients: the same bits on a GPU; elsewhere parts of the ring, and registers.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · W width of the sorted rows
"""

import math

import pytest
import torch
from torch import Tensor

from amoeba.core.layout import build_layout
from amoeba.kernels.hopper import wgrad
from amoeba.kernels.hopper.wgrad_kernel import ring_parts
from amoeba.kernels.weight_gradient import heaviest_first
from selection import each_value_once

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
# Rows of an expert: none, less than a stage of 64, whole stages and turns of 256, one more and one less.
COUNTS = (0, 1, 63, 64, 65, 128, 191, 192, 193, 255, 256, 257, 320, 511, 512, 513, 0, 1000, 3)


@each_value_once()
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 256, 300, 511, 512, 777])
@pytest.mark.parametrize("count", range(4))
def test_parts_of_a_tile_fill_the_ring_from_where_the_tile_before_it_ended(rows, count, monkeypatch):
    monkeypatch.setattr("amoeba.kernels.hopper.wgrad_kernel.gl.minimum", min)  # of numbers
    start, stage, stages = 100, 64, 4
    head, behind, filled = ring_parts.fn(start, start + rows, count, stage, stages)
    assert start <= head <= behind <= filled <= start + rows < filled + stage
    assert (behind - head) % (stages * stage) == 0, "whole turns"
    assert filled - behind < stages * stage, "no whole turn is left for the tail"
    if head < filled:
        assert (count + (head - start) // stage) % stages == 0, "whole turns begin at the first stage"
        assert head > start, "something is multiplied while sums are stored behind the head"


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize(
    ("hidden", "width", "top_k"), [(256, 320, 2), (384, 192, 3), (320, 320, 2), (256, 512, 2), (192, 704, 3)]
)
def test_tiles_one_behind_the_other_have_the_bits_of_tiles_one_by_one(hidden, width, top_k, device, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(wgrad, "_known_top_k", lambda hidden, width, top_k: 0)
        plain = gradients(hidden, width, top_k, device)
    assert all(one[: len(COUNTS)].isfinite().all() for one in plain.values())
    for programs in (None, 3, 528):
        if programs is not None:
            monkeypatch.setattr(wgrad, "programs", lambda device, count=programs: count)
        for name, one in gradients(hidden, width, top_k, device).items():
            assert torch.equal(plain[name].view(torch.int16), one.view(torch.int16)), (name, programs)


def gradients(hidden: int, width: int, top_k: int, device: torch.device) -> dict[str, Tensor]:
    """Stored (H, W) and (W, H). Rows and tokens of nobody are NaN, and so is what is not written."""
    generator = torch.Generator().manual_seed(3)
    owner_N = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    owner_N = owner_N[torch.randperm(len(owner_N), generator=generator)]
    unowned = -len(owner_N) % top_k + 7 * top_k
    shuffled = torch.cat((owner_N, torch.full((unowned,), len(COUNTS))))
    layout = build_layout(shuffled.view(-1, top_k).to(device), len(COUNTS))
    order_N, offs_E = layout.order_N.int(), layout.offs_E.int()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    left_TH, right_NW = normal(len(shuffled) // top_k, hidden), normal(len(shuffled), width)
    left_TH[-7:] = math.nan
    right_NW[len(owner_N) :] = math.nan
    made = {}
    for name, shape in (("plain", (hidden, width)), ("turned", (width, hidden))):
        made[name] = torch.full((len(COUNTS) + 1, *shape), math.nan, dtype=torch.bfloat16, device=device)
        out_EHW = made[name][:-1] if name == "plain" else made[name][:-1].transpose(1, 2)
        wgrad.weight_gradient(left_TH, order_N, top_k, right_NW, offs_E, heaviest_first(offs_E), out_EHW)
    return made
