"""Codes and scales bit by bit, against tables of what each code stands for, written down here from the definitions."""

import bisect
import itertools
import math

import pytest
import torch

from amoeba.precision import (
    E2M1,
    E4M3,
    FORMATS,
    FP8_128,
    FP8_128_ROWS,
    FP8_TRAINING,
    FP8_TRAINING_ROWS,
    MXFP4,
    MXFP8,
    NVFP4,
    Format,
    quantise,
    quantised,
)
from amoeba.precision.formats import (
    E8M0,
    MXFP8_TRAINING,
    MXFP8_TRAINING_ROWS,
    NVFP4_TRAINING,
    NVFP4_TRAINING_ROWS,
    format_named,
)
from amoeba.precision.quantised import QuantisedMatrix
from selection import each_value_once


def e4m3_value(code: int) -> float:
    """Sign, 4 bits of exponent with a bias of 7, 3 of mantissa; all ones is NaN."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(size, sign)


def e2m1_value(code: int) -> float:
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(size, sign)


def e8m0_value(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


TABLES = {"e4m3": [e4m3_value(code) for code in range(256)], "e2m1": [e2m1_value(code) for code in range(16)]}


def nearest(value: float, table: list[float]) -> int:
    """The code of the nearest number, of two the even code; of the value's sign. Exact: all of it fits a double."""
    half = len(table) // 2
    sizes = [size for size in table[:half] if not math.isnan(size)]
    above = min(bisect.bisect_left(sizes, abs(value)), len(sizes) - 1)
    below = max(above - 1, 0)
    further = abs(value) - sizes[below] - (sizes[above] - abs(value))
    code = above if further > 0 or (further == 0 and above % 2 == 0) else below
    return code + half * (math.copysign(1, value) < 0)


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


@pytest.mark.parametrize("element", [E4M3, E2M1], ids=lambda element: element.name)
def test_every_code_stands_for_its_number_and_comes_back(element) -> None:
    table = TABLES[element.name]
    codes = torch.arange(len(table), dtype=torch.uint8)
    values = element.decode(codes)
    expected = torch.tensor(table)
    assert values.dtype == torch.float32
    assert torch.equal(values.view(torch.int32)[~expected.isnan()], expected.view(torch.int32)[~expected.isnan()])
    assert torch.equal(values.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(element.encode(values)[numbers], codes[numbers])


@pytest.mark.parametrize("element", [E4M3, E2M1], ids=lambda element: element.name)
def test_rounding_is_to_the_nearest_with_ties_to_even_and_saturates(element) -> None:
    table = TABLES[element.name]
    sizes = [size for size in table[: len(table) // 2] if not math.isnan(size)]
    middles = [(lower + upper) / 2 for lower, upper in itertools.pairwise(sizes)]
    beside = [math.nextafter(middle, side) for middle in middles for side in (0, math.inf)]
    beside32 = [torch.nextafter(torch.tensor(m), torch.tensor(s)).item() for m in middles for s in (0.0, math.inf)]
    drawn = (torch.randn(300, generator=torch.Generator().manual_seed(0)) * sizes[-1] / 3).tolist()
    far = [sizes[-1] * 1.01, sizes[-1] * 2, 3e38, sizes[1] / 2, sizes[1] / 4, 1e-45, 0.0]
    positive = [*sizes, *middles, *beside32, *drawn, *far, *map(fp32, beside)]
    values = [*positive, *(-value for value in positive)]
    found = element.encode(torch.tensor(values)).tolist()
    wrong = [(v, f) for v, f in zip(values, found, strict=True) if f != nearest(v, table)]
    assert not wrong, wrong[:5]


def test_nan_and_infinities_are_nan_in_e4m3() -> None:
    assert E4M3.decode(E4M3.encode(torch.tensor([math.nan, -math.nan, math.inf, -math.inf]))).isnan().all()


def test_every_exponent() -> None:
    found = E8M0.decode(torch.arange(256, dtype=torch.uint8)).double()
    expected = torch.tensor([e8m0_value(code) for code in range(256)], dtype=torch.float64)
    assert torch.equal(found[:255], expected[:255]) and found[255].isnan()


def test_two_codes_to_a_byte_the_first_in_the_low_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes % 16, codes // 16), dim=1)
    assert torch.equal(E2M1.pack(pairs).flatten(), codes)
    assert torch.equal(E2M1.decode_packed(codes[:, None]), E2M1.decode(pairs))


# --- whole matrices ---------------------------------------------------------------------------------------------------


def truth_of(matrix: torch.Tensor, format: Format) -> tuple[dict, list[list[int | None]], list[list[float]]]:
    """Scale codes by block, codes and numbers, one number after the other by the definitions, in fp32 where they say
    fp32. Of a number that is not finite the code is None."""
    table, (block_rows, block_columns) = TABLES[format.element.name], format.block
    rows = matrix.tolist()
    blocks: dict[tuple[int, int], list[float]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            blocks.setdefault((i // block_rows, j // block_columns), []).append(value)
    amax = {place: max((abs(v) for v in values if math.isfinite(v)), default=0.0) for place, values in blocks.items()}
    matrix_scales = {}
    for i, _ in amax:
        over_all = max(size for (other, _), size in amax.items() if other == i or not format.by_row)
        matrix_scales[i] = max(fp32(over_all / fp32(6.0 * 448.0)), 2.0**-126) if over_all else 1.0
    stored: dict[tuple[int, int], float] = {}
    scales: dict[tuple[int, int], float] = {}
    for place, largest in amax.items():
        if format.scale == "fp32" or format.power_of_two:
            scales[place] = max(fp32(largest / 448), 2.0**-126) if largest else 1.0
            if format.power_of_two:  # the next one, or itself
                scales[place] = min(2.0**k for k in range(-126, 128) if 2.0**k >= scales[place])
            stored[place] = scales[place] if format.scale == "fp32" else math.log2(scales[place]) + 127
        elif format.scale == "e8m0":
            emax = 8 if format.element is E4M3 else 2
            exponent = math.floor(math.log2(largest)) - emax if largest else -127
            stored[place] = max(-127, min(127, exponent)) + 127
            scales[place] = e8m0_value(int(stored[place]))
        else:
            stored[place] = nearest(fp32(fp32(largest / 6) / matrix_scales[place[0]]), TABLES["e4m3"])
            scales[place] = fp32(TABLES["e4m3"][int(stored[place])] * matrix_scales[place[0]])
    codes, numbers = [], []
    for i, row in enumerate(rows):
        of_row, represented = [], []
        for j, value in enumerate(row):
            place = i // block_rows, j // block_columns
            scale = scales[place]
            finite = math.isfinite(value)
            code = nearest(fp32(value / scale) if scale else math.copysign(0.0, value), table) if finite else None
            of_row.append(code)
            if format.element is E2M1 and not all(map(math.isfinite, blocks[place])):
                represented.append(math.nan)
                stored[place] = 255 if format.scale == "e8m0" else 0x7F
            else:
                represented.append(math.nan if code is None else fp32(table[code] * scale))
        codes.append(of_row)
        numbers.append(represented)
    return stored, codes, numbers


def awkward_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Sizes over many powers of two, whole blocks of zeros, a -0, infinities, numbers below fp32's smallest normal."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= 2.0 ** torch.randint(-12, 6, (rows, 1), generator=generator)
    matrix[0] = 0
    matrix[0, 0] = -0.0
    if rows > 4 and columns > 3:
        matrix[1] = torch.randn(columns, generator=generator) * 1e-38
        matrix[2, 1], matrix[2, 2] = math.inf, -math.inf
        matrix[3] = torch.randint(-6, 7, (columns,), generator=generator).float()  # many ties
    return matrix


@each_value_once()
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 31), (7, 64), (130, 5), (6, 145)])
def test_a_quantised_matrix_has_the_bits_of_its_definition(format: Format, rows: int, columns: int) -> None:
    matrix = awkward_matrix(rows, columns)
    found = quantise(matrix, format)
    stored, codes, numbers = truth_of(matrix, format)
    for (i, j), expected in stored.items():
        assert found.scales[i, j].item() == expected, (i, j)
    shown = found.data
    if format.element is E2M1:
        shown = torch.stack((found.data & 15, found.data >> 4), dim=-1).flatten(1)
        assert not shown[:, columns:].any()  # what fills the last block
        shown = shown[:, :columns]
    same = [
        got == expected or expected is None
        for got_row, row in zip(shown.tolist(), codes, strict=True)
        for got, expected in zip(got_row, row, strict=True)
    ]
    assert all(same)
    torch.testing.assert_close(found.dequantise(), torch.tensor(numbers), rtol=0, atol=0, equal_nan=True)
    assert found.shape == (rows, columns)


@each_value_once()
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_nan_or_an_infinity_becomes_nan_or_makes_its_block_nan(format: Format, value: float) -> None:
    matrix = torch.ones(4, 70)
    matrix[2, 40] = value
    is_nan = quantise(matrix, format).dequantise().isnan()
    expected = torch.zeros_like(is_nan)
    rows, block = format.block
    if format.element is E4M3:
        expected[2, 40] = True
    else:
        expected[2 // rows * rows :, 40 // block * block : (40 // block + 1) * block][:rows] = True
    assert torch.equal(is_nan, expected)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_stack_is_its_matrices_and_parts_have_blocks_of_their_own(format: Format, monkeypatch) -> None:
    stack = torch.randn(3, 150, 40, generator=torch.Generator().manual_seed(1))
    stack *= torch.tensor([1.0, 30.0, 0.01])[:, None, None]
    stack[:, 75:] *= 100
    whole, closest = quantise(stack, format, parts=2), quantise(stack, format, parts=2, closest=True)
    with monkeypatch.context() as patched:
        patched.setattr(quantised, "AT_ONCE", 0)  # one after the other
        apart, closest_apart = quantise(stack, format, parts=2), quantise(stack, format, parts=2, closest=True)
    for found, expected in ((whole, apart), (closest, closest_apart)):
        assert torch.equal(found.data, expected.data) and torch.equal(found.scales, expected.scales)
        if format.has_matrix_scale:
            assert torch.equal(found.matrix_scale, expected.matrix_scale)
    for e in range(3):
        halves = [quantise(half, format).dequantise() for half in (stack[e, :75], stack[e, 75:])]
        if not format.has_matrix_scale:
            assert torch.equal(whole[e].dequantise(), torch.cat(halves))
        assert torch.equal(whole[e].dequantise(), whole.dequantise()[e])


@each_value_once()
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4)])
def test_nothing_at_all(format: Format, shape: tuple[int, ...]) -> None:
    assert quantise(torch.empty(shape), format).dequantise().shape == shape


def test_errors_and_bytes_are_those_of_the_formats() -> None:
    matrix = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2))
    errors = {
        FP8_128: 0.027,
        FP8_128_ROWS: 0.027,
        FP8_TRAINING: 0.027,
        FP8_TRAINING_ROWS: 0.027,
        MXFP8: 0.030,
        MXFP4: 0.12,
        NVFP4: 0.10,
        MXFP8_TRAINING: 0.027,
        MXFP8_TRAINING_ROWS: 0.027,
        NVFP4_TRAINING: 0.13,
        NVFP4_TRAINING_ROWS: 0.10,
    }
    bits = {
        FP8_128: 8.01,
        FP8_128_ROWS: 8.26,
        FP8_TRAINING: 8.01,
        FP8_TRAINING_ROWS: 8.26,
        MXFP8: 8.26,
        MXFP4: 4.26,
        NVFP4: 4.51,
        MXFP8_TRAINING: 8.01,
        MXFP8_TRAINING_ROWS: 8.26,
        NVFP4_TRAINING: 4.04,
        NVFP4_TRAINING_ROWS: 4.54,
    }
    for format, most in errors.items():
        found = quantise(matrix.bfloat16(), format)
        assert (found.dequantise() - matrix).norm() <= most * matrix.norm(), format.name
        assert found.nbytes * 8 / matrix.numel() <= bits[format]


def test_quantising_what_was_dequantised_changes_no_number() -> None:
    """Nor a code, unless the largest was rounded down to where half the scale will do."""
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    for format in FORMATS.values():
        once = quantise(matrix, format)
        again = quantise(once.dequantise(), format)
        if format.by_row:  # the number of one row in many is off by its last bit
            assert torch.allclose(again.dequantise(), once.dequantise(), rtol=1e-6)
            continue
        assert torch.equal(again.dequantise(), once.dequantise()), format.name
        assert format.power_of_two or torch.equal(again.data, once.data), format.name


@pytest.mark.parametrize("shape", [(2, 5, 31), (2, 40, 33), (1, 1, 1), (3, 16, 64)])
@pytest.mark.parametrize("format", [FP8_TRAINING, MXFP8_TRAINING, NVFP4_TRAINING], ids=lambda format: format.name)
def test_a_matrix_in_square_blocks_that_is_transposed_is_the_same_numbers(format: Format, shape: tuple) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    found = quantise(matrix, format)
    assert torch.equal(found.transposed().dequantise(), found.dequantise().mT)
    turned = quantise(matrix.mT, format)
    assert torch.equal(found.transposed().data, turned.data) and torch.equal(found.transposed().scales, turned.scales)


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match=r"format: expected one of fp8-128, .*; got 'fp8'"):
        format_named("fp8")
    with pytest.raises(ValueError, match=r"of floating point, in equal parts; got torch.float32"):
        quantise(torch.zeros(5, 4), MXFP8, parts=2)
    with pytest.raises(ValueError, match=r"a matrix in mxfp4: expected 16 bytes \(uint8\) in a row of 20"):
        QuantisedMatrix(torch.zeros(3, 10, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), MXFP4, 20)
    with pytest.raises(ValueError, match="matrix_scale of nvfp4: expected one of shape"):
        QuantisedMatrix(torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8), NVFP4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_a_gpu_finds_the_codes_and_scales_that_a_cpu_finds(format: Format) -> None:
    matrix = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    here, there = quantise(matrix, format), quantise(matrix.cuda(), format)
    assert torch.equal(here.data, there.data.cpu())
    assert torch.equal(here.scales, there.scales.cpu())


@pytest.mark.parametrize("format", [MXFP4, NVFP4, FP8_128], ids=lambda format: format.name)
def test_without_numbers_only_shapes_are_made(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels are compiled ahead: to quantise hundreds of experts that hold nothing took most of the time."""
    monkeypatch.setattr("amoeba.precision.quantised.quantise_again", None)
    found = quantise(torch.empty(3, 64, 256, dtype=torch.bfloat16, device="meta"), format)
    assert found.shape == (3, 64, 256) and found.data.is_meta
