"""The Gluon kernels for Hopper against torch in fp64: products, their activations, and weight gradients.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · O, W widths

All widths are multiples of 64, as the kernels ask for, and few of a tile's 128 and 256. Each kernel runs on all
multiprocessors, on three, where each computes many tiles one after the other, and by many programs; all give the same
bits. Compiling takes seconds a variant, so sizes vary freely (they are not compiled in) and plans do not.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from amoeba import Routing, experts
from amoeba.core.config import Activation
from amoeba.core.layout import build_layout
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.kernels.activate import SCALED_COLUMNS, activate_backward, new_scales
from amoeba.kernels.hopper import gemm, lora_activation_backward, wgrad
from amoeba.kernels.lora.epilogue import Addend, padded_rank
from amoeba.kernels.weight_gradient import heaviest_first
from amoeba.proof.reference.experts import activate
from selection import quick

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")]

E, K = 7, 2
# Rounded once to the dtype; a sum in fp32 adds next to nothing.
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
BOTH = list(TOLERANCE)
SIZES = [(64, 320), (320, 64), (448, 192)]  # H, I

# name -> rows of each expert, and tokens that belong to nobody
ROUTINGS: dict[str, tuple[tuple[int, ...], int]] = {
    "rests": ((0, 2, 127, 128, 129, 300, 0), 19),
    "skewed": ((1, 0, 2000, 0, 3, 64, 0), 0),
    "everywhere": ((256, 64, 65, 1, 128, 191, 63), 1),
    "nobody": ((0,) * 7, 40),
    "one row": ((0, 0, 0, 0, 0, 0, 2), 0),
}


def often(routing: str, width: int) -> bool:
    """Whether every run has such rows: all kinds of them in one width, and one kind in all widths."""
    return routing == "rests" or width == SIZES[-1][0]


@dataclass
class Rows:
    """Routed rows sorted by expert; the last tokens belong to nobody, in all of their slots."""

    counts: tuple[int, ...]
    tokens: int
    order_N: Tensor
    offs_E: Tensor

    @property
    def owned(self) -> int:
        return sum(self.counts)

    @property
    def owned_tokens(self) -> int:
        return self.owned // K

    def experts(self) -> Iterator[tuple[int, slice]]:
        start = 0
        for e, count in enumerate(self.counts):
            yield e, slice(start, start + count)
            start += count

    def of_tokens(self, width: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Rows by token; NaN where a token belongs to nobody."""
        rows_TW = normal(self.tokens, width, dtype=dtype, seed=seed, device=self.offs_E.device)
        rows_TW[self.owned_tokens :] = math.nan
        return rows_TW

    def sorted(self, width: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Sorted rows; NaN and Inf in those of nobody."""
        rows_NW = normal(self.tokens * K, width, dtype=dtype, seed=seed, device=self.offs_E.device)
        rows_NW[self.owned :] = math.nan
        rows_NW[self.owned + 1 :: 2] = math.inf
        return rows_NW

    def token(self, rows: slice) -> Tensor:
        return (self.order_N[rows] // K).long()


def normal(*shape: int, dtype: torch.dtype, seed: int, device: torch.device, scale: float = 1.0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(device, dtype)


def routed(name: str, device: torch.device) -> Rows:
    counts, unowned = ROUTINGS[name]
    owner_N = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
    owner_N = owner_N[torch.randperm(len(owner_N), generator=torch.Generator().manual_seed(3))]
    expert_TK = torch.cat((owner_N, torch.full((unowned * K,), E))).view(-1, K)
    layout = build_layout(expert_TK.to(device), E)
    return Rows(counts, expert_TK.shape[0], layout.order_N.int(), layout.offs_E.int())


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """An output, and the memory that it is the beginning of."""
    memory = torch.full((shape[0] + 64, *shape[1:]), math.nan, dtype=dtype, device=device)
    return memory[: shape[0]], memory


def on_any_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, compute: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What `compute` gives, twice with a program for each multiprocessor, with three and with many, if the bits are the
    same."""
    first, *others = compute(), compute()
    for number in (3, 528):
        for module in (gemm, wgrad, lora_activation_backward):
            monkeypatch.setattr(module, "programs", lambda device, number=number: number)
        others.append(compute())
    for again in others:
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "not the same bits"
    return first


def assert_rows(name: str, memory: Tensor, expected: Tensor, owned: int) -> None:
    """The owned rows are right, and nothing is written behind them."""
    assert memory[owned:].isnan().all(), f"{name}: rows that belong to nobody were written"
    assert_close(name, memory[:owned], expected[:owned])


def assert_close(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.isfinite().all(), f"{name}: {got.isfinite().logical_not().sum()} numbers are not finite"
    error = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    print(f"{name}: {error:.2e}")
    assert error <= TOLERANCE[got.dtype], f"{name}: relative error {error:.2e}"


UPS = {
    "silu": (Activation(), False, True, BOTH),
    "gpt-oss": (Activation("silu", alpha=1.702, limit=0.75, up_shift=1.0), True, False, [torch.bfloat16]),
    "gelu": (Activation("gelu"), True, True, [torch.bfloat16]),
    "gelu_tanh plain": (Activation("gelu_tanh", gated=False), False, True, [torch.bfloat16]),
    "relu plain": (Activation("relu", gated=False), False, False, [torch.bfloat16]),
    "relu2 plain": (Activation("relu2", gated=False, limit=1.5), True, True, BOTH),
}  # activation, bias, whether h is kept, dtypes


@quick(lambda routing, hidden, name, dtype: often(routing, hidden) and (dtype == torch.bfloat16 or name == "silu"))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (*_, dtypes) in UPS.items() for dtype in dtypes])
def test_up_projection_with_its_activation(name, dtype, hidden, inner, routing, device, monkeypatch):
    activation, has_bias, keep, _ = UPS[name]
    rows, width = routed(routing, device), activation.width(inner)
    x_TH = rows.of_tokens(hidden, dtype, seed=0)
    gate_up_EJH = normal(E, width, hidden, dtype=dtype, seed=1, device=device, scale=hidden**-0.5)
    bias_EJ = normal(E, width, dtype=dtype, seed=2, device=device) if has_bias else None

    def compute() -> tuple[Tensor, ...]:
        h_NJ, h_memory = poisoned(rows.tokens * K, width, dtype=dtype, device=device)
        a_NI, a_memory = poisoned(rows.tokens * K, inner, dtype=dtype, device=device)
        table = gemm.tile_table(rows.offs_E, rows.tokens * K)
        kept = h_NJ if keep else None
        gemm.up(x_TH, rows.order_N, K, gate_up_EJH, table, activation, a_NI, h_NJ=kept, bias_EJ=bias_EJ)
        return a_memory, h_memory

    a_memory, h_memory = on_any_number_of_programs(monkeypatch, compute)
    expected = torch.zeros(rows.owned, width, dtype=torch.float64, device=device)
    for e, of_e in rows.experts():
        expected[of_e] = x_TH[rows.token(of_e)].double() @ gate_up_EJH[e].double().T
        if bias_EJ is not None:
            expected[of_e] += bias_EJ[e].double()
    assert_rows("a", a_memory, activate(expected, activation), rows.owned)
    if keep:
        assert_rows("h", h_memory, expected, rows.owned)
    else:
        assert h_memory.isnan().all()


PRODUCTS = [
    # gathered, matrix stored (O, W), bias, dtypes
    (True, True, True, BOTH),
    (True, False, False, [torch.bfloat16]),
    (False, True, False, [torch.bfloat16]),
    (False, False, True, BOTH),
]


@quick(lambda routing, depth, gathered, dtype: often(routing, depth) and (dtype == torch.bfloat16 or gathered))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("depth", "width"), [*SIZES, (192, 448)])
@pytest.mark.parametrize(
    ("gathered", "rows_first", "has_bias", "dtype"), [(*plan, dtype) for *plan, dtypes in PRODUCTS for dtype in dtypes]
)
def test_rows_times_their_experts_matrix(
    gathered, rows_first, has_bias, dtype, depth, width, routing, device, monkeypatch
):
    rows = routed(routing, device)
    left = (rows.of_tokens if gathered else rows.sorted)(depth, dtype, seed=0)
    matrix_EOW = normal(E, width, depth, dtype=dtype, seed=1, device=device)
    if not rows_first:
        matrix_EOW = matrix_EOW.transpose(1, 2).contiguous().transpose(1, 2)
    bias_EO = normal(E, width, dtype=dtype, seed=2, device=device, scale=depth**0.5) if has_bias else None
    order = {"order_N": rows.order_N, "top_k": K} if gathered else {}

    def compute() -> tuple[Tensor, ...]:
        out_NO, memory = poisoned(rows.tokens * K, width, dtype=dtype, device=device)
        table = gemm.tile_table(rows.offs_E, rows.tokens * K)
        gemm.multiply(left, matrix_EOW, table, out_NO, bias_EO=bias_EO, **order)
        return (memory,)

    (memory,) = on_any_number_of_programs(monkeypatch, compute)
    expected = torch.zeros(rows.owned, width, dtype=torch.float64, device=device)
    for e, of_e in rows.experts():
        of_expert = left[rows.token(of_e)] if gathered else left[of_e]
        expected[of_e] = of_expert.double() @ matrix_EOW[e].double().T
        if bias_EO is not None:
            expected[of_e] += bias_EO[e].double()
    assert_rows("out", memory, expected, rows.owned)


@quick(lambda activated, padded, rank: not activated or padded == rank)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("gathered", "rows_first", "padded", "rank"),
    [
        (True, True, 64, 16),  # padded further than needed
        (True, True, 64, 64),
        (True, True, 16, 16),
        (True, True, 32, 24),
        (True, False, 128, 70),
        (True, False, 16, 8),
        (False, False, 16, 5),
        (False, False, 32, 24),
        (False, True, 64, 32),
        (False, True, 32, 32),
        (False, True, 16, 16),
    ],
)
@pytest.mark.parametrize("activated", [False, True])
def test_an_addend_is_more_of_the_depth(activated, gathered, rows_first, padded, rank, routing, device, monkeypatch):
    if activated and not (gathered and rows_first):
        pytest.skip("the up projection gathers, from matrices stored (J, H)")
    dtype, depth, width = torch.bfloat16, 192, 384
    rows = routed(routing, device)
    left = (rows.of_tokens if gathered else rows.sorted)(depth, dtype, seed=0)
    matrix_EOW = normal(E, width, depth, dtype=dtype, seed=1, device=device, scale=depth**-0.5)
    low_NR = rows.sorted(padded, dtype, seed=2)
    factor_EOR = normal(E, width, padded, dtype=dtype, seed=3, device=device, scale=rank**-0.5)
    low_NR[:, rank:] = factor_EOR[:, :, rank:] = 0
    if not rows_first:
        matrix_EOW = matrix_EOW.transpose(1, 2).contiguous().transpose(1, 2)
    order = {"order_N": rows.order_N, "top_k": K} if gathered else {}

    def compute() -> tuple[Tensor, ...]:
        columns = width // 2 if activated else width
        out_NO, memory = poisoned(rows.tokens * K, columns, dtype=dtype, device=device)
        table = gemm.tile_table(rows.offs_E, rows.tokens * K)
        addend = Addend(low_NR, factor_EOR, rank)
        if activated:
            gemm.up(left, rows.order_N, K, matrix_EOW, table, Activation(), out_NO, addend=addend)
        else:
            gemm.multiply(left, matrix_EOW, table, out_NO, addend=addend, **order)
        return (memory,)

    (memory,) = on_any_number_of_programs(monkeypatch, compute)
    expected = torch.zeros(rows.owned, width, dtype=torch.float64, device=device)
    for e, of_e in rows.experts():
        of_expert = left[rows.token(of_e)] if gathered else left[of_e]
        expected[of_e] = of_expert.double() @ matrix_EOW[e].double().T
        expected[of_e] += low_NR[of_e].double() @ factor_EOR[e].double().T
    assert_rows("out", memory, activate(expected, Activation()) if activated else expected, rows.owned)


@quick(lambda routing, hidden, dtype, transposed: often(routing, hidden) and (dtype == torch.bfloat16 or transposed))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("hidden", "width"), [*SIZES, (192, 448), (256, 320)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
def test_weight_gradient(dtype, transposed, hidden, width, routing, device, monkeypatch):
    rows = routed(routing, device)
    left_TH, right_NW = rows.of_tokens(hidden, dtype, seed=0), rows.sorted(width, dtype, seed=1)
    heaviest_E = heaviest_first(rows.offs_E)

    def compute() -> tuple[Tensor, ...]:
        shape = (E, width, hidden) if transposed else (E, hidden, width)
        stored, memory = poisoned(*shape, dtype=dtype, device=device)
        out_EHW = stored.transpose(1, 2) if transposed else stored
        wgrad.weight_gradient(left_TH, rows.order_N, K, right_NW, rows.offs_E, heaviest_E, out_EHW)
        return (memory,)

    (memory,) = on_any_number_of_programs(monkeypatch, compute)
    expected = torch.zeros(E, hidden, width, dtype=torch.float64, device=device)
    for e, of_e in rows.experts():
        expected[e] = left_TH[rows.token(of_e)].double().T @ right_NW[of_e].double()
    got = memory[:E].transpose(1, 2) if transposed else memory[:E]
    assert memory[E:].isnan().all()
    assert_close("gradient", got, expected)
    assert all((got[e] == 0).all() for e, count in enumerate(rows.counts) if count == 0)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_table_holds_every_tile_once(routing: str, device: torch.device) -> None:
    rows = routed(routing, device)
    total, _, _, _, *entries = gemm.tile_table(rows.offs_E, rows.tokens * K).tolist()
    found = [tuple(entries[4 * i : 4 * i + 4]) for i in range(total)]
    block = gemm.BLOCK_M
    assert found == [
        (e, first, of_e.stop, -(-(of_e.stop - of_e.start) // block))
        for e, of_e in rows.experts()
        for first in range(of_e.start, of_e.stop, block)
    ]
    assert len(entries) >= 4 * total


@quick(lambda in_place, routing, inner: in_place or (routing, inner) == ("rests", 192))
@pytest.mark.parametrize("routing", ["rests", "skewed", "everywhere", "nobody"])
@pytest.mark.parametrize(
    # ranks: of gate, up and down, and whether gate and up have the same; inner: warpgroups share steps of 64 columns
    ("name", "dtype", "ranks", "inner"),
    [
        ("silu", torch.bfloat16, (16, 16, 16), 192),
        ("gpt-oss", torch.bfloat16, (5, 0, 3), 64),
        ("gelu", torch.bfloat16, (0, 40, 64), 320),
        ("silu", torch.float16, (20, 12, 8), 128),
        ("silu", torch.bfloat16, (8, 16, 24), 192),
        ("silu", torch.bfloat16, (16, 16, 16, True), 192),
        ("silu", torch.bfloat16, (24, 24, 8, True), 128),
        ("silu", torch.bfloat16, (16, 16, 16, True), 320),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_activation_backward_with_thin_products(name, dtype, ranks, inner, in_place, routing, device, monkeypatch):
    """dh has the bits of the pass without LoRA; thin products and sums are those of dh and s·a as they are rounded."""
    activation, rows = UPS[name][0], routed(routing, device)
    gate_rank, up_rank, down_rank, *shared = ranks
    of_gate, of_up = slice(0, gate_rank), slice(0 if shared else gate_rank, up_rank if shared else gate_rank + up_rank)
    count, scaling = rows.tokens * K, 1.5
    da_NI, h_NJ = rows.sorted(inner, dtype, 1), rows.sorted(2 * inner, dtype, 2)
    padded, down_padded = padded_rank(max(of_gate.stop, of_up.stop)), padded_rank(down_rank)
    low_NP, dlow_down_NP = rows.sorted(padded, dtype, 3), rows.sorted(down_padded, dtype, 4)
    low_NP[: rows.owned, max(of_gate.stop, of_up.stop) :] = 0
    dlow_down_NP[: rows.owned, down_rank:] = 0
    b_EOP = normal(E, 2 * inner, padded, dtype=dtype, seed=5, device=device)
    b_EOP[:, :inner, gate_rank:] = 0
    b_EOP[:, inner:, : of_up.start] = 0
    b_EOP[:, inner:, of_up.stop :] = 0
    weight_TK = normal(rows.tokens, K, dtype=dtype, seed=6, device=device).abs()
    expected_dh, scaled_a_NI = torch.empty_like(h_NJ), torch.empty_like(da_NI)
    expected_ds = activate_backward(
        da_NI, h_NJ, weight_TK, rows.order_N, activation, expected_dh, scaled_a_NI, rows.offs_E
    )
    table = gemm.tile_table(rows.offs_E, count)

    def compute() -> tuple[Tensor, ...]:
        h, (dh_NJ, memory) = h_NJ.clone(), poisoned(count, 2 * inner, dtype=dtype, device=device)
        if in_place:
            dh_NJ = memory = h
        found = lora_activation_backward.activate_backward(
            da_NI,
            h,
            weight_TK,
            rows.order_N,
            activation,
            dh_NJ,
            rows.offs_E,
            table,
            up=lora_activation_backward.Up(b_EOP, low_NP, of_gate, of_up, scaling),
            down=lora_activation_backward.Down(dlow_down_NP, down_rank),
        )
        sums = [
            found.db.write(torch.full((E, inner, rank), math.nan, dtype=dtype, device=device), first=first, rank=of)
            for rank, first, of in ((gate_rank, 0, 0), (up_rank, inner, of_up.start))
            if rank
        ]
        da_down = torch.full((E, down_rank, inner), math.nan, dtype=dtype, device=device)
        found.da_down.write(da_down.mT)
        return dh_NJ[: rows.owned], found.dlow_NP[: rows.owned], da_down, *sums, found.ds_N, memory[rows.owned :]

    dh_NJ, dlow_NP, da_down, *sums, ds_N, behind = on_any_number_of_programs(monkeypatch, compute)
    assert torch.equal(dh_NJ, expected_dh[: rows.owned])
    assert not behind.isfinite().any()
    assert (ds_N[rows.owned :] == 0).all()
    torch.testing.assert_close(ds_N, expected_ds, rtol=1e-4, atol=1e-3)
    ranks_of = [(rank, of) for rank, of in ((gate_rank, 0), (up_rank, of_up.start)) if rank]
    columns = [slice(0, inner)] * bool(gate_rank) + [slice(inner, 2 * inner)] * bool(up_rank)
    expected_dlow = torch.zeros(rows.owned, padded, dtype=torch.float64, device=device)
    expected_sums = [torch.zeros(one.shape, dtype=torch.float64, device=device) for one in sums]
    expected_da = torch.zeros(da_down.shape, dtype=torch.float64, device=device)
    for e, own in rows.experts():
        dh, scaled = expected_dh[own].double(), scaled_a_NI[own].double()
        expected_dlow[own] = scaling * dh @ b_EOP[e].double()
        expected_da[e] = dlow_down_NP[own, :down_rank].double().mT @ scaled
        for one, (rank, of), column in zip(expected_sums, ranks_of, columns, strict=True):
            one[e] = dh[:, column].mT @ low_NP[own, of : of + rank].double()
    assert_close("dlow", dlow_NP, expected_dlow)
    assert_close("da_down", da_down, expected_da)
    for one, expected in zip(sums, expected_sums, strict=True):
        assert_close("db", one, expected)


@quick(lambda ranks, shared: shared or ranks != (16, 16, 16))
@pytest.mark.parametrize(
    ("ranks", "shared"),
    [((8, 8, 8), False), ((16, 16, 16), False), ((16, 16, 16), True), ((24, 24, 8), True), ((8, 16, 32), False)],
)
def test_a_layer_with_lora_takes_that_pass_and_its_gradients_are_right(ranks, shared, device, monkeypatch):
    """Of ranks that are one short step, whole or padded, and of those that are two."""
    taken: list[int] = []
    real = lora_activation_backward.activate_backward
    monkeypatch.setattr(
        lora_activation_backward, "activate_backward", lambda *given, **named: taken.append(1) or real(*given, **named)
    )
    hidden, inner, tokens = 256, 128, 1024
    gate, up, down = ranks
    draw = {"dtype": torch.bfloat16, "device": device}
    x_TH = normal(tokens, hidden, seed=1, **draw)
    weights = ExpertWeights(
        normal(E, 2 * inner, hidden, seed=2, scale=hidden**-0.5, **draw),
        normal(E, hidden, inner, seed=3, scale=inner**-0.5, **draw),
    )
    logits_TE = normal(tokens, E, seed=4, dtype=torch.float32, device=device)
    weight_TK, expert_TK = logits_TE.softmax(-1).topk(K)
    shapes = {
        "gate_lora_a": (E, gate, hidden),
        "gate_lora_b": (E, inner, gate),
        "up_lora_a": (E, up, hidden),
        "up_lora_b": (E, inner, up),
        "down_lora_a": (E, down, inner),
        "down_lora_b": (E, hidden, down),
    }
    factors = {name: normal(*shape, seed=5 + at, scale=0.2, **draw) for at, (name, shape) in enumerate(shapes.items())}

    def gradients(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        named = {name: factor.detach().to(dtype).requires_grad_() for name, factor in factors.items()}
        if shared:
            named["up_lora_a"] = named["gate_lora_a"]
        x = x_TH.detach().to(dtype).requires_grad_()
        given = weight_TK.detach().to(dtype).requires_grad_()
        of = ExpertWeights(weights.gate_up_EJH.to(dtype), weights.down_EHI.to(dtype))
        y = experts(x, Routing(expert_TK, given), of, lora=LoraFactors(**named, scaling=2.0), backend=backend)
        y.backward(normal(tokens, hidden, seed=20, dtype=torch.float32, device=device).to(dtype))
        return {"y": y.detach(), "x": x.grad, "weight": given.grad, **{name: one.grad for name, one in named.items()}}

    found, expected = gradients("triton", torch.bfloat16), gradients("eager", torch.float64)
    assert taken
    for name, one in found.items():
        error = float((one.double() - expected[name]).norm() / expected[name].norm())
        print(name, f"{error:.2e}")
        assert error < 1e-2, (name, error)


@quick(lambda routing, hidden, inner: often(routing, hidden))
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_product_in_fp16_with_scales_loses_next_to_nothing(routing, hidden, inner, device):
    """Of tokens some of which are a million times as large as others, and one that is not finite."""
    rows = routed(routing, device)
    sizes = torch.logspace(-12, 4, rows.tokens, device=device).bfloat16()
    dy = rows.of_tokens(hidden, torch.bfloat16, 1) * sizes[:, None]
    dy[: min(1, rows.owned_tokens)] = math.inf
    down = normal(E, hidden, inner, dtype=torch.bfloat16, seed=2, device=device)
    out, memory = poisoned(rows.tokens * K, inner, dtype=torch.bfloat16, device=device)
    scales = new_scales(out).fill_(math.nan)
    options = {"order_N": rows.order_N, "top_k": K}
    table = gemm.tile_table(rows.offs_E, rows.tokens * K)
    gemm.multiply(dy, down.mT, table, out, scales_NB=scales, **options)
    low, low_scales = torch.empty_like(out), new_scales(out)
    low_table = gemm.tile_table(rows.offs_E, rows.tokens * K, block_m=gemm.FEW_ROWS)
    gemm.multiply(dy, down.mT, low_table, low, scales_NB=low_scales, block_m=gemm.FEW_ROWS, **options)
    for one, other in ((out, low), (scales, low_scales)):
        assert one.view(torch.int16)[: rows.owned].equal(other.view(torch.int16)[: rows.owned])
    found = out.view(torch.float16).double() * scales.repeat_interleave(SCALED_COLUMNS, 1)[:, :inner].double()
    for e, each in rows.experts():
        expected = dy[rows.token(each)].double() @ down[e].double()
        finite = expected.isfinite().all(1)
        assert not found[each][~finite].isfinite().any()
        of_rows = (found[each] - expected)[finite].norm(dim=1) / expected[finite].norm(dim=1)
        unwritten = [float(each_of[each].isnan().float().mean()) for each_of in (out.view(torch.float16), scales)]
        assert bool((of_rows < 5e-4).all()), (e, of_rows.max(), unwritten)
    assert scales[rows.owned :].isnan().all()
    assert memory[rows.owned :].isnan().all()


def test_gradients_of_x_and_of_routing_weights_have_no_rounding_of_da(device, monkeypatch):
    """Against fp64, with dA' in fp16 and, as it was, in bf16."""
    from amoeba.backends.triton_rows import HopperRows

    tokens, hidden, inner, count, top_k = 1024, 512, 256, 16, 4

    def leaf(*shape, seed):
        return normal(*shape, dtype=torch.bfloat16, seed=seed, device=device, scale=shape[-1] ** -0.5)

    x = leaf(tokens, hidden, seed=0) * 16
    weights = leaf(count, 2 * inner, hidden, seed=1), leaf(count, hidden, inner, seed=2)
    scores = normal(tokens, count, dtype=torch.float32, seed=3, device=device).softmax(-1)
    weight, expert = scores.topk(top_k)
    dy = normal(tokens, hidden, dtype=torch.bfloat16, seed=4, device=device)

    def errors() -> list[float]:
        x_, s = x.clone().requires_grad_(), weight.clone().requires_grad_()
        experts(x_, Routing(expert, s), ExpertWeights(*weights), backend="triton").backward(dy)
        return [
            float((got - wanted).norm() / wanted.norm()) for got, wanted in zip((x_.grad, s.grad), truth, strict=True)
        ]

    x_, s = x.double().requires_grad_(), weight.double().requires_grad_()
    y = torch.zeros_like(x_)
    for e in range(count):
        token, slot = (expert == e).nonzero(as_tuple=True)
        h = x_[token] @ weights[0][e].double().T
        rows = (torch.nn.functional.silu(h[:, :inner]) * h[:, inner:]) @ weights[1][e].double().T
        y = y.index_add(0, token, rows * s[token, slot, None])
    y.backward(dy.double())
    truth = x_.grad, s.grad
    found = errors()
    monkeypatch.setattr(HopperRows, "_new_scales", lambda self, da_NI: None)
    before = errors()
    print(f"dx, routing weights: {found} with dA' in fp16, {before} in bf16")
    assert found[0] < 0.94 * before[0] and found[1] < 0.9 * before[1]
