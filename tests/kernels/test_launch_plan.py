"""A pass that comes again is repeated from its list of steps: the same bits, and no memory is kept."""

import ast
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import selection

pytest.importorskip("triton")
import triton
import triton.language as tl

from amoeba import Activation, Routing, experts
from amoeba.backends import sorted_rows
from amoeba.backends import triton as backend
from amoeba.backends.triton_rows import TritonRows
from amoeba.core.problem import Problem
from amoeba.kernels import launch
from amoeba.kernels.launch import Quick, quick
from amoeba.kernels.launch import plan as launch_plan
from amoeba.kernels.launch.persistent_grid import share_the_gpu
from amoeba.kernels.launch.plan import planned
from amoeba.kernels.tile_sizes import as_with
from amoeba.precision import FP8_128_ROWS, quantise
from repeated_steps import check_elsewhere, check_repeated
from small_layer import H, Layer, kernel_device

DEVICE = kernel_device()
SOURCE = Path(__file__).parents[2] / "src" / "amoeba"


def plans() -> list[Any]:
    return [plan for plan in launch_plan._plans.values() if plan not in (None, launch_plan._SEEN)]


@quick
@triton.jit
def _add(left, right, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(left + at, mask=inside) + tl.load(right + at, mask=inside), mask=inside)


def add(left: Tensor, right: Tensor) -> Tensor:
    out = torch.empty_like(left)
    _add[(1,)](left, right, out, left.numel(), BLOCK=16)
    return out


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


@contextmanager
def shared_gpu() -> Iterator[None]:
    share_the_gpu()
    try:
        yield
    finally:
        share_the_gpu(False)


class Calls:
    """Counts how often a pass is computed as it is written."""

    def __init__(self, compute: Any, what: tuple = ("pass",)) -> None:
        self.compute, self.what, self.count = compute, what, 0

    def __call__(self, *tensors: Tensor | None) -> Any:
        def run() -> Any:
            self.count += 1
            return self.compute(*tensors)

        return planned(self.what, tensors, run)


class Two(NamedTuple):
    first: Tensor | None
    second: Tensor | None


CASES = {
    "biases": {},
    "factors": {"bias": False, "rank": 3},
    "an activation without gates": {"activation": Activation("gelu", gated=False)},
    "sentinels": {"expert_TK": torch.tensor([[0, -1], [-1, -1], [3, 0], [0, 2], [5, 1]]), "tokens": 5},
    "several tiles of columns": {"bias": False, "inner": 70},
}


class TestALayer:
    @selection.quick(lambda name, recompute: name == "biases" or recompute)
    @pytest.mark.parametrize(("name", "recompute"), [*((name, False) for name in CASES), ("factors", True)])
    def test_a_repeated_pass_has_the_bits_of_one_that_is_computed(self, name, recompute, monkeypatch):
        monkeypatch.setattr(backend, "DECODE_TOKENS", 0)  # which would take the forward that saves nothing
        layer = Layer(**CASES[name]).to(DEVICE)
        check_repeated(lambda seed: self.step(layer, recompute, seed), monkeypatch)

    @staticmethod
    def step(layer: Layer, recompute: bool, seed: int) -> dict[str, Tensor]:
        """Other numbers, other experts, another dy for each seed."""
        generator = torch.Generator().manual_seed(seed)
        named = {}
        for name, tensor in layer.tensors.items():
            change = torch.rand(tensor.shape, generator=generator).to(DEVICE)
            named[name] = (tensor.detach() + 0.1 * change).requires_grad_()
        order = torch.randperm(layer.expert_TK.shape[0], generator=generator).to(DEVICE)
        routing = Routing(layer.expert_TK[order].contiguous(), named["weight"])
        lora = layer.lora(named)
        y_TH = experts(named["x"], routing, layer.weights(named), lora=lora, backend="triton", recompute=recompute)
        dy_TH = torch.rand(y_TH.shape, generator=generator).to(DEVICE)
        gradients = torch.autograd.grad(y_TH, list(named.values()), dy_TH)
        return {"y": y_TH.detach(), **dict(zip(named, gradients, strict=True))}

    def test_two_backwards_of_one_graph_are_not_one_that_frees_it(self):
        """The last may write dh over h, the others may not."""
        layer = Layer(bias=False).to(DEVICE)
        found = []
        for _ in range(3):
            named = layer.tensors
            routing = Routing(layer.expert_TK, named["weight"])
            y_TH = experts(named["x"], routing, layer.weights(named), backend="triton")
            for keep in (True, True, False):
                found.append(torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH, retain_graph=keep))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))

    def test_rows_with_gaps_between_them_are_a_kind_of_their_own(self):
        layer = Layer(bias=False).to(DEVICE)
        routing = Routing(layer.expert_TK, layer.tensors["weight"].detach())
        weights = layer.weights(layer.tensors)
        x_TH = layer.tensors["x"].detach()
        wide = torch.zeros(x_TH.shape[0], 2 * H, device=DEVICE)
        wide[:, :H] = x_TH
        turned = x_TH.t().contiguous().t()
        found = [experts(x, routing, weights, backend="triton") for _ in range(3) for x in (x_TH, wide[:, :H], turned)]
        assert len(plans()) == 3
        assert all(torch.equal(y_TH, found[0]) for y_TH in found)

    def test_each_field_of_a_problem_makes_another_kind(self):
        """One that is left out of the key would be repeated with what it was at first."""
        layer = Layer(bias=False, rank=2).to(DEVICE)
        named = {name: tensor.detach() for name, tensor in layer.tensors.items()}
        usual = Problem(named["x"], layer.expert_TK, named["weight"], layer.weights(named))
        changes = {
            "x_TH": torch.cat([usual.x_TH, usual.x_TH], 1)[:, :H],
            "expert_TK": usual.expert_TK.int(),
            "weight_TK": usual.weight_TK.double(),
            "weights": replace(usual.weights, activation=Activation("gelu")),
            "lora": layer.lora(named),
            "most_rows": 1000,
            "onto_TH": torch.ones_like(usual.x_TH),
            "quantised_x": quantise(usual.x_TH, FP8_128_ROWS),
        }
        assert {*changes, "overlapped"} == set(Problem._fields)  # passes with it have no plan
        for count, change in enumerate(({}, *({name: value} for name, value in changes.items())), 1):
            problem = usual._replace(**change)
            expected = sorted_rows.forward(problem, "h", TritonRows)[0]
            for _ in range(3):
                assert torch.equal(backend.BACKEND.forward(problem, "h")[0], expected), change.keys()
            assert len(plans()) == count, change.keys()


class TestWhatIsRepeated:
    def test_the_first_is_computed_the_second_recorded_and_the_third_repeated(self):
        calls = Calls(lambda left, right: Two(add(left, add(left, right)), None))
        for turn in range(5):
            left, right = numbers(turn, 1, 2), numbers(1, turn, 0)
            found = calls(left, right)
            assert type(found) is Two and found.second is None
            assert torch.equal(found.first, 2 * left + right)
        assert calls.count == 2

    def test_results_are_new_each_time(self):
        calls = Calls(lambda left, right: (add(left, right), left.new_empty(0)))
        found = [calls(numbers(turn), numbers(1)) for turn in range(5)]
        assert [y.item() for y, _ in found] == [1, 2, 3, 4, 5]
        assert len({id(nothing) for _, nothing in found}) == 5 and found[-1][1].shape == (0,)

    def test_other_operations_are_part_of_the_list(self):
        def compute(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
            total = torch.zeros(3, dtype=torch.float32, device=DEVICE)
            total[1:].copy_(add(left, right)[1:])
            return total.clone(), add(left, right).sum(0, keepdim=True)

        calls = Calls(compute)
        for turn in range(4):
            left, right = numbers(turn, 1, 2), numbers(1, turn, 3)
            total, summed = calls(left, right)
            assert total.tolist() == [0, 1 + turn, 5] and summed.item() == 7 + 2 * turn
        assert calls.count == 2

    def test_a_view_comes_as_that_view(self):
        calls = Calls(lambda left, right: (add(left, right)[1:], left[:2]))
        for turn in range(4):
            left = numbers(turn, 1, 2)
            end, beginning = calls(left, numbers(1, 1, 1))
            assert end.tolist() == [2, 3] and beginning.tolist() == [turn, 1]
            assert beginning.untyped_storage().data_ptr() == left.untyped_storage().data_ptr()

    def test_what_is_written_in_place_is_written_in_the_tensors_of_the_day(self):
        def compute(left: Tensor, right: Tensor) -> tuple[Tensor]:
            _add[(1,)](left, right, left, left.numel(), BLOCK=16)
            return (add(left, right),)

        calls = Calls(compute)
        for turn in range(4):
            left, right = numbers(turn, 1), numbers(1, 2)
            (found,) = calls(left, right)
            assert left.tolist() == [turn + 1, 3] and found.tolist() == [turn + 2, 5]


class TestKinds:
    @pytest.mark.parametrize(
        "other",
        [
            (("other",), numbers(1, 2, 3)),
            (("pass",), numbers(1, 2, 3, 4)),
            (("pass",), numbers(1, 2, 3).double()),
            (("pass",), torch.zeros(6, device=DEVICE)[::2]),
            (("pass",), torch.zeros(4, device=DEVICE)[1:]),
            (("pass",), None),
        ],
        ids=["what", "shape", "dtype", "strides", "alignment", "no tensor"],
    )
    def test_another_kind_is_computed(self, other):
        what, right = other
        left = numbers(1, 2, 3)
        usual = Calls(lambda left, right: (left.clone(),))
        for _ in range(3):
            usual(left, numbers(1, 2, 3))
        assert usual.count == 2
        unusual = Calls(usual.compute, what)
        unusual(left, right)
        assert unusual.count == 1

    @pytest.mark.parametrize("others", [as_with(64), shared_gpu()], ids=["as with more experts", "on a shared GPU"])
    def test_a_pass_among_others_is_another_kind(self, others):
        calls = Calls(lambda left: (left.clone(),))
        for _ in range(3):
            calls(numbers(1))
        with others:
            calls(numbers(1))
        assert calls.count == 3

    def test_there_is_an_end_to_their_number(self, monkeypatch):
        monkeypatch.setattr(launch_plan, "MOST_PLANS", 4)
        calls = Calls(lambda left: (left.clone(),))
        for size in range(1, 30):
            calls(torch.zeros(size, device=DEVICE))
        assert len(launch_plan._plans) <= 4


class TestWhatIsNotRepeated:
    def check(self, calls: Calls, *tensors: Tensor) -> None:
        before = calls.count
        for _ in range(4):
            calls(*tensors)
        assert calls.count == before + 4 and not plans()

    def test_tensors_that_share_memory(self):
        both = numbers(1, 2, 3, 4, 5, 6, 7, 8)
        calls = Calls(lambda left, right: (add(left, right),))
        self.check(calls, both[:6], both[4:])
        launch_plan.forget_plans()
        self.check(calls, both, both)

    def test_memory_that_is_not_among_the_arguments(self):
        kept = numbers(1, 2)
        self.check(Calls(lambda left: (add(left, kept),)), numbers(3, 4))

    def test_what_waits_for_the_device(self):
        self.check(Calls(lambda left: (left * left.sum().item(),)), numbers(3, 4))

    def test_results_that_are_no_tensors(self):
        self.check(Calls(lambda left: (left.clone(), 3)), numbers(3, 4))

    def test_a_part_of_what_is_recorded(self):
        inner = Calls(lambda left: (add(left, left.clone()),), ("inner",))
        outer = Calls(lambda left: inner(left), ("outer",))
        for turn in range(5):
            assert outer(numbers(turn, 1))[0].tolist() == [2 * turn, 2]
        assert outer.count == 2 and inner.count == 2

    def test_a_profiler_of_triton_sees_each_launch(self, monkeypatch):
        calls = Calls(lambda left: (left.clone(),))
        for _ in range(3):
            calls(numbers(1))
        hook = SimpleNamespace(calls=[print])
        monkeypatch.setattr(launch.knobs.runtime, "launch_enter_hook", hook, raising=False)
        calls(numbers(1))
        assert calls.count == 3

    def test_what_another_thread_is_about_to_launch(self):
        calls = Calls(lambda left: (left.clone(),))
        for _ in range(3):
            calls(numbers(1))
        (plan,) = plans()
        with plan.lock:
            calls(numbers(1))
        assert calls.count == 3 and not plan.lock.locked()

    def test_a_thread_does_not_record_what_another_launches(self):
        def compute(left: Tensor) -> tuple[Tensor]:
            other = threading.Thread(target=add, args=(numbers(1), numbers(2)))
            other.start()
            other.join()
            return (add(left, left.clone()),)

        calls = Calls(compute)
        for turn in range(4):
            assert calls(numbers(turn))[0].item() == 2 * turn
        assert calls.count == 2

    def test_a_pass_that_fails_leaves_nothing_behind(self):
        def fail(left: Tensor) -> Any:
            raise RuntimeError("out of memory")

        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                Calls(fail)(numbers(1))
        assert launch.listening.recorder is None and not torch.utils._python_dispatch._get_current_dispatch_mode()


class TestMemory:
    def test_a_plan_keeps_no_tensor(self):
        seen: list[weakref.ref] = []

        def compute(left: Tensor, right: Tensor) -> tuple[Tensor]:
            between = add(left, right)
            seen.append(weakref.ref(between))
            return (add(left, between),)

        calls = Calls(compute)
        for _ in range(2):
            left, right = numbers(1, 2), numbers(3, 4)
            (found,) = calls(left, right)
            seen += [weakref.ref(each) for each in (left, right, found)]
            del left, right, found
        assert len(plans()) == 1 and all(ref() is None for ref in seen)


class Compiled:
    """Stands for a compiled kernel of (rows, x, n): notes what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def run(self, *arguments: Any) -> None:
        *before, rows, x, n = arguments
        self.launched.append((*before, rows.base.data_ptr(), rows.shape, x, n))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.run(*grid, "stream", "function", "metadata", None, None, None, *arguments)


class Descriptor:
    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.block_shape = base, base.shape, [8, 8]


def test_a_compiled_kernel_gets_the_addresses_of_the_day(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch_plan, "current_stream", lambda: "stream")
    compiled = Compiled()
    jit = SimpleNamespace(arg_names=("rows", "x", "n"), params=[SimpleNamespace(is_constexpr=False)] * 3)
    kernel = Quick(type("Jit", (), {**vars(jit), "__getitem__": lambda self, grid: lambda *_, **constants: compiled})())

    def compute(left: Tensor) -> tuple[Tensor]:
        out = torch.empty((2, 4), dtype=torch.float32, device=left.device)
        kernel[(5, 2)](Descriptor(left), out[1:], 7)
        return (out,)

    calls = Calls(compute)
    for _ in range(4):
        left = torch.zeros(4, 4)
        (out,) = calls(left)
        if compiled.launched:
            *before, base, shape, x, n = compiled.launched[-1]
            assert before == [5, 2, 1, "stream", "function", "metadata", None, None, None]
            x = x.data_ptr() if isinstance(x, Tensor) else x
            assert (base, shape, x, n) == (left.data_ptr(), left.shape, out[1:].data_ptr(), 7)
    assert calls.count == 2 and len(compiled.launched) == 3


def launches_of_others(tree: ast.Module) -> list[str]:
    """Kernels by name that are launched, name[grid](...), without being `quick`: a recording would not see them."""
    quick_ones = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "quick" for each in node.decorator_list)
    }
    kernels = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {each.value.id for each in called if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name)}
    return sorted((named & kernels) - quick_ones)


def test_every_kernel_that_is_launched_is_quick():
    texts = {path.name: path.read_text() for path in SOURCE.rglob("*.py")}
    found = {name: launches_of_others(ast.parse(text)) for name, text in texts.items() if ".jit" in text}
    assert len(found) > 20
    del found["shmem_put.py"]  # NVSHMEM is set up by a hook of Triton's own launcher
    assert not {name: kernels for name, kernels in found.items() if kernels}
    code = "@triton.jit\ndef kernel(x): ...\n\ndef f(x):\n    kernel[(1,)](x)"
    assert launches_of_others(ast.parse(code)) == ["kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repeated_passes_on_a_gpu_in_a_graph_and_on_another_stream(dtype):
    from amoeba import ExpertWeights

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").div(shape[-1] ** 0.5).to(dtype)

    x_TH, dy_TH = normal(300, 256), normal(300, 256)
    gate_up, down = normal(8, 256, 256), normal(8, 256, 128)
    expert_TK = torch.randint(0, 8, (300, 2), generator=generator, device="cuda")
    weight_TK = torch.rand(300, 2, generator=generator, device="cuda")
    inputs = [each.requires_grad_() for each in (x_TH, gate_up, down, weight_TK)]

    def step() -> tuple[Tensor, ...]:
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), ExpertWeights(gate_up, down), backend="triton")
        return y_TH.detach(), *torch.autograd.grad(y_TH, inputs, dy_TH)

    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
    assert len(plans()) == 2
    check_elsewhere(step, first)


def test_memory_that_was_freed_and_allocated_again_is_what_it_was_last() -> None:
    recorder = launch_plan._Recorder([])
    recorder._places += [launch_plan._Place(64, 128, slot, 64) for slot in (3, 4)]
    assert recorder._find(SimpleNamespace(data_ptr=lambda: 80)) == (4, 16)
