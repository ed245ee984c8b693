"""Passes of packed experts in another thread: `submit_experts` and `sync`, forward and backward."""

import threading
import warnings

import pytest
import torch
from packed_layer import PackedLayer, assert_close
from torch.utils.checkpoint import checkpoint

from amoeba import Routing, experts, submit_experts
from amoeba.backends.packed import BACKEND
from selection import each_value_once

PATIENCE = 2  # seconds


class Submitted(PackedLayer):
    """The layer, with every pass submitted."""

    def submit(self, packed, **options):
        return submit_experts(self.x_TH, self.routing, packed, lora=self.lora, **options)

    def run(self, packed, **options):
        return self.submit(packed, **options).sync()


class Gate:
    """Holds up a pass in the other thread until it is opened; `behind` says in which thread it was."""

    def __init__(self, monkeypatch, name):
        self.open, self.behind = threading.Event(), None
        own = getattr(BACKEND.operator, name)

        def wait(*arguments):
            self.behind = threading.current_thread()
            assert self.open.wait(PATIENCE), "the caller did not go on"
            return own(*arguments)

        monkeypatch.setattr(BACKEND.operator, name, wait)


class Between(torch.autograd.Function):
    """Something that the caller computes meanwhile: opens a gate in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_gate = backward
        if forward is not None:
            forward.open.set()
        return x * 2

    @staticmethod
    def backward(ctx, dx):
        if ctx.backward_gate is not None:
            ctx.backward_gate.open.set()
        return dx * 2, None, None


@each_value_once()
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["h", "recompute"])
@pytest.mark.parametrize(("kind", "backward", "nodes"), [("bf16", None, 1), ("int8", "bf16", 1), ("int8", None, 3)])
def test_a_submitted_pass_has_the_bits_of_a_blocking_one(kind, backward, nodes, options):
    layer = Submitted()
    packed = layer.pack(kind, nodes, backward=backward)
    found, expected = layer.found(packed, **options), PackedLayer.found(PackedLayer(), packed, **options)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert_close(found, layer.truth(), **({} if kind == "bf16" else {"output": 3e-2, "gradients": 5e-2}))


def test_the_caller_goes_on_while_a_forward_is_under_way(monkeypatch):
    layer, gate = Submitted(), Gate(monkeypatch, "forward")
    ticket = layer.submit(layer.pack())
    other_TH = Between.apply(layer.x_TH, gate, None)
    y_TH = ticket.sync()
    assert gate.behind is not threading.current_thread()
    assert torch.equal(y_TH, PackedLayer().run(layer.pack()))
    assert torch.equal(other_TH, layer.x_TH * 2)


def test_what_is_recorded_between_goes_back_while_a_backward_is_under_way(monkeypatch):
    layer, packed = Submitted(), PackedLayer().pack()
    expected = PackedLayer.found(PackedLayer(), packed)
    gate = Gate(monkeypatch, "backward")
    ticket = layer.submit(packed)
    other_TH = Between.apply(layer.x_TH, None, gate)
    y_TH = ticket.sync() + other_TH
    y_TH.backward(layer.dy_TH)
    assert gate.behind is not threading.current_thread()
    assert torch.equal(layer.x_TH.grad, expected["x"] + 2 * layer.dy_TH)
    for name, factor in layer.lora.tensors().items():
        assert torch.equal(factor.grad, expected[name]), name


def test_two_open_tickets_are_synced_in_any_order():
    one, other = Submitted(), Submitted(seed=1)
    tickets = one.submit(one.pack()), other.submit(other.pack())
    y_other, y_one = tickets[1].sync(), tickets[0].sync()
    assert torch.equal(y_one, PackedLayer.run(one, one.pack()))
    assert torch.equal(y_other, PackedLayer.run(other, other.pack()))
    (y_one.sum() + y_other.sum()).backward()
    assert one.x_TH.grad is not None and other.x_TH.grad is not None


def test_a_graph_that_is_kept_goes_back_twice():
    layer = Submitted()
    y_TH = layer.run(layer.pack())
    first, second = (torch.autograd.grad(y_TH, layer.x_TH, layer.dy_TH, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_an_error_of_the_other_thread_is_raised_by_sync(monkeypatch):
    def broken(*_):
        raise MemoryError("in the other thread")

    layer, packed = Submitted(), PackedLayer().pack()
    with monkeypatch.context() as patch:
        patch.setattr(BACKEND.operator, "forward", broken)
        ticket = layer.submit(packed)
    with pytest.raises(MemoryError, match="in the other thread"):
        ticket.sync()
    y_TH = layer.run(packed)  # the thread goes on
    monkeypatch.setattr(BACKEND.operator, "backward", broken)
    with pytest.raises(MemoryError, match="in the other thread"):
        y_TH.backward(layer.dy_TH)


def test_a_ticket_is_synced_once():
    layer = Submitted()
    ticket = layer.submit(layer.pack())
    ticket.sync()
    with pytest.raises(ValueError, match="ticket: expected one that is open; got one that was synced before"):
        ticket.sync()


def test_a_ticket_that_is_dropped_says_so_and_later_ones_are_not_disturbed():
    layer = Submitted()
    packed = layer.pack()
    ticket = layer.submit(packed)
    with pytest.warns(UserWarning, match="submitted and never synced"):
        del ticket
    assert torch.equal(layer.run(packed), PackedLayer.run(layer, packed))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(mode):
    layer = Submitted()
    packed = layer.pack()
    with mode():
        y_TH = layer.run(packed)
    assert not y_TH.requires_grad
    assert torch.equal(y_TH, PackedLayer.run(layer, packed))


def test_activation_checkpointing_and_autocast():
    layer, packed = Submitted(), PackedLayer().pack()
    expected = PackedLayer.found(PackedLayer(), packed)
    with torch.autocast("cpu", torch.bfloat16):
        y_TH = checkpoint(
            lambda x: submit_experts(x, layer.routing, packed, lora=layer.lora).sync(), layer.x_TH, use_reentrant=False
        )
    (dx_TH,) = torch.autograd.grad(y_TH, layer.x_TH, layer.dy_TH)
    assert torch.equal(y_TH, expected["output"]) and torch.equal(dx_TH, expected["x"])


def test_a_compiled_function_computes_at_once():
    layer = Submitted()
    packed = layer.pack()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x_TH):
        ticket = submit_experts(x_TH, layer.routing, packed)
        other_TH = x_TH * 2
        return ticket.sync() + other_TH

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        y_TH = run(layer.x_TH)
    assert torch.equal(y_TH, experts(layer.x_TH, layer.routing, packed) + layer.x_TH * 2)


def test_second_derivatives_are_refused_as_those_of_a_blocking_pass():
    layer = Submitted()
    y_TH = layer.run(layer.pack())
    (dx_TH,) = torch.autograd.grad(y_TH.sum(), layer.x_TH, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        dx_TH.sum().backward()


def test_resident_experts_are_computed_by_the_call_itself():
    layer = PackedLayer()
    ticket = submit_experts(layer.x_TH, layer.routing, layer.weights)
    assert torch.equal(ticket.sync(), experts(layer.x_TH, layer.routing, layer.weights))


@pytest.mark.gpu
def test_the_gpu_computes_between_submit_and_sync(monkeypatch):
    """Forward and backward, in a stream other than the default, with memory that is used again at once."""
    layer, packed = PackedLayer(), PackedLayer().pack()
    expected = layer.found(packed)
    own = BACKEND.operator.forward
    product = torch.randn(64, 64, device="cuda").bfloat16().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            x_TH, weight_TK = (t.detach().cuda().requires_grad_() for t in (layer.x_TH, layer.weight_TK))
            gate = threading.Event()

            def wait(*arguments, gate=gate):
                assert gate.wait(PATIENCE)
                return own(*arguments)

            monkeypatch.setattr(BACKEND.operator, "forward", wait)
            ticket = submit_experts(x_TH * 1, Routing(layer.expert_TK.cuda(), weight_TK), packed, lora=layer.lora)
            other_TH = x_TH @ product
            stream.synchronize()  # what the caller launched is done, although the pass has not begun
            gate.set()
            y_TH = ticket.sync()
            (y_TH + 0 * other_TH).backward(layer.dy_TH.cuda())
            assert torch.equal(y_TH.cpu(), expected["output"])
            assert torch.equal(x_TH.grad.cpu(), expected["x"])
            assert torch.equal(weight_TK.grad.cpu(), expected["weight"])
            for name, factor in layer.lora.tensors().items():
                assert torch.equal(factor.grad, expected[name]), name
                factor.grad = None
