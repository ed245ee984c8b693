"""The engine: its stack of caches, its checks, its background.

T tokens · H hidden
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from packed_layer import H, PackedLayer, assert_close, engine_gradients

from amoeba.cpu import engine as engine_module
from amoeba.cpu import passes, planner
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.engine import Engine
from amoeba.cpu.packed_weights import load_packed

try:
    load_packed()
except CoreUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


PATHS = Path(engine_module.__file__).parents[2], Path(__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}


def exit_code_of(child, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "it hangs"


def make(layer, nodes=1, **options):
    return Engine(layer.pack(nodes=nodes), layer.lora, **{"max_len": 64, "top_k": 2} | options)


class TestThePasses:
    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("nodes", [1, 3])
    def test_they_are_those_of_the_seam(self, nodes, recompute):
        layer = PackedLayer()
        engine = make(layer, nodes, recompute=recompute)
        found = {"output": engine.forward(*layer.inputs())}
        found |= engine_gradients(engine.backward(layer.dy_TH), layer.wanted())
        assert_close(found, layer.truth())
        expected = layer.found(layer.pack(nodes=nodes), recompute=recompute)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name

    def test_without_lora(self):
        layer = PackedLayer()
        layer.lora = None
        engine = make(layer)
        engine.forward(*layer.inputs())
        gradients = engine.backward(layer.dy_TH)
        assert [n for n, gradient in gradients._asdict().items() if gradient is not None] == ["x", "weight"]

    def test_caches_are_consumed_in_reverse_order(self):
        layers = [PackedLayer(tokens=tokens) for tokens in (37, 5, 64)]
        engine = make(layers[0], max_cache_depth=3)
        for layer in layers:
            engine.forward(*layer.inputs())
        assert engine.cache_depth == 3
        for layer in reversed(layers):
            found = engine.backward(layer.dy_TH).x
            layer.weights, layer.lora = layers[0].weights, layers[0].lora
            assert torch.equal(found, layer.found(engine.packed)["x"])
        assert engine.cache_depth == 0

    def test_a_backward_computes_with_the_factors_of_its_forward(self):
        layer = PackedLayer()
        expected = layer.found(layer.pack(nodes=2))
        engine = make(layer, nodes=2, max_cache_depth=2)
        engine.forward(*layer.inputs())
        for factor in layer.lora.tensors().values():
            factor.data.mul_(0.5)
        engine.forward(*layer.inputs())
        changed = layer.found(layer.pack(nodes=2))
        assert torch.equal(engine.backward(layer.dy_TH).x, changed["x"])
        assert torch.equal(engine.backward(layer.dy_TH).x, expected["x"])


class TestTheStack:
    def test_underflow(self):
        layer = PackedLayer()
        engine = make(layer)
        with pytest.raises(
            RuntimeError, match=r"cache underflow: expected a forward with save=True.*got a backward more"
        ):
            engine.backward(layer.dy_TH)
        engine.forward(*layer.inputs(), save=False)
        with pytest.raises(RuntimeError, match="cache underflow"):
            engine.backward(layer.dy_TH)
        engine.forward(*layer.inputs())
        engine.backward(layer.dy_TH)
        with pytest.raises(RuntimeError, match="cache underflow"):
            engine.backward(layer.dy_TH)

    def test_overflow(self):
        layer = PackedLayer()
        engine = make(layer, max_cache_depth=2)
        engine.forward(*layer.inputs())
        engine.forward(*layer.inputs())
        with pytest.raises(RuntimeError, match="cache overflow: expected at most max_cache_depth = 2"):
            engine.forward(*layer.inputs())
        engine.forward(*layer.inputs(), save=False)
        assert engine.cache_depth == 2
        engine.backward(layer.dy_TH)
        engine.forward(*layer.inputs())

    def test_a_gradient_of_another_forward_is_refused_and_the_cache_stays(self):
        layer = PackedLayer()
        engine = make(layer)
        engine.forward(*layer.inputs())
        with pytest.raises(ValueError, match=r"dy_TH: expected shape \(37, 64\), as the x of the forward saved last"):
            engine.backward(layer.dy_TH[:5])
        engine.backward(layer.dy_TH)

    def test_x_changed_in_place_is_refused(self):
        layer = PackedLayer()
        engine, inputs = make(layer), layer.inputs()
        engine.forward(*inputs)
        inputs[0].zero_()
        with pytest.raises(RuntimeError, match=r"changed in place since. Hand over a copy"):
            engine.backward(layer.dy_TH)


class TestBadInput:
    """All of it is told before a pointer is taken, and in the thread that made the mistake."""

    def refused(self, message, **changed):
        layer = PackedLayer()
        engine = make(layer)
        named = dict(zip(("x", "expert", "weight"), layer.inputs(), strict=True)) | changed
        with pytest.raises(ValueError, match=message):
            engine.submit_forward(*named.values())
        with pytest.raises(RuntimeError, match="sync: expected a submission"):
            engine.sync()

    def test_more_tokens_than_max_len(self):
        self.refused("x_TH: expected at most max_len = 64 tokens; got 65 tokens", x=torch.zeros(65, H).bfloat16())

    def test_fp32_for_bf16(self):
        self.refused("x_TH: expected torch.bfloat16.*; got torch.float32. Cast it", x=torch.zeros(37, H))
        layer = PackedLayer()
        engine = make(layer)
        engine.forward(*layer.inputs())
        with pytest.raises(ValueError, match=r"dy_TH: expected torch.bfloat16.*; got torch.float32"):
            engine.backward(layer.dy_TH.float())

    def test_shape(self):
        self.refused(r"x_TH: expected shape \(T, 64\); got \(37, 63\)", x=torch.zeros(37, H - 1).bfloat16())
        self.refused(r"x_TH: expected shape \(T, 64\); got \(37,\)", x=torch.zeros(37).bfloat16())

    def test_rows_that_are_not_contiguous(self):
        self.refused(r"x_TH: expected rows that are contiguous.*strides", x=torch.zeros(H, 37).bfloat16().t())

    def test_device(self):
        self.refused("x_TH: expected a tensor on the CPU; got meta", x=torch.zeros(37, H, device="meta").bfloat16())

    def test_more_experts_per_token_than_top_k(self):
        self.refused(r"expert_TK: expected shape \(T, K\) with K <= 2", expert=torch.zeros(37, 3, dtype=torch.int64))

    def test_routing_of_other_tokens(self):
        layer = PackedLayer()
        with pytest.raises(ValueError, match="expert_TK and weight_TK: expected shape"):
            make(layer).forward(layer.inputs()[0][:9], *layer.inputs()[1:])

    @pytest.mark.parametrize("name", ["max_len", "top_k", "max_cache_depth"])
    def test_limits_below_one(self, name):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1; got 0"):
            make(PackedLayer(), **{name: 0})

    def test_factors_of_other_experts(self):
        layer, other = PackedLayer(), PackedLayer(inner=33)
        with pytest.raises(ValueError, match="gate_lora_a and gate_lora_b: expected shapes"):
            Engine(layer.pack(), other.lora, max_len=64, top_k=2)
        with pytest.raises(ValueError, match=r"gate_lora_a: expected torch.bfloat16 or torch.float32"):
            Engine(layer.pack(), layer.lora.to(torch.float64), max_len=64, top_k=2)


class TestTheBackground:
    def test_submissions_are_computed_in_order_and_synced_one_by_one(self):
        layer = PackedLayer()
        expected = layer.found(layer.pack(nodes=2))
        engine = make(layer, nodes=2)
        engine.submit_forward(*layer.inputs())
        engine.submit_backward(layer.dy_TH)
        engine.submit_forward(*layer.inputs(), save=False)
        assert torch.equal(engine.sync(), expected["output"])
        assert torch.equal(engine.sync().x, expected["x"])
        assert torch.equal(engine.sync(), expected["output"])

    def test_submitting_does_not_wait(self, monkeypatch):
        layer = PackedLayer()
        engine, go, right = make(layer), threading.Event(), passes.forward

        def slow(*given):
            assert go.wait(20)
            return right(*given)

        monkeypatch.setattr(engine_module.passes, "forward", slow)
        start = time.perf_counter()
        engine.submit_forward(*layer.inputs())
        assert time.perf_counter() - start < 10
        go.set()
        assert engine.sync().shape == layer.x_TH.shape

    def test_what_was_handed_over_lives_until_sync(self):
        layer = PackedLayer()
        engine = make(layer)
        x_TH = layer.x_TH.detach().clone()
        alive = weakref.ref(x_TH)
        engine.submit_forward(x_TH, *layer.inputs()[1:], save=False)
        del x_TH
        gc.collect()
        assert alive() is not None
        engine.sync()
        gc.collect()
        assert alive() is None

    def test_errors_are_raised_at_sync_and_what_follows_is_computed(self):
        layer = PackedLayer()
        engine = make(layer)
        engine.submit_backward(layer.dy_TH)
        engine.submit_forward(*layer.inputs())
        with pytest.raises(RuntimeError, match="cache underflow"):
            engine.sync()
        assert engine.sync().isfinite().all()

    def test_a_sync_too_many_and_a_direct_call_before_the_sync_are_refused(self):
        layer = PackedLayer()
        engine = make(layer)
        with pytest.raises(RuntimeError, match=r"sync: expected a submission.*got none"):
            engine.sync()
        engine.submit_forward(*layer.inputs())
        with pytest.raises(RuntimeError, match="backward: expected nothing in the background; got 1 submissions"):
            engine.backward(layer.dy_TH)
        engine.sync()
        engine.backward(layer.dy_TH)

    def test_an_engine_that_goes_takes_its_thread_and_its_weights_along(self):
        layer = PackedLayer()
        engine = make(layer, nodes=2)
        engine.forward(*layer.inputs())
        weights = weakref.ref(engine.packed)
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("amoeba-engine")]
        assert threads
        del engine
        gc.collect()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert weights() is None

    def test_a_process_may_end_while_the_engine_computes(self):
        """As torch gives the interpreter free while it multiplies, which a thread that is killed does not survive."""
        program = """
import torch
from packed_layer import PackedLayer
from amoeba.cpu import engine as module
layer, right = PackedLayer(), module.passes.forward
engine = module.Engine(layer.pack(), max_len=64, top_k=2, max_cache_depth=3)
square = torch.randn(256, 256)

def slow(*given):
    for _ in range(200):
        square @ square
    return right(*given)

module.passes.forward = slow
for _ in range(3):
    engine.submit_forward(*layer.inputs())
print("the end")
"""
        done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_computes_too(self):
        layer = PackedLayer()
        engine = make(layer)
        expected = engine.forward(*layer.inputs(), save=False)
        child = os.fork()
        if child == 0:
            right = torch.equal(engine.forward(*layer.inputs(), save=False), expected)
            os._exit(0 if right else 1)
        assert exit_code_of(child) == 0

    def test_the_seam_and_the_engine_may_run_at_the_same_time(self):
        layer = PackedLayer()
        engine = make(layer, nodes=2, max_cache_depth=8)
        expected = layer.found(engine.packed)
        for _ in range(8):
            engine.submit_forward(*layer.inputs())
        for _ in range(4):
            assert torch.equal(layer.run(engine.packed), expected["output"])
        for _ in range(8):
            assert torch.equal(engine.sync(), expected["output"])


@pytest.mark.gpu
def test_the_engine_with_x_on_a_gpu():
    layer = PackedLayer()
    expected = layer.found(layer.pack(nodes=2))
    engine = make(layer, nodes=2)
    x_TH, expert_TK, weight_TK = (tensor.cuda() for tensor in layer.inputs())
    engine.submit_forward(x_TH * 1, expert_TK, weight_TK)
    engine.submit_backward(layer.dy_TH.cuda())
    y_TH, gradients = engine.sync(), engine.sync()
    assert y_TH.is_cuda and gradients.x.is_cuda and gradients.weight.is_cuda
    assert torch.equal(y_TH.cpu(), expected["output"])
    found = engine_gradients(gradients, layer.wanted())
    for name, gradient in found.items():
        assert torch.equal(gradient.cpu(), expected[name]), name


def test_more_memory_than_there_is_is_foreseen(monkeypatch):
    layer = PackedLayer()
    monkeypatch.setattr(planner, "available_memory", lambda device: 10 << 20)
    make(layer)
    with pytest.raises(MemoryError, match=r"expected .* to be free.*; got 10.0 MiB. Pack in int8.*smaller max_len"):
        make(layer, max_len=1 << 16)
