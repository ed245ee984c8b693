"""Products with quantised matrices, against torch in fp64 on what the matrices stand for.

N routed rows · E experts · I in · O out
"""

import math

import pytest
import torch

from amoeba.core.layout import build_layout
from amoeba.kernels.lora.epilogue import Addend, padded_rank
from amoeba.kernels.tile_sizes import Configuration
from amoeba.kernels.weight_only_gemm import multiply_rows
from amoeba.precision import E2M1, FP8_128, MXFP4, MXFP8, NVFP4, quantise
from selection import each_value_once, quick

FORMATS = (FP8_128, MXFP8, MXFP4, NVFP4)
TINY = Configuration(block_m=16, block_n=32, block_k=32, group_m=2, num_warps=4, num_stages=2)
LONG = Configuration(block_m=16, block_n=64, block_k=256, group_m=1, num_warps=4, num_stages=2)  # over a block of 128
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SIZES = {"even": (64, 128, 1), "awkward": (37, 45, 1), "over a block": (150, 70, 2), "a column": (1, 33, 1)}


def problem(size: str, experts: int, device: torch.device, transposed: bool):
    """Rows and experts' matrices (O, I), stored as they are or the other way round, in one part or two."""
    out, inner, parts = SIZES[size]
    generator = torch.Generator().manual_seed(3)
    rows_down, columns = (inner, out) if transposed else (out, inner)
    matrix = torch.randn(experts, rows_down * parts, columns, generator=generator) / 8
    expert_TK = torch.rand(19, experts + 1, generator=generator).argsort(1)[:, :2]  # the last of them is nobody's
    return matrix.to(device), build_layout(expert_TK.to(device), experts), generator, parts


@each_value_once("format")
@quick(lambda size, dtype, transposed, format: dtype == torch.float32 and (size != "even" or transposed))
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("transposed", [False, True], ids=["W", "Wt"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rows_times_what_the_codes_stand_for(format, size, transposed, dtype, device):
    matrix, layout, generator, parts = problem(size, 3, device, transposed)
    quantised = quantise(matrix, format, parts=parts)
    dense = quantised.dequantise(torch.float64)
    dense = dense if transposed else dense.mT  # (E, I, O)
    x_TI = torch.randn(19, dense.shape[1], generator=generator).to(device, dtype)
    bias_EO = torch.randn(3, dense.shape[2], generator=generator).to(device, dtype)
    rank = padded_rank(5)
    low_NR = torch.randn(layout.order_N.shape[0], rank, generator=generator).to(device, dtype)
    factor_EOR = torch.randn(3, dense.shape[2], rank, generator=generator).to(device, dtype) / 8
    out_NO = torch.full((layout.order_N.shape[0], dense.shape[2]), math.nan, dtype=dtype, device=device)
    multiply_rows(
        x_TI,
        quantised,
        layout.offs_E,
        out_NO,
        transposed=transposed,
        order_N=layout.order_N,
        top_k=2,
        bias_EO=bias_EO,
        addend=Addend(low_NR, factor_EOR, rank),
        configuration=LONG if size == "over a block" else TINY,
    )
    start = 0
    for e, end in enumerate(layout.offs_E.tolist()):
        rows = slice(start, end)
        expected = x_TI.double()[layout.token_N[rows]] @ dense[e] + bias_EO[e].double()
        expected += low_NR[rows].double() @ factor_EOR[e].double().T
        error = (out_NO[rows].double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error <= TOLERANCE[dtype], f"expert {e}: {error:.2e}"
        start = end
    assert out_NO[start:].isnan().all(), "rows that belong to nobody are not written"


@quick(lambda format, transposed: transposed or format is MXFP4)
@pytest.mark.parametrize("transposed", [False, True], ids=["W", "Wt"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_every_code_and_the_ends_of_the_scales_are_decoded_exactly(format, transposed, device):
    """The identity times the matrix: each number has to come out as the definition has it. One NaN spoils sums."""
    width, is_byte = 256, format.element is not E2M1
    quantised = quantise(torch.randn(1, 8, width, generator=torch.Generator().manual_seed(0)).to(device), format)
    every = torch.arange(width, dtype=torch.uint8, device=device) & (255 if is_byte else 15)
    numbers = every.masked_fill(every & 127 == 127, 0)
    quantised.data.copy_((numbers if is_byte else E2M1.pack(every)).expand_as(quantised.data))
    if format.scale == "e8m0":
        ends = torch.tensor([1, 2, 9, 100, 127, 128, 240, 246], dtype=torch.uint8, device=device)
        quantised.scales.copy_(ends[None, :, None].expand_as(quantised.scales))

    def times_identity() -> tuple[torch.Tensor, torch.Tensor]:
        expected = quantised.dequantise()[0]
        expected = expected if transposed else expected.T.contiguous()
        identity, out_NO = torch.eye(expected.shape[0], device=device), torch.empty_like(expected)
        offs_E = torch.tensor([expected.shape[0]], dtype=torch.int32, device=device)
        return expected, multiply_rows(identity, quantised, offs_E, out_NO, transposed=transposed, configuration=TINY)

    expected, found = times_identity()
    assert torch.equal(found, expected)
    if is_byte:
        quantised.data[0, 3, 7] = 0x7F
    elif format.scale == "e8m0":
        quantised.scales[0, 3, 0] = 255
    else:
        quantised.scales[0, 3, 0] = 0x7F
    expected, found = times_identity()
    assert torch.equal(found.isnan().any(0), expected.isnan().any(0)) and found.isnan().any()


def test_no_rows(device: torch.device) -> None:
    quantised = quantise(torch.randn(2, 5, 7).to(device), MXFP8)
    offs_E = torch.zeros(2, dtype=torch.int32, device=device)
    out_NO = torch.empty(0, 5, device=device)
    assert multiply_rows(torch.empty(0, 7, device=device), quantised, offs_E, out_NO).shape == (0, 5)


def test_other_shapes_are_refused(device: torch.device) -> None:
    quantised = quantise(torch.randn(2, 5, 7).to(device), MXFP8)
    offs_E = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"expected \(N, I\), \(E, O, I\) with contiguous matrices"):
        multiply_rows(torch.empty(3, 8, device=device), quantised, offs_E, torch.empty(3, 5, device=device))
