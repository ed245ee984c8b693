"""`amoeba bench --graphs`: replays take turns, each backward has its forward, the host's time is a call's."""

import json
from dataclasses import replace

import pytest
import torch

from amoeba.bench import captured as captured_module
from amoeba.bench import timing as timing_module
from amoeba.bench.captured import LAYERS, apart, host_times, in_graphs
from amoeba.bench.suite import Plan
from amoeba.bench.workload import Shape, make_workload
from amoeba.commands import bench_layers as bench_command
from noted_output import NotedOutput

CPU = torch.device("cpu")
TINY = Shape("tiny", tokens=37, hidden=32, intermediate=16, experts=6, top_k=2)


@pytest.fixture
def workload():
    return make_workload(TINY, CPU, torch.float32)


def test_replays_take_turns_and_each_backward_comes_behind_its_forward(monkeypatch, workload):
    order: list[str] = []
    clock = [0]

    def capture(run, _):
        name, forward_ms, backward_ms = run()

        def replay(part, ms):
            order.append(f"{name} {part}")
            clock[0] += ms * 10**6

        return lambda: replay("forward", forward_ms), lambda: replay("backward", backward_ms)

    monkeypatch.setattr(captured_module, "capture", capture)
    monkeypatch.setattr(timing_module.time, "perf_counter_ns", lambda: clock[0])

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    found, left_out = in_graphs({"a": lambda: ("a", 1, 4), "b": lambda: ("b", 2, 3), "c": waits}, workload, 3)
    steps = {name: [f"{name} forward", f"{name} backward"] for name in "ab"}
    turns = steps["a"] + steps["b"]
    assert order == turns + turns + steps["b"] + steps["a"] + turns, "once to upload, then there and back again"
    assert left_out == {"c": "RuntimeError: operation not permitted when stream is capturing"}
    assert (found["a"].rounds, found["a"].forward_median_ms, found["a"].backward_median_ms) == (3, 1.0, 4.0)
    assert found["b"].backward_times_faster_than == {"a": pytest.approx(4 / 3)}
    assert found["b"].forward_times_faster_than == {"a": 0.5} and found["b"].backward_min_ms == 3.0


def test_the_hosts_time_is_that_of_backward_alone_and_of_each_of_several(monkeypatch, workload):
    clock = [0.0]
    layers = apart(workload)

    def run_of(layer, seconds):
        def run():
            clock[0] += 100.0  # forward is not counted
            y_TH = layer.x_TH * layer.gate_up_EJH.sum()

            def slowly(gradient):
                clock[0] += seconds

            y_TH.register_hook(slowly)
            return y_TH

        return run

    monkeypatch.setattr(captured_module, "MOST_HOST_SECONDS", 1e9)
    runs = {"quick": [run_of(layer, 0.001) for layer in layers], "slow": [run_of(layer, 0.003) for layer in layers]}
    found = host_times(runs, layers, 1, clock=lambda: clock[0])
    assert found["quick"].rounds == captured_module.HOST_ROUNDS and found["quick"].layers == LAYERS
    for name, ms in (("quick", 1.0), ("slow", 3.0)):
        host = found[name]
        assert [host.median_ms, host.min_ms] == pytest.approx([ms, ms])
        assert [host.of_several_median_ms, host.of_several_min_ms] == pytest.approx([ms, ms])
    monkeypatch.setattr(captured_module, "MOST_HOST_SECONDS", 0.0)
    few = host_times(runs, layers, 1, clock=lambda: clock[0])["quick"].rounds
    assert few == captured_module.LEAST_HOST_ROUNDS, "layers whose host is far ahead take no minutes"


def test_the_command_prints_and_writes_eager_times_graphs_and_the_host(monkeypatch):
    def capture(run, workload):
        outputs = []

        def forward():
            outputs[:] = [run()]

        def backward():
            torch.autograd.grad(outputs.pop(), list(workload.leaves().values()), workload.dy_TH)

        return forward, backward

    monkeypatch.setattr(captured_module, "capture", capture)
    monkeypatch.setattr(captured_module, "HOST_ROUNDS", 2)
    output = NotedOutput()
    shapes = [TINY, replace(TINY, name="step", tokens=1, forward_only=True)]
    ours = ["grouped", "eager"]
    plan = Plan(shapes, CPU, [torch.float32], ["training"], 1, peers=["grouped_mm"], ours=ours, graphs=True)
    document, ok = bench_command.run(plan, None, output, ceilings=None)
    assert ok and document["command"].endswith("--ours grouped --ours eager --graphs")
    json.dumps(document, allow_nan=False)
    layer, step = document["results"]
    measured = {m["implementation"]: m for m in layer["measurements"] if m["status"] == "timed"}
    ours = ["amoeba eager", "amoeba grouped"]
    for name in ours:
        (other,) = {*ours} - {name}
        assert list(measured[name]["in_graphs"]["backward_times_faster_than"]) == [other]
        assert measured[name]["backward_host"]["layers"] == LAYERS
    assert measured["transformers grouped_mm"]["in_graphs"] is None, "ours alone"
    assert all(m["backward_host"] is None for m in step["measurements"]), "a decoding step has no backward"
    _, columns, rows = output.titled("in CUDA graphs")
    assert columns == ["", "forward", "in graph", "backward", "in graph ", "host", "of 4", "vs eager", "vs grouped"]
    assert [row[0] for row in rows] == ours and rows[0][-2] == "-" and rows[0][-1].endswith("x")


@pytest.mark.parametrize(
    ("measured", "message"),
    [("forward", "--graphs: expected --pass training or both"), ("training", "--graphs: expected a GPU")],
)
def test_what_cannot_be_captured_is_refused_before_anything_is_measured(measured, message):
    plan = Plan([TINY], torch.device("cpu"), [torch.float32], [measured], 1, graphs=True)
    with pytest.raises(ValueError, match=message):
        bench_command.check_plan(plan)
    bench_command.check_plan(replace(plan, graphs=False))


@pytest.mark.gpu
def test_on_a_gpu_backward_in_a_graph_takes_no_longer_than_eager():
    shape = Shape("tiny", tokens=256, hidden=256, intermediate=128, experts=8, top_k=2)
    plan = Plan(
        [shape], torch.device("cuda"), [torch.bfloat16], ["training"], 3, ["loop"], ["triton", "tasks"], graphs=True
    )
    document, ok = bench_command.run(plan, None, NotedOutput(), ceilings=None)
    assert ok
    timed = [m for m in document["results"][0]["measurements"] if m["status"] == "timed"]
    assert {m["implementation"] for m in timed} == {"amoeba triton", "amoeba tasks"}
    for each in timed:
        assert each["not_in_graphs"] is None
        assert 0 < each["in_graphs"]["backward_median_ms"] < 3 * each["backward_median_ms"]
        assert 0 < each["backward_host"]["min_ms"] <= each["backward_host"]["median_ms"] < 100
