"""AdamW is torch's AdamW on fp32 masters; bf16 parameters are these, rounded. All the ways to compute it agree."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from optimizers import by_kernels, everything, gradients, groups, parameters, same, set_gradients, train
from torch.nn import Parameter

from amoeba.optim import AdamW, torch_step
from amoeba.optim.rounding import split
from amoeba.optim.torch_step import coefficients
from selection import each_value_once, quick

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
STATES = pytest.mark.parametrize("states", ["float32", "bfloat16"])


def way(name: str, optimizer: AdamW) -> AdamW:
    if name == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels do not run on the CPU here; test_adamw_gpu.py has them")
    return by_kernels(optimizer) if name == "kernels" else optimizer


@each_value_once()
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("precise", [torch.float32, torch.float64], ids=str)
def test_many_steps_of_several_groups_are_those_of_torch(precise, max_norm):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    theirs = [Parameter(parameter.detach().to(precise)) for parameter in theirs]
    train(AdamW(groups(ours), lr=1e-2), ours, steps=60, max_norm=max_norm)
    train(torch.optim.AdamW(groups(theirs), lr=1e-2), theirs, steps=60, max_norm=max_norm)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(parameter.to(precise), expected, rtol=2e-6, atol=2e-6)


@each_value_once()
@pytest.mark.parametrize("max_norm", [None, 0.5])
@STATES
def test_training_in_bf16_is_training_in_fp32_rounded_bit_for_bit(states, max_norm):
    rounded = parameters(torch.bfloat16)
    masters = [Parameter(parameter.detach().float()) for parameter in rounded]
    in_bf16, in_fp32 = (AdamW(groups(of), lr=1e-4, states=states) for of in (rounded, masters))
    for master in masters:
        master.grad_dtype = None  # any: the same gradients have the same norm
    for values in gradients(rounded, steps=40):
        for of, optimizer in ((rounded, in_bf16), (masters, in_fp32)):
            set_gradients(of, values, torch.bfloat16)
            if max_norm is not None:
                optimizer.note_clipping(max_norm)
            optimizer.step()
    for parameter, master in zip(rounded, masters, strict=True):
        assert torch.equal(in_bf16.master_of(parameter), master)
        assert torch.equal(in_fp32.master_of(master), master)
        assert torch.equal(parameter, split(master.detach())[0])
        if parameter.numel() > 1000:
            assert not torch.equal(parameter.float(), master), "masters are finer than bf16"


def test_steps_too_small_for_bf16_add_up():
    parameter = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=1e-4, weight_decay=0.0)
    plain = torch.optim.AdamW([lost := Parameter(parameter.detach().clone())], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        lost.grad = torch.ones_like(lost)
        optimizer.step()
        plain.step()
    assert torch.equal(lost, torch.ones_like(lost)), "what happens without masters"
    assert torch.allclose(optimizer.master_of(parameter), torch.tensor(0.99), atol=1e-5)
    assert torch.equal(parameter, torch.full_like(parameter, 0.99))


@each_value_once()
@quick(lambda dtype, states, gradient_dtype: gradient_dtype == dtype or (dtype, states) == (torch.bfloat16, "float32"))
@BOTH
@STATES
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_compute_the_same_bits_as_torch(dtype, states, gradient_dtype):
    optimizers = []
    for name in ("torch", "kernels"):
        of = parameters(dtype)
        optimizer = way(name, AdamW(groups(of), lr=1e-2, states=states, seed=3))
        for parameter in of:
            parameter.grad_dtype = None
        for values in gradients(of, steps=2):
            set_gradients(of, values, gradient_dtype)
            optimizer.step()
        optimizers.append(optimizer)
    assert same(*optimizers)


@pytest.mark.parametrize("by_mkl", [None, True])
def test_roots_are_the_nearest_numbers(by_mkl, monkeypatch):
    """The first two are those that MKL rounds the wrong way."""
    if by_mkl is not None:
        monkeypatch.setattr(torch_step, "_ROOTS_BY_MKL", by_mkl)
    sizes = 10.0 ** torch.randint(-30, 30, (1 << 16,), generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * sizes
    numbers = torch.cat([torch.tensor([0.5158079862594604, 0.5028960704803467, 0.0, 1e-45, torch.inf]), drawn])
    assert torch.equal(torch_step.nearest_root(numbers), torch.from_numpy(np.sqrt(numbers.numpy())))


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_options_may_be_whole_numbers(name):
    results = []
    for kind in (int, float):
        of = parameters(torch.bfloat16, shapes=[(40,)])
        options = {"lr": kind(1), "betas": (kind(0), kind(0)), "weight_decay": kind(0), "eps": kind(0)}
        optimizer = way(name, AdamW(of, **options))
        train(optimizer, of, steps=1)
        assert all(type(value) is float for value in coefficients(optimizer.param_groups[0], 1)[:-1])
        results.append(optimizer)
    assert same(*results)


@BOTH
def test_kernels_find_the_norm_and_clip_by_it(dtype):
    optimizers, norms = [], []
    for name in ("torch", "kernels"):
        of = parameters(dtype)
        optimizer = way(name, AdamW(of))
        set_gradients(of, next(gradients(of, 1)))
        norms.append(optimizer.note_clipping(0.1))
        optimizer._clipping = torch.tensor(0.0625) if optimizer._clipping < 1 else None  # of the same bits for both
        optimizer.step()
        optimizers.append(optimizer)
    exact = torch.cat([value.double().flatten() for value in next(gradients(of, 1))]).norm()
    for norm in norms:
        assert norm.dtype == torch.float32 and norm.dim() == 0
        assert abs(norm.item() / exact.item() - 1) < 1e-5
    assert same(*optimizers)


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_gradients_may_lie_anyhow_in_memory(name):
    def trained(place):
        of = parameters(torch.bfloat16, shapes=[(36, 64), (1100,)])
        optimizer = way(name, AdamW(of, lr=1e-2))
        for values in gradients(of, 1):
            set_gradients(of, [place(value) for value in values])
            norm = optimizer.note_clipping(1.0)
            optimizer.step()
        return [*everything(optimizer), norm]

    def shifted(value):
        return torch.empty(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape).copy_(value)

    def strided(value):
        return torch.stack((value, value), -1)[..., 0]

    def transposed(value):
        return value.t().contiguous().t()

    expected = trained(torch.Tensor.contiguous)
    for place in (shifted, strided, transposed):
        for found, wanted in zip(trained(place), expected, strict=True):
            assert torch.equal(found, wanted), place.__name__


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_a_parameter_that_lies_transposed_in_memory_trains_like_another(name):
    results = []
    for transposed in (False, True):
        (parameter,) = parameters(torch.bfloat16, shapes=[(40, 60)])
        if transposed:
            parameter = Parameter(parameter.detach().t().contiguous().t())
        optimizer = way(name, AdamW([parameter], lr=1e-2))
        train(optimizer, [parameter], steps=2)
        results.append(optimizer.master_of(parameter))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_what_is_not_a_number_is_seen_in_the_parameter(name):
    (parameter,) = parameters(torch.bfloat16, shapes=[(1024,)])
    parameter.grad_dtype = None
    optimizer = way(name, AdamW([parameter], states="bfloat16"))
    gradient = torch.zeros(1024)
    gradient[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    gradient.view(torch.int32)[3] = 0x7FFFFFFF  # the NaN that a GPU computes
    set_gradients([parameter], [gradient], torch.float32)
    optimizer.step()
    assert parameter[:4].isnan().all() and parameter[4:].isfinite().all()
    assert optimizer.state[parameter]["exp_avg"][:4].isfinite().logical_not().all()


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_a_step_moves_the_version_of_its_parameters(name):
    of = parameters(torch.bfloat16, shapes=[(8,), (9,)])
    optimizer = way(name, AdamW(of))
    before = [parameter._version for parameter in of]
    train(optimizer, of, steps=1)
    assert all(parameter._version > version for parameter, version in zip(of, before, strict=True))


def test_chunks_do_not_show(monkeypatch):
    results = []
    for size in (torch_step.CHUNK, 1000):
        monkeypatch.setattr(torch_step, "CHUNK", size)
        of = parameters(torch.bfloat16)
        train(optimizer := AdamW(of, states="bfloat16"), of, steps=2)
        results.append(optimizer)
    assert same(*results)


def test_clipping_is_that_of_torch_and_leaves_the_gradients_as_they_are():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    (values,) = gradients(ours, 1)
    set_gradients(ours, values)
    set_gradients(theirs, values)
    optimizer = AdamW(ours)
    norm, expected = optimizer.note_clipping(2.0), torch.nn.utils.clip_grad_norm_(theirs, 2.0)
    assert norm > 2.0 and torch.allclose(norm, expected)
    for parameter, value, clipped in zip(ours, values, theirs, strict=True):
        assert torch.equal(parameter.grad, value.float())
        assert torch.allclose(parameter.grad * optimizer._clipping, clipped.grad)


@pytest.mark.parametrize("forgotten_by", ["step", "zero_grad"])
def test_clipping_is_for_one_step(forgotten_by):
    of = parameters(torch.float32)
    optimizer = AdamW(of)
    train(optimizer, of, steps=1, max_norm=1e-3)
    if forgotten_by == "zero_grad":
        set_gradients(of, next(gradients(of, 1)))
        optimizer.note_clipping(1e-3)
        optimizer.zero_grad()
    other = AdamW(unclipped := [Parameter(parameter.detach().clone()) for parameter in of])
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, of, steps=1)
    train(other, unclipped, steps=1)
    assert same(optimizer, other)


def test_a_norm_below_the_limit_changes_nothing():
    of, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = AdamW(of), AdamW(plain)
    train(optimizer, of, steps=2, max_norm=1e9)
    train(other, plain, steps=2)
    assert same(optimizer, other)


def test_the_average_of_squares_in_bf16_follows_small_changes():
    (parameter,) = parameters(torch.bfloat16, shapes=[(4096,)])
    optimizer = AdamW([parameter], lr=0.0, betas=(0.9, 0.999), states="bfloat16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    average = optimizer.state[parameter]["exp_avg_sq"]
    assert average.dtype == torch.bfloat16
    average.fill_(1.0)
    nearest = average.clone()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(1000):
        optimizer.step()
        nearest.mul_(0.999)
    assert (nearest == 1).all(), "0.999 is nearer to 1 than to the number below it"
    assert abs(average.double().mean() - 0.999**1000) < 0.01


@STATES
def test_trainings_repeat_and_a_seed_shows_in_bf16_averages_alone(states):
    runs = []
    for seed in (0, 0, 1):
        of = parameters(torch.bfloat16)
        train(optimizer := AdamW(of, states=states, seed=seed), of, steps=4)
        runs.append(optimizer)
    assert same(*runs[:2])
    assert same(*runs[1:]) == (states == "float32")


# ---- What AdamW cannot work with is refused in words


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": torch.tensor(1.0)}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": 0.9}, "betas"),
        ({"states": "float16"}, "states"),
        ({"states": torch.bfloat16}, "states"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, name):
    of = parameters(torch.float32)
    with pytest.raises(ValueError, match=f"{name}: expected .* got "):
        AdamW(of, **options)
    optimizer = AdamW(of[:1])
    with pytest.raises(ValueError, match=f"{name}: expected .* got "):
        optimizer.add_param_group({"params": of[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (Parameter(torch.ones(3, dtype=torch.float16)), "expected bfloat16 or float32; got torch.float16"),
        (Parameter(torch.ones(3, dtype=torch.float64)), "expected bfloat16 or float32; got torch.float64"),
        (Parameter(torch.ones(3, 8)[:, :4]), "dense memory"),
        (Parameter(torch.ones(3, 1).expand(3, 4)), "dense memory"),
    ],
)
def test_parameters_it_cannot_train_are_refused(parameter, said):
    with pytest.raises(ValueError, match=said):
        AdamW([parameter])


def test_gradients_it_cannot_take_are_refused():
    (parameter,) = parameters(torch.float32, shapes=[(4, 3)])
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ValueError, match=r"gradient: expected a dense one .* got sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="gradient: expected a dense one"):
        optimizer.note_clipping(1.0)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_to_clip_to_is_a_number_of_at_least_0(max_norm):
    of = parameters(torch.float32)
    train(optimizer := AdamW(of), of, steps=1)
    with pytest.raises(ValueError, match="max_norm: expected"):
        optimizer.note_clipping(max_norm)


def test_clipping_without_gradients_is_refused():
    with pytest.raises(ValueError, match="gradients: expected at least one"):
        AdamW(parameters(torch.float32)).note_clipping(1.0)


def test_a_state_of_other_parameters_is_refused_and_says_so():
    of = parameters(torch.float32)
    train(first := AdamW(of[:1]), of[:1], steps=1)
    with pytest.raises(ValueError, match=r"exp_avg: expected a state of AdamW of shape \(3, 347\); got \(2, 512\)"):
        AdamW(of[1:2]).load_state_dict(first.state_dict())
    momentum = torch.optim.SGD(of[:1], lr=1e-3, momentum=0.9)
    train(momentum, of[:1], steps=1)
    with pytest.raises(ValueError, match="expected a state of AdamW"):
        AdamW(of[:1]).load_state_dict(momentum.state_dict())


def test_a_state_on_another_device_than_its_parameter_is_refused():
    (parameter,) = parameters(torch.float32, shapes=[(4,)])
    train(optimizer := AdamW([parameter]), [parameter], steps=1)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="state of the optimizer: expected it on cpu"):
        optimizer.step()


# ---- What AdamW keeps: checkpoints that go on bit for bit, copies, the state of torch's AdamW, steps counted


def stored(state_dict):
    """Through a file, as a checkpoint is."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_value_once()
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


def test_the_optimizer_not_the_checkpoint_decides_the_dtype_of_averages():
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
