"""Hopper's products with experts in codes: on a GPU the bits of the same products on what the codes stand for;
elsewhere which matrices they take, which layers, and what such a layer asks of them.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hopper import IS_HOPPER, E, K, Rows, normal, routed
from torch import Tensor

from amoeba import Activation, Routing, experts
from amoeba.backends import quantised_rows, quantised_triton
from amoeba.backends.quantised_rows import why_not_hopper
from amoeba.core.problem import Problem
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.kernels.hopper import gemm, weight_only_gemm
from amoeba.kernels.hopper.tile_order import FEW_ROWS
from amoeba.kernels.lora.epilogue import Addend
from amoeba.precision import E2M1, FP8_128, FP8_128_ROWS, MXFP4, MXFP8, NVFP4, Format, QuantisedMatrix, quantise
from amoeba.precision.formats import OF_BLOCKS, fp8_blocks
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.proof.reference.experts import activate
from selection import each_value_once, quick
from small_layer import Layer, kernel_device

FORMATS = {"fp8": FP8_128, "mxfp8": MXFP8, "mxfp4": MXFP4, "nvfp4": NVFP4}
BF16, GATED = torch.bfloat16, Activation()
UNTOUCHED = -7.0  # no NaN, which rows of nobody would become as well
by_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
BLOCKS = tuple(OF_BLOCKS[name] for name in ("q8_0", "q4_k", "q6_k", "nf4"))


def on_hopper(test: Callable) -> Callable:
    needs = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")
    return pytest.mark.gpu(needs(test))


# H, I and parts of gate_up. Blocks of fp8 are cut at 192 and 320, and in one part they are of gate and up at once.
SIZES = {
    "whole blocks": (512, 256, 2),
    "half blocks": (192, 320, 2),
    "half blocks in one part": (320, 192, 1),
    "one part": (256, 320, 1),
    "columns in tall groups": (192, 576, 2),
}
ROUTED = ("rests", "everywhere", "one row", "nobody")
# Bias, whether h is kept, and the addend's rank.
UPS = {
    "h": (False, True, 0),
    "bias": (True, False, 0),
    "h, bias, rank 32": (True, True, 32),
    "rank 16": (False, False, 16),
}
PRODUCTS = {
    "down": (False, False, False, 0),
    "down with bias": (False, False, True, 0),
    "down with rank 16": (False, False, False, 16),
    "dA'": (True, True, False, 0),
    "dA' with rank 16": (True, True, False, 16),
    "dx": (False, True, False, 0),
    "dx with rank 16": (False, True, False, 16),
    "dx with rank 32": (False, True, False, 32),
    "dx with rank 128": (False, True, False, 128),
}  # gathered, transposed, bias, rank
FEW = ("h", "bias", "down", "dA'", "dx with rank 32")


def often(format: Format, plan: str, size: str, routing: str) -> bool:
    """Whether every run has it: a plan is compiled in seconds, sizes and rows are not compiled in."""
    return (format in (FP8_128, MXFP4) or plan in FEW) and (routing == "rests" or size == "half blocks")


def codes(format: Format, rows: int, columns: int, device: torch.device, parts: int = 1, seed: int = 1):
    """A matrix of each expert, and what it stands for."""
    drawn = normal(E, rows, columns, dtype=torch.float32, seed=seed, device=device, scale=columns**-0.5)
    matrix = quantise(drawn, format, parts=parts)
    assert weight_only_gemm.why_not(matrix) is None
    return matrix, matrix.dequantise(BF16)


def addend_of(rank: int, width: int, rows: Rows, device: torch.device, turned: bool) -> Addend | None:
    """turned: its factor is stored the other way round, as the gradients of rows have it."""
    if rank == 0:
        return None
    factor_EOR = normal(E, width, rank, dtype=BF16, seed=4, device=device, scale=rank**-0.5)
    return Addend(rows.sorted(rank, BF16, seed=3), factor_EOR.mT.contiguous().mT if turned else factor_EOR, rank)


def untouched(rows: Rows, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """An output, and the memory that it is the beginning of."""
    memory = torch.full((rows.tokens * K + 64, width), UNTOUCHED, dtype=BF16, device=device)
    return memory[: rows.tokens * K], memory


def assert_same_bits(
    of_codes: Callable[[int], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    rows: Rows,
    plan: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice by a program for each multiprocessor, then by three, which compute many tiles one after the other; some
    plans in tiles of few rows, too. of_codes: of a tile's rows."""
    few = ((None, FEW_ROWS), (3, FEW_ROWS)) if plan in FEW else ()
    for number, block_m in ((None, gemm.BLOCK_M), (None, gemm.BLOCK_M), (3, gemm.BLOCK_M), *few):
        count = weight_only_gemm.programs if number is None else lambda device, number=number: number
        with monkeypatch.context() as patch:
            patch.setattr(weight_only_gemm, "programs", count)
            computed = of_codes(block_m)
        for found, wanted in zip(computed, expected, strict=True):
            assert (found[rows.owned :] == UNTOUCHED).all(), "rows that belong to nobody were written"
            assert wanted[: rows.owned].isfinite().all()
            assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), f"by {number or 'all'} programs"


@on_hopper
@quick(often)
@pytest.mark.parametrize("routing", ROUTED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", UPS)
@by_format
def test_up_has_the_bits_of_the_product_on_the_dequantised_matrix(format, plan, size, routing, device, monkeypatch):
    (hidden, inner, parts), (has_bias, keep, rank), rows = SIZES[size], UPS[plan], routed(routing, device)
    x_TH = rows.of_tokens(hidden, BF16, seed=0)
    gate_up, dense_EJH = codes(format, 2 * inner, hidden, device, parts)
    bias_EJ = normal(E, 2 * inner, dtype=BF16, seed=2, device=device) if has_bias else None
    addend = addend_of(rank, 2 * inner, rows, device, turned=False)

    def compute(up: Callable[..., None], matrix: Any, block_m: int = gemm.BLOCK_M) -> tuple[Tensor, ...]:
        table = gemm.tile_table(rows.offs_E, rows.tokens * K, block_m=block_m)
        h_NJ, h_memory = untouched(rows, 2 * inner, device)
        a_NI, a_memory = untouched(rows, inner, device)
        kept = {"h_NJ": h_NJ if keep else None, "bias_EJ": bias_EJ, "addend": addend}
        up(x_TH, rows.order_N, K, matrix, table, GATED, a_NI, **kept, block_m=block_m)
        return (a_memory, h_memory) if keep else (a_memory,)

    expected = compute(gemm.up, dense_EJH)
    of_codes = partial(compute, weight_only_gemm.up, gate_up)
    assert_same_bits(of_codes, expected, rows, plan, monkeypatch)


@on_hopper
@quick(often)
@pytest.mark.parametrize("routing", ROUTED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", PRODUCTS)
@by_format
def test_products_have_the_bits_of_those_on_the_dequantised_matrix(format, plan, size, routing, device, monkeypatch):
    (hidden, inner, parts), rows = SIZES[size], routed(routing, device)
    gathered, transposed, has_bias, rank = PRODUCTS[plan]
    if plan.startswith("dx"):
        matrix, dense = codes(format, 2 * inner, hidden, device, parts)
    else:
        matrix, dense = codes(format, hidden, inner, device)
    dense = dense.mT if transposed else dense
    _, width, depth = dense.shape
    left = (rows.of_tokens if gathered else rows.sorted)(depth, BF16, seed=0)
    bias_EO = normal(E, width, dtype=BF16, seed=2, device=device) if has_bias else None
    given: dict[str, Any] = {"bias_EO": bias_EO, "addend": addend_of(rank, width, rows, device, transposed)}
    given |= {"order_N": rows.order_N, "top_k": K} if gathered else {}

    def compute(
        multiply: Callable[..., None], matrix: Any, block_m: int = gemm.BLOCK_M, **how: bool
    ) -> tuple[Tensor, ...]:
        table = gemm.tile_table(rows.offs_E, rows.tokens * K, block_m=block_m)
        out_NO, memory = untouched(rows, width, device)
        multiply(left, matrix, table, out_NO, **given, **how, block_m=block_m)
        return (memory,)

    expected = compute(gemm.multiply, dense)
    of_codes = partial(compute, weight_only_gemm.multiply, matrix, transposed=transposed)
    assert_same_bits(of_codes, expected, rows, plan, monkeypatch)


# Of an expert all scales are one of these; what they make of codes overflows, underflows or is no number.
ENDS = {
    "fp32": (1e-40, 1.2e-38, 1.0, 1e36, math.inf, math.nan),
    "e8m0": (0, 1, 127, 253, 254, 255),
    "e4m3": (0, 1, 0x38, 0x7E, 0x7F, 0xC0),
}


@on_hopper
@pytest.mark.parametrize("transposed", [False, True])
@by_format
def test_every_code_and_the_ends_of_the_scales_are_decoded(format, transposed, device) -> None:
    """A column of the product is one number all along its depth, which a mean of them gives back."""
    size, ends = 256, ENDS[format.scale]
    matrix = quantise(torch.zeros(len(ends), size, size, device=device), format)
    every = torch.arange(size, device=device).to(torch.uint8)
    every = every if format.element.bits == 8 else every & 15
    if transposed:
        matrix.data.copy_(every if format.element.bits == 8 else E2M1.pack(every))
    else:
        matrix.data.copy_((every if format.element.bits == 8 else every * 17)[:, None])
    for e, end in enumerate(ends):
        matrix.scales[e] = end
    if matrix.matrix_scale is not None:
        matrix.matrix_scale.copy_(torch.tensor([1e-30, 1e-38, 1e-3, 1.0, 1.0, 1e20]))
    dense = matrix.dequantise(BF16)
    count = 130 * len(ends)
    rows_NW = torch.full((count, size), 1 / size, dtype=BF16, device=device)
    offs_E = torch.arange(130, count + 1, 130, dtype=torch.int32, device=device)
    table = gemm.tile_table(offs_E, count)
    found, wanted = (torch.full((count, size), UNTOUCHED, dtype=BF16, device=device) for _ in range(2))
    gemm.multiply(rows_NW, dense.mT if transposed else dense, table, wanted)
    weight_only_gemm.multiply(rows_NW, matrix, table, found, transposed=transposed)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    for e in range(len(ends)):
        numbers = dense[e][0] if transposed else dense[e][:, 0]
        is_large = numbers.abs() > 2.0**-100  # smaller ones the matrix unit need not keep
        assert torch.equal(found[130 * e][is_large], numbers[is_large]), ends[e]
    assert found.isnan().any() and not found.isnan().all()


def drawn_layer(activation: Activation, bias: bool, device: torch.device) -> tuple[ExpertWeights, LoraFactors]:
    hidden, inner, rank = 320, 192, 16

    def draw(*shape: int, seed: int) -> Tensor:
        return normal(*shape, dtype=BF16, seed=seed, device=device, scale=shape[-1] ** -0.5)

    biases = (draw(E, 2 * inner, seed=3), draw(E, hidden, seed=4)) if bias else (None, None)
    weights = ExpertWeights(draw(E, 2 * inner, hidden, seed=1), draw(E, hidden, inner, seed=2), *biases, activation)
    shapes = [(E, rank, hidden), (E, inner, rank)] * 2 + [(E, rank, inner), (E, hidden, rank)]
    factors = (draw(*shape, seed=5 + at).float().requires_grad_() for at, shape in enumerate(shapes))
    return weights, LoraFactors(*factors, scaling=2.0)


LAYERS = {
    "gated": (GATED, False),
    "gpt-oss": (Activation(alpha=1.702, limit=7.0, up_shift=1.0, interleaved=True), True),
}


def dequantise_some_at_a_time(experts: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where experts have many rows. width: bytes of one, gate and up."""
    monkeypatch.setattr(quantised_rows, "MANY_ROWS", 0)
    monkeypatch.setattr(quantised_rows, "MANY_ROWS_OF_NVFP4", 0)
    monkeypatch.setattr(quantised_rows, "DEQUANTISED_BYTES", experts * width)


@on_hopper
@quick(lambda format, name: format is FP8_128 if name == "gated" else format is MXFP4)
@pytest.mark.parametrize("many_rows", [False, True], ids=["decoded", "dequantised"])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("format", [*FORMATS.values(), *BLOCKS], ids=lambda format: format.name)
def test_a_layer_has_the_bits_of_the_same_layer_on_dequantised_experts(
    format, name, tokens, many_rows, device, monkeypatch
) -> None:
    """Output and all gradients, of x, of routing weights and of factors; some slots belong to nobody."""
    if many_rows:
        dequantise_some_at_a_time(3, 2 * 192 * 320 * 2, monkeypatch)  # of seven
    weights, lora = drawn_layer(*LAYERS[name], device)
    with torch.no_grad():
        in_codes = quantise_experts(weights, format)
        dense = dequantise_experts(in_codes, BF16)
    generator = torch.Generator().manual_seed(11)
    expert_TK = torch.rand(tokens, E, generator=generator).topk(K).indices.to(device)
    expert_TK[expert_TK == 3] = E
    x_TH = normal(tokens, 320, dtype=BF16, seed=12, device=device).requires_grad_()
    weight_TK = torch.rand(tokens, K, generator=generator).to(device).requires_grad_()
    taken: list[str] = []
    for launcher in ("up", "multiply"):
        real = getattr(weight_only_gemm, launcher)
        monkeypatch.setattr(
            weight_only_gemm, launcher, lambda *g, real=real, as_=launcher, **n: taken.append(as_) or real(*g, **n)
        )
    found = []
    for kind in (in_codes, dense):
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), kind, lora=lora, backend="triton")
        leaves = [x_TH, weight_TK, *lora.tensors().values()]
        found.append([y_TH.detach(), *torch.autograd.grad(y_TH, leaves, torch.ones_like(y_TH))])
    first = "up" if name == "gated" else "multiply"
    assert taken == ([] if many_rows or format in BLOCKS else [first, *["multiply"] * 3]), "up, down, dA' and dx"
    for at, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other), at


# Without a GPU


def matrix_of(format: Format, rows: int = 192, columns: int = 192, parts: int = 1) -> QuantisedMatrix:
    return quantise(torch.zeros(2, rows, columns), format, parts=parts)


@pytest.mark.parametrize("parts", [1, 2])
def test_matrices_in_formats_that_files_have_are_taken(parts: int) -> None:
    for format in (*FORMATS.values(), fp8_blocks(64, 32), fp8_blocks(128, 64), fp8_blocks(256, 128)):
        assert weight_only_gemm.why_not(matrix_of(format, 384, 192, parts)) is None, format.name


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (matrix_of(fp8_blocks(32, 32)), "cannot dequantise blocks of 32 x 32 in fp8-32x32"),
        (matrix_of(fp8_blocks(64, 16)), "cannot dequantise blocks of 64 x 16 in fp8-64x16"),
        (matrix_of(FP8_128_ROWS), "cannot dequantise blocks of 1 x 128 in fp8-128-rows"),
        (matrix_of(MXFP4, 576, 192, parts=3), "at most two parts per matrix, not 3"),
        (matrix_of(MXFP8, 128, 192), "needs sizes of 192 or more, this is (128, 192)"),
        (matrix_of(NVFP4, 192, 128), "needs sizes of 192 or more, this is (192, 128)"),
    ],
    ids=["32 x 32", "64 x 16", "rows", "three parts", "few rows", "few columns"],
)
def test_other_matrices_are_refused_by_name(matrix: QuantisedMatrix, reason: str) -> None:
    assert reason in str(weight_only_gemm.why_not(matrix))


def test_experts_whose_codes_or_scales_are_not_contiguous_are_refused() -> None:
    matrix = matrix_of(MXFP8)
    for changed in ({"data": matrix.data.mT.contiguous().mT}, {"scales": matrix.scales.mT.contiguous().mT}):
        assert "contiguous" in str(weight_only_gemm.why_not(replace(matrix, **changed)))


def apart(tensor: Tensor) -> Tensor:
    """The same with something between its experts."""
    return torch.stack((tensor, torch.ones_like(tensor)), 1)[:, 0]


def in_slots(matrix: QuantisedMatrix) -> list[QuantisedMatrix]:
    """With something between experts' codes, scales, or numbers of matrices; and codes that begin at an odd byte."""

    shifted = torch.zeros(matrix.data.numel() + 1, dtype=torch.uint8)[1:].view(matrix.data.shape)
    names = ("data", "scales", "matrix_scale") if matrix.matrix_scale is not None else ("data", "scales")
    changed = [replace(matrix, **{name: apart(getattr(matrix, name))}) for name in names]
    return [*changed, replace(matrix, data=shifted)]


@pytest.mark.parametrize("format", [MXFP8, NVFP4], ids=lambda format: format.name)
def test_experts_in_slots_are_not_in_one_piece_but_served(format: Format) -> None:
    whole = matrix_of(format)
    assert weight_only_gemm.is_in_one_piece(whole)
    for matrix in in_slots(whole):
        assert weight_only_gemm.why_not(matrix) is None
        assert not weight_only_gemm.is_in_one_piece(matrix)


def problem_of(
    format: Format = MXFP4, hidden: int = 192, inner: int = 192, dtype: torch.dtype = BF16, **changed: Any
) -> Problem:
    """As it is on a GPU, x too."""
    x_TH: Any = SimpleNamespace(
        device=torch.device("cuda"), dtype=dtype, shape=(5, hidden), stride=(hidden, 1).__getitem__, data_ptr=lambda: 0
    )
    weights = QuantisedExperts.holding(
        matrix_of(format, 2 * inner, hidden, parts=2), matrix_of(format, hidden, inner), dtype=dtype
    )
    expert_TK = torch.zeros(5, K, dtype=torch.int64)
    return Problem(x_TH, expert_TK, torch.ones(5, K), replace(weights, **changed))


class TestLayers:
    """Which layers these kernels compute, told without them."""

    @pytest.fixture(autouse=True)
    def _hopper(self, gpu_of) -> None:
        gpu_of(9, 0)

    @by_format
    def test_in_bf16_with_multiples_of_64(self, format: Format) -> None:
        assert why_not_hopper(problem_of(format, 320, 192)) is None

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            ({"dtype": torch.float16}, "dequantises to bf16; x is torch.float16"),
            ({"dtype": torch.float32}, "x is torch.float32"),
            ({"hidden": 224}, "H to be a multiple of 64; it is 224"),
            ({"inner": 208}, "I to be a multiple of 64; it is 208"),
            ({"inner": 128}, "needs sizes of 192 or more, this is (192, 128)"),
            ({"hidden": 128}, "needs sizes of 192 or more, this is (384, 128)"),
            ({"format": fp8_blocks(32, 64)}, "cannot dequantise blocks of 32 x 64"),
        ],
        ids=lambda given: str(given) if isinstance(given, str) else "",
    )
    def test_others_do_not_and_say_why(self, given: dict[str, Any], reason: str) -> None:
        assert reason in str(why_not_hopper(problem_of(**given)))

    def test_other_gpus_do_not(self, gpu_of):
        for capability in ((8, 0), (10, 0)):
            gpu_of(*capability)
            assert "needs a Hopper GPU" in str(why_not_hopper(problem_of()))


def stand_in_multiply(
    rows_NW: Tensor,
    matrix: QuantisedMatrix | Tensor,
    table: Tensor,
    out_NO: Tensor,
    *,
    transposed: bool = False,
    order_N: Tensor | None = None,
    top_k: int = 1,
    scales_NB: None = None,
    bias_EO: Tensor | None = None,
    addend: Addend | None = None,
    block_m: int = gemm.BLOCK_M,
) -> None:
    """By torch, tile by tile, with codes and with numbers."""
    dense = matrix if isinstance(matrix, Tensor) else matrix.dequantise()
    dense = dense.mT if transposed else dense
    for e, chosen in tiles(table, block_m):
        taken = chosen if order_N is None else order_N[chosen] // top_k
        out_NO[chosen] = rows_NW[taken] @ dense[e].T
        if bias_EO is not None:
            out_NO[chosen] += bias_EO[e]
        if addend is not None:
            out_NO[chosen] += addend.low_NR[chosen] @ addend.factor_EOR[e].T


def tiles(table: Tensor, block_m: int) -> list[tuple[int, slice]]:
    """Experts and rows of a table."""
    count, _, _, _, *entries = table.tolist()
    places = [entries[4 * tile : 4 * tile + 3] for tile in range(count)]
    return [(e, slice(first, min(first + block_m, end))) for e, first, end in places]


def stand_in_up(
    x_TH: Tensor,
    order_N: Tensor,
    top_k: int,
    gate_up: QuantisedMatrix | Tensor,
    table: Tensor,
    activation: Activation,
    a_NI: Tensor,
    *,
    h_NJ: Tensor | None = None,
    bias_EJ: Tensor | None = None,
    addend: Addend | None = None,
    block_m: int = gemm.BLOCK_M,
) -> None:
    h_NJ = torch.zeros(order_N.shape[0], gate_up.shape[1]) if h_NJ is None else h_NJ
    added: dict[str, Any] = {"bias_EO": bias_EJ, "addend": addend}
    stand_in_multiply(x_TH, gate_up, table, h_NJ, order_N=order_N, top_k=top_k, block_m=block_m, **added)
    for _, chosen in tiles(table, block_m):
        a_NI[chosen] = activate(h_NJ[chosen], activation)


def stood_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products by torch, in passes as they are on Hopper; which ones are asked for."""
    asked: list[str] = []

    def noted(name: str, compute: Callable[..., None]) -> Callable[..., None]:
        return lambda *given, **named: asked.append(name) or compute(*given, **named)

    monkeypatch.setattr(quantised_rows, "why_not_hopper", lambda problem: None)
    for most in ("DECODE_TOKENS", "DECODE_SLOTS"):
        monkeypatch.setattr(quantised_triton, most, 0)
    for module, kind in ((weight_only_gemm, "of codes"), (gemm, "of numbers")):
        monkeypatch.setattr(module, "multiply", noted(f"multiply {kind}", stand_in_multiply))
        monkeypatch.setattr(module, "up", noted(f"up {kind}", stand_in_up))
    return asked


interpreted = pytest.mark.skipif(kernel_device().type != "cpu", reason="the rest of a pass is interpreted")


@each_value_once("many_rows")
@interpreted
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("many_rows", [False, True], ids=["decoded", "dequantised"])
@pytest.mark.parametrize(
    ("activation", "first"), [(GATED, "up"), (replace(GATED, interleaved=True), "multiply")], ids=["parted", "in turns"]
)
def test_a_layer_asks_for_its_four_products(activation, first, many_rows, trains, monkeypatch) -> None:
    """Rows of gate and up that take turns are multiplied, and activated by another kernel. Where experts have many rows
    each product is asked for twice: for three experts of the four, and for the last."""
    asked = stood_in(monkeypatch)
    layer = Layer(activation, rank=5)
    if many_rows:
        dequantise_some_at_a_time(3, layer.tensors["gate_up"][0].nbytes, monkeypatch)
    layer.expert_TK[1, 0] = layer.expert_TK[4, 1] = 4  # nobody
    weights = quantise_experts(layer.weights({n: t.detach() for n, t in layer.tensors.items()}), MXFP8)
    frozen = ("gate_up", "down", "gate_up_bias", "down_bias")
    leaves = [tensor for name, tensor in layer.tensors.items() if name not in frozen]
    found = []
    for backend in ("triton", "eager"):
        with torch.set_grad_enabled(trains):
            routing = Routing(layer.expert_TK, layer.tensors["weight"])
            y_TH = experts(layer.tensors["x"], routing, weights, lora=layer.lora(layer.tensors), backend=backend)
        found.append([y_TH.detach(), *(torch.autograd.grad(y_TH, leaves, layer.dy_TH) if trains else ())])
    products = [first, *["multiply"] * (3 if trains else 1)]
    if many_rows:  # down's matrices are half as large: all four at once
        at_once = {0: 2, 1: 1, 2: 1, 3: 2}
        assert asked == [f"{name} of numbers" for at, name in enumerate(products) for _ in range(at_once[at])]
    else:
        assert asked == [f"{name} of codes" for name in products]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@interpreted
@quick(lambda format: format in (NVFP4, BLOCKS[0]))
@pytest.mark.parametrize("format", [FP8_128, NVFP4, *BLOCKS], ids=lambda format: format.name)
def test_a_layer_whose_experts_are_in_slots_has_the_bits_of_one_in_one_piece(format: Format, monkeypatch) -> None:
    asked = stood_in(monkeypatch)
    layer = Layer(GATED, bias=False, rank=5)
    whole = quantise_experts(layer.weights({n: t.detach() for n, t in layer.tensors.items()}), format)
    stored = [None if tensor is None else apart(tensor.detach()) for tensor in whole.tensors()]
    leaves = [tensor for name, tensor in layer.tensors.items() if name not in ("gate_up", "down")]
    found = []
    for weights in (whole, QuantisedExperts.of(stored, whole.constants())):
        routing = Routing(layer.expert_TK, layer.tensors["weight"])
        y_TH = experts(layer.tensors["x"], routing, weights, lora=layer.lora(layer.tensors), backend="triton")
        found.append([y_TH.detach(), *torch.autograd.grad(y_TH, leaves, layer.dy_TH)])
    products = ["up", *["multiply"] * 3]
    kinds = "of numbers" if format in BLOCKS else "of codes", "of numbers"
    assert asked == [f"{name} {kind}" for kind in kinds for name in products]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("block_m", [gemm.BLOCK_M, FEW_ROWS])
def test_tables_of_some_experts_have_the_tiles_of_the_whole_one(block_m: int, device: torch.device) -> None:
    rows = routed("rests", device)
    whole = tiles(gemm.tile_table(rows.offs_E, rows.tokens * K, block_m=block_m), block_m)
    for at_once in (1, 2, 3, E):
        found: list[tuple[int, slice]] = []
        for first in range(0, E, at_once):
            last = min(first + at_once, E)
            some = tiles(gemm.tile_table(rows.offs_E, rows.tokens * K, first, last, block_m), block_m)
            assert all(0 <= e < last - first for e, _ in some)
            found += [(first + e, chosen) for e, chosen in some]
        assert found == whole, at_once
