"""What AdamW keeps: checkpoints that go on bit for bit, copies, the state of torch's AdamW, steps counted."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from optimizers import groups, parameters, same, train
from torch.nn import Parameter

from amoeba.optim import AdamW

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
STATES = pytest.mark.parametrize("states", ["float32", "bfloat16"])


def stored(state_dict):
    """Through a file, as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@BOTH
@STATES
def test_a_training_resumed_from_a_checkpoint_goes_on_bit_for_bit(dtype, states):
    whole = parameters(dtype)
    train(expected := AdamW(groups(whole), states=states, seed=5), whole, steps=3)
    halfway = stored({"optimizer": expected.state_dict(), "parameters": [parameter.detach() for parameter in whole]})
    resumed = [Parameter(parameter) for parameter in halfway["parameters"]]
    optimizer = AdamW(groups(resumed), states=states)
    optimizer.load_state_dict(halfway["optimizer"])
    assert same(optimizer, expected)
    for of, by in ((whole, expected), (resumed, optimizer)):
        train(by, of, steps=3, seed=7)
    assert same(optimizer, expected)
    state = optimizer.state[resumed[0]]
    assert state["step"] == 6 and state["exp_avg"].dtype == getattr(torch, states)
    assert ("remainder" in state) == (dtype == torch.bfloat16)


def test_loading_copies():
    of = parameters(torch.float32)
    train(first := AdamW(of), of, steps=1)
    second = AdamW(of)
    second.load_state_dict(first.state_dict())
    assert second.state[of[0]]["exp_avg"] is not first.state[of[0]]["exp_avg"]
    before = first.state[of[0]]["exp_avg"].clone()
    train(second, of, steps=1)
    assert torch.equal(first.state[of[0]]["exp_avg"], before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_of_an_optimizer_goes_on_like_it(duplicate):
    of = parameters(torch.bfloat16)
    train(optimizer := AdamW(of, states="bfloat16"), of, steps=2)
    again = duplicate(optimizer)
    train(optimizer, of, steps=2)
    train(again, again.param_groups[0]["params"], steps=2)
    assert same(optimizer, again)


def test_the_state_of_torchs_adamw_is_taken_up():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    train(other := torch.optim.AdamW(groups(theirs), lr=1e-2), theirs, steps=3)
    with torch.no_grad():
        for parameter, value in zip(ours, theirs, strict=True):
            parameter.copy_(value)
    optimizer = AdamW(groups(ours))
    optimizer.load_state_dict(stored(other.state_dict()))
    assert optimizer.param_groups[2]["lr"] == 1e-2
    for of, by in ((ours, optimizer), (theirs, other)):
        train(by, of, steps=3, seed=9)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(parameter, expected, rtol=2e-6, atol=2e-6)


def test_the_optimizer_decides_what_averages_are_stored_in_not_the_checkpoint():
    of = parameters(torch.bfloat16)
    train(first := AdamW(of), of, steps=1)
    second = AdamW(of, states="bfloat16")
    second.load_state_dict(first.state_dict())
    assert second.state[of[0]]["exp_avg"].dtype == torch.bfloat16
    train(second, of, steps=1)


def test_a_parameter_without_a_gradient_waits_and_counts_its_own_steps():
    of = parameters(torch.bfloat16)
    optimizer = AdamW(of)
    first, others = of[0], of[1:]
    train(optimizer, of, steps=1)
    before = first.detach().clone()
    first.grad = None
    optimizer.step()
    assert torch.equal(first, before)
    assert [optimizer.state[parameter]["step"] for parameter in of] == [1] + [2] * len(others)
    train(optimizer, of, steps=1)
    assert [optimizer.state[parameter]["step"] for parameter in of] == [2] + [3] * len(others)


def test_learning_rates_are_scheduled_and_a_closure_is_called():
    (parameter,) = parameters(torch.bfloat16, shapes=[(6,)])
    optimizer = AdamW([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.zero_grad()

    def closure():
        loss = (parameter.float() ** 2).sum()
        loss.backward()
        return loss

    expected = (parameter.detach().float() ** 2).sum()
    assert torch.equal(optimizer.step(closure), expected)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
