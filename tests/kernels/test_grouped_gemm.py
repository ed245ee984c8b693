"""Products of sorted rows with their experts' matrices, against torch in fp64.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I
"""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.layout import Layout, build_layout
from amoeba.kernels.down_backward import down_backward, number_of_slices
from amoeba.kernels.grouped_gemm import multiply_rows, multiply_rows_activated
from amoeba.kernels.lora.epilogue import Addend
from amoeba.kernels.tile_sizes import Configuration, Product, configuration
from amoeba.kernels.tiles import slots, tile_constants
from amoeba.proof.reference.experts import activate, activate_backward
from selection import each_value_once

TINY = Configuration(block_m=16, block_n=32, block_k=16, group_m=2, num_warps=4, num_stages=2)
WIDE = Configuration(block_m=32, block_n=64, block_k=32, group_m=3, num_warps=1, num_stages=3)  # epilogues in slices
# tl.dot on bf16 is wrong in Triton's interpreter
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

ACTIVATIONS = {
    "swiglu": Activation("silu"),
    "geglu": Activation("gelu"),
    "tanh": Activation("gelu_tanh"),
    "gpt-oss": Activation("silu", alpha=1.702, limit=1.0, up_shift=1.0, interleaved=True),
    "clamped": Activation("silu", limit=0.7),
    "plain": Activation("gelu", gated=False),
    "relu2": Activation("relu2", gated=False, limit=1.5),
}

# name -> (T, H, I, E, K, how rows are routed)
CASES = {
    "even": (32, 48, 32, 4, 2, "random"),
    "awkward": (31, 37, 39, 3, 2, "random"),
    "one expert": (21, 24, 9, 5, 1, "one"),
    "one row": (1, 17, 1, 4, 1, "random"),
    "fewer rows than experts": (3, 16, 16, 19, 2, "random"),
    "all experts": (7, 19, 40, 3, 3, "all"),
    "unowned": (40, 16, 24, 5, 2, "unowned"),
    "nobody": (9, 16, 16, 2, 2, "nobody"),
    "no tokens": (0, 16, 16, 2, 2, "random"),
    "many rows": (200, 48, 24, 2, 2, "all"),
}
EVERY_CASE = [(case, torch.float32) for case in CASES] + [("awkward", dtype) for dtype in DTYPES[1:]]


@dataclass
class Problem:
    """The inputs of a layer, with its rows sorted by expert."""

    x_TH: Tensor
    weight_TK: Tensor
    gate_up_EJH: Tensor
    down_EHI: Tensor
    bias_EJ: Tensor
    layout: Layout
    activation: Activation

    @property
    def order(self) -> dict:
        return {"order_N": self.layout.order_N, "top_k": self.layout.top_k}

    @property
    def owned(self) -> int:
        return int(self.layout.offs_E[-1])

    def per_expert(self):
        """(expert, its sorted rows) for every expert."""
        start = 0
        for e, end in enumerate(self.layout.offs_E.tolist()):
            yield e, slice(start, end)
            start = end

    def rows(self, width: int) -> Tensor:
        """A buffer for the sorted rows, poisoned."""
        return torch.full(
            (self.layout.order_N.shape[0], width), math.nan, dtype=self.x_TH.dtype, device=self.x_TH.device
        )


def problem(
    case: str, dtype: torch.dtype, device: torch.device, activation: str = "swiglu", transposed: bool = False
) -> Problem:
    tokens, hidden, intermediate, experts, top_k, how = CASES[case]
    g = torch.Generator().manual_seed(7)
    act = ACTIVATIONS[activation]
    expert_TK = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k]
    if how == "one":
        expert_TK = torch.full_like(expert_TK, experts - 2)
    if how == "unowned":
        expert_TK = torch.where(torch.rand(tokens, top_k, generator=g) < 0.4, torch.tensor(experts), expert_TK)
    if how == "nobody":
        expert_TK = torch.full_like(expert_TK, -1)
    layout = build_layout(expert_TK.to(device), experts)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    width = act.width(intermediate)
    gate_up_EJH = values(experts, width, hidden) / math.sqrt(hidden)
    down_EHI = values(experts, hidden, intermediate)
    if transposed:
        gate_up_EJH = gate_up_EJH.transpose(1, 2).contiguous().transpose(1, 2)
        down_EHI = down_EHI.transpose(1, 2).contiguous().transpose(1, 2)
    weight_TK = torch.rand(tokens, top_k, generator=g).to(device)
    return Problem(values(tokens, hidden), weight_TK, gate_up_EJH, down_EHI, values(experts, width), layout, act)


def assert_close(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    print(f"{name}: {error:.2e}")
    assert error <= TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


@each_value_once()
@pytest.mark.parametrize(("case", "dtype"), EVERY_CASE)
def test_gathered_rows_times_their_experts_matrix(case: str, dtype: torch.dtype, device: torch.device) -> None:
    p = problem(case, dtype, device)
    out_NJ = p.rows(p.gate_up_EJH.shape[1])
    multiply_rows(p.x_TH, p.gate_up_EJH.transpose(1, 2), p.layout.offs_E, out_NJ, **p.order, configuration=TINY)
    expected = torch.full_like(out_NJ, math.nan, dtype=torch.float64)
    for e, rows in p.per_expert():
        expected[rows] = p.x_TH.double()[p.layout.token_N[rows]] @ p.gate_up_EJH[e].double().T
    assert_close("out", out_NJ[: p.owned], expected[: p.owned], dtype)
    assert out_NJ[p.owned :].isnan().all(), "rows that belong to nobody are not written"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_sorted_rows_with_bias_and_either_storage_of_the_matrix(transposed, bias, device):
    p = problem("unowned", torch.float32, device, transposed=transposed)
    a_NI = torch.randn(p.rows(p.down_EHI.shape[2]).shape, device=device)
    a_NI[p.owned :] = math.nan
    bias_EH = torch.randn(p.down_EHI.shape[:2], device=device) if bias else None
    y_NH = p.rows(p.down_EHI.shape[1])
    multiply_rows(a_NI, p.down_EHI.transpose(1, 2), p.layout.offs_E, y_NH, bias_EO=bias_EH, configuration=TINY)
    expected = torch.empty_like(y_NH, dtype=torch.float64)
    for e, rows in p.per_expert():
        expected[rows] = a_NI[rows].double() @ p.down_EHI[e].double().T
        if bias_EH is not None:
            expected[rows] += bias_EH[e].double()
    assert_close("y", y_NH[: p.owned], expected[: p.owned], torch.float32)


@each_value_once()
@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_product_and_an_addend(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    p = problem("unowned", dtype, device)
    low_NR = torch.randn(p.rows(rank).shape, device=device).to(dtype)
    low_NR[p.owned :] = math.nan
    factor_EOR = torch.randn(*p.gate_up_EJH.shape[:2], rank, device=device).to(dtype) / math.sqrt(rank)
    out_NJ = p.rows(p.gate_up_EJH.shape[1])
    matrix = p.gate_up_EJH.transpose(1, 2)
    addend = Addend(low_NR, factor_EOR, low_NR.shape[1])
    multiply_rows(p.x_TH, matrix, p.layout.offs_E, out_NJ, **p.order, scale=0.75, addend=addend, configuration=TINY)
    expected = torch.empty_like(out_NJ, dtype=torch.float64)
    for e, rows in p.per_expert():
        expected[rows] = 0.75 * p.x_TH.double()[p.layout.token_N[rows]] @ p.gate_up_EJH[e].double().T
        expected[rows] += low_NR[rows].double() @ factor_EOR[e].double().T
    assert_close("out", out_NJ[: p.owned], expected[: p.owned], dtype)
    assert out_NJ[p.owned :].isnan().all(), "rows that belong to nobody are not written"


@each_value_once()
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_addend_in_tiles_of_128_rows(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """With a rank of 32 and four warps the addend came out wrong on Hopper, see `with_addend`."""
    p = problem("many rows", dtype, device)
    low_NR = torch.randn(p.rows(rank).shape, device=device).to(dtype)
    factor_EJR = torch.randn(*p.gate_up_EJH.shape[:2], rank, device=device).to(dtype) / math.sqrt(rank)
    addend, offs_E = Addend(low_NR, factor_EJR, rank), p.layout.offs_E
    h_NJ, a_NI = p.rows(p.gate_up_EJH.shape[1]), p.rows(p.down_EHI.shape[2])
    multiply_rows_activated(p.x_TH, p.gate_up_EJH, offs_E, p.activation, h_NJ, a_NI, **p.order, addend=addend)
    out_NJ = p.rows(p.gate_up_EJH.shape[1])
    multiply_rows(p.x_TH, p.gate_up_EJH.transpose(1, 2), offs_E, out_NJ, **p.order, addend=addend)
    expected = torch.empty_like(out_NJ, dtype=torch.float64)
    for e, rows in p.per_expert():
        expected[rows] = p.x_TH.double()[p.layout.token_N[rows]] @ p.gate_up_EJH[e].double().T
        expected[rows] += low_NR[rows].double() @ factor_EJR[e].double().T
    assert_close("h", h_NJ, expected, dtype)
    assert_close("out", out_NJ, expected, dtype)


def test_strided_rows_into_part_of_a_wider_buffer(device: torch.device) -> None:
    p = problem("awkward", torch.float32, device)
    rows_NI = torch.randn(p.rows(2 * p.down_EHI.shape[2]).shape, device=device)[:, ::2]
    hidden = p.down_EHI.shape[1]
    wide = p.rows(hidden + 5)
    multiply_rows(rows_NI, p.down_EHI.transpose(1, 2), p.layout.offs_E, wide[:, 2 : 2 + hidden], configuration=TINY)
    expected = torch.cat([rows_NI[rows].double() @ p.down_EHI[e].double().T for e, rows in p.per_expert()])
    assert_close("y", wide[:, 2 : 2 + hidden], expected, torch.float32)
    assert wide[:, :2].isnan().all() and wide[:, 2 + hidden :].isnan().all()


def up_reference(p: Problem, bias: bool) -> Tensor:
    h_NJ = torch.zeros(p.layout.order_N.shape[0], p.gate_up_EJH.shape[1], dtype=torch.float64, device=p.x_TH.device)
    for e, rows in p.per_expert():
        h_NJ[rows] = p.x_TH.double()[p.layout.token_N[rows]] @ p.gate_up_EJH[e].double().T
        if bias:
            h_NJ[rows] += p.bias_EJ[e].double()
    return h_NJ


def check_up(p: Problem, bias: bool, keep_h: bool, chosen: Configuration | None) -> None:
    h_NJ = p.rows(p.gate_up_EJH.shape[1]) if keep_h else None
    a_NI = p.rows(p.down_EHI.shape[2])
    multiply_rows_activated(
        p.x_TH,
        p.gate_up_EJH,
        p.layout.offs_E,
        p.activation,
        h_NJ,
        a_NI,
        **p.order,
        bias_EJ=p.bias_EJ if bias else None,
        configuration=chosen,
    )
    expected = up_reference(p, bias)[: p.owned]
    assert_close("a", a_NI[: p.owned], activate(expected, p.activation), p.x_TH.dtype)
    assert a_NI[p.owned :].isnan().all(), "rows that belong to nobody are not written"
    if h_NJ is not None:
        assert_close("h", h_NJ[: p.owned], expected, p.x_TH.dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_up_projection_applies_every_activation(activation: str, device: torch.device) -> None:
    check_up(problem("awkward", torch.float32, device, activation), bias=True, keep_h=True, chosen=TINY)


@pytest.mark.parametrize(("case", "dtype"), EVERY_CASE)
def test_up_projection_in_every_case(case: str, dtype: torch.dtype, device: torch.device) -> None:
    check_up(problem(case, dtype, device), bias=False, keep_h=case == "unowned", chosen=None)


@pytest.mark.parametrize("activation", ["swiglu", "gpt-oss", "plain"])
def test_up_projection_with_transposed_storage(activation: str, device: torch.device) -> None:
    check_up(problem("even", torch.float32, device, activation, transposed=True), bias=True, keep_h=True, chosen=WIDE)


def check_down_backward(p: Problem, chosen: Configuration | None, in_place: bool = False, keep_a: bool = True) -> None:
    dtype, owned, order_N = p.x_TH.dtype, p.owned, p.layout.order_N
    h_NJ = torch.randn(p.rows(p.gate_up_EJH.shape[1]).shape, device=p.x_TH.device).to(dtype)
    h_NJ[owned:] = math.nan
    h_wide = h_NJ[:owned].double()
    dh_NJ = h_NJ if in_place else p.rows(h_NJ.shape[1])
    scaled_a_NI = p.rows(p.down_EHI.shape[2]) if keep_a else None
    dy_TH = p.x_TH  # any rows of H will do
    ds_N = down_backward(
        dy_TH,
        p.down_EHI,
        p.layout.offs_E,
        h_NJ,
        p.weight_TK,
        p.activation,
        dh_NJ,
        scaled_a_NI,
        order_N,
        top_k=p.layout.top_k,
        configuration=chosen,
    )
    a = activate(h_wide, p.activation)
    da = torch.zeros_like(a)
    for e, rows in p.per_expert():
        da[rows] = dy_TH.double()[p.layout.token_N[rows]] @ p.down_EHI[e].double()
    scale = p.weight_TK.double().reshape(-1)[order_N[:owned], None]
    assert_close("dh", dh_NJ[:owned], activate_backward(da * scale, h_wide, p.activation), dtype)
    assert_close("ds", ds_N[:owned], (da * a).sum(1), dtype)
    assert ds_N.dtype == torch.float32
    if scaled_a_NI is not None:
        assert_close("scaled a", scaled_a_NI[:owned], a * scale, dtype)
        assert scaled_a_NI[owned:].isnan().all(), "rows that belong to nobody are not written"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_down_backward_through_every_activation(activation: str, device: torch.device) -> None:
    check_down_backward(problem("awkward", torch.float32, device, activation), TINY)


@pytest.mark.parametrize("activation", ["swiglu", "gpt-oss", "plain"])
def test_down_backward_in_slices_with_transposed_storage(activation: str, device: torch.device) -> None:
    p = problem("even", torch.float32, device, activation, transposed=True)
    assert number_of_slices(WIDE, p.activation) > 1
    check_down_backward(p, WIDE)


@pytest.mark.parametrize(("case", "dtype"), EVERY_CASE)
def test_down_backward_in_every_case(case: str, dtype: torch.dtype, device: torch.device) -> None:
    check_down_backward(problem(case, dtype, device), None)


@pytest.mark.parametrize("activation", ["swiglu", "gpt-oss", "plain"])
def test_down_backward_may_overwrite_h(activation: str, device: torch.device) -> None:
    check_down_backward(problem("unowned", torch.float32, device, activation), TINY, in_place=True, keep_a=False)


def test_two_runs_are_bitwise_equal(device: torch.device) -> None:
    p = problem("awkward", torch.float32, device)
    h_NJ = torch.randn(p.rows(p.gate_up_EJH.shape[1]).shape, device=device)
    runs = []
    for _ in range(2):
        dh_NJ = torch.empty_like(h_NJ)
        ds_N = down_backward(
            p.x_TH,
            p.down_EHI,
            p.layout.offs_E,
            h_NJ,
            p.weight_TK,
            p.activation,
            dh_NJ,
            None,
            p.layout.order_N,
            top_k=2,
            configuration=TINY,
        )
        runs.append((dh_NJ, ds_N))
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("block_m", [16, 64])
def test_there_are_slots_enough_for_any_routing(block_m: int) -> None:
    g = torch.Generator().manual_seed(3)
    for rows, experts in ((1, 1), (5, 40), (199, 7), (760, 63)):
        for _ in range(20):
            cuts = torch.randint(0, rows + 1, (experts,), generator=g).sort().values.tolist()
            chosen = Configuration(block_m, 16, 16, 1, 1, 1)
            per_row = tile_constants(rows, experts, chosen)["SLOT_PER_ROW"]
            start, next_free = 0, 0
            for e, end in enumerate(cuts):
                first_slot = start if per_row else start // block_m + e
                assert first_slot >= next_free
                next_free = first_slot + -(-(end - start) // block_m)
                start = end
            assert next_free <= slots(rows, experts, block_m)


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("capability", "shared_kilobytes"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227)])
@pytest.mark.parametrize("role", ["product", "up", "down_backward", "weight_gradient"])
def test_default_configurations_fit_in_shared_memory(role, capability, shared_kilobytes, dtype):
    for rows in (1, 100, 1000, 10_000, 1_000_000):
        chosen = configuration(role, Product(rows, 16, 2048, 1536, dtype), capability)
        stage = (chosen.block_m + chosen.block_n) * chosen.block_k * dtype.itemsize
        assert stage * chosen.num_stages <= shared_kilobytes * 1024


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        configuration("up", Product(8, 2, 20, 1, torch.float64), (9, 0))
