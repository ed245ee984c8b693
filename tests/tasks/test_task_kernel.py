"""The scheduled backward as one kernel has the bits of the `triton` backend's own kernels."""

import pytest
import torch

from amoeba.core.config import Activation, RouterConfig
from amoeba.core.problem import Needs, Problem
from amoeba.core.weights import ExpertWeights
from amoeba.proof.conformance import poisoned_memory

pytest.importorskip("triton")
from amoeba.backends import sorted_rows
from amoeba.backends.triton_rows import TritonRows
from amoeba.kernels.router import router_backward, router_forward
from amoeba.kernels.sort import sort_rows
from amoeba.tasks.graph import OF_EXPERT, Kind
from amoeba.tasks.timeline import DeviceTrace
from amoeba.tasks.triton import backward
from amoeba.tasks.triton.backward import scheduled_backward
from amoeba.tasks.triton.bias_tasks import BiasTasks
from amoeba.tasks.triton.router_tasks import RouterTasks
from selection import quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PlainRows(TritonRows):
    """On Hopper too."""

    @classmethod
    def dispatch(cls, problem, saved):
        return TritonRows(problem, *(saved[1:] if saved else sort_rows(problem.expert_TK, problem.weights.num_experts)))


def make_problem(
    tokens, hidden, intermediate, experts, top_k, activation=None, dtype=torch.float32, one=False, seed=0, biases=()
):
    activation = activation or Activation("silu")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        """Divided by the fan-in's root: sums over it stay in the range of fp16."""
        return torch.randn(*shape, generator=generator, dtype=torch.float32).div(shape[-1] ** 0.5).to(DEVICE, dtype)

    width = activation.width(intermediate)
    matrices = normal(experts, width, hidden), normal(experts, hidden, intermediate)
    widths = {"gate_up_bias_EJ": width, "down_bias_EH": hidden}
    given = {name: normal(experts, widths[name]) for name in biases}
    weights = ExpertWeights(*matrices, activation=activation, **given)
    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    ids = torch.zeros_like(ids) if one else ids
    weight = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
    return Problem(normal(tokens, hidden), ids.to(DEVICE), weight, weights), normal(tokens, hidden)


def both(problem, dy_TH, **options):
    _, saved = sorted_rows.forward(problem, "h", PlainRows)
    weights = problem.weights
    biases = weights.gate_up_bias_EJ, weights.down_bias_EH
    of_biases = {"gate_up_bias": biases[0] is not None, "down_bias": biases[1] is not None}
    needs = Needs(x=True, weight=True, gate_up=True, down=True, **of_biases)
    expected = sorted_rows.backward(problem, saved, dy_TH, needs, PlainRows)
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
            biases=BiasTasks(*biases),
            **options,
        )
    return expected, found


def same(left, right):
    return all(a.equal(b) for a, b in zip(left, right, strict=True) if a is not None)


def check(problem, dy_TH, **options):
    expected, found = both(problem, dy_TH, **options)
    for name, value in found._asdict().items():
        if (other := getattr(expected, name)) is None:
            assert value is None, name
            continue
        assert value.isfinite().all(), name
        assert value.equal(other), name


@pytest.mark.parametrize(
    "sizes",
    [(40, 16, 24, 2, 2), (1, 16, 16, 4, 1), (9, 20, 130, 9, 1)],
    ids=["three blocks of tokens", "one row, empty experts", "several column tiles, two waves"],
)
def test_gradients_have_the_bits_of_the_triton_backend(sizes):
    check(*make_problem(*sizes))


BOTH = ("gate_up_bias_EJ", "down_bias_EH")


@pytest.mark.parametrize("biases", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up's", "down's"])
def test_biases_have_the_bits_of_the_triton_backend(biases):
    check(*make_problem(40, 16, 24, 3, 2, biases=biases))


def test_biases_of_many_columns_and_of_an_expert_with_several_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(backward, "BIAS_COLUMNS", 16)
    check(*make_problem(150, 40, 16, 2, 1, biases=BOTH, one=True))


def test_all_tokens_on_one_expert():
    check(*make_problem(70, 16, 16, 3, 1, one=True))


@pytest.mark.parametrize(
    "activation", [Activation("relu", gated=False), Activation("silu", interleaved=True)], ids=["plain", "interleaved"]
)
def test_other_activations(activation):
    check(*make_problem(9, 16, 24, 3, 2, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [(), BOTH], ids=["plain", "biases"])
def test_many_programs_have_the_same_bits_in_every_run(dtype, biases):
    problem, dy_TH = make_problem(3000, 512, 256, 16, 4, dtype=dtype, biases=biases)
    first = both(problem, dy_TH)[1]
    for _ in range(20):
        check(problem, dy_TH)
        assert same(first, both(problem, dy_TH)[1])


ROUTERS = {
    "softmax": RouterConfig(num_experts=5, top_k=2),
    "over all": RouterConfig(num_experts=5, top_k=2, renormalize=False, scaling_factor=2.5),
    "sigmoid": RouterConfig(num_experts=5, top_k=2, score="sigmoid"),
}


@quick(lambda name: name != "softmax")
@pytest.mark.parametrize("name", ROUTERS)
def test_the_routers_backward_as_tasks_has_the_same_gradients(name):
    config, (problem, dy_TH) = ROUTERS[name], make_problem(40, 20, 24, 5, 2, biases=BOTH)
    generator = torch.Generator().manual_seed(1)
    gate_EH = torch.randn(5, 20, generator=generator).to(DEVICE)
    logits_TE = problem.x_TH @ gate_EH.T
    expert_TK, weight_TK, scores_TE = router_forward(logits_TE, config, None)
    problem = problem._replace(expert_TK=expert_TK.masked_fill(expert_TK == 3, -1), weight_TK=weight_TK)
    plain = both(problem, dy_TH)[1]
    router = RouterTasks(config, gate_EH, expert_TK, weight_TK, scores_TE, logits_TE)
    trace = DeviceTrace(problem.x_TH.device)
    found = both(problem, dy_TH, router=router, trace=trace.room)[1]
    assert same(found._replace(x=plain.x), plain)
    d_logits = router_backward(expert_TK, weight_TK, scores_TE, plain.weight, None, logits_TE, config, torch.float32)
    torch.testing.assert_close(
        router.d_logits, d_logits, rtol=1e-5 if DEVICE == "cuda" else 0, atol=1e-7 * (DEVICE == "cuda")
    )
    wide, x = d_logits.double(), problem.x_TH.double()
    torch.testing.assert_close(found.x.double(), plain.x.double() + wide @ gate_EH.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(router.d_gate.double(), wide.T @ x, rtol=1e-5, atol=1e-5)
    kinds = [record.task.kind for record in trace.records()]
    assert kinds.count(Kind.ROUTER) == kinds.count(Kind.COMBINE) == 3 and kinds[-1] == Kind.ROUTER_WEIGHTS


def traced(problem, dy_TH):
    _, saved = sorted_rows.forward(problem, "h", PlainRows)
    trace, weights = DeviceTrace(problem.x_TH.device), problem.weights
    arguments = (
        dy_TH, problem.x_TH, saved.h_NJ, problem.expert_TK, problem.weight_TK, weights.gate_up_EJH, weights.down_EHI,
        weights.activation, saved.maps,
    )  # fmt: skip
    biases = weights.gate_up_bias_EJ, weights.down_bias_EH
    found = [scheduled_backward(*arguments, biases=BiasTasks(*biases), trace=each) for each in (None, trace.room)]
    records = trace.records()
    return *found, records, trace.gates(records, saved.offs_E.tolist())


def test_a_traced_backward_has_the_same_bits_and_each_task_once():
    problem, dy_TH = make_problem(40, 16, 24, 3, 2, biases=BOTH)
    plain, found, records, arrows = traced(problem, dy_TH)
    assert same(plain, found)
    assert [record.ticket for record in records] == list(range(len(records)))
    assert len({record.task for record in records}) == len(records)
    kinds = {record.task.kind for record in records}
    assert kinds == {Kind.DOWN, Kind.ACTIVATE, Kind.UP, Kind.COMBINE, *OF_EXPERT}
    assert all(record.came <= record.started <= record.ended for record in records)
    behind = {after.task for _, after in arrows}
    waiting = {Kind.ACTIVATE, Kind.UP, *OF_EXPERT}
    if DEVICE == "cpu":  # one program, whose clock goes on at each look
        assert behind == {record.task for record in records if record.task.kind in waiting}
        assert all(before.ended <= after.started for before, after in arrows)
    assert all(before.started <= after.started for before, after in arrows)  # its end is noted behind its signal
