"""Gradients of weights in e4m3 by torch, where the kernel for Hopper cannot run; their copies are the real ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from amoeba.backends.fp8_kernel_rows import AllInFp8KernelRows
from amoeba.kernels.hopper import scaled_gradient
from amoeba.kernels.hopper.product import tile_table
from amoeba.kernels.quantise_turned import RowBlocks, Turned, row_blocks
from amoeba.precision.formats import E4M3


def weight_gradient(left: Turned, right: Turned, blocks: RowBlocks, heaviest_E: Tensor, out_EMN: Tensor) -> None:
    height = out_EMN.shape[1]
    scales_BM = left.scales[: blocks.most * height].view(-1, height)
    for e, (start, end) in enumerate(itertools.pairwise([0, *blocks.end_E.tolist()])):
        one = E4M3.decode(left.codes_BWR[start:end]) * scales_BM[start:end, :, None]
        other = E4M3.decode(right.codes_BWR[start:end]) * right.scales[:, None]
        out_EMN[e] = torch.einsum("bmr,bnr->mn", one, other)


def stand_in_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(rows: AllInFp8KernelRows) -> RowBlocks:
        return row_blocks(rows.offs_E, tile_table(rows.offs_E, rows.order_N.shape[0]))

    monkeypatch.setattr(scaled_gradient, "weight_gradient", weight_gradient)
    monkeypatch.setattr(AllInFp8KernelRows, "row_blocks", property(blocks))
