"""The planner: what it predicts is what is allocated, and what cannot be is told beforehand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packed_layer import INTERLEAVED, PLAIN, E, H, I, K, PackedLayer

from amoeba import Activation
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.planner import LayerSizes, check_memory, plan
from amoeba.cpu.weights import load_packed
from selection import each_value_once

try:
    load_packed()
except CoreUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

QWEN = LayerSizes(128, 2048, 768)
PASS = {"max_len": 2048, "top_k": 8, "ranks": (8, 8, 8)}


@each_value_once()
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("activation", [Activation(), INTERLEAVED, PLAIN], ids=["gated", "interleaved", "plain"])
def test_packed_weights_take_exactly_what_is_planned(kind, nodes, activation):
    layer = PackedLayer(activation)
    packed = layer.pack(kind, nodes)
    found = plan(LayerSizes(E, H, I, activation, bias=True), kind=kind, nodes=nodes, max_len=37, top_k=K)
    assert packed.nbytes() == found.bytes_of("packed W")
    layer.run(packed).backward(layer.dy_TH)
    assert packed.nbytes() == found.bytes_of("packed W") + found.bytes_of("packed Wᵀ")


@pytest.mark.parametrize("nodes", [1, 3])
def test_weights_stored_for_backward_are_planned_and_not_packed(nodes):
    layer, sizes = PackedLayer(), LayerSizes(E, H, I, bias=True)
    packed = layer.pack("int8", nodes, backward="bf16")
    found = plan(sizes, kind="int8", backward="bf16", nodes=nodes, max_len=37, top_k=K)
    layer.run(packed).backward(layer.dy_TH)
    assert packed.nbytes() == found.bytes_of("packed W") + found.bytes_of("stored W")
    assert found.bytes_of("stored W") == 2 * E * 3 * H * I and not found.bytes_of("packed Wᵀ")
    assert found.bytes_of("caches") == plan(
        sizes, kind="int8", recompute=True, nodes=nodes, max_len=37, top_k=K
    ).bytes_of("caches")


def torch_keeps_what_is_freed() -> bool:
    """Builds for ARM bring an allocator of their own, whose cache counts as resident memory."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    return library.is_file() and b"mimalloc" in library.read_bytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
@pytest.mark.skipif(torch_keeps_what_is_freed(), reason="this torch has mimalloc, which keeps freed memory")
@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "nodes", "saved"), [("bf16", 1, "h"), ("int8", 2, "recompute")])
def test_the_peak_of_middle_sized_layers_is_within_ten_percent(kind, nodes, saved):
    """Small blocks are given back at once, and torch's own cache of compiled products is off: neither is ours."""
    script = Path(__file__).with_name("measure_passes.py")
    source = Path(__file__).parents[2] / "src"
    settings = {
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    }
    command = [sys.executable, str(script), kind, str(nodes), saved]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["measured"] == pytest.approx(found["planned"], rel=0.1)


class TestTheNumbers:
    def test_int8_takes_half_of_the_weights(self):
        bf16, int8 = (plan(QWEN, kind=kind, **PASS) for kind in ("bf16", "int8"))
        assert bf16.bytes_of("packed W") == 128 * 3 * 768 * 2048 * 2
        assert int8.bytes_of("packed W") == pytest.approx(bf16.bytes_of("packed W") / 2, rel=0.01)

    def test_caches_are_h_and_little_more_and_recompute_keeps_no_h(self):
        h = 2 * 2048 * 8 * 2 * 768
        assert h <= plan(QWEN, **PASS).bytes_of("caches") <= 1.15 * h
        assert plan(QWEN, recompute=True, **PASS).bytes_of("caches") < 0.02 * h

    def test_layers_share_the_scratch_and_nothing_else(self):
        one, many = plan(QWEN, **PASS), plan(QWEN, layers=48, **PASS)
        for name in ("packed W", "packed Wᵀ", "factor copies", "caches", "saved inputs"):
            assert many.bytes_of(name) == 48 * one.bytes_of(name), name
        assert many.bytes_of("scratch") == one.bytes_of("scratch")

    def test_inference_needs_no_transposed_weights_and_no_caches(self):
        names = {item.name for item in plan(QWEN, training=False, **PASS).items}
        assert names == {"packed W", "factor copies", "scratch", "rows in and out"}

    def test_deepseek_v3_over_two_nodes(self):
        """The example of seed 002, which gives one node's 3.5 GiB per projection as the sum over both."""
        found = plan(
            LayerSizes(256, 7168, 2048), kind="bf16", nodes=2, ranks=(16, 16, 16), max_len=25600, top_k=8, layers=1
        )
        projection, input_cache, half_of_h = 3.5 * 2**30, 350 * 2**20, 800 * 2**20
        assert found.bytes_of("packed W") == found.bytes_of("packed Wᵀ") == 2 * 3 * projection
        assert found.bytes_of("saved inputs") == input_cache + 12 * 25600 * 8
        assert found.bytes_of("caches") == pytest.approx(2 * half_of_h, rel=0.05)  # gate and up; a is not kept
        assert found.bytes_of("factor copies") > 2 * 3 * 8 * 2**20

    def test_the_table_is_readable(self):
        text = str(plan(QWEN, kind="int8", layers=48, **PASS))
        assert text.splitlines()[0].startswith("48 layers of 128 experts, H=2048 I=768, int8, 1 node, 2048 tokens")
        assert "packed W " in text
        assert text.splitlines()[-1].split()[0] == "total"


class TestWhetherItFits:
    def test_too_much_says_how_much_how_much_there_is_and_what_to_change(self):
        found = plan(QWEN, layers=48, **PASS)
        with pytest.raises(MemoryError) as caught:
            check_memory(found, available=20 << 30)
        text = str(caught.value)
        assert f"expected {found.total / 2**30:.2f} GiB to be free" in text
        assert "got 20.00 GiB" in text
        for remedy in ("int8", "max_len", "recompute"):
            assert remedy in text
        assert str(found) in text

    def test_what_is_allocated_already_is_not_asked_for_again(self):
        found = plan(QWEN, **PASS)
        check_memory(found, available=found.total)
        check_memory(found, available=1 << 30, already=found.total - (1 << 30))
        with pytest.raises(MemoryError):
            check_memory(found, available=(1 << 30) - 1, already=found.total - (1 << 30))

    def test_a_small_layer_fits_here(self):
        check_memory(plan(LayerSizes(4, 64, 32), max_len=8, top_k=2))
