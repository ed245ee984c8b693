"""`amoeba.MoE` in training: balance, statistics, checkpointing, torch.compile, initialisation, copies.

T tokens · K experts per token · E experts · H hidden
"""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from amoeba import MoE, RouterConfig
from amoeba.routing.router import load_balance_loss
from small_layers import FULL, NUM_EXPERTS, PLAIN, TOP_K, gradients, make_layer, make_x

torch.set_num_threads(1)


# ---- balance and statistics


def test_balance_update_moves_the_bias_against_the_load_and_resets_it():
    layer = make_layer()
    bias_E = layer.gate.e_score_correction_bias
    before = bias_E.clone()
    _, first = layer(make_x(63), return_routing=True)
    _, second = layer(make_x(40, seed=9), return_routing=True)
    load_E = torch.bincount(torch.cat((first.expert_TK, second.expert_TK)).flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(layer.statistics.load_E, load_E)
    layer.update_balance(0.25)
    expected = before + 0.25 * (load_E.double().mean() - load_E).sign().float()
    torch.testing.assert_close(bias_E, expected)
    assert layer.gate.e_score_correction_bias is bias_E
    assert layer.statistics.load_E.sum() == 0
    layer.update_balance(0.25)
    torch.testing.assert_close(bias_E, expected)


def test_balance_update_evens_out_a_skewed_load():
    layer = make_layer()
    layer.gate.e_score_correction_bias.copy_(torch.linspace(2, -2, NUM_EXPERTS))
    violation = []
    for step in range(60):
        layer(make_x(256, seed=step))
        violation.append(float(layer.statistics.summary()["max_violation"]))
        layer.update_balance(0.05)
    assert violation[0] > 1.0
    assert sum(violation[-10:]) / 10 < 0.35


def test_balance_update_without_a_selection_bias_is_refused():
    with pytest.raises(ValueError, match=r"update_balance: expected .*selection_bias=False.*selection_bias=True"):
        MoE(PLAIN).update_balance(0.1)


def test_statistics_count_training_and_not_evaluation():
    layer, x = make_layer(), make_x(63)
    layer.eval()(x)
    assert layer.statistics.steps == 0
    layer.train()(x)
    assert layer.statistics.steps == 1
    assert layer.statistics.load_E.sum() == 63 * TOP_K


def test_capacity_drops_are_reported():
    layer = make_layer(replace(PLAIN, router=RouterConfig(NUM_EXPERTS, TOP_K, capacity_factor=0.5)))
    _, routing = layer(make_x(64), return_routing=True)
    dropped_TK = routing.expert_TK == NUM_EXPERTS
    assert (routing.weight_TK[dropped_TK] == 0).all()
    assert layer.statistics.summary()["drop_rate"] == dropped_TK.float().mean() >= 0.5
    assert (layer.statistics.load_E <= 12).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient_and_counts_once(reentrant):
    config = replace(FULL, router=replace(FULL.router, jitter=0.2))
    layer, x, dy = make_layer(config), make_x(63), make_x(63, seed=3)
    torch.manual_seed(0)
    plain = gradients(layer, x, dy)
    layer.statistics.reset()

    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=reentrant)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert layer.statistics.steps == 1


def test_jitter_acts_in_training_only():
    layer, x = make_layer(replace(PLAIN, router=replace(PLAIN.router, jitter=0.2))), make_x(17)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), make_layer(PLAIN)(x))


# ---- the life of a module


def test_a_compiled_layer_computes_routes_and_counts_the_same():
    layer, x, dy = make_layer(), make_x(2, 21), make_x(2, 21, seed=3)
    plain = gradients(layer, x, dy)
    layer.statistics.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = x.clone().requires_grad_()
    y, routing = compiled(x, return_routing=True)
    found = torch.autograd.grad(y, [x, *layer.parameters()], dy, retain_graph=True)
    assert torch.equal(y, plain.pop("y"))
    assert all(torch.equal(got, expected) for got, expected in zip(found, plain.values(), strict=True))
    assert torch.equal(routing.expert_TK, layer(x, return_routing=True)[1].expert_TK)
    assert load_balance_loss(routing, NUM_EXPERTS).requires_grad
    assert layer.statistics.steps == 2


def test_initialisation_follows_the_seed():
    layers = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        layers.append(MoE(FULL))
    for first, again, other in zip(*(layer.named_parameters() for layer in layers), strict=True):
        assert torch.equal(first[1], again[1])
        if first[0].endswith("_bias"):
            assert not first[1].any()
        else:
            assert not torch.equal(first[1], other[1])
            assert 0.015 < first[1].std().item() < 0.025
    assert not layers[0].gate.e_score_correction_bias.any()


@pytest.fixture
def uninitialised_memory_is_poisoned():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_poisoned")
def test_layer_from_the_meta_device_draws_the_same_weights():
    layer = MoE(FULL, device="meta")
    assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    direct = MoE(FULL).state_dict()
    assert all(torch.equal(tensor, direct[name]) for name, tensor in layer.state_dict().items())
    assert not any(buffer.any() for buffer in layer.statistics.buffers())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.usefixtures("uninitialised_memory_is_poisoned")
def test_layer_from_the_meta_device_takes_a_state_dict_and_trains(assign):
    source, x = make_layer(), make_x(17)
    outer = torch.nn.Sequential(MoE(FULL, device="meta"))
    if not assign:
        outer.to_empty(device="cpu")
    outer.load_state_dict(torch.nn.Sequential(source).state_dict(), assign=assign)
    assert torch.equal(outer(x), source(x))
    assert torch.equal(outer[0].statistics.load_E, source.statistics.load_E)


def by_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), by_torch_save],
    ids=["deepcopy", "pickle", "torch_save"],
)
def test_a_copy_computes_the_same_and_lives_its_own_life(duplicate):
    layer, x = make_layer(), make_x(17)
    y = layer(x)
    twin = duplicate(layer)
    assert twin.config == layer.config
    assert torch.equal(twin.statistics.load_E, layer.statistics.load_E)
    assert torch.equal(twin(x), y)
    twin.update_balance(0.5)
    twin.gate.weight.data.zero_()
    assert layer.statistics.steps == 1
    assert torch.equal(layer(x), y)


def test_training_lowers_the_loss_and_reaches_every_parameter():
    torch.manual_seed(0)
    teacher = make_layer()
    layer = MoE(FULL)
    start = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    x = make_x(128)
    with torch.no_grad():
        target = teacher(x)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        y, routing = layer(x, return_routing=True)
        loss = (y - target).square().mean()
        (loss + 0.001 * load_balance_loss(routing, NUM_EXPERTS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.update_balance(0.001)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(not torch.equal(parameter, start[name]) for name, parameter in layer.named_parameters())
