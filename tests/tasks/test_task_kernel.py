"""The scheduled backward as one kernel has the bits of the `triton` backend's own kernels."""

from __future__ import annotations

import pytest
import torch

from amoeba.core.config import Activation
from amoeba.core.problem import Needs, Problem
from amoeba.core.weights import ExpertWeights
from amoeba.proof.conformance import poisoned_memory

pytest.importorskip("triton")
from amoeba.backends import sorted_rows
from amoeba.backends.triton_rows import TritonRows
from amoeba.kernels.sort import sort_rows
from amoeba.tasks.graph import Kind
from amoeba.tasks.timeline import DeviceTrace
from amoeba.tasks.triton.backward import scheduled_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PlainRows(TritonRows):
    """On Hopper too."""

    @classmethod
    def dispatch(cls, problem, saved):
        return TritonRows(problem, *(saved[1:] if saved else sort_rows(problem.expert_TK, problem.weights.num_experts)))


def make_problem(tokens, hidden, intermediate, experts, top_k, activation=None, dtype=torch.float32, one=False, seed=0):
    activation = activation or Activation("silu")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        """Divided by the fan-in's root: sums over it stay in the range of fp16."""
        return torch.randn(*shape, generator=generator, dtype=torch.float32).div(shape[-1] ** 0.5).to(DEVICE, dtype)

    width = activation.width(intermediate)
    weights = ExpertWeights(
        normal(experts, width, hidden), normal(experts, hidden, intermediate), activation=activation
    )
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    ids = torch.zeros_like(ids) if one else ids
    weight = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
    return Problem(normal(tokens, hidden), ids.to(DEVICE), weight, weights), normal(tokens, hidden)


def both(problem, dy_TH, **options):
    _, saved = sorted_rows.forward(problem, "h", PlainRows)
    needs = Needs(x=True, weight=True, gate_up=True, down=True)
    expected = sorted_rows.backward(problem, saved, dy_TH, needs, PlainRows)
    weights = problem.weights
    with poisoned_memory():
        found = scheduled_backward(
            dy_TH,
            problem.x_TH,
            saved.h_NJ,
            problem.expert_TK,
            problem.weight_TK,
            weights.gate_up_EJH,
            weights.down_EHI,
            weights.activation,
            saved.maps,
            **options,
        )
    return expected, found


def check(problem, dy_TH, **options):
    expected, found = both(problem, dy_TH, **options)
    for name, value in found._asdict().items():
        assert value.isfinite().all(), name
        assert value.equal(getattr(expected, name)), name


@pytest.mark.parametrize(
    "sizes",
    [(40, 16, 24, 2, 2), (1, 16, 16, 4, 1), (9, 20, 130, 9, 1)],
    ids=["three blocks of tokens", "one row, empty experts", "several column tiles, two waves"],
)
def test_gradients_have_the_bits_of_the_triton_backend(sizes):
    check(*make_problem(*sizes))


def test_all_tokens_on_one_expert():
    check(*make_problem(70, 16, 16, 3, 1, one=True))


@pytest.mark.parametrize(
    "activation", [Activation("relu", gated=False), Activation("silu", interleaved=True)], ids=["plain", "interleaved"]
)
def test_other_activations(activation):
    check(*make_problem(9, 16, 24, 3, 2, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_programs_have_the_same_bits_in_every_run(dtype):
    problem, dy_TH = make_problem(3000, 512, 256, 16, 4, dtype=dtype)
    first = both(problem, dy_TH)[1]
    for _ in range(20):
        check(problem, dy_TH)
        assert all(left.equal(right) for left, right in zip(first, both(problem, dy_TH)[1], strict=True))


def traced(problem, dy_TH):
    _, saved = sorted_rows.forward(problem, "h", PlainRows)
    trace, weights = DeviceTrace(problem.x_TH.device), problem.weights
    arguments = (
        dy_TH, problem.x_TH, saved.h_NJ, problem.expert_TK, problem.weight_TK, weights.gate_up_EJH, weights.down_EHI,
        weights.activation, saved.maps,
    )  # fmt: skip
    found = scheduled_backward(*arguments), scheduled_backward(*arguments, trace=trace.room)
    records = trace.records()
    return *found, records, trace.gates(records, saved.offs_E.tolist())


def test_a_traced_backward_has_the_same_bits_and_each_task_once_behind_its_gates():
    problem, dy_TH = make_problem(40, 16, 24, 3, 2)
    plain, found, records, arrows = traced(problem, dy_TH)
    assert all(left.equal(right) for left, right in zip(plain, found, strict=True))
    assert [record.ticket for record in records] == list(range(len(records)))
    assert len({record.task for record in records}) == len(records)
    kinds = {record.task.kind for record in records}
    assert kinds == {Kind.DOWN, Kind.ACTIVATE, Kind.UP, Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS, Kind.COMBINE}
    assert all(record.came <= record.started <= record.ended for record in records)
    behind = {after.task for _, after in arrows}
    waiting = {Kind.ACTIVATE, Kind.UP, Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS}
    if DEVICE == "cpu":  # one program, whose clock goes on at each look
        assert behind == {record.task for record in records if record.task.kind in waiting}
        assert all(before.ended <= after.started for before, after in arrows)
    assert all(before.started <= after.started for before, after in arrows)  # its end is noted behind its signal
