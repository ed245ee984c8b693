"""The backend `tasks`: proven like every other, taken where it is asked for by name or was measured to be faster."""

import os

import pytest
import torch

from amoeba import Activation, ExpertWeights, Routing, experts
from amoeba.backends import registry
from amoeba.backends import registry as measured
from amoeba.backends.backend import Request
from amoeba.commands.verify_run import check_backends
from amoeba.proof.cases import Case
from amoeba.proof.conformance import verify_case
from amoeba.tasks.sizes import Sizes, extra_bytes
from small_layer import Layer

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="on a CPU only the interpreter serves"
)
FEW = {"num_experts": 4}
CASES = [
    Case(17, 2, pattern="sentinels", **FEW),
    Case(9, 2, Activation("gelu", gated=False), pattern="empty_experts", recompute=True),
    Case(65, 1, pattern="all_on_one", **FEW),
    Case(9, 2, Activation("silu", alpha=1.702, up_shift=-0.5, limit=2.0, interleaved=True), **FEW),
    Case(0, 2),
    Case(3, 4, hidden=128, intermediate=64, **FEW),
    Case(9, 2, pattern="sentinels_alone", narrow=True, **FEW),
    Case(17, 2, bias=True, pattern="sentinels", **FEW),
    Case(9, 2, Activation("silu", alpha=1.702, up_shift=1.0, limit=2.0, interleaved=True), bias=True, **FEW),
]


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    """Registered for one test: others count the backends that there are."""
    monkeypatch.setattr(registry, "_backends", list(registry._backends))
    from amoeba.backends.tasks import BACKENDS

    (backend,) = BACKENDS
    registry.register_backend(backend)
    yield backend
    monkeypatch.undo()
    registry._sort_backends()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_agrees_with_the_reference(case):
    result = verify_case(case, "tasks", DEVICE, torch.float32)
    assert result.ok and result.refused is None, (result.failure, result.refused, result.errors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    [CASES[0], *(pytest.param(case, marks=pytest.mark.thorough) for case in CASES[1:])],
    ids=lambda case: case.name,
)
def test_it_agrees_in_half_precision(case, dtype):
    """Each case is a kernel to compile."""
    assert verify_case(case, "tasks", DEVICE, dtype).ok


def request_of(layer: Layer, weights: ExpertWeights | None = None) -> Request:
    named = {name: tensor.detach().to(DEVICE) for name, tensor in layer.tensors.items()}
    routing = Routing(layer.expert_TK.to(DEVICE), named["weight"])
    return Request(named["x"], routing, layer.weights(named) if weights is None else weights)


def test_auto_takes_it_only_where_the_table_says_that_it_is_faster(monkeypatch):
    request, frozen = request_of(Layer(bias=False)), request_of(Layer(bias=False))
    for weight in request.weights.tensors()[:2]:
        weight.requires_grad_()
    usual = registry.explain(request).backend.name
    assert usual != "tasks" and registry.backends_of(ExpertWeights, DEVICE)[-1].name == "tasks"
    (tokens, hidden), weights = request.x_TH.shape, request.weights
    layer = hidden, weights.intermediate, weights.num_experts, request.routing.expert_TK.shape[1]
    monkeypatch.setattr(measured, "_is_measured", lambda weights: True)  # as on a GPU in 16 bits
    monkeypatch.setattr(measured, "gpu_name", lambda device: "this one")
    monkeypatch.setattr(measured, "gpu_bytes", lambda device: 1 << 30)

    def chosen(*ratios, gpu="this one", rival=usual, request=request):
        monkeypatch.setattr(measured, "RATIOS", {(gpu, rival): ratios})
        return registry.explain(request).backend.name

    ratio = measured.Ratio("tasks", *layer, tokens, measured.AT_LEAST)
    assert chosen(ratio) == chosen(ratio._replace(tokens=tokens + 1, times=0.9), ratio) == "tasks"
    assert chosen(ratio, gpu="another") == chosen(ratio, rival="another") == chosen() == usual
    assert chosen(ratio._replace(tokens=tokens + 1)) == chosen(ratio._replace(hidden=hidden + 64)) == usual
    assert chosen(ratio._replace(top_k=layer[3] + 1)) == usual
    fewer, more = ratio._replace(tokens=tokens - 1), ratio._replace(tokens=tokens + 1)
    assert chosen(fewer, more) == "tasks", "faster with fewer and with more tokens"
    assert chosen(fewer) == chosen(fewer, more._replace(times=0.9)) == chosen(fewer._replace(times=0.9), more) == usual
    assert chosen(ratio, ratio._replace(times=measured.AT_LEAST - 0.001)) == usual, "not with skewed routing, say"
    assert chosen(ratio, request=request_of(Layer(bias=True))) == usual, "no layer with biases was measured"
    assert chosen(ratio, request=frozen) == usual, "it would compute gradients that are not needed"
    monkeypatch.setattr(measured, "gpu_bytes", lambda device: 1 << 16)
    assert chosen(ratio) == usual, "needs too much of such a memory"


def test_it_needs_as_much_more_memory_than_triton_as_was_measured():
    """Peaks in MiB: document `sonicmoe-unfinished` of 7051d0f (H200, 2026-11-16)."""
    for tokens, sizes, tasks, triton in (
        (32768, Sizes(2048, 768, 128, 8), 3588, 2436),
        (32768, Sizes(2048, 1024, 64, 8), 3588, 2564),
        (32768, Sizes(4096, 256, 256, 16), 6919, 5639),
        (32768, Sizes(4096, 1024, 128, 8), 7172, 4612),
        (8192, Sizes(4096, 14336, 8, 2), 4288, 3712),
    ):
        assert extra_bytes(sizes, tokens * sizes.top_k, 2) == (tasks - triton) << 20
    for ratio in measured.RATIOS["NVIDIA H200", "triton"]:
        sizes = Sizes(ratio.hidden, ratio.intermediate, ratio.experts, ratio.top_k)
        assert extra_bytes(sizes, ratio.tokens * ratio.top_k, 2) < 3 << 30


def test_without_memory_for_it_triton_computes_from_then_on(monkeypatch):
    import amoeba.backends.tasks as backend

    asked, request = [], request_of(Layer(bias=False))

    def full(problem):
        asked.append(problem)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(backend, "kernel_for", full)
    monkeypatch.setattr(backend, "_no_room", {})
    wanted = [t.detach().requires_grad_() for t in (request.x_TH, *request.weights.tensors()[:2])]
    x_TH, weights = wanted[0], ExpertWeights(*wanted[1:])
    found, expected = (
        torch.autograd.grad(experts(x_TH, request.routing, weights, backend=name).sum(), wanted)
        for name in ("tasks", "triton")
    )
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True)) and len(asked) == 1
    experts(x_TH, request.routing, weights, backend="tasks").sum().backward()
    assert len(asked) == 1


def test_it_is_there_for_who_asks_for_it_by_name(monkeypatch):
    monkeypatch.setattr(registry, "_backends", [each for each in registry._backends if each.name != "tasks"])
    registry._sort_backends()
    request = request_of(Layer(bias=False))
    assert registry.choose("tasks", request).name == "tasks"
    assert check_backends(["tasks"], DEVICE) == ["tasks"]


def test_what_it_has_no_tasks_for_is_refused_with_the_reason(tasks):
    plain = request_of(Layer(bias=False))
    assert tasks.why_not(plain) is None
    assert tasks.why_not(request_of(Layer(bias=True))) is None
    turned = ExpertWeights(plain.weights.gate_up_EJH.mT.contiguous().mT, plain.weights.down_EHI)
    assert "contiguous" in tasks.why_not(request_of(Layer(bias=False), turned))
    with pytest.raises(ValueError, match="tasks does not; got needs contiguous weights"):
        registry.choose("tasks", request_of(Layer(bias=False), turned))


def test_only_what_is_asked_for_gets_a_gradient():
    request = request_of(Layer(bias=False))
    x_TH = request.x_TH.clone().requires_grad_()
    experts(x_TH, request.routing, request.weights, backend="tasks").sum().backward()
    assert x_TH.grad is not None and request.weights.gate_up_EJH.grad is None


@pytest.mark.gpu
def test_a_thousand_steps_end_and_a_captured_one_has_their_bits():
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").div(shape[-1] ** 0.5).bfloat16().requires_grad_()

    x_TH, gate_up, down, dy_TH = normal(257, 128), normal(8, 128, 128), normal(8, 128, 64), normal(257, 128).detach()
    routing = Routing(torch.randint(-1, 8, (257, 2), generator=generator, device="cuda"), torch.rand(257, 2).cuda())

    def step():
        y_TH = experts(x_TH, routing, ExpertWeights(gate_up, down), backend="tasks")
        return torch.autograd.grad(y_TH, (x_TH, gate_up, down), dy_TH)

    first = step()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        for left, right in zip(first, step(), strict=True):
            differ |= (left != right).any()
    assert not differ
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for each in captured:
        each.zero_()
    for _ in range(3):
        graph.replay()
    assert all(left.equal(right) for left, right in zip(first, captured, strict=True))
