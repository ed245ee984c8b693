"""Watched routers: counts, and gradients of the losses that keep them even, against autograd through the losses."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from amoeba.observe.router_watch import RouterWatch
from amoeba.routing.balance import Ledger, attach_balance, count_choices
from amoeba.routing.router import Routing, load_balance_loss, z_loss
from tiny_models import build, experts_of, needs, token_ids

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "glm4_moe"]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def seen_by_hooks(model, watch):
    """Logits and choices of each layer in one pass, and the model's loss."""
    logits, choices, handles = {}, {}, []
    for layer, (experts, routers) in enumerate(zip(watch.experts, watch.routers, strict=True)):

        def of_router(module, args, output, layer=layer):
            parts = output if isinstance(output, tuple) else (output,)
            experts = watch.ledger.experts[layer]
            logits[layer] = next(p for p in parts if p.is_floating_point() and p.shape[-1] == experts)

        def of_experts(module, args, kwargs, layer=layer):
            choices[layer] = [*args, *kwargs.values()][1]

        handles.append(routers[0].register_forward_hook(of_router))
        handles.append(experts.register_forward_pre_hook(of_experts, with_kwargs=True))
    ids = token_ids()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    for handle in handles:
        handle.remove()
    return logits, choices, loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_losses_written_out(family):
    torch.manual_seed(0)
    model = build(needs(family)).train()
    model.set_experts_implementation("amoeba")
    watch = RouterWatch(model)
    watch.close()
    for routers in watch.routers:
        for parameter in (p for router in routers for p in router.parameters()):
            parameter.data.mul_(8)  # away from even
    logits, choices, loss = seen_by_hooks(model, watch)
    layers = range(len(watch.names))
    losses = [
        load_balance_loss(
            Routing(choices[i], torch.ones(choices[i].shape), scores_TE=logits[i].float().softmax(-1), trusted=True),
            watch.ledger.experts[i],
        )
        for i in layers
    ]
    balance, z = sum(losses) / len(layers), sum(z_loss(logits[i]) for i in layers) / len(layers)
    expected = gradients(model, loss + 0.3 * balance + 0.2 * z)

    watch = RouterWatch(model)
    watch.balance(0.3, 0.2)
    ids = token_ids()
    found = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    watch.check_balanced()
    watch.close()
    unpulled = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: name + text)
    routers = [name for name in expected if not torch.allclose(expected[name], unpulled[name], rtol=1e-3, atol=1e-7)]
    assert routers, "the losses change nothing here, so nothing was tested"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_counted_and_left_as_it_was(family):
    model = build(needs(family)).train()
    model.set_experts_implementation("amoeba")
    classes = [type(module) for module in model.modules()]
    watch = RouterWatch(model)
    ids = token_ids()
    model(input_ids=ids, use_cache=False)
    layers = watch.take()
    assert len(layers) == len(watch.names) == len(experts_of(model))
    for layer, slots in zip(layers, watch.take(), strict=True):
        assert sum(layer["load"]) % ids.numel() == 0 and sum(layer["load"]) > 0
        assert layer["entropy"] is not None and 0 < layer["entropy"] <= torch.tensor(len(layer["load"])).log() + 1e-5
        assert layer["drop_rate"] == 0 and sum(slots["load"]) == 0  # taken, it starts anew
    assert sum(map(sum, watch.take_coactivation()[0]["counts"])) > 0
    model.eval()
    model(input_ids=ids, use_cache=False)
    assert all(sum(layer["load"]) == 0 for layer in watch.take())
    watch.close()
    assert [type(module) for module in model.modules()] == classes
    assert not any("amoeba_key" in vars(module) for module in model.modules())


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_one_compiled_layer_serves_all_and_counts_the_same():
    import torch._dynamo.utils

    torch.manual_seed(0)
    model = build("qwen3_moe").train()
    model.set_experts_implementation("amoeba")
    watch = RouterWatch(model)
    watch.balance(0.3, 0.2)
    ids = token_ids()
    expected = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    counted = watch.take()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", dynamic=False)
    found = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 < len(model.model.layers)
    assert watch.take() == counted
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_recompute_counts_nothing_twice():
    ledger = Ledger([4])
    logits = torch.randn(5, 4, requires_grad=True)
    expert_TK = torch.tensor([[0, 1], [1, 2], [1, 3], [1, 4], [-1, 0]])

    def layer(logits):
        weight_TK = attach_balance(logits[:, :2].sigmoid(), logits, ledger.key(0))
        return count_choices(weight_TK, expert_TK, ledger.key(0)).sum()

    ledger.pull = 1.0
    checkpoint(layer, logits, use_reentrant=False).backward()
    assert ledger.load_LE.tolist() == [[2, 4, 1, 1, 2]]  # the last are the ids outside [0, E)
    assert ledger.entropy_L2[0, 0] == 5
    assert ledger.together_LEE[0, 0, 1] == 1 and ledger.together_LEE[0, 1, 1] == 4


def test_entropy_is_that_of_the_scores_and_survives_certainty():
    ledger = Ledger([3, 3])
    logits = torch.tensor([[0.0, 0.0, 0.0], [100.0, 0.0, -100.0], [float("-inf"), 1.0, 1.0]])
    attach_balance(logits, logits, ledger.key(1))
    expected = torch.distributions.Categorical(logits=logits[:2]).entropy().sum() + torch.tensor(2.0).log()
    assert ledger.entropy_L2[0].tolist() == [0, 0] and ledger.entropy_L2[1, 0] == 3
    assert abs(ledger.entropy_L2[1, 1].item() * 2.0**-20 - expected.item()) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_a_second_watch_takes_over():
    model = build("qwen3_moe").train()
    model.set_experts_implementation("amoeba")
    classes = [type(module) for module in model.modules()]
    first, second = RouterWatch(model), RouterWatch(model)
    model(input_ids=token_ids(), use_cache=False)
    assert sum(first.take()[0]["load"]) == 0 < sum(second.take()[0]["load"])
    second.close()
    first.close()
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.filterwarnings("ignore")
def test_what_a_pass_is_counted_for_is_told_by_its_tokens():
    model = build("qwen3_moe").eval()
    model.set_experts_implementation("amoeba")
    watch = RouterWatch(model)
    ids = token_ids()
    wanted_T = torch.arange(ids.numel()) % 3 == 0

    def loads(wanted_T):
        with watch.counting(wanted_T) as counts, torch.no_grad():
            model(input_ids=ids, use_cache=False)
        return torch.stack(counts)

    some, others, every = loads(wanted_T), loads(~wanted_T), loads(torch.ones_like(wanted_T))
    assert torch.equal(some + others, every) and some.sum() > 0 < others.sum()
    assert (every.sum(-1) % ids.numel() == 0).all() and not any(module._forward_pre_hooks for module in watch.experts)
    assert all(sum(layer["load"]) == 0 for layer in watch.take()), "an evaluation is no training"


def test_slots_without_an_expert_are_dropped_and_counts_are_reset():
    model = build("qwen3_moe").train()
    model.set_experts_implementation("amoeba")
    watch = RouterWatch(model)
    module, experts = watch.experts[0], watch.ledger.experts[0]
    x_TH = torch.randn(4, model.config.hidden_size)
    expert_TK = torch.tensor([[0, 1], [0, experts], [1, 2], [0, 2]])  # one of eight has no expert
    module(x_TH, expert_TK, torch.ones(4, 2))
    assert sum(map(sum, watch.take_coactivation()[0]["counts"])) > 0
    layer = watch.take()[0]
    assert layer["load"][:3] == [3, 2, 2] and layer["drop_rate"] == 1 / 8
    module(x_TH, expert_TK, torch.ones(4, 2))
    watch.forget()
    assert sum(watch.take()[0]["load"]) == sum(map(sum, watch.take_coactivation()[0]["counts"])) == 0
    watch.close()


@pytest.mark.parametrize("experts", [[4, 4, 4], [3, 3], [128, 128]])
def test_counts_of_every_layer_begin_at_16_bytes(experts):
    """Else a GPU's kernels would be compiled twice, and ahead of a run only for the first layer."""
    ledger = Ledger(experts)
    assert all(row.data_ptr() % 16 == ledger.last_LE.data_ptr() % 16 for row in ledger.last_LE)
    assert ledger.last_LE.shape == ledger.load_LE.shape == (len(experts), max(experts) + 1)
