"""A search takes the fastest candidate that is right, within its time; timings are made up here."""

import json
import math

import pytest
import torch
from forgetting import forget

from amoeba import ExpertWeights, Routing, experts
from amoeba.bench.workload import Shape
from amoeba.commands import tune
from amoeba.commands.output import Output
from amoeba.system import tuned
from amoeba.tuning.search import Search, find_best, median_ms
from amoeba.tuning.searches import searches
from called import call

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU  # else in Triton's interpreter
LAYER = Shape("66,32,16,4,2", 66, 32, 16, 4, 2)


class Made:
    """Candidates are names: `ours`, and what else `times` has. Each run notes the name, by which it is timed."""

    def __init__(self, **times: float) -> None:
        self.times, self.running, self.measured = times, "", list[str]()
        self.result = torch.zeros(8, dtype=torch.float32)

    def run(self, name: str):
        self.running = name
        if name.startswith("fails"):
            raise RuntimeError("out of resource: shared memory")
        if name.startswith("memory"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if name.startswith("unwritten"):
            self.result[:4] = 1.0
        else:
            self.result.fill_(2.0 if name.startswith("wrong") else 1.0)
        return (self.result,)

    def measure(self, run) -> float:
        run()
        self.measured.append(self.running)
        return self.times[self.running]

    def found(self, clock=lambda: 0.0, deadline=1.0):
        search = Search("key", torch.float32, list(self.times), lambda: self.run)
        return find_best(search, measure=self.measure, clock=clock, deadline=deadline)


def test_the_fastest_is_taken_and_compared_with_ours():
    found = Made(ours=4.0, slower=5.0, faster=2.0, fast=3.0).found()
    assert (found.best, found.best_ms, found.default_ms, found.gain, found.tried) == ("faster", 2.0, 4.0, 2.0, 4)
    assert found.entry()["configuration"] == "faster"


def test_ours_stays_unless_another_is_worth_other_bits():
    assert Made(ours=4.0, little=3.95).found().best == "ours"
    assert Made(ours=4.0, enough=3.9).found().best == "enough"


@pytest.mark.parametrize(
    ("name", "reason"), [("wrong", "differs"), ("unwritten", "differs"), ("fails", "out of resource")]
)
def test_what_is_wrong_or_does_not_run_is_left_out_with_the_reason(name, reason):
    made = Made(ours=4.0, **{name: 1.0}, right=3.0)
    found = made.found()
    assert found.best == "right"
    assert reason in found.left_out[name]
    assert name not in made.measured


def test_without_memory_it_ends():
    with pytest.raises(torch.OutOfMemoryError):
        Made(ours=4.0, memory=1.0).found()


def test_ours_is_measured_even_without_time_and_nothing_after_the_deadline():
    assert Made(ours=4.0, faster=1.0).found(deadline=0.0).best == "ours"
    ticks = iter(range(10))
    made = Made(ours=4.0, first=3.0, second=2.0, third=1.0)
    assert made.found(clock=lambda: next(ticks), deadline=2.0).best == "second"
    assert made.measured == ["ours", "first", "second"]


def test_not_a_number_is_wrong_too():
    made = Made(ours=4.0, odd=1.0)
    plain = made.run
    made.run = lambda name: (plain(name)[0].fill_(math.nan),) if name == "odd" else plain(name)  # type: ignore[method-assign]
    assert "nan" in made.found().left_out["odd"]


class Quiet(Output):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def line(self, text: str = "", style: str | None = None) -> None:
        self.said.append(text)

    progress = warning = line  # type: ignore[assignment]


def searched(dtype: torch.dtype = torch.float32) -> list[Search]:
    """All kernels of a layer, with two candidates each: the interpreter is slow."""
    found = searches(LAYER, dtype, DEVICE, head_sizes=())
    return [Search(each.key, each.dtype, each.candidates[:2], each.make) for each in found]


def test_every_kernel_of_a_layer_is_searched_and_found_again(monkeypatch):
    """A key that no launch asks for would be searched in vain."""
    asked = set[str]()
    plain = tuned.choose
    monkeypatch.setattr(tuned, "choose", lambda device, key, allowed: asked.add(key) or plain(device, key, allowed))
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float32, device=DEVICE).requires_grad_()

    weights = ExpertWeights(draw(4, 32, 32), draw(4, 32, 16))
    for tokens in (66, 64, 8, 1):
        expert_TK = torch.rand((tokens, 4), generator=generator, dtype=torch.float32, device=DEVICE).topk(2).indices
        routing = Routing(expert_TK, torch.full((tokens, 2), 0.5, dtype=torch.float32, device=DEVICE))
        with torch.set_grad_enabled(tokens > 64):
            y = experts(draw(tokens, 32), routing, weights, backend="triton")
        if tokens > 64:
            y.sum().backward()
    keys = {search.key for search in searched()}
    assert keys == asked
    assert len(keys) == 9


def test_each_is_kept_as_it_is_found_and_used_by_the_next_process():
    output, now = Quiet(), iter(range(1000))
    faster = iter([2.0, 1.0] * 20)
    few = searched()[:3]
    seconds = [search.candidates[1] for search in few]
    document = tune.run(
        list(few), 10.0, DEVICE, output, measure=lambda run: run() and next(faster), clock=lambda: float(next(now))
    )
    assert document["finished"]
    json.dumps(document, allow_nan=False)
    assert [row["key"] for row in document["kernels"]] == [search.key for search in few]
    assert any("1/3" in line for line in output.said) and any("AMOEBA_TUNED=off" in line for line in output.said)
    forget()
    for search, second in zip(few, seconds, strict=True):
        assert tuned.choose(DEVICE, search.key, lambda search=search: search.candidates) == second


def test_ctrl_c_keeps_what_was_found():
    few = searched()[:3]
    measured = iter([1.0] * 3)  # the fourth measurement, of the second kernel, is interrupted

    def measure(run) -> float:
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    output = Quiet()
    document = tune.run(list(few), 10.0, DEVICE, output, measure=measure)
    assert not document["finished"] and len(document["kernels"]) == 1
    assert "interrupted: 1 of 3" in " ".join(output.said)
    assert list(tuned.read(tuned.path_of(tuned.gpu_of(DEVICE)), tuned.gpu_of(DEVICE))) == [few[0].key]


def test_time_is_shared_by_the_searches_that_are_left():
    now, spans = [0.0], []

    def make_search(name: str, seconds: float) -> Search:
        def make():
            started = now[0]

            def run(candidate):
                now[0] += seconds
                spans.append((name, now[0] - started))
                return (torch.ones(1, dtype=torch.float32, device="cpu"),)

            return run

        return Search(name, torch.float32, tuple(range(100)), make)

    few = [make_search("a", 1.0), make_search("b", 1.0), make_search("c", 1.0)]
    tune.run(few, 1.0, CPU, Quiet(), measure=lambda run: 1.0, clock=lambda: now[0])
    longest = {name: max(span for at, span in spans if at == name) for name, _ in spans}
    assert longest == {"a": 20.0, "b": 20.0, "c": 20.0}


def test_after_the_time_is_over_the_next_call_goes_on():
    now, begun = [0.0], list[str]()

    def make_search(name: str) -> Search:
        def run(candidate):
            begun.append(name)
            now[0] += 40.0  # a kernel that takes long to compile
            return (torch.ones(1, dtype=torch.float32, device="cpu"),)

        return Search(name, torch.float32, (0,), lambda: run)

    def call() -> tuple[dict, str]:
        begun.clear()
        output, began = Quiet(), [make_search(name) for name in "abc"]
        document = tune.run(began, 1.0, CPU, output, measure=lambda run: 1.0, clock=lambda: now[0])
        return document, " ".join(output.said)

    document, said = call()
    assert begun == ["a", "b"] and document["finished"] and document["not_searched"] == ["c"]
    assert "1 of 3 kernels were not tuned" in said
    document, said = call()
    assert begun == ["c", "a"] and document["not_searched"] == ["b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_it_says_so():
    result = call("tune", "--shape", "small", code=2)
    assert "a CUDA device" in result.output and "GPU" in result.output


def test_the_command_searches_keeps_and_returns_a_document(monkeypatch):
    monkeypatch.setattr(tune, "check_device", lambda: DEVICE)
    monkeypatch.setattr("amoeba.tuning.search.median_ms", lambda run: 1.0)
    words = ("--shape", "2,32,16,4,2", "--dtype", "float32", "--dtype", "fp32", "--minutes", "0.0001", "--json")
    result = call("tune", *words)
    document = result.document
    assert document["document"] == "amoeba tune" and document["finished"]
    (row,) = document["kernels"]
    assert row["key"].startswith("decode float32 tokens=2") and row["tried"] == 1
    assert tuned.read(tuned.path_of(tuned.gpu_of(DEVICE)), tuned.gpu_of(DEVICE))[row["key"]]["ms"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "neither"),
        (("--shape", "small", "--model", "demo"), "both"),
        (("--shape", "1,2"), "five positive integers"),
        (("--shape", "small", "--dtype", "float64"), "The kernels support no other dtype"),
        (("--shape", "small", "--minutes", "0"), "more than 0"),
        (("--shape", "small", "--minutes", "nan"), "more than 0"),
        (("--model", "nowhere"), "config.json"),
    ],
)
def test_what_a_user_gets_wrong_is_said(words, said, monkeypatch):
    monkeypatch.setattr(tune, "check_device", lambda: CPU)
    result = call("tune", *words, code=2)
    assert said in result.said


def test_the_layers_of_a_model_are_found():
    pytest.importorskip("transformers")
    from amoeba.tuning.model_shapes import shapes_of

    (shape,), head_sizes = shapes_of("120m", tokens=4096)
    assert (shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k) == (4096, 768, 704, 32, 4)
    assert head_sizes == (64,)


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_on_a_gpu_what_can_be_captured_is_replayed_and_not_launched(waits: bool) -> None:
    runs, x = [], torch.ones(1024, device=DEVICE)

    def run() -> None:
        runs.append(1)
        x.mul_(1.0)
        if waits:
            x[0].item()  # which no graph captures

    assert 0 < median_ms(run) < 1
    assert (len(runs) == 1) != waits
