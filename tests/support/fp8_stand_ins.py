"""The products of Hopper in fp8 stood in for by torch: the rest of a pass is the real one, interpreted and in fp32.

T tokens · K experts per token · N = T·K routed rows · E experts

    stand_in(monkeypatch)       # in processes that a test starts: with pytest.MonkeyPatch.context() as patch
"""

import itertools

import pytest
import torch
from torch import Tensor

from amoeba import Activation
from amoeba.backends import fp8_triton
from amoeba.backends.fp8_kernel_rows import AllInFp8KernelRows
from amoeba.backends.triton_rows import HopperRows, TritonRows
from amoeba.kernels.hopper import fp8_gemm, fp8_wgrad
from amoeba.kernels.hopper.gemm import tile_table
from amoeba.kernels.quantise import RowBlocks, Transposed, row_blocks
from amoeba.precision import QuantisedMatrix, quantise
from amoeba.precision.formats import E4M3
from amoeba.proof.reference.experts import activate


def product(
    rows: QuantisedMatrix,
    matrix: QuantisedMatrix,
    offs_E: Tensor,
    out: Tensor,
    *,
    order_N: Tensor | None = None,
    top_k: int = 1,
    bias_EO: Tensor | None = None,
) -> None:
    for e, (start, end) in enumerate(itertools.pairwise([0, *offs_E.tolist()])):
        chosen = slice(start, end) if order_N is None else order_N[start:end] // top_k
        out[start:end] = rows.dequantise()[chosen] @ matrix[e].dequantise().T + (0 if bias_EO is None else bias_EO[e])


def up(
    x: QuantisedMatrix,
    order_N: Tensor,
    top_k: int,
    matrix: QuantisedMatrix,
    offs_E: Tensor,
    activation: Activation,
    a: QuantisedMatrix,
    *,
    h_NJ: Tensor | QuantisedMatrix | None = None,
    bias_EJ: Tensor | None = None,
) -> None:
    h = h_NJ if isinstance(h_NJ, Tensor) else torch.zeros(order_N.shape[0], matrix.shape[1])
    product(x, matrix, offs_E, h, order_N=order_N, top_k=top_k, bias_EO=bias_EJ)
    owned = int(offs_E[-1])
    coded = [(a, activate(h[:owned], activation))] + ([(h_NJ, h[:owned])] if isinstance(h_NJ, QuantisedMatrix) else [])
    for codes, numbers in coded:
        found = quantise(numbers, codes.format)
        codes.data[:owned], codes.scales[:owned] = found.data, found.scales


def weight_gradient(
    left: Transposed, right: Transposed, blocks: RowBlocks, heaviest_E: Tensor, out_EMN: Tensor
) -> None:
    height = out_EMN.shape[1]
    scales_BM = left.scales[: blocks.most * height].view(-1, height)
    for e, (start, end) in enumerate(itertools.pairwise([0, *blocks.end_E.tolist()])):
        one = E4M3.decode(left.codes_BWR[start:end]) * scales_BM[start:end, :, None]
        other = E4M3.decode(right.codes_BWR[start:end]) * right.scales[:, None]
        out_EMN[e] = torch.einsum("bmr,bnr->mn", one, other)


def _row_blocks(rows: AllInFp8KernelRows) -> RowBlocks:
    return row_blocks(rows.offs_E, tile_table(rows.offs_E, rows.order_N.shape[0]))


def stand_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fp8_gemm, "multiply", product)
    patch.setattr(fp8_gemm, "up", up)
    patch.setattr(HopperRows, "table", property(lambda rows: rows.offs_E))
    patch.setattr(HopperRows, "_multiply", TritonRows._multiply)
    patch.setattr(HopperRows, "weight_gradient", TritonRows.weight_gradient)
    patch.setattr(fp8_wgrad, "weight_gradient", weight_gradient)
    patch.setattr(AllInFp8KernelRows, "row_blocks", property(_row_blocks))
    patch.setattr(fp8_triton.BACKEND, "why_not", lambda request: None, raising=False)
