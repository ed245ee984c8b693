"""Experts over processes that share a GPU, by every transport: the gradients of one process, and many steps.

With CUDA MPS they run at the same time, else they take turns. NVSHMEM wants it, and a share of the GPU for each of
them, which these tests give their processes:

    export CUDA_MPS_PIPE_DIRECTORY=$PWD/build/mps CUDA_MPS_LOG_DIRECTORY=$PWD/build/mps
    mkdir -p build/mps && nvidia-cuda-mps-control -d
    python -m pytest -m gpu tests/parallel/test_ranks_share_a_gpu.py -k shmem
    echo quit | nvidia-cuda-mps-control
"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import amoeba
from amoeba import ExpertWeights, Routing, experts, with_precision
from amoeba.parallel import Owners, Ranks, ShardedExperts
from amoeba.parallel.processes import LocalRanks, first_processes
from amoeba.parallel.transports.choice import choose_transport
from amoeba.precision.recipes import OF_ALL_TOKENS, SUMMARIES

pytestmark = pytest.mark.gpu
K, E, H, I = 4, 16, 256, 128
NAMES = ("output", "x", "weight", "gate_up", "down")
WAYS: dict[str, dict[str, Any]] = {
    "collective": {"transport": "collective"},
    "peers, sums by rows": {"transport": "peers", "straight": False},
    "peers, sums straight": {"transport": "peers", "straight": True},
    "overlapped": {"transport": "peers", "straight": True, "overlap": True},
    "fixed room": {"transport": "peers", "straight": True, "most_tokens": 704, "most_rows": 8 * 704 * K},
}
# of the output and the gradient of x, which are rounded once more; all else has the bits of one process
MOST = {torch.bfloat16: 4e-3, torch.float32: 1e-6}


WITH_MPS = pytest.mark.skipif(
    not Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "nowhere"), "control").exists(),
    reason="NVSHMEM wants MPS where ranks share a GPU: see the top of this file",
)


def take_half() -> None:
    """Of the GPU, by MPS: before CUDA is asked for anything."""
    assert not torch.cuda.is_initialized()
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"


def tokens_of(count: int) -> list[int]:
    return [0 if rank == 2 else 200 + 71 * rank for rank in range(count)]


def layer_and_tokens(count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of all ranks."""
    generator, tokens = torch.Generator().manual_seed(count), sum(tokens_of(count))
    shapes = {"x": (tokens, H), "dy": (tokens, H), "gate_up": (E, 2 * I, H), "down": (E, H, I)}
    found = {name: (torch.randn(*shape, generator=generator) / 8).to(dtype) for name, shape in shapes.items()}
    found["expert"] = torch.rand(tokens, E, generator=generator).topk(K, 1).indices
    found["weight"] = torch.rand(tokens, K, generator=generator)
    return {name: tensor.cuda() for name, tensor in found.items()}


def results(of: dict[str, Tensor], weights: Any) -> list[Tensor]:
    """By NAMES. weights: what is made of gate_up and down."""
    wanted = [of[name].requires_grad_() for name in NAMES[1:]]
    y_TH = experts(of["x"], Routing(of["expert"], of["weight"]), weights(ExpertWeights(of["gate_up"], of["down"])))
    return [tensor.detach().cpu() for tensor in (y_TH, *torch.autograd.grad(y_TH, wanted, of["dy"]))]


def alone(count: int, dtype: torch.dtype, precision: str = "bf16") -> list[Tensor]:
    return results(layer_and_tokens(count, dtype), lambda weights: with_precision(weights, precision))


def share(rank: int, count: int, dtype: torch.dtype, options: dict[str, Any], precision: str = "bf16") -> list[Tensor]:
    of, owners, parts = layer_and_tokens(count, dtype), Owners.even(E, count), tokens_of(count)
    for name in ("x", "dy", "expert", "weight"):
        of[name] = of[name].split(parts)[rank].clone()
    for name in ("gate_up", "down"):
        of[name] = owners.take(of[name], rank).clone()
    ranks = Ranks(first_processes(count), 60.0)
    return results(of, lambda local: ShardedExperts(with_precision(local, precision), owners, ranks, **options))


def scheduled_share(
    rank: int, count: int, dtype: torch.dtype, steps: int, transport: str = "peers"
) -> tuple[int, list[list[Tensor]]]:
    """By the scheduled backward: how often it began before dy of the other ranks was there, and what each step gave."""
    from amoeba.tasks.hopper import backward as hopper
    from amoeba.tasks.triton import arrivals
    from amoeba.tasks.triton import backward as plain

    announced, taken = arrivals.announced, []

    def noted(dy_RH: Tensor) -> Any:
        taken.append(found := announced(dy_RH))
        return found

    arrivals.announced = noted
    most = torch.cuda.get_device_properties(0).multi_processor_count // count
    hopper.multiprocessors = plain.programs = lambda device: most  # so that those of all ranks find room at once
    options = {"transport": transport, "local_backend": "tasks", "most_tokens": 704, "most_rows": 8 * 704 * K}
    found = [share(rank, count, dtype, options) for _ in range(steps)]
    return sum(each is not None for each in taken), found


def remote_share(rank: int, count: int, dtype: torch.dtype, steps: int) -> tuple[str, list[list[Tensor]]]:
    os.environ["AMOEBA_REMOTE_RANKS"] = "1"
    ranks = Ranks(first_processes(count), 60.0)
    transport, refused = choose_transport("auto", ranks, torch.device("cuda", torch.cuda.current_device()))
    assert transport is not None, refused
    options = {"transport": transport.name}
    return f"{transport.name}; {refused}", [share(rank, count, dtype, options) for _ in range(steps)]


def differences(way: str, parts: list[list[Tensor]], expected: list[Tensor], most: float) -> list[str]:
    found = []
    for name, other, *own in zip(NAMES, expected, *parts, strict=True):
        one = torch.cat(own)
        error = ((one.double() - other.double()).norm() / other.double().norm()).item()
        print(f"{len(parts)} ranks, {way}, {other.dtype}, {name}: {'same bits' if torch.equal(one, other) else error}")
        if not (torch.equal(one, other) or (name in ("output", "x") and error <= most)):
            found.append(f"{way}: {name} {error}")
    return found


@pytest.mark.parametrize("count", [2, *(pytest.param(more, marks=pytest.mark.thorough) for more in (4, 8))])
def test_every_way_has_the_gradients_of_one_process(count: int) -> None:
    wrong = []
    with LocalRanks(count) as processes:
        for dtype, most in MOST.items():
            (expected,) = processes.run(alone, [(count, dtype)])
            for way, options in WAYS.items():
                parts = processes.run(share, [(rank, count, dtype, options) for rank in range(count)])
                wrong += differences(way, parts, expected, most)
    assert not wrong


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_way_has_the_gradients_of_one_process_that_trains_in_fp8(count: int) -> None:
    """Twice each: what was guessed of the rows to come, and launch plans, are those of the first time."""
    wrong, dtype = [], torch.bfloat16
    with LocalRanks(count) as processes:
        for precision in SUMMARIES.keys() - {OF_ALL_TOKENS}:
            (expected,) = processes.run(alone, [(count, dtype, precision)])
            for way, options in (*WAYS.items(), *WAYS.items()):
                parts = processes.run(share, [(rank, count, dtype, options, precision) for rank in range(count)])
                wrong += differences(f"{precision}, {way}", parts, expected, MOST[dtype])
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_the_scheduled_backward_sends_and_returns_rows_by_its_tasks(count: int, dtype: torch.dtype) -> None:
    steps, wrong = 3, list[str]()
    with LocalRanks(count) as processes:
        (expected,) = processes.run(alone, [(count, dtype)])
        parts = processes.run(scheduled_share, [(rank, count, dtype, steps) for rank in range(count)])
    assert [early for early, _ in parts] == [steps] * count
    for step in range(steps):
        wrong += differences(f"tasks, step {step}", [found[step] for _, found in parts], expected, MOST[dtype])
    assert not wrong


@pytest.mark.thorough
@WITH_MPS
def test_remote_ranks_go_by_shmem_with_the_gradients_of_one_process() -> None:
    steps, wrong = 6, []  # a counter that goes wrong lets the second one read too early
    with LocalRanks(2) as processes:
        processes.run(take_half, [()] * 2)
        for dtype, most in MOST.items():
            (expected,) = processes.run(alone, [(2, dtype)])
            parts = processes.run(remote_share, [(rank, 2, dtype, steps) for rank in range(2)])
            assert parts[0][0].startswith("shmem"), parts[0][0]
            for step in range(steps):
                wrong += differences(f"shmem, step {step}", [found[step] for _, found in parts], expected, most)
    assert not wrong


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@WITH_MPS
def test_the_scheduled_backward_begins_early_over_shmem(dtype: torch.dtype) -> None:
    steps, wrong = 4, list[str]()
    with LocalRanks(2) as processes:
        processes.run(take_half, [()] * 2)
        (expected,) = processes.run(alone, [(2, dtype)])
        parts = processes.run(scheduled_share, [(rank, 2, dtype, steps, "shmem") for rank in range(2)])
    assert [early for early, _ in parts] == [steps] * 2
    for step in range(steps):
        wrong += differences(f"tasks by shmem, {step}", [found[step] for _, found in parts], expected, MOST[dtype])
    assert not wrong


def many_steps(rank: int, steps: int, ways: list[str]) -> list[Tensor]:
    """Weights after so many steps of gradient descent, with numbers of tokens that change, and with which gradients are
    asked for. ways: in turn."""
    of, owners, ranks = layer_and_tokens(2, torch.bfloat16), Owners.even(E, 2), Ranks(first_processes(2), 60.0)
    weights = [owners.take(of[name], rank).clone().requires_grad_() for name in ("gate_up", "down")]
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(2 * step + rank)
        tokens = (0, 16, 96, 33, 200, 7, 128, 0)[(step * (rank + 1) + rank) % 8]
        x_TH = torch.randn(tokens, H, generator=generator, device="cuda").bfloat16().requires_grad_()
        expert_TK = torch.rand(tokens, E, generator=generator, device="cuda").topk(K, 1).indices
        weight_TK = torch.rand(tokens, K, generator=generator, device="cuda").requires_grad_(step % 4 > 1)
        layer = ShardedExperts(ExpertWeights(*weights), owners, ranks, **WAYS[ways[step % len(ways)]])
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), layer)
        others = ([], [x_TH], [weight_TK], [x_TH, weight_TK])[step % 4]
        gradients = torch.autograd.grad(y_TH, [*weights, *others], 0.01 * y_TH.detach())
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=False):
                weight -= 0.01 * gradient
    return [weight.detach().cpu() for weight in weights]


@pytest.mark.thorough
def test_a_thousand_steps_of_changing_ways_do_not_hang() -> None:
    mixed = ["peers, sums straight", "overlapped", "peers, sums by rows"]
    with LocalRanks(2) as processes:
        found = [
            processes.run(many_steps, [(rank, 1000, ways) for rank in range(2)])
            for ways in (mixed, ["peers, sums by rows"])
        ]
    for one, other in zip(*found, strict=True):
        for weight, expected in zip(one, other, strict=True):
            assert weight.isfinite().all() and torch.equal(weight, expected)


def test_rows_sent_quantised_have_the_bits_of_rows_quantised_on_arrival() -> None:
    wrong = []
    with LocalRanks(2) as processes:
        for precision, (way, options) in itertools.product(("fp8", "fp8-saved", "w8a8"), WAYS.items()):
            found = processes.run(sent_both_ways, [(rank, 2, precision, options) for rank in range(2)])
            wrong += [] if found == [(True, True)] * 2 else [f"{precision}, {way}: {found}"]
    assert not wrong


def sent_both_ways(rank: int, count: int, precision: str, options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a pass without gradients has the same bits, and whether rows were sent quantised at all."""
    from amoeba.parallel import sharded_backend
    from amoeba.placements import placement_named

    of, owners, parts = layer_and_tokens(count, torch.bfloat16), Owners.even(E, count), tokens_of(count)
    x_TH, expert_TK, weight_TK = (of[name].split(parts)[rank].clone() for name in ("x", "expert", "weight"))
    local = ExpertWeights(*(owners.take(of[name], rank).clone() for name in ("gate_up", "down")))
    made = placement_named(precision).make(local)
    layer = ShardedExperts(made, owners, Ranks(first_processes(count), 60.0), **options)
    found, asked = [], sharded_backend._row_format
    try:
        for format_of in (asked, lambda request: 0):
            sharded_backend._row_format = format_of
            with torch.no_grad():
                found.append(experts(x_TH, Routing(expert_TK, weight_TK), layer).cpu())
    finally:
        sharded_backend._row_format = asked
    request = amoeba.Request(x_TH, Routing(expert_TK, weight_TK), layer)
    with torch.no_grad():
        return torch.equal(*found), asked(request) > 0
