"""Nodes compute with copies of the factors; whatever changes a factor, no copy is ever stale (bug 22 of the seed)."""

import gc

import numpy as np
import pytest
import torch
from packed_layer import E, H, PackedLayer, R

from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu.build import CoreUnavailable
from amoeba.cpu.node_passes import NodeFactors
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.packed_experts import FactorMemory
from amoeba.cpu.weights import load_packed
from selection import each_value_once

try:
    load_packed()
except CoreUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture
def packings(monkeypatch):
    """One entry for each time that a node packed factors."""
    entries, right = [], NodeFactors.pack

    def noted(node, lora, pool):
        entries.append(lora)
        return right(node, lora, pool)

    monkeypatch.setattr(NodeFactors, "pack", staticmethod(noted))
    return entries


def assert_fresh(layer, packed):
    """The packed experts give what experts that never saw other factors give."""
    assert torch.equal(layer.run(packed), layer.run(layer.pack(nodes=packed.nodes)))


@each_value_once()
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_an_optimizer_step_between_forwards(optimizer, options):
    layer = PackedLayer()
    packed = layer.pack(nodes=2)
    stepping = getattr(torch.optim, optimizer)(layer.lora.tensors().values(), lr=1e-3, **options)
    before = None
    for _ in range(3):
        y_TH = layer.run(packed)
        y_TH.backward(layer.dy_TH)
        stepping.step()
        stepping.zero_grad()
        assert before is None or not torch.equal(y_TH, before)
        before = y_TH.detach()
        assert_fresh(layer, packed)


WAYS = {
    "no_grad": lambda factor: factor.detach().mul_(1.5),
    "data": lambda factor: factor.data.mul_(1.5),
    "data of one number": lambda factor: factor.data.view(-1)[7:8].add_(1.0),
    "another tensor as data": lambda factor: setattr(factor, "data", factor.data * 1.5),
    "numpy": lambda factor: np.multiply(view := factor.detach().view(torch.int16).numpy(), -1, out=view),
    "two rows swapped": lambda factor: factor.data.copy_(factor.data.flip(1)),
}


@each_value_once("way")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LORA_NAMES)
@pytest.mark.parametrize("nodes", [1, 2])
def test_any_way_to_change_a_factor_is_seen(name, way, nodes):
    layer = PackedLayer()
    packed = layer.pack(nodes=nodes)
    before = layer.run(packed)
    WAYS[way](getattr(layer.lora, name))
    assert not torch.equal(layer.run(packed), before)
    assert_fresh(layer, packed)


def test_few_tokens_see_a_change_in_an_expert_they_meet():
    layer = PackedLayer()
    packed = layer.pack(nodes=2)
    routing = (torch.tensor([[1, 2]]), torch.ones(1, 2))
    layer.x_TH, (layer.expert_TK, layer.weight_TK) = layer.x_TH.detach()[:1], routing
    before = layer.run(packed)
    layer.lora.down_lora_b.data[2].mul_(3.0)
    assert not torch.equal(layer.run(packed), before)
    assert_fresh(layer, packed)


def test_a_change_in_an_expert_is_seen_once_a_token_meets_it():
    layer = PackedLayer()
    packed = layer.pack(nodes=2)
    layer.x_TH, layer.weight_TK = layer.x_TH.detach()[:1], torch.ones(1, 2)
    for pair in ([0, 1], [4, 2]):
        layer.expert_TK = torch.tensor([pair])
        layer.lora.down_lora_b.data[2].mul_(3.0)
        assert_fresh(layer, packed)


def test_other_factors_at_the_same_address_are_other_factors():
    layer = PackedLayer()
    packed = layer.pack(nodes=2)
    for seed in range(4):
        layer.lora = None
        gc.collect()
        layer.lora = PackedLayer(seed=seed).lora
        assert_fresh(layer, packed)


def test_another_scaling_is_seen():
    layer = PackedLayer()
    packed = layer.pack()
    layer.run(packed)
    layer.lora = LoraFactors(**layer.lora.tensors(), scaling=3.0)
    assert_fresh(layer, packed)


@pytest.mark.parametrize("tokens", [37, 1])
def test_factors_that_did_not_change_are_packed_once(packings, tokens):
    layer = PackedLayer(tokens=tokens)
    packed = layer.pack(nodes=2)
    for _ in range(3):
        layer.run(packed).backward(layer.dy_TH)
    assert len(packings) == 2, "once for each node"


@each_value_once()
@pytest.mark.parametrize("shape", [(E, R, H), (E, 5, 31), (E, 1, 1), (E, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_checksum_sees_every_single_bit(shape, dtype):
    factor, pool = torch.randn(shape).to(dtype), WorkerPool(2)
    memory = FactorMemory({"one": factor, "other": factor})
    before, words, everyone = memory.checksums(pool), factor.view(torch.int16), torch.arange(E)[None]
    for place in (0, words.numel() // 3, words.numel() - 1):
        for bit in (0, 7, 15):
            words.view(-1)[place] ^= torch.tensor(1 << bit).to(torch.int16)
            assert (memory.checksums(pool) != before).sum() == 2
            changed = place * E // words.numel()
            assert not memory.has(before, pool, everyone)
            assert not memory.has(before, pool, torch.tensor([[changed, changed]]))
            assert memory.has(before, pool, everyone[everyone != changed][None]), "nobody met the changed expert"
            words.view(-1)[place] ^= torch.tensor(1 << bit).to(torch.int16)
    assert memory.has(before, pool, torch.cat([everyone, torch.tensor([[-1, E]])], 1))
    assert torch.equal(FactorMemory({"one": factor.mT.contiguous().mT}).checksums(pool), before[:1])


def test_factors_that_do_not_lie_contiguously_are_read_anew_each_time():
    layer = PackedLayer()
    turned = layer.lora.down_lora_a.detach().mT.contiguous().mT
    layer.lora = LoraFactors(**(layer.lora.tensors() | {"down_lora_a": turned}), scaling=2.0)
    packed = layer.pack()
    before = layer.run(packed)
    turned.data.mul_(1.5)
    assert not torch.equal(layer.run(packed), before)
    assert_fresh(layer, packed)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_backward_computes_with_the_factors_of_its_forward(nodes):
    """Also where nothing could have told autograd that they were changed, and another forward came between."""
    layer = PackedLayer()
    packed = layer.pack(nodes=nodes)
    expected = layer.found(layer.pack(nodes=nodes))["x"]
    first = layer.run(packed)
    for factor in layer.lora.tensors().values():
        factor.data.mul_(0.5)
    second = layer.run(packed)
    (of_second,) = torch.autograd.grad(second, layer.x_TH, layer.dy_TH)
    (of_first,) = torch.autograd.grad(first, layer.x_TH, layer.dy_TH)
    assert torch.equal(of_first, expected)
    assert torch.equal(of_second, layer.found(layer.pack(nodes=nodes))["x"])
