"""The C++ core reads blocks: the bits of the definition, and products with one format for gate_up and another
for down."""

import pytest
import torch
from torch import Tensor, nn

from amoeba import Activation, Routing, experts
from amoeba.backends.read_quantised import scaled_codes
from amoeba.core.weights import AnyExperts
from amoeba.cpu.core import load_core, why_no_core
from amoeba.precision.blocks import BLOCK_KINDS
from amoeba.precision.formats import MXFP4, NVFP4, OF_BLOCKS, Format
from amoeba.precision.quantised import QuantisedMatrix, quantise
from amoeba.precision.quantised_experts import QuantisedExperts, ReadInBlocks, dequantise_experts
from selection import each_value_once

pytestmark = pytest.mark.skipif(why_no_core() is not None, reason=str(why_no_core()))
HALVES = {"q6_k": [208], "q3_k": [108], "q2_k": [80, 82], "q8_0": [0], "q5_0": [0], "q4_0": [0], "nf4": []}
ROWS_IN_8_BITS = 2e-2  # error of a layer, relative; weights whose offsets and numbers cancel have the largest
EXPERTS, HIDDEN, INTERMEDIATE = 3, 608, 280  # blocks of 256, of which the last is cut


def random_matrix(
    format: Format, experts: int = 2, rows: int = 5, columns: int = 768, size: int = 0xBB
) -> QuantisedMatrix:
    """Any bits, with scales that are finite. size: a mask of the upper byte of numbers in fp16."""
    kind, generator = BLOCK_KINDS[format.name], torch.Generator().manual_seed(0)
    stored = experts, rows, -(-columns // kind.numbers) * kind.bytes
    data = torch.randint(0, 256, stored, dtype=torch.uint8, generator=generator)
    for place in HALVES.get(format.name, [0, 2]):
        data.unflatten(-1, (-1, kind.bytes))[..., place + 1] &= size
    if format.name == "nf4":
        blocks = data.unflatten(-1, (-1, kind.bytes))
        blocks[..., :4] = (torch.rand(*blocks.shape[:-1], 1, generator=generator) / 64).view(torch.uint8)
    return QuantisedMatrix(data, torch.empty((experts, 0, 0), dtype=torch.uint8), format, columns)


@each_value_once()
@pytest.mark.parametrize("columns", [768, 100])
@pytest.mark.parametrize("format", OF_BLOCKS.values(), ids=lambda format: format.name)
def test_an_expert_is_dequantised_to_the_bits_of_the_definition(format, columns):
    matrix = random_matrix(format, columns=columns)
    codes = scaled_codes(ReadInBlocks(matrix, torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.empty((5, columns), dtype=dtype)
        load_core().dequantise(codes, 1, out=found)
        assert torch.equal(found, matrix[1].dequantise(dtype))


def outcome(weights: AnyExperts, tokens: int, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    expert_TK = torch.randint(0, EXPERTS, (tokens, 2), generator=generator)
    routing = Routing(expert_TK, torch.rand(tokens, 2, generator=generator))
    with torch.no_grad():
        return experts(x_TH, routing, weights, backend=backend).double()


@each_value_once()
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize(
    ("up", "down"),
    [("q4_k", "q6_k"), ("q8_0", "q5_0"), ("q2_k", "q3_k"), ("q5_1", "q4_1"), ("q5_k", "q4_0"), ("nf4", "q8_0")],
)
def test_products_of_two_formats_are_those_of_the_dequantised_experts(up, down, tokens):
    shapes = {"experts": EXPERTS, "rows": 2 * INTERMEDIATE, "columns": HIDDEN}
    gate_up = random_matrix(OF_BLOCKS[up], **shapes, size=0x9B)  # small numbers
    shapes = {"experts": EXPERTS, "rows": HIDDEN, "columns": INTERMEDIATE}
    weights = QuantisedExperts.holding(gate_up, random_matrix(OF_BLOCKS[down], **shapes), activation=Activation())
    assert weights.down_format is OF_BLOCKS[down]
    assert QuantisedExperts.of(weights.tensors(), weights.constants()).constants() == weights.constants()
    in_whole_numbers = tokens == 300 and load_core().in_whole_numbers and up != "nf4"
    of_rows = ROWS_IN_8_BITS if in_whole_numbers else 0  # in both products
    for dtype, tolerance in ((torch.float32, 1e-5 + of_rows), (torch.bfloat16, 1e-2 + of_rows)):
        found = outcome(weights.to(dtype), tokens, dtype, "cpu")
        expected = outcome(dequantise_experts(weights, torch.float64), tokens, torch.float64)
        assert (found - expected).norm() < tolerance * expected.norm()


def in_8_bits(rows: Tensor) -> Tensor:
    """As whole numbers up to 127 with a scale for each 32 columns."""
    groups = nn.functional.pad(rows, (0, -rows.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest)).round().double() * (largest / 127)).flatten(1)[:, : rows.shape[1]]


@each_value_once()
@pytest.mark.parametrize("columns", [768, 300, 33])
@pytest.mark.parametrize("format", [*OF_BLOCKS.values(), MXFP4, NVFP4], ids=lambda format: format.name)
def test_rows_of_a_prompt_meet_codes_in_whole_numbers(format, columns):
    if format.scale == "inside":
        matrix = random_matrix(format, 4, 53, columns, size=0x9B)
    else:
        matrix = quantise(torch.randn(4, 53, columns), format)
    generator = torch.Generator().manual_seed(1)
    if not load_core().multiplies_whole(scaled_codes(ReadInBlocks(matrix, torch.float32))):
        pytest.skip("not on this CPU, or not of this format")
    codes, offs_E = scaled_codes(ReadInBlocks(matrix, torch.float32)), torch.tensor([1, 1, 18, 88], dtype=torch.int32)
    x_TI, bias_EO = torch.randn(20, columns, generator=generator), torch.randn(4, 53, generator=generator)
    x_TI[:, 7] *= 100
    index_N = torch.randint(0, 20, (88,), generator=generator)
    found, given = torch.full((90, 53), torch.nan), {"bias_EO": bias_EO, "index_N": index_N}
    load_core().multiply_whole(offs_E, x_TI, codes, out=found[:88], **given)
    for expert, start, end in ((0, 0, 1), (2, 1, 18), (3, 18, 88)):
        dequantised, bias_O = matrix[expert].dequantise(torch.float64).T, bias_EO[expert]
        for rows, tolerance in ((x_TI, 4e-2), (in_8_bits(x_TI), 1e-6)):  # 32 columns share the large one's scale
            truth = rows[index_N[start:end]].double() @ dequantised + bias_O
            assert (found[start:end] - truth).norm() < tolerance * truth.norm()
    assert found[88:].isnan().all()

    alone, rows = torch.empty(1, 53), x_TI[index_N[40:41]].clone()
    offs_E = torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    load_core().multiply_whole(offs_E, rows, codes, out=alone, bias_EO=bias_EO)
    assert torch.equal(alone[0], found[40])
    for wrong in (torch.nan, torch.inf):
        rows[0, columns // 2] = wrong
        load_core().multiply_whole(offs_E, rows, codes, out=alone)
        assert alone.isnan().all()


def test_formats_with_scales_apart_are_not_mixed():
    up = quantise(torch.randn(2, 64, 64), OF_BLOCKS["q8_0"])
    down = quantise(torch.randn(2, 64, 32), MXFP4)
    with pytest.raises(ValueError, match="in one format"):
        QuantisedExperts.holding(up, down)
