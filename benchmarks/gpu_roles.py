"""Each kernel of the GPU path by itself, beside torch's grouped product where there is one: where a step's time goes.

    PYTHONPATH=src python benchmarks/gpu_roles.py                      # qwen3_30b
    PYTHONPATH=src python benchmarks/gpu_roles.py sonic_a sonic_b mixtral

Needs a CUDA device, torch and triton; the kernels for Hopper are measured on Hopper. All in turns, with the GPU given a
head start and the second-level cache filled before each (see amoeba/bench/timing.py). Products are compared with
torch's first, and left out if they differ by more than rounding. docs/log.md quotes such tables; claims about the layer
come from `amoeba bench`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends.low_rank import ByToken
from amoeba.backends.triton_rows import HopperRows, TritonRows
from amoeba.bench.shapes import SHAPES
from amoeba.bench.timing import Step, time_in_turns
from amoeba.bench.workload import draw_routing, relative_error
from amoeba.config import Activation
from amoeba.kernels.activate import activate, activate_backward
from amoeba.kernels.combine import combine
from amoeba.kernels.sort import sort_rows
from amoeba.problem import Needs, Problem
from amoeba.weights import ExpertWeights

REPEATS = 10
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Role:
    name: str
    run: Callable[[], object]
    flops: float = 0.0
    bytes: float = 0.0
    expected: Tensor | None = None  # what run() has to return


def roles_of(name: str) -> list[Role]:
    shape, device = SHAPES[name], torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    T, H, I, E, K = shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k
    N, activation = shape.rows, Activation()
    expert_TK, weight_TK = draw_routing(shape, generator)
    gate_up, down = normal(E, 2 * I, H, scale=H**-0.5), normal(E, H, I, scale=I**-0.5)
    problem = Problem(normal(T, H), expert_TK, weight_TK.float(), ExpertWeights(gate_up, down))
    ours, dy_TH = TritonRows.dispatch(problem, None), normal(T, H)
    rows = plain = TritonRows(problem, ours.order_N, ours.slot_row_N, ours.offs_E)
    slot_row_TK, offs_E = rows.slot_row_N.view(T, K), rows.offs_E
    x_NH, dy_NH = (t.index_select(0, rows.order_N // K) for t in (problem.x_TH, dy_TH))

    h_NJ, a_NI = plain.up(True)
    assert h_NJ is not None
    da_NI = F.grouped_mm(dy_NH, down, offs=offs_E)
    dh_NJ, scaled_a_NI, out_TH = torch.empty_like(h_NJ), torch.empty_like(a_NI), torch.empty_like(dy_TH)
    y_NH = F.grouped_mm(a_NI, down.transpose(1, 2), offs=offs_E)
    unit = 2.0 * N * H * I

    def back() -> None:
        activate_backward(da_NI, h_NJ, problem.weight_TK, rows.order_N, activation, dh_NJ, scaled_a_NI, offs_E)

    back()
    dx_NH = F.grouped_mm(dh_NJ, gate_up, offs=offs_E)
    d_down = F.grouped_mm(dy_NH.t(), scaled_a_NI, offs=offs_E)
    d_gate_up = F.grouped_mm(dh_NJ.t(), x_NH, offs=offs_E)
    return [
        Role("sort", lambda: sort_rows(expert_TK, E)),
        Role("up, torch (sorted rows, not activated)", lambda: F.grouped_mm(x_NH, gate_up.mT, offs=offs_E), 2 * unit),
        Role("up, ours", lambda: ours.up(True)[1], 2 * unit, expected=a_NI),
        Role("up, plain Triton", lambda: plain.up(True)[1], 2 * unit, expected=a_NI),
        Role("activation", lambda: activate(h_NJ, activation, scaled_a_NI, offs_E), bytes=6.0 * N * I),
        Role("down, torch", lambda: F.grouped_mm(a_NI, down.mT, offs=offs_E), unit),
        Role("down, ours", lambda: ours.down(a_NI), unit, expected=y_NH),
        Role("down, plain Triton", lambda: plain.down(a_NI), unit, expected=y_NH),
        Role("combine", lambda: combine(y_NH, slot_row_TK, problem.weight_TK, out_TH), bytes=2.0 * (N + T) * H),
        Role("dA', torch (sorted rows)", lambda: F.grouped_mm(dy_NH, down, offs=offs_E), unit),
        Role("activation back", back, bytes=12.0 * N * I),
        Role("d down, torch (sorted rows)", lambda: F.grouped_mm(dy_NH.t(), scaled_a_NI, offs=offs_E), unit),
        Role("d down, ours", lambda: ours.weight_gradient(ByToken(dy_TH), scaled_a_NI, down), unit, expected=d_down),
        Role("dx, torch", lambda: F.grouped_mm(dh_NJ, gate_up, offs=offs_E), 2 * unit),
        Role("dx, ours", lambda: ours.up_backward(dh_NJ, Needs(x=True, weight=False))[0], 2 * unit, expected=dx_NH),
        Role("d gate_up, torch (sorted rows)", lambda: F.grouped_mm(dh_NJ.t(), x_NH, offs=offs_E), 2 * unit),
        Role("d gate_up, ours", lambda: ours.weight_gradient(dh_NJ, ours.x, gate_up), 2 * unit, expected=d_gate_up),
        *(in_fp8(ours, dy_TH, dh_NJ) if isinstance(ours, HopperRows) and not (H % 128 or I % 128) else []),
    ]


def in_fp8(ours: HopperRows, dy_TH: Tensor, dh_NJ: Tensor) -> list[Role]:
    """The same products in e4m3; their numbers are proven by `amoeba verify`."""
    from amoeba.backends.fp8_codes import codes_of
    from amoeba.kernels.hopper import scaled_product
    from amoeba.kernels.quantise import empty_rows, quantise_rows

    x_TH, weights, table, order_N, K = ours.problem.x_TH, ours.problem.weights, ours.table, ours.order_N, ours.top_k
    gate_up, down, activation = weights.gate_up_EJH, weights.down_EHI, weights.activation
    (_, H, I), N = down.shape, ours.problem.rows
    of_gate_up, of_down = codes_of(gate_up), codes_of(down)
    of_gate_up.write(gate_up, both=True)
    of_down.write(down, both=True)
    x, dy, dh = quantise_rows(x_TH), quantise_rows(dy_TH), quantise_rows(dh_NJ)
    a, h_NJ, y_NH = empty_rows(N, I, x_TH.device), torch.empty_like(dh_NJ), ours.new_rows(H)
    da_NI = torch.empty((N, I), dtype=torch.float32, device=x_TH.device)
    turned_down, turned_gate_up, unit = of_down.turned(down), of_gate_up.turned(gate_up), 2.0 * N * H * I
    scaled_a_NI, codes = ours.new_rows(I), empty_rows(N, 2 * I, x_TH.device)

    def up(h: Tensor | None) -> None:
        scaled_product.up(x, order_N, K, of_gate_up.matrix, table, activation, a, h_NJ=h)

    def back() -> None:
        weight_TK, offs_E = ours.problem.weight_TK, ours.offs_E
        activate_backward(da_NI, h_NJ, weight_TK, order_N, activation, dh_NJ, scaled_a_NI, offs_E, quantised_dh=codes)

    up(h_NJ)
    rows, matrix = a.data.view(scaled_product.E4M3), of_down.matrix.data.view(scaled_product.E4M3).mT
    ones = torch.ones(N, device=x_TH.device), torch.ones(down.shape[:2], device=x_TH.device)
    options = {"offs": ours.offs_E, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return [
        Role("quantise x", lambda: quantise_rows(x_TH), bytes=3.0 * x_TH.numel()),
        Role("quantise gate_up", lambda: of_gate_up.write(gate_up, both=True), bytes=4.0 * gate_up.numel()),
        Role("up in fp8", lambda: up(h_NJ), 2 * unit),
        Role("up in fp8, h not kept", lambda: up(None), 2 * unit),
        Role("down in fp8", lambda: scaled_product.multiply(a, of_down.matrix, table, y_NH), unit),
        Role("down in fp8, torch (rowwise)", lambda: torch._scaled_grouped_mm(rows, matrix, *ones, **options), unit),
        Role(
            "dA' in fp8",
            lambda: scaled_product.multiply(dy, turned_down, table, da_NI, order_N=order_N, top_k=K),
            unit,
        ),
        Role("activation back in fp8", back, bytes=16.0 * N * I),
        Role("dx in fp8", lambda: scaled_product.multiply(dh, turned_gate_up, table, y_NH), 2 * unit),
    ]


def measure(name: str) -> None:
    print(
        f"{name}: T,H,I,E,K = {SHAPES[name].tokens},{SHAPES[name].hidden},{SHAPES[name].intermediate},...", flush=True
    )
    right: dict[str, Role] = {}
    for role in roles_of(name):
        found = role.run()
        if isinstance(found, Tensor) and role.expected is not None:
            error = relative_error(found, role.expected)
            if error > TOLERANCE:
                print(f"  {role.name}: off by {error:.1e}, not timed")
                continue
        right[role.name] = role
    timings = time_in_turns({key: _step(role) for key, role in right.items()}, torch.device("cuda"), REPEATS)
    for key, timing in timings.items():
        role, ms = right[key], timing.median_ms
        rate = f"{role.flops / ms / 1e9:6.0f} TFLOP/s" if role.flops else ""
        rate = f"{role.bytes / ms / 1e9:6.2f} TB/s" if role.bytes else rate
        print(f"  {key:42s} {ms:8.4f} ms (min {timing.min_ms:.4f}) {rate}", flush=True)


def _step(role: Role) -> Step:
    def step(mark: Callable[[], None]) -> None:
        mark()
        role.run()
        mark()

    return step


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("gpu_roles: needs a CUDA device, torch sees none; the layer as a whole runs anywhere: amoeba bench")
    for wanted in sys.argv[1:] or ["qwen3_30b"]:
        if wanted not in SHAPES:
            sys.exit(f"gpu_roles: expected one of {', '.join(SHAPES)}, got {wanted!r}")
        measure(wanted)
