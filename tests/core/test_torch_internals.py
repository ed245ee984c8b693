"""What torch has no public name for answers as we believe; a new version of torch that does not fails here first."""

import gc
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amoeba.core import torch_internals
from amoeba.core.torch_internals import TorchDispatchMode


class Noted(torch.autograd.Function):
    """Notes in backward what `ask` says there."""

    answers: list[object] = []  # noqa: RUF012
    ask = staticmethod(lambda dy: None)

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        Noted.answers.append(Noted.ask(dy))
        return dy


def answers(ask, **options: bool) -> list[object]:
    Noted.answers, Noted.ask = [], staticmethod(ask)
    x = torch.ones(3, requires_grad=True)
    dy = torch.ones(2, 3) if options.get("is_grads_batched") else torch.ones(3)
    torch.autograd.grad(Noted.apply(x), x, dy, **options)
    return Noted.answers


def test_transforms_and_forward_mode_are_seen() -> None:
    assert not torch_internals.transformed()
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_internals.transformed())
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    with torch.autograd.forward_ad.dual_level():
        function(torch.ones(3))
    assert seen == [True, True] and not torch_internals.transformed()


def test_a_dispatch_mode_is_seen_and_a_function_mode_is_not() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Watching():
        assert torch_internals.has_dispatch_mode()
    with TorchFunctionMode():
        assert not torch_internals.has_dispatch_mode()


def test_backward_knows_that_it_is_one_and_whether_the_graph_goes() -> None:
    assert not torch_internals.inside_backward() and not torch_internals.graph_is_freed()
    assert answers(lambda dy: (torch_internals.inside_backward(), torch_internals.graph_is_freed())) == [(True, True)]
    assert answers(lambda dy: torch_internals.graph_is_freed(), retain_graph=True) == [False]


@pytest.mark.parametrize("asked", ["both", "one"])
def test_backward_knows_where_it_goes_on(asked: str) -> None:
    found = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
            found.extend(torch_internals.backward_goes_on_to(node) for node, _ in ctx.next_functions)
            assert ctx.needs_input_grad == (True, True)
            return dy, dy

    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    torch.autograd.grad(Two.apply(x * 2, y * 2).sum(), [x] if asked == "one" else [x, y])
    assert found == [True, asked == "both"]


def test_a_batch_of_gradients_is_seen() -> None:
    assert answers(torch_internals.is_batch_of_gradients) == [False]
    assert answers(torch_internals.is_batch_of_gradients, is_grads_batched=True) == [True]


def test_views_and_operations_that_write_to_their_arguments_are_told_apart() -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            seen[name] = torch_internals.is_view(function), torch_internals.writes_to_arguments(function)
            return function(*args, **(kwargs or {}))

    with Watching():
        x = torch.empty(4, 6)
        x.zero_().add_(1)
        x.transpose(0, 1), x[1:], x.view(6, 4), x.as_strided((2,), (1,)), x.detach(), x[None], x[0]
        x.clone(), x.sum(0), torch.empty_like(x), x.new_empty(0), torch.zeros(3), x.copy_(x.clone())
    views = {"transpose", "slice", "view", "as_strided", "detach", "unsqueeze", "select"}
    assert {name for name, (view, _) in seen.items() if view} == views
    assert {name for name, (_, writes) in seen.items() if writes} == {"zero_", "add_", "copy_"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_torch_has_memory_that_other_processes_reach() -> None:
    assert torch_internals.why_not_symmetric_memory() is None


def determinism() -> tuple[bool, bool, bool]:
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *asked, torch._inductor.config.deterministic


@pytest.mark.parametrize(("asked", "warns"), [(False, False), (True, True), (True, False)])
def test_deterministic_algorithms_inside_leave_the_compiler_alone(asked: bool, warns: bool) -> None:
    inside = []

    def fails() -> None:
        with torch_internals.deterministic_algorithms():
            inside.append(determinism())
            raise KeyError

    torch.use_deterministic_algorithms(asked, warn_only=warns)
    try:
        with pytest.raises(KeyError):
            fails()
        assert inside == [(True, False, asked)] and determinism() == (asked, warns, asked)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_compilers_hash_of_torch_is_made_next_to_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    here, hashed = threading.get_ident(), []
    own = codecache.build_code_hash
    monkeypatch.setattr(codecache, "build_code_hash", lambda *args: hashed.append(threading.get_ident()) or own(*args))
    codecache.torch_key.clear()
    torch_internals.begin_hashing_compiler()
    for thread in threading.enumerate():
        if thread.name == "torch_key":
            thread.join(timeout=60)
    assert hashed and here not in hashed
    hashed.clear()
    codecache.torch_key()
    assert not hashed


def test_another_shape_of_the_same_memory_is_no_view() -> None:
    x = torch.arange(6.0, requires_grad=True)
    y = 2 * x
    found = torch_internals.reshaped(y, torch.Size((2, 3)))
    assert found.data_ptr() == y.data_ptr() and not found._is_view()
    found.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 6


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_during_a_capture(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []

    @contextmanager
    def stand_in(graph, **options):
        inside.append((gc.isenabled(), len(kept), options["capture_error_mode"]))
        yield

    class Circle:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            kept.pop()

    monkeypatch.setattr(torch.cuda, "graph", stand_in)
    kept, before = [None], gc.isenabled()
    Circle()
    try:
        gc.enable() if enabled else gc.disable()
        with torch_internals.capture(None):
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError), torch_internals.capture(None):
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
    assert inside == [(False, 0, "thread_local")] * 2
